"""``python -m yeto_torch.demo``: a syncer and two learners train one model on real data on this machine.

The same machinery as ``yeto_torch.run``: real processes, real sockets. Then the comparison: one learner alone on its
part of the data with as many steps, and synchronous training on as many samples as the fleet saw. This module is the
command line; ``demos`` does the work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from yeto_torch.launcher.fleet import INTERRUPTED
from yeto_torch.launcher.folder import RunFolder, new_run_dir
from yeto_torch.wire.errors import YetoError

CONFIGURATION = 2


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when the run failed, 2 for a wrong command, 130 when interrupted."""
    options = _parser().parse_args(argv)
    path = (options.run_dir or new_run_dir(Path("runs"))).absolute()
    try:
        _check(options, path)
    except ValueError as error:
        return _complain(str(error), CONFIGURATION)
    try:
        return _compare(options, path)
    except ImportError as error:
        return _complain(f"{error}; the demonstration needs: pip install 'yeto-torch[demo]'", 1)
    except YetoError as error:
        return _complain(str(error), 1)
    except OSError as error:
        return _complain(f"{path}: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)


def _compare(options: argparse.Namespace, path: Path) -> int:
    from rich.console import Console  # the demo extra and torch: not before the command is known to be right

    from yeto_torch.demos import report
    from yeto_torch.demos.comparison import Comparison, FleetError

    console = Console()
    results = []
    for seed in range(options.seeds):
        folder = RunFolder(path / f"seed-{seed}" if options.seeds > 1 else path)
        try:
            results.append(Comparison(console, options, seed, folder).run())
        except FleetError as error:
            for line in error.tail:
                print(f"    {line}", file=sys.stderr)
            return _complain(str(error), error.code)
    report.show(console, results)
    report.save(path / "result.json", results, {k: v for k, v in vars(options).items() if k != "run_dir"})
    console.print(f"Run folder: {path}", highlight=False, soft_wrap=True)
    console.print("  tape.jsonl, checkpoint.yeto, model.safetensors, curves.png, logs; result.json", highlight=False)
    return 0


def _check(options: argparse.Namespace, path: Path) -> None:
    if options.text and options.split == "classes":
        raise ValueError("--split classes is for the digits; text has no classes")
    if options.seeds < 1:
        raise ValueError(f"--seeds {options.seeds}: must be at least 1")
    if options.steps is not None and options.steps < 50:
        raise ValueError(f"--steps {options.steps}: must be at least 50")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"--run-dir {path}: must be a new or an empty folder")


def _complain(text: str, code: int) -> int:
    print(f"yeto_torch.demo: {text}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m yeto_torch.demo",
        description="A syncer and two learners train one model on real data; compared with one learner and with "
        "synchronous training. Offline.",
        allow_abbrev=False,
    )
    parser.add_argument("--split", choices=["even", "classes"], default="even", help="classes: digits 0-4 and 5-9")
    parser.add_argument("--text", action="store_true", help="characters of the standard library instead of digits")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="repeat with N seeds and show the spread")
    parser.add_argument("--steps", type=int, metavar="S", help="planned optimizer steps of each learner")
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps")
    parser.add_argument("--run-dir", type=Path, metavar="D", help="default: runs/<time>")
    return parser


if __name__ == "__main__":
    sys.exit(main())
