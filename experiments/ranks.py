"""One rank of synchronous data parallelism: torch's DDP over gloo, steps paced as those of the learners.

Its one argument is JSON: ``rank``, ``ranks``, ``meeting`` (a file the ranks meet at, new for every start), ``step_s``,
``seed``, ``checkpoint`` (a path) and ``every`` (steps). Rank 0 saves; all load the last checkpoint when they start.
Every step of rank 0 is a line: what was reached.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from experiments.processes import STARTED
from experiments.tasks import loss_of, make_task


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, checkpoint = options["rank"], Path(options["checkpoint"])
    task = make_task("char", options["seed"])
    model, stream = task.model(), task.stream()
    step = _load(model, checkpoint)
    distributed.init_process_group("gloo", f"file://{options['meeting']}", rank=rank, world_size=options["ranks"])
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    print(STARTED, flush=True)
    made, began = 0, time.monotonic()
    while True:
        optimizer.zero_grad()
        loss_of(parallel, stream.take(1)).backward()
        optimizer.step()
        step, made = step + 1, made + 1
        if rank == 0:
            if step % options["every"] == 0:
                _save(model, checkpoint, step)
            print(f"step {step}", flush=True)
        time.sleep(max(0.0, began + made * options["step_s"] - time.monotonic()))  # time is the subject here


def _save(model: nn.Module, path: Path, step: int) -> None:
    temporary = path.with_name(path.name + ".new")
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(named, temporary, {"step": str(step)})
    temporary.replace(path)


def _load(model: nn.Module, path: Path) -> int:
    """The step of the checkpoint, whose parameters ``model`` has now; 0 without one."""
    if not path.exists():
        return 0
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(file.get_tensor(name))
        return int(file.metadata()["step"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
