"""A real learner whose steps take as long as it is told: one sample a step, the rest of the step is waited for.

Its one argument is JSON: ``step_s``, ``seed``, and ``optimizer`` for YetoOuterOptimizer. It prints a line when it is
about to train; when the fleet has finished, a JSON line with its steps and what its sockets carried by its own count.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from experiments.processes import STARTED
from experiments.tasks import loss_of, make_task
from yeto_torch import YetoOuterOptimizer


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    task = make_task("char", options["seed"])
    model, stream = task.model(), task.stream()
    with YetoOuterOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model, **options["optimizer"]) as optimizer:
        print(STARTED, flush=True)
        steps, began = 0, time.monotonic()
        while not optimizer.finished:
            optimizer.zero_grad()
            loss_of(model, stream.take(1)).backward()
            optimizer.step()
            steps += 1
            time.sleep(max(0.0, began + steps * options["step_s"] - time.monotonic()))  # time is the subject here
        stats = optimizer.stats
        told = {"steps": steps, "bytes_sent": stats.bytes_sent, "bytes_received": stats.bytes_received}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
