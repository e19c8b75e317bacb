"""Coverage-guided search for inputs that break a promise: ``python -m tests.fuzz.run --time 60 [target ...]``.

Needs the ``fuzz`` extra (atheris). Every target runs for its share of the time in a process of its own, starting from
the seeds and the kept corpus. A find is printed and ends with exit code 1; with ``--keep`` the inputs that reach new
code are minimised and written to ``corpus/``, where the test suite replays them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

LIMITS = ["-max_len=600", "-timeout=20", "-rss_limit_mb=3000", "-print_final_stats=1", "-verbosity=1"]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--time", type=int, default=60, metavar="SECONDS", help="for all targets together")
    options.add_argument("--keep", action="store_true", help="write what was found worth keeping to corpus/")
    options.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options.add_argument("targets", nargs="*")
    chosen = options.parse_args()
    if chosen.child:
        _search(chosen.child[0], chosen.child[1:])
        return 0
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("this needs atheris: pip install -e '.[fuzz]' (Linux)", file=sys.stderr)
        return 2
    from tests.fuzz.targets import TARGETS

    names = chosen.targets or list(TARGETS)
    failed = [name for name in names if not _fuzz(name, max(1, chosen.time // len(names)), keep=chosen.keep)]
    print("nothing was found" if not failed else f"found something in: {', '.join(failed)}")
    return 1 if failed else 0


def _fuzz(name: str, seconds: int, *, keep: bool) -> bool:
    """One target for so long; False when it found something."""
    from tests.fuzz import seeds

    with tempfile.TemporaryDirectory(prefix="yeto-fuzz-") as folder:
        start, found = Path(folder) / "start", Path(folder) / "found"
        for path in (start, found):
            path.mkdir()
        for number, data in enumerate([*seeds.seeds()[name], *seeds.kept(name)]):
            (start / str(number)).write_bytes(data)
        print(f"{name}: {seconds} s", flush=True)
        done = _run(
            name, folder, [*LIMITS, f"-max_total_time={seconds}", f"-artifact_prefix={folder}/find-", found, start]
        )
        said = done.stderr.decode(errors="replace").splitlines()
        if done.returncode:
            print("\n".join(said[-60:]))
            for path in Path(folder).glob("find-*"):
                print(f"{name}: {path.name} {path.read_bytes().hex()}", flush=True)
            return False
        runs = next((line.split()[-1] for line in said if "number_of_executed_units" in line), "?")
        print(f"{name}: {runs} runs, {len(list(found.iterdir()))} new inputs", flush=True)
        if keep:
            lawful = seeds.seeds()[name]
            worth = _worth_keeping(name, lawful, [path.read_bytes() for path in (*start.iterdir(), *found.iterdir())])
            seeds.keep(name, worth)
            print(f"{name}: {len(worth)} kept", flush=True)
        return True


def _worth_keeping(name: str, known: list[bytes], inputs: list[bytes]) -> list[bytes]:
    """The fewest and shortest inputs, but for ``known`` ones, that reach every pair of lines all of them reach."""
    from tests.fuzz.targets import TARGETS

    reached: set[tuple[str, int, int]] = set()
    for data in known:
        reached |= _arcs(TARGETS[name], data)
    kept = []
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        arcs = _arcs(TARGETS[name], data)
        if not arcs <= reached:
            reached |= arcs
            kept.append(data)
    return kept


def _arcs(target: Callable[[bytes], None], data: bytes) -> set[tuple[str, int, int]]:
    """(file, line, next line) of our code that an input runs through."""
    arcs: set[tuple[str, int, int]] = set()

    def enter(frame: FrameType, _event: str, _arg: object) -> Callable[..., object] | None:
        file = frame.f_code.co_filename
        if "/yeto_torch/" not in file and "/syncer/" not in file:
            return None
        last = frame.f_lineno

        def line(frame: FrameType, _event: str, _arg: object) -> Callable[..., object]:
            nonlocal last
            arcs.add((file, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line

    sys.settrace(enter)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return arcs


def _run(name: str, folder: str, arguments: list[str | Path]) -> subprocess.CompletedProcess[bytes]:
    """The search ends its process hard, so what it writes lies in ``folder``, which goes with us."""
    command = [sys.executable, "-m", "tests.fuzz.run", "--child", name, *map(str, arguments)]
    return subprocess.run(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": folder}, check=False
    )


def _search(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["yeto_torch", "syncer"]):
        from tests.fuzz.targets import TARGETS
    atheris.Setup([name, *arguments], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
