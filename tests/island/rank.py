"""One rank of a learner: the training script of the tests here.

Its one argument is JSON: ``rank``, ``world``, ``rendezvous`` (a file), ``timeout_s`` (of the process group), ``wrap``
(``plain``, ``ddp``, ``fsdp``, ``hsdp`` ...), ``seed``, ``width``, ``steps`` (then ``finish()``; null = until finished),
``pace_s``, ``out`` (where the final parameters go), ``optimizer`` (arguments of YetoOuterOptimizer), and ``trouble``:
what happens at step ``at`` on rank ``on``. It prints a line when it has joined, one per global step it sees, and one at
the end.
"""

import json
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from tests.island.models import loss, whole_values, wrapped
from tests.support.toy import digest, toy
from yeto_torch import YetoOuterOptimizer


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options['rendezvous']}",
        rank=options["rank"],
        world_size=options["world"],
        timeout=timedelta(seconds=options.get("timeout_s", 20)),
    )
    try:
        train(options)
    except Exception as error:
        print(f"raised {type(error).__name__}: {error}")
        raise
    finally:
        print("left")


def train(options: dict) -> None:
    rank = options["rank"]
    # every learner starts elsewhere, its ranks from one place
    model = wrapped(toy(options.get("seed", 0), options.get("width", 24)), options.get("wrap", "ddp"))
    inner = torch.optim.AdamW(model.parameters(), lr=options.get("lr", 0.01))
    arguments = {"process_group": dist.group.WORLD, "streams": 1, "connect_timeout_s": 60, "final_timeout_s": 60}
    trouble = options.get("trouble", {})
    step, seen = 0, -1
    with YetoOuterOptimizer(inner, model.named_parameters(), **arguments, **options.get("optimizer", {})) as optimizer:
        print(
            f"joined at {optimizer.stats.global_step}, weights {digest(np.concatenate(whole_values(model, optimizer.layout)))}"
        )
        while not optimizer.finished and step != options.get("steps"):
            step += 1
            optimizer.zero_grad()
            loss(model, options.get("seed", 0), rank, step, options.get("wrap", "ddp")).backward()
            optimizer.step(tokens=options.get("tokens", 1) + rank)
            if trouble.get("at") == step and trouble.get("on") == rank:
                make_trouble(trouble["what"], optimizer, model)
            if optimizer.stats.global_step != seen:
                seen = optimizer.stats.global_step
                print(f"step {seen} of local step {step}")
            time.sleep(options.get("pace_s", 0.002))
        if options.get("budget"):
            optimizer.report_budget(options["budget"])
        optimizer.finish()
        print(f"finished at {optimizer.stats.global_step}, reconnects {optimizer.stats.reconnects}")
        values = whole_values(model, optimizer.layout)
        print(f"local step {step}, versions {optimizer.stats.versions}")
    if options.get("out"):
        np.savez(options["out"], *values)


def make_trouble(what: str, optimizer: YetoOuterOptimizer, model: torch.nn.Module) -> None:
    if what == "nan":
        with torch.no_grad():
            for parameter in model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.fill_(float("nan"))
                break
    elif what == "raise":
        raise ArithmeticError("the data of this rank is broken")
    elif what == "close":
        optimizer.close()
    elif what == "hang":
        time.sleep(3600)
    else:
        raise ValueError(what)


if __name__ == "__main__":
    main()
