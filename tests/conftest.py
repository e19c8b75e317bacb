"""What holds for every test: two cores are enough, no window opens, no process of ours outlives the run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests run beside each other and beside their children
os.environ.setdefault("MPLBACKEND", "Agg")

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.kernel_switch import working

settings.register_profile("suite", deadline=None)  # a busy machine must not make a property fail
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the checkout."""
    return ROOT


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """No test depends on the YETO_* variables of the shell it was started from."""
    for name in list(os.environ):
        if name.startswith("YETO_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module", params=["compiled", "plain"])
def either_way(request):
    """Run a module's tests with the compiled kernels, and again with the code that stands in for them."""
    with working(request.param):
        yield request.param


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind():
    yield
    left = _children()
    assert not left, f"the tests left processes behind: {left}"


def _children() -> dict[int, str]:
    """Command lines of living child processes of this one that run our commands (Linux; elsewhere nothing is known)."""
    found = {}
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in file.read_text().split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended meanwhile
                continue
            if "syncer" in command or "yeto_torch" in command:
                found[int(pid)] = command
    return found
