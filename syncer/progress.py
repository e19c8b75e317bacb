"""What an operator sees while rounds go by: a live line in a terminal, else a plain log line every few seconds.

It reads merge lines and counters and decides nothing. ``progress=off`` leaves plain lines only.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from syncer.policy import SyncerPolicy

if TYPE_CHECKING:
    from syncer.server import Server

log = logging.getLogger("syncer")

_EVERY_S = 10.0


class Progress:
    """Rounds done, rate, time left, learners in the last round, bytes."""

    def __init__(self, policy: SyncerPolicy) -> None:
        self._total = policy.total_steps
        self._budget = policy.budget_learner_steps  # the learners' steps end the process then, not the total
        self._first: tuple[float, int] | None = None
        self._next_line = 0.0
        self._bar: Any = None
        # rich draws the live line; it belongs to an extra, and without it plain lines say the same
        wanted = policy.progress == "auto" and self._budget is None
        if wanted and sys.stderr.isatty() and find_spec("rich") is not None:
            self._bar = _live_bar(self._total)

    def committed(self, line: Mapping[str, Any], server: Server) -> None:
        """A merge line was written."""
        now, step = time.monotonic(), int(line["step"])
        if self._first is None:
            self._first = (now, step)
        started, first = self._first
        rate = (step - first) / (now - started) if now > started else 0.0
        left = f"{(self._total - step) / rate:.0f} s left" if rate > 0 else "time left unknown"
        received, sent = server.bytes_moved
        text = (
            f"{len(line['responded'])} of {len(line['expected'])} answered, round {line['ms']:.0f} ms, "
            f"{rate:.2f} rounds/s, {received / 1e6:.1f} MB in, {sent / 1e6:.1f} MB out"
        )
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=step, note=text)
        elif now >= self._next_line:
            self._next_line = now + _EVERY_S
            if self._budget is None:
                log.info("step %d of %d: %s, %s", step, self._total, text, left)
            else:
                log.info("step %d, until learners have made %d local steps: %s", step, self._budget, text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


def _live_bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("rounds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("rounds", total=total, note="")
    bar.start()
    return bar, task
