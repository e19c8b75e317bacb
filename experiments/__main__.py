"""``python -m experiments run e1 ... | report | estimate``; see ``experiments/README.md``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.lasting import jobs_now
from experiments.records import Records
from experiments.runner import ROOT, run_all, work
from experiments.specs import EXPERIMENTS, Scale, jobs_of

RECORDS = ROOT / "experiments" / "records" / "records.jsonl"
QUICK = ROOT / "runs" / "evidence-quick"


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before torch is imported, and for every process of ours: one thread per run
    if options.command == "work":
        with contextlib.suppress(KeyboardInterrupt):
            work(sys.stdin, sys.stdout)
        return 0
    from experiments import report  # a worker needs no statistics

    scale = Scale(options.quick)
    path = options.records or (QUICK / "records.jsonl" if options.quick else RECORDS)
    try:
        records = Records(path)
        if options.command == "run":
            for name in options.names or EXPERIMENTS:
                if name == "lasting":
                    _run_lasting(records, options.jobs)
                else:
                    _run(name, scale, records, options.seeds, options.jobs)
        elif options.command == "estimate":
            print(report.estimate(scale, records, options.jobs))
        else:
            target = options.output or (QUICK / "evidence.md" if options.quick else ROOT / "docs" / "evidence.md")
            report.write(target, scale, records)
            print(f"written: {target}")
    except KeyboardInterrupt:
        print("interrupted; what was finished is recorded, and the same command goes on from there", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def _run(name: str, scale: Scale, records: Records, seeds: Sequence[int] | None, workers: int) -> None:
    """An experiment's runs; those that follow from others, such as the tuning, are named once these are there."""
    while True:
        jobs = jobs_of(name, scale, records, seeds)
        if not records.missing([job.key for job in jobs]):
            return
        print(f"{name}: ", end="", file=sys.stderr)
        run_all(jobs, records, workers)


def _run_lasting(records: Records, workers: int) -> None:
    """The second set: what is chosen on tuning seeds decides what is run next."""
    while jobs := jobs_now(records):
        print("lasting: ", end="", file=sys.stderr)
        run_all(jobs, records, workers)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Evidence, run by run.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quick", action="store_true", help="two seeds, fewer and shorter runs: no claims")
    common.add_argument("--records", type=Path, metavar="PATH", help="default: experiments/records/records.jsonl")
    common.add_argument("--jobs", type=_count, default=2, help="runs beside each other, one core each")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", parents=[common], help="make the runs that are not recorded yet")
    run.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(EXPERIMENTS)} (default: these), lasting")
    run.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="default: the experiment's own")
    told = commands.add_parser("report", parents=[common], help="write the tables from the records alone")
    told.add_argument("--output", type=Path, metavar="PATH", help="default: docs/evidence.md")
    commands.add_parser("estimate", parents=[common], help="say how long the missing runs would take")
    commands.add_parser("work", help="a worker of run")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
