"""The tests of the rooms that changed: what ``make check`` runs of the suite, and for how long.

``python -m tests.changed [BASE]`` compares the working tree with where it left BASE (``main``). A room's tests lie in
the folder of its name: ``syncer/core/rounds.py`` is tested by ``tests/core/``. A changed test file is run itself.
After ``CAP_S`` seconds no further test is begun, and how many were skipped is said: a check is quick, ``make test`` is
complete: it also runs the rooms that import the changed one, and real processes (``tests/e2e``).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CAP_S = 30.0
_END = time.monotonic() + CAP_S
_ELSEWHERE = {"conf": "config"}  # top folders whose tests have another name


def guard_of(path: str) -> str | None:
    """The tests for one changed file, a path relative to the root; None where only the whole suite tells."""
    *folders, name = Path(path).parts
    if name.endswith(".md"):
        return "tests/docs"
    if folders[:1] == ["tests"]:
        return _a_test(path) or _deepest(folders[1:])
    inner = folders[1:] if folders[:1] in (["yeto_torch"], ["syncer"]) else []
    top = [_ELSEWHERE.get(folder, folder) for folder in folders[:1]]
    return _deepest(inner) or _deepest(top)


def _a_test(path: str) -> str | None:
    return path if Path(path).match("test_*.py") and (ROOT / path).exists() else None


def _deepest(parts: list[str]) -> str | None:
    """The deepest of ``tests/a/b`` and ``tests/a``, for ``a``, ``b``, that has tests in it."""
    for end in range(len(parts), 0, -1):
        folder = Path("tests", *parts[:end])
        if any((ROOT / folder).rglob("test_*.py")):
            return folder.as_posix()
    return None


def selected(changed: Iterable[str]) -> list[str]:
    """What to give to pytest: changed test files first, then rooms; no file twice."""
    guards = {guard for path in changed if (guard := guard_of(path))}
    inside = {guard for guard in guards for folder in guards - {guard} if Path(guard).is_relative_to(folder)}
    return sorted(guards - inside, key=lambda guard: (not guard.endswith(".py"), guard))


def changed_files(base: str) -> list[str]:
    """Tracked files that differ from where this branch left ``base``, committed or not, and new files.

    Raises subprocess.CalledProcessError where git does not know ``base``.
    """
    fork = _git("merge-base", base, "HEAD")
    return [*_git("diff", "--name-only", *fork), *_git("ls-files", "--others", "--exclude-standard")]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """As a plugin (``-p tests.changed``), in every process of the run: skip what would begin after the cap."""
    if time.monotonic() > _END:
        pytest.skip(f"the {CAP_S:g} s of make check are over; make test runs these")


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 also where the cap left tests out and those that ran are green."""
    try:
        tests = selected(changed_files(argv[0] if argv else "main"))
    except subprocess.CalledProcessError:
        print("name the branch that this one left: make check BASE=origin/main", file=sys.stderr)
        return 2
    if not tests:
        print("no room with tests of its own has changed; make test runs them all")
        return 0
    print("changed:", *tests, flush=True)
    return int(pytest.main(["-p", "tests.changed", "--quiet", "--numprocesses", "2", "--dist", "worksteal", *tests]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
