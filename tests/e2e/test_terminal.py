"""The live panel of a real syncer in a real (pseudo-)terminal."""

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from tests.support.processes import ROOT, child_environment
from tests.support.real_learners import SCRIPT
from tests.support.waiting import WAIT_S


class Terminal:
    """A child whose stderr is a terminal of ``columns``, and everything it has drawn so far."""

    def __init__(self, argv, columns):
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = child_environment() | {"TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        self.child = subprocess.Popen(
            [sys.executable, *argv],
            cwd=ROOT,
            env=environment,
            stderr=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        self.raw = ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._thread.start()

    def _read(self, fd):
        with os.fdopen(fd, encoding="utf-8", errors="replace", newline="") as file:
            try:
                while text := file.read(1):
                    with self._changed:
                        self.raw += text
                        self._changed.notify_all()
            except OSError:  # how a terminal says that its other end is closed
                pass

    @property
    def text(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw).replace("\r", "")

    def wait_for(self, pattern):
        with self._changed:
            deadline = time.monotonic() + WAIT_S
            while not (found := re.search(pattern, self.text, re.MULTILINE)):
                assert time.monotonic() < deadline, f"{pattern!r} did not come:\n{self.text[-3000:]}"
                self._changed.wait(1.0)
            return found

    def end(self):
        code = self.child.wait(WAIT_S)
        self._thread.join(WAIT_S)
        return code

    def close(self):
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
        self.end()


@pytest.fixture
def terminal():
    open_ones = []

    def start(argv, columns=120):
        open_ones.append(Terminal(argv, columns))
        return open_ones[-1]

    yield start
    for one in open_ones:
        one.close()


def syncer(*overrides, learners):
    return ["-m", "syncer", f"learners={learners}", "total_steps=12", "listen.port=0", *overrides]


def test_a_syncer_in_a_terminal_shows_how_far_it_is_who_is_here_and_why_it_waits(terminal, processes):
    screen = terminal(syncer("schedule.sync_interval_steps=0", "merge.device=cpu", learners=2))
    address = screen.wait_for(r"syncer listening on (\S+)$")[1]
    screen.wait_for(r"waiting for assembling: no learner is connected yet, 2 are awaited")
    screen.wait_for(r"learners +0 of 2 connected")
    environment = {"YETO_SYNCER": address, "YETO_RUN_ID": "terminal"}
    for learner in range(2):
        processes.start(f"learner {learner}", [SCRIPT, "{}"], environment | {"YETO_LEARNER_ID": str(learner)})
    assert screen.end() == 0
    text = screen.text
    assert re.search(r"rounds +12/12  \d+\.\d\d a second, 0 s left", text, re.MULTILINE)
    assert re.search(r"learners +2 of 2 connected: #0 \w+, #1 \w+", text, re.MULTILINE)
    assert re.search(r"last round +[12] of 2 answered, round \d+ ms", text, re.MULTILINE)
    assert re.search(r"bytes +\d\.\d MB in, \d\.\d MB out \(\d\.\d and \d\.\d MB/s now\)", text, re.MULTILINE)
    # log lines stand whole above the panel, never inside of it
    for line in ("training starts at step 0 with 2 learners", "training complete after 12 outer steps"):
        assert re.search(rf"\d\d:\d\d:\d\d INFO {line} *$", text, re.MULTILINE), text
    assert text.rindex("waiting for") < text.rindex("12/12")  # nothing any more, in the last picture
    assert not re.search(r"step \d+ of 12: ", text)  # the panel says it
    assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")  # the cursor is back


def test_progress_off_is_plain_lines_in_a_terminal_too(terminal):
    screen = terminal(syncer("progress=off", learners=1))
    screen.wait_for(r"INFO syncer listening on")
    screen.wait_for(r"INFO waiting for assembling")
    screen.child.send_signal(signal.SIGINT)
    assert screen.end() == 130
    assert "\x1b" not in screen.raw


def test_a_narrow_terminal_and_ctrl_c_leave_it_as_it_was(terminal):
    screen = terminal(syncer(learners=1), columns=40)
    screen.wait_for(r"learners +0 of 1")
    screen.child.send_signal(signal.SIGINT)
    assert screen.end() == 130
    assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")
    assert "Traceback" not in screen.text
