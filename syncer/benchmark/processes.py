"""Child processes that write to log files, and their ends as events.

Every child leads a process group of its own: a Ctrl-C in the terminal reaches only us, and whatever an ended child
left running in its group is killed. Threads only report; whoever reads ``next_event`` decides.

Must not know what a syncer or a learner is.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 20


@dataclass(eq=False)
class Child:
    """A running or ended process; ``log`` holds its command and then all it says."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    code: int | None = None  # set when its end was taken from the event queue
    _reaping: threading.Lock = field(default_factory=threading.Lock)

    def signal(self, number: int) -> None:
        """Send ``number`` to the child's whole group; nothing once it has ended."""
        with self._reaping:  # a pid that was not reaped cannot have been given to somebody else
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, number)

    def reap(self) -> int:
        """Wait for the end, kill what is left of the group; the exit code, 128 + n after signal n."""
        can_look = hasattr(os, "waitid")
        if can_look:  # without reaping: the group's number stays ours while we kill the rest of it
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            self.signal(signal.SIGKILL)
        with self._reaping if can_look else contextlib.nullcontext():
            code = self.process.wait()
        return code if code >= 0 else 128 - code

    def tail(self, lines: int) -> list[str]:
        """The end of what it said."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        return text.splitlines()[-lines:]

    @property
    def last_line(self) -> str:
        """What it said last."""
        return next((line for line in reversed(self.tail(_TAIL_LINES)) if line.strip()), "")


@dataclass(frozen=True, slots=True)
class Ended:
    child: Child
    code: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """We were asked to stop."""


Event = Ended | Signalled


class Children:
    """Starts children and hands out their ends in order. Used by one thread.

    Attributes:
        alive: those whose end was not taken yet.
        interrupted: a signal to us was taken.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # its put() may be called from a signal handler
        self.alive: list[Child] = []
        self.interrupted = False

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Child:
        """Start ``argv`` without input, its output going to ``log``. Raises OSError."""
        with log.open("wb") as output:
            output.write(f"$ {shlex.join(argv)}\n".encode())
            output.flush()
            process = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )
        child = Child(name, log, process)
        self.alive.append(child)
        threading.Thread(target=self._wait, args=(child,), name=f"{name} end", daemon=True).start()
        return child

    def next_event(self, timeout_s: float | None) -> Event | None:
        """The next event, or None after ``timeout_s``."""
        try:
            event = self._events.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(event, Ended):
            event.child.code = event.code
            self.alive.remove(event.child)
        elif isinstance(event, Signalled):
            self.interrupted = True
        return event

    def stop(self, grace_s: float) -> None:
        """Ask every child to end, and kill those that have not after ``grace_s`` or when we are asked again."""
        self._signal_all(signal.SIGINT)
        deadline = time.monotonic() + grace_s
        while self.alive:
            event = self.next_event(deadline - time.monotonic())
            if event is None or isinstance(event, Signalled):
                self.kill()

    def kill(self) -> None:
        """SIGKILL every group that is left and wait for the ends."""
        self._signal_all(signal.SIGKILL)
        while self.alive:
            self.next_event(None)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Children]:
        """While inside, SIGINT, SIGTERM and SIGHUP become events; on leaving, whatever still runs is killed."""

        def report(_number: int, _frame: FrameType | None) -> None:
            self._events.put(Signalled())

        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, report)
        try:
            yield self
        finally:
            self.kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signal_all(self, number: int) -> None:
        for child in self.alive:
            child.signal(number)

    def _wait(self, child: Child) -> None:
        self._events.put(Ended(child, child.reap()))
