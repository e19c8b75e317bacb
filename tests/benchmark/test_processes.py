"""Children of the benchmark: their logs, their ends, and that nothing of them stays."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from syncer.benchmark.processes import LoggedChildren
from yeto_torch.launcher.processes import Exited, Signalled

WAIT_S = 60.0
# Python, since a shell may miss a signal between two commands
OBEDIENT = f"exec {sys.executable} -c \"import time; print('up', flush=True); time.sleep(1000)\""
STUBBORN = "trap '' INT TERM; echo up; while :; do sleep 0.1; done"


@pytest.fixture
def children():
    with LoggedChildren().watched() as children:
        yield children
    assert not children.alive


def start(children, script, log, name="child"):
    return children.start_logged(name, ["/bin/sh", "-c", script], dict(os.environ), log)


def says(child, word):
    """Once it has said so."""
    deadline = time.monotonic() + WAIT_S
    while word not in child.last_lines(50):
        assert time.monotonic() < deadline, child.last_lines(50)
        time.sleep(0.005)


def gone(pid):
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        with suppress(OSError):  # a zombie that nobody has reaped yet is gone as well
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_log_begins_with_the_command_and_holds_all_output(children, tmp_path):
    child = start(children, "echo out; echo err >&2; exit 3", tmp_path / "log")
    assert children.next_event(WAIT_S) == Exited(child, 3)
    assert child.code == 3
    assert (tmp_path / "log").read_text().splitlines() == [
        "$ /bin/sh -c 'echo out; echo err >&2; exit 3'",
        "out",
        "err",
    ]
    assert child.last_line == "err"
    assert child.last_lines(2) == ["out", "err"]


def test_a_signal_s_exit_code_is_the_shell_s(children, tmp_path):
    child = start(children, "kill -9 $$", tmp_path / "log")
    assert children.next_event(WAIT_S) == Exited(child, 137)


def test_ends_come_in_order_and_nothing_comes_in_between(children, tmp_path):
    first = start(children, "exit 0", tmp_path / "1")
    assert children.next_event(WAIT_S).child is first
    assert children.next_event(0.0) is None
    assert children.alive == []


def test_the_tail_of_a_long_log_is_read_from_its_end(children, tmp_path):
    child = start(children, "seq 1 100000", tmp_path / "log")
    children.next_event(WAIT_S)
    assert child.last_lines(2) == ["99999", "100000"]


def test_what_an_ended_child_left_running_is_killed(children, tmp_path):
    child = start(children, "sleep 1000 & echo $!; exit 0", tmp_path / "log")
    children.next_event(WAIT_S)
    assert gone(int(child.last_line))


def test_a_child_that_does_not_end_when_asked_is_killed(children, tmp_path):
    stubborn, obedient = (
        start(children, STUBBORN, tmp_path / "1"),
        start(children, OBEDIENT, tmp_path / "2"),
    )
    for child in (stubborn, obedient):
        says(child, "up")
    children.stop(6.0)  # what obeys has the time, on a busy machine too
    assert (stubborn.code, obedient.code) == (137, 130)
    assert gone(stubborn.process.pid)


def test_a_second_signal_kills_at_once(children, tmp_path):
    child = start(children, STUBBORN, tmp_path / "log")
    says(child, "up")
    signal.raise_signal(signal.SIGINT)
    assert children.next_event(WAIT_S) == Signalled(signal.SIGINT)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    children.stop(WAIT_S * 100)
    assert child.code == 137
    assert children.interrupted


def test_leaving_kills_and_gives_the_signals_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    children = LoggedChildren()
    with suppress(RuntimeError), children.watched():
        child = start(children, STUBBORN, tmp_path / "log")
        says(child, "up")
        assert signal.getsignal(signal.SIGINT) != before
        raise RuntimeError("an error of our own")
    assert child.code == 137
    assert gone(child.process.pid)
    assert signal.getsignal(signal.SIGINT) is before
