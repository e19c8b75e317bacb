"""Who makes a run of which kind. It decides nothing else."""

from __future__ import annotations

from typing import Any

from experiments.configs import Alone, training
from experiments.specs import Job, Kills, Trace, Wire


def run_job(job: Job) -> dict[str, Any]:
    """The result of a run, as JSON has it. Raises ValueError for a kind that does not exist."""
    match job.kind:
        case "train":
            from experiments.training import run

            return run(training(job.config))
        case "alone":
            from experiments.training import run

            return run(Alone(**job.config))
        case "trace":
            from experiments.goodput import run_trace

            return run_trace(Trace(**job.config))
        case "wire":
            from experiments.wire import count_bytes

            return count_bytes(Wire(**job.config))
        case "kills":
            from experiments.kills import run_kills

            return run_kills(Kills(**job.config))
    raise ValueError(f"job of kind {job.kind!r}: expected train, alone, trace, wire or kills")
