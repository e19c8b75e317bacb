"""A user's training script, as small as it gets: the process learner of the end-to-end tests.

Its one argument is JSON: ``seed``, ``width``, ``pace_s``, ``steps`` (then ``finish()``; null = until finished), ``out``
(where the final parameters go), ``optimizer`` (arguments of YetoOuterOptimizer). It prints a line when it has joined,
one per global step it sees, and one at the end.
"""

import json
import sys
import time

import numpy as np
import torch

from tests.support.toy_model import digest, flat, loss_of, toy
from yeto_torch import YetoOuterOptimizer


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model = toy(options.get("seed", 0), options.get("width", 24))
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    step, seen = 0, -1
    with YetoOuterOptimizer(inner, model, **options.get("optimizer", {})) as optimizer:
        print(f"joined at {optimizer.stats.global_step} as learner, weights {digest(flat(model, optimizer.layout)[0])}")
        while not optimizer.finished and step != options.get("steps"):
            step += 1
            optimizer.zero_grad()
            loss_of(model, options.get("seed", 0), step).backward()
            optimizer.step()
            if optimizer.stats.global_step != seen:
                seen = optimizer.stats.global_step
                print(f"step {seen}")
            time.sleep(options.get("pace_s", 0.002))
        optimizer.finish()
        values = flat(model, optimizer.layout)
        print(f"finished at {optimizer.stats.global_step}, reconnects {optimizer.stats.reconnects}")
    if options.get("out"):
        np.savez(options["out"], *values)


if __name__ == "__main__":
    main()
