"""Replay one seed with its whole story, or look through many: ``python -m tests.sim SEED`` / ``--seeds N``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.play import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="play this seed and print its story")
    parser.add_argument("--seeds", type=int, default=0, help="play so many seeds, and print the failures only")
    parser.add_argument("--first", type=int, default=0, help="the first seed of many")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        outcome = play(arguments.seed)
        print("\n".join(outcome.story))
        print(outcome.trace or f"seed {outcome.seed} holds: step {outcome.committed} at {outcome.ended_at:.1f} s")
        return outcome.failure is not None
    started, failed = time.monotonic(), []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        outcome = play(seed)
        if outcome.failure is not None:
            failed.append(seed)
            print(outcome.report(), flush=True)
    took = time.monotonic() - started
    print(f"{arguments.seeds} seeds in {took:.0f} s, {len(failed)} failed{': ' if failed else ''}{failed or ''}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
