"""``python -m syncer.benchmark key=value ... [-- train.py args]``: the learner-budget benchmark, end to end.

Trains a fleet until every learner has made exactly ``budget_steps`` local steps, closes the run in two syncer processes
on one endpoint, and says whether it was a valid experiment. This module is the command line and the order of things;
``experiment`` does the work.

Exit codes: 0 = everything holds; 1 = it does not, or could not be conducted; 2 = configuration; 130 = interrupted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import sys
from typing import TYPE_CHECKING

from yeto_torch.wire.errors import RunError, StateError, YetoError

if TYPE_CHECKING:
    from syncer.benchmark.config import BenchmarkPlan
    from syncer.benchmark.files import Folder
    from syncer.benchmark.verdict import Arms, Check, Evidence

_DESCRIPTION = """\
The learner-budget benchmark: every learner makes exactly budget_steps local steps, then one consolidation round per
fragment merges all of them. Required: learners=M budget_steps=B. Behind -- a learner of your own (a script or -m MODULE
that wraps its optimizer, calls report_budget(steps) and then finish()); without it a task of the demonstration."""


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # nothing runs yet, so just leave
        signal.signal(number, lambda *_: os._exit(130))
    from syncer.benchmark.config import BENCHMARK, make_plan  # after the handlers: Hydra takes a while
    from syncer.config.arguments import configured

    split = argv.index("--") if "--" in argv else len(argv)
    command = argv[split + 1 :] if split < len(argv) else None
    words = ["baseline=true" if word == "--baseline" else word for word in argv[:split]]
    try:
        config = configured(words, "python -m syncer.benchmark", _DESCRIPTION, BENCHMARK)
        if config is None:
            return 0
        plan = make_plan(config, command)
    except ValueError as error:
        print("syncer.benchmark: configuration error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return run(plan)


def run(plan: BenchmarkPlan) -> int:
    """Conduct the experiment of ``plan``, judge it, export the model, compare; returns the exit code."""
    from syncer.benchmark.experiment import Experiment, InterruptedExperimentError
    from syncer.benchmark.processes import LoggedChildren
    from syncer.benchmark.summary import comparison, document, holds, table

    arms: Arms | None = None
    try:
        _check_packages(plan)
        plan.folder.mkdir(parents=True, exist_ok=True)
        with LoggedChildren().watched() as children:
            experiment = Experiment(plan, secrets.token_hex(8), children, _say)
            evidence = experiment.conduct()
            checks = _checks(evidence, experiment.folder)
            if plan.baseline and holds(checks):
                arms = experiment.compare()
        text = json.dumps(document(evidence, checks, arms), indent=1)
        experiment.folder.verdict.write_text(text + "\n", encoding="utf-8")
    except InterruptedExperimentError:
        return 130
    except (YetoError, OSError) as error:
        _say(f"error: {error}")
        return 1
    for line in experiment.last_words():
        print(f"    {line}", file=sys.stderr)
    print("\n".join(["", *table(evidence, checks)]))
    if arms is not None:
        print("\n".join(["", *comparison(evidence, arms)]))
    print(f"run folder: {plan.folder}")
    return 0 if holds(checks) else 1


def _checks(evidence: Evidence, folder: Folder) -> list[Check]:
    """The verdict; a valid experiment's model is exported, and only a valid one's."""
    from syncer.benchmark.verdict import Check, judge

    checks = judge(evidence)
    if not any(check.deviations for check in checks):
        try:
            checks.append(Check("model", f"{folder.model.name}, {folder.export()}"))
        except StateError as error:
            checks.append(Check("model", "not written", (f"the model cannot be exported: {error}",)))
    return checks


def _check_packages(plan: BenchmarkPlan) -> None:
    """Raises RunError when the default learner cannot start."""
    missing = [name for name in ("sklearn", "torchvision") if importlib.util.find_spec(name) is None]
    if plan.command is None and missing:
        raise RunError(f"the default learner needs {missing[0]}: pip install 'yeto-torch[demo]'")


def _say(text: str) -> None:
    print(f"[benchmark] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
