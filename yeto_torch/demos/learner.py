"""The script that every learner of the demonstration runs: an ordinary training loop with one line changed.

The launcher starts it once per learner with the YETO_* environment. It appends what it sees to ``learner-<id>.jsonl``
in the run folder, which is all that the progress display and the curves know of it.

It trains until the fleet is done; with a learner budget (YETO_BUDGET_STEPS) exactly so many steps, which it reports.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

from yeto_torch import YetoOuterOptimizer
from yeto_torch.demos.task import evaluate, inner_optimizer, loss_of, make_task, set_lr


def main() -> None:
    options = _options()
    learner = int(os.environ["YETO_LEARNER_ID"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    budget = int(os.environ.get("YETO_BUDGET_STEPS", "0"))
    learners = int(os.environ.get("YETO_LEARNERS", "2"))
    task = make_task(options.task, split=options.split, seed=options.seed, learners=learners)
    model = task.model()
    batches = task.batches(learner)
    log = MetricsLog(Path(os.environ["YETO_RUN_DIR"]) / f"learner-{learner}.jsonl")

    optimizer = YetoOuterOptimizer(  # the one line
        inner_optimizer(task, model),
        model.named_parameters(),
        fragments=options.fragments or task.fragments,
        matrix_merge=options.matrix_merge,
        average=options.average,
        wire_dtype=options.wire_dtype,
        streams=options.streams,
    )

    step = 0
    while step < budget if budget else not optimizer.finished:
        if learner == 0 and options.evaluate_every and step % options.evaluate_every == 0:
            now = time.time()  # the others train on meanwhile
            accuracy, held_out_loss = evaluate(model, task)
            log.write(time=now, step=step, held_out_accuracy=accuracy, held_out_loss=held_out_loss)
        set_lr(optimizer, task, step / budget if budget else optimizer.stats.global_step / options.total_steps)
        inputs, targets = next(batches)
        loss = loss_of(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(tokens=len(inputs))
        step += 1
        log.write_every(0.1, step=step, loss=loss)
    if budget:
        optimizer.report_budget(step)
    optimizer.finish()

    stats = optimizer.stats
    log.write(step=step, done=True, bytes_sent=stats.bytes_sent, bytes_received=stats.bytes_received)


class MetricsLog:
    """One JSON object a line, flushed, so that another process can follow it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._written_at = float("-inf")

    def write(self, **values: object) -> None:
        self._file.write(json.dumps({"time": time.time(), **values}) + "\n")

    def write_every(self, seconds: float, *, step: int, loss: torch.Tensor) -> None:
        """Write step and loss, but not more often than this: the value is only read out then."""
        now = time.monotonic()
        if now - self._written_at >= seconds:
            self._written_at = now
            self.write(step=step, loss=loss.item())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["digits", "text"], required=True)
    parser.add_argument("--split", choices=["even", "classes"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--total-steps", type=int, default=1, help="outer steps of the run, unless there is a budget")
    parser.add_argument("--evaluate-every", type=int, default=0, help="inner steps of learner 0; 0 = never")
    parser.add_argument("--fragments", type=int, help="default: the task's")
    parser.add_argument("--matrix-merge", default="rda")
    parser.add_argument("--average")
    parser.add_argument("--wire-dtype", default="bf16")
    parser.add_argument("--streams", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
