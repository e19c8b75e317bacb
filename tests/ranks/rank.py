"""One rank of a learner: the training script of the tests here.

Its one argument is JSON: ``rank``, ``world``, ``rendezvous`` (a file), ``timeout_s`` (of the learner's process group;
default: the job's), ``wrap`` (``plain``, ``ddp``, ``fsdp``, ``hsdp``, ``fsdp1``), ``seed``, ``widths`` (of the model,
per rank), ``steps`` (then ``finish()``; null = until finished), ``budget`` (to report), ``pace_s``, ``out`` (where the
final parameters go), ``grouped`` (false: without a process group), ``nested`` (on_sync calls resync), ``optimizer``
(arguments of YetoOuterOptimizer), and ``trouble``: what happens behind step ``at`` on rank ``on``. It prints a line
when it has joined, one per global step it sees, and one at the end.
"""

import json
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks.models import local_values, loss, whole_values, wrapped
from tests.support.toy_model import digest, toy
from yeto_torch import YetoOuterOptimizer


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options['rendezvous']}",
        rank=options["rank"],
        world_size=options["world"],
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD if options.get("grouped", True) else None
    if "timeout_s" in options:  # a group of its own: all ranks are here, so none is late for a short timeout
        dist.barrier()
        group = dist.new_group(timeout=timedelta(seconds=options["timeout_s"]), backend="gloo")
    options["optimizer"] = {"process_group": group, "streams": 1, "fragments": 3, **options["optimizer"]}
    try:
        train(options)
    except Exception as error:
        print(f"raised {type(error).__name__}: {error}")
        raise


def train(options: dict[str, Any]) -> None:
    rank, how, step, seen = options["rank"], options.get("wrap", "ddp"), 0, -1
    # every learner starts elsewhere, its ranks from one place
    parts = toy(options.get("seed", 0), options["widths"][rank] if "widths" in options else 24)
    model = wrapped(parts, how)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    if options.get("nested"):
        options["optimizer"]["on_sync"] = lambda _: optimizer.resync()
    with YetoOuterOptimizer(inner, model.named_parameters(), **options["optimizer"]) as optimizer:
        start = digest(np.concatenate(whole_values(model, optimizer.layout)))
        print(f"joined at {optimizer.stats.global_step}, weights {start}, layout {optimizer.layout.fingerprint.hex()}")
        while not optimizer.finished and step != options.get("steps"):
            step += 1
            optimizer.zero_grad()
            loss(model, options.get("seed", 0), rank, step, how).backward()
            optimizer.step(tokens=1 + rank)
            for trouble in options.get("trouble", ()):
                if trouble["at"] == step and trouble["on"] == rank:
                    make_trouble(trouble["what"], optimizer, model)
            if optimizer.stats.global_step != seen:
                seen = optimizer.stats.global_step
                print(f"step {seen}, local {digest(np.concatenate(local_values(model)))}")
            time.sleep(options.get("pace_s", 0.002))
        if "budget" in options:
            optimizer.report_budget(options["budget"])
        optimizer.finish()
        print(f"finished at {optimizer.stats.global_step} after {step} steps, stats {optimizer.stats.versions}")
        np.savez(options["out"], *whole_values(model, optimizer.layout))


def make_trouble(what: str, optimizer: YetoOuterOptimizer, model: torch.nn.Module) -> None:
    if what == "nan":
        first = next(model.parameters()).detach()
        (first.to_local() if hasattr(first, "to_local") else first).fill_(float("nan"))
    elif what == "raise":
        raise ArithmeticError("the data of this rank is broken")
    elif what == "close":
        optimizer.close()
    elif what == "hang":
        threading.Event().wait()
    else:
        raise ValueError(what)


if __name__ == "__main__":
    main()
