"""Replay one seed with its whole story, or look through many.

python -m tests.sim SEED                 one seed, one line per happening
python -m tests.sim --seeds N            the failures among N seeds, on every core
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from tests.sim.play import Outcome, play

_CHUNK = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Play seeds of the simulated world.")
    parser.add_argument("seed", nargs="?", type=int, help="play this seed and print its story")
    parser.add_argument("--seeds", type=int, default=0, help="play so many seeds and print the failures")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        outcome = play(arguments.seed)
        print("\n".join(outcome.story))
        print(outcome.trace or f"seed {outcome.seed} holds: step {outcome.committed} at {outcome.ended_at:.1f} s")
        return int(outcome.failure is not None)
    return _look_through(range(arguments.first, arguments.first + arguments.seeds), arguments.jobs)


def _look_through(seeds: range, jobs: int) -> int:
    started, failed = time.monotonic(), []
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for outcome in pool.map(_failure, seeds, chunksize=_CHUNK):
            if outcome is not None:
                failed.append(outcome.seed)
                print(outcome.report(), flush=True)
    took_s = time.monotonic() - started
    print(f"{len(seeds)} seeds in {took_s:.0f} s, {len(failed)} failed{': ' if failed else ''}{failed or ''}")
    return int(bool(failed))


def _failure(seed: int) -> Outcome | None:
    outcome = play(seed)
    return None if outcome.failure is None else outcome


if __name__ == "__main__":
    sys.exit(main())
