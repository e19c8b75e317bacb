"""A learner whose steps take as long as it is told: eight equal matrices, gradients that cost nothing.

Arguments: width, seconds per step, then JSON for YetoOuterOptimizer. At the end it prints how many steps it made in how
many seconds, by the clock that paced them.
"""

import json
import sys
import time

import torch
from torch import nn

from yeto_torch import YetoOuterOptimizer


def main(width: int, step_s: float, options: str) -> None:
    torch.set_num_threads(1)
    model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(8))
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with YetoOuterOptimizer(inner, model, **json.loads(options)) as optimizer:
        steps, started = 0, time.monotonic()
        while not optimizer.finished:
            optimizer.step()
            steps += 1
            time.sleep(max(0.0, started + steps * step_s - time.monotonic()))
        print(f"made {steps} steps in {time.monotonic() - started:.3f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
