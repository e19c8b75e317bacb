"""A user's learner for the benchmark, as small as it gets, and the ways in which one can spoil an experiment.

    budget_learner_script.py [what is wrong with the last learner [matrix merge, wire dtype]]

What can be wrong: twice, short, killed, untidy, broken, early; and slow, of all.

``python -m syncer.benchmark ... -- budget_learner_script.py`` starts it and tells it all it needs by the environment.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from tests.support.toy_model import loss_of, toy
from yeto_torch import YetoOuterOptimizer
from yeto_torch.wire.messages import BudgetDone


def wait_for_the_end(optimizer: YetoOuterOptimizer) -> None:
    """Of the first syncer process."""
    while optimizer.stats.connected:
        time.sleep(0.001)


def main(wrong: str = "", matrix_merge: str = "rda", wire_dtype: str = "bf16") -> None:
    torch.set_num_threads(1)
    learner, budget = int(os.environ["YETO_LEARNER_ID"]), int(os.environ["YETO_BUDGET_STEPS"])
    is_last = learner == int(os.environ["YETO_LEARNERS"]) - 1
    wrong = wrong if is_last or wrong in ("slow", "twice") else ""
    if wrong == "short":  # a learner that is not told the budget cannot know that it stops early
        del os.environ["YETO_BUDGET_STEPS"]
        budget -= 1
    model = toy(learner)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    layout = {"fragments": 3, "matrix_merge": matrix_merge}
    with YetoOuterOptimizer(inner, model, wire_dtype=wire_dtype, streams=1, **layout) as optimizer:
        for step in range(budget):
            optimizer.zero_grad()
            loss_of(model, learner, step).backward()
            optimizer.step(tokens=8)
            if wrong == "broken":
                raise RuntimeError("the data set is not there")
            if wrong == "slow":
                print(f"step {step}", flush=True)
                time.sleep(0.05)
        if wrong == "early":
            return
        if wrong == "twice" and learner == 0:  # with a report from everybody it would be over before the second one
            wait_for_the_end(optimizer)
            return
        optimizer.report_budget(budget)
        if wrong == "twice":
            optimizer._learner.link._group.send(BudgetDone(budget))
        if wrong == "killed":
            wait_for_the_end(optimizer)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.finish()
    if wrong == "untidy":
        tape = Path(os.environ["YETO_RUN_DIR"]) / "tape.jsonl"
        lines = tape.read_text().splitlines(keepends=True)
        lines.remove([line for line in lines if '"gnorm"' in line][-2])
        tape.write_text("".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
