"""``python -m benchmarks [NAME ...] [--quick] [--json PATH]``: measure, print one table, write the JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import FIGURES, figures
from benchmarks.harness import Figure, Size, report, table
from benchmarks.stage import ONE_THREAD, ROOT


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, whatever was measured; 2 for a wrong argument."""
    parser = _parser()
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in FIGURES]
    if unknown:
        parser.error(f"figure {unknown[0]!r}: expected one of {', '.join(FIGURES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process of ours is left behind
    size = Size.QUICK if options.quick else Size.FULL
    load, found = os.getloadavg(), []
    os.environ |= ONE_THREAD  # as every process that is measured; before numpy is imported, which asks once
    import torch

    from syncer.merge import kernels

    torch.set_num_threads(1)
    if kernels.compiled is None:
        print("no compiled loops (docs): merge, round, codec and scale are about half as good", file=sys.stderr)
    for name in options.names or FIGURES:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        found += figures(name, size)
    print(table(found))
    path = options.json or ROOT / "benchmarks" / "results" / time.strftime(f"{size.value}-%Y%m%d-%H%M%S.json")
    _write(path, found, size, load)
    return 0


def _write(path: Path, found: Sequence[Figure], size: Size, load: Sequence[float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report(found, size, load), indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ratios against limits and rivals.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which figures: {', '.join(FIGURES)}; default all")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer turns: under two minutes together")
    parser.add_argument("--json", type=Path, metavar="PATH", help="default: benchmarks/results/<size>-<time>.json")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
