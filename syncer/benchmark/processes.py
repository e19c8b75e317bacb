"""Child processes of an experiment: each writes to a log file, and all of them end with us.

How a child is started, told and reaped is the launcher's (``yeto_torch.launcher.processes``); here no pipe is read,
so that nobody waits for us. Must not know what a syncer or a learner is.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from yeto_torch.launcher.processes import Child, Children, Signalled

_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 20


@dataclass(eq=False, kw_only=True)
class LoggedChild(Child):
    """``log`` holds the child's command and then all it says."""

    log: Path

    def last_lines(self, most: int) -> list[str]:
        """The end of what it said."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        return text.splitlines()[-most:]

    @property
    def last_line(self) -> str:
        """What it said last."""
        return next((line for line in reversed(self.last_lines(_TAIL_LINES)) if line.strip()), "")


class LoggedChildren(Children):
    """Starts children with logs and hands out their ends in order. Used by one thread."""

    def start_logged(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> LoggedChild:
        """Start ``argv`` without input, its output going to ``log``. Raises OSError."""
        with log.open("wb") as output:
            output.write(f"$ {shlex.join(argv)}\n".encode())
            output.flush()
            process = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )
        child = LoggedChild(name, process, log=log)
        self.watch(child)
        return child

    def stop(self, grace_s: float) -> None:
        """Ask every child to end, and kill those that have not after ``grace_s`` or when we are asked again."""
        for child in self.alive:
            child.signal(signal.SIGINT)
        deadline = time.monotonic() + grace_s
        while self.alive:
            event = self.next_event(deadline - time.monotonic())
            if event is None or isinstance(event, Signalled):
                self.kill()

    @contextlib.contextmanager
    def watched(self) -> Iterator[LoggedChildren]:
        """While inside, SIGINT, SIGTERM and SIGHUP become events; on leaving, whatever still runs is killed."""
        with self.signals():
            try:
                yield self
            finally:
                self.kill()
