"""Child processes and their output as one stream of events.

A child runs in its own process group, so a Ctrl-C in the terminal reaches only us and we decide who is told. Two
threads watch each child: one turns its output into whole lines, one waits for its end. Both only report; whoever reads
``Children.next_event`` decides. Whatever an ended child left running in its group is killed: no orphan stays. Not even
if we are killed ourselves, where the command was ``leashed``.

This shell must not know what a syncer or a learner is.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

MAX_LINE_BYTES = 1 << 20  # a longer line is passed on in pieces: memory stays bounded
MAX_WAITING_LINES = 4096  # then the child itself waits, on its full pipe
TAIL_LINES = 200
REFRESH_S = 1.0  # a progress bar (carriage returns) becomes a line this often
DRAIN_S = 2.0  # after a child's end, silence on its pipe for this long is the end too: something else holds it open
_BREAK = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a child's output, without its line break."""

    child: Child
    text: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A child has ended and all its output has been delivered. ``code`` is 128 + n after signal n."""

    child: Child
    code: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """We were asked to stop."""

    signum: int


Event = Line | Exited | Signalled

# PR_SET_PDEATHSIG belongs to the process and survives its exec; setting it between fork and exec would risk a deadlock.
_LEASH = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])"""


def leashed(command: Sequence[str]) -> list[str]:
    """The same command, on Linux told to end (SIGTERM) when the thread that starts it is gone, however it went."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *command]


def python_environment(sharing: int | None = None) -> dict[str, str]:
    """Ours, for a child that runs Python: unbuffered, and with the checkout, which need not be installed.

    ``sharing``: how many such children share the cores, unless the user has chosen; None = its libraries decide.
    """
    env = dict(os.environ)
    if sharing is not None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env = {"OMP_NUM_THREADS": str(max(1, cores // sharing))} | env
    source = Path(__file__).resolve().parents[2]
    if source.name not in ("site-packages", "dist-packages"):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source), env.get("PYTHONPATH"))))
    return env | {"PYTHONUNBUFFERED": "1"}


class LineSplitter:
    """Bytes as they come from a pipe, out as whole lines of text; a partial line waits for its rest.

    A bare carriage return overwrites in a terminal. Here what stood before it is passed on at most once per
    ``REFRESH_S`` and else dropped: nobody could have read it either.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._refreshed_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[str]:
        self._rest += data
        lines, start = [], 0
        for match in _BREAK.finditer(self._rest):
            part, start = self._rest[start : match.start()], match.end()
            if match.group() == b"\r":
                if not part or now - self._refreshed_at < REFRESH_S:
                    continue
                self._refreshed_at = now
            lines.append(_text(part))
        self._rest = self._rest[start:]
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(_text(self._rest))
            self._rest = b""
        return lines

    def close(self) -> list[str]:
        """The last line, if it had no line break."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")


@dataclass(eq=False)
class Child:
    """A running or ended process. ``tail`` holds its last lines once they were taken from the event queue."""

    name: str
    process: subprocess.Popen[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    code: int | None = None  # set when its Exited was taken from the event queue
    turns: int = 0  # of the reading thread; odd while it waits for the pipe
    _reaping: threading.Lock = field(default_factory=threading.Lock)

    def signal(self, signum: int) -> None:
        """Send ``signum`` to the child's whole group; nothing once it has ended."""
        with self._reaping:  # a pid that was not reaped cannot have been given to somebody else
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signum)

    def reap(self) -> int:
        """Wait for the end, kill what is left of the group, and return the exit code."""
        if hasattr(os, "waitid"):  # look without reaping: the group's number stays ours while we kill the rest of it
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            self.signal(signal.SIGKILL)
        with self._reaping if hasattr(os, "waitid") else contextlib.nullcontext():
            code = self.process.wait()
        return code if code >= 0 else 128 - code


class Children:
    """Starts children and hands out, in order of arrival, what they say and how they end. Used by one thread."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # its put() may be called from a signal handler
        self._room = threading.Semaphore(MAX_WAITING_LINES)
        self.alive: list[Child] = []  # those whose end was not taken yet
        self.interrupted = False  # a signal to us was taken

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Child:
        """Start ``command`` in its own process group, without input, with stdout and stderr in one pipe.

        Raises OSError when the program cannot be started.
        """
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,  # a background group that reads the terminal would be stopped
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        child = Child(name, process)
        self.watch(child)
        return child

    def watch(self, child: Child) -> None:
        """Report what a started child says, if that comes through a pipe, and then its end."""
        self.alive.append(child)
        pipe, reader = child.process.stdout, None
        if pipe is not None:
            reader = threading.Thread(target=self._read, args=(child, pipe), name=f"{child.name} output", daemon=True)
            reader.start()
        threading.Thread(target=self._wait, args=(child, reader), name=f"{child.name} end", daemon=True).start()

    def next_event(self, timeout_s: float | None) -> Event | None:
        """The next event, or None after ``timeout_s``."""
        try:
            event = self._events.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(event, Line):
            self._room.release()
            event.child.tail.append(event.text)
        elif isinstance(event, Exited):
            event.child.code = event.code
            self.alive.remove(event.child)
        elif isinstance(event, Signalled):
            self.interrupted = True
        return event

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While inside, SIGINT, SIGTERM and SIGHUP become ``Signalled`` events; only in the main thread."""

        def report(signum: int, _frame: FrameType | None) -> None:
            self._events.put(Signalled(signum))

        before = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    before[signum] = signal.signal(signum, report)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def kill(self) -> None:
        """SIGKILL every group that is left and wait for the ends; the way out of an error of our own."""
        for child in self.alive:
            child.signal(signal.SIGKILL)
        while self.alive:
            self.next_event(None)

    def _read(self, child: Child, pipe: IO[bytes]) -> None:
        splitter = LineSplitter()
        with pipe:
            while True:
                child.turns += 1
                data = os.read(pipe.fileno(), 1 << 16)
                child.turns += 1
                if not data:
                    break
                self._report(child, splitter.feed(data, time.monotonic()))
        self._report(child, splitter.close())

    def _report(self, child: Child, lines: list[str]) -> None:
        for text in lines:
            self._room.acquire()
            self._events.put(Line(child, text))

    def _wait(self, child: Child, reader: threading.Thread | None) -> None:
        code = child.reap()
        turns = -1
        while reader is not None and reader.is_alive() and not (turns == child.turns and turns % 2):
            turns = child.turns
            reader.join(DRAIN_S)
        self._events.put(Exited(child, code))
