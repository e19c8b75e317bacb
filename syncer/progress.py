"""What an operator sees while rounds go by: a live panel in a terminal, else a plain log line every few seconds.

It reads merge lines, names and counters and decides nothing. ``progress=off`` leaves plain lines only; the panel needs
rich, which belongs to an extra, and without it plain lines say the same.

Speeds are those of the last seconds, so that a run that stands still shows it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from syncer.config.policy import SyncerPolicy
from syncer.core.record import MeasuredLine

if TYPE_CHECKING:
    from syncer.terminal import Panel, Picture

log = logging.getLogger("syncer")

_EVERY_S = 10.0
_ROUNDS_WINDOW_S = 120.0  # of rounds a second
_BYTES_WINDOW_S = 10.0
_SHOWN = 8  # learners told one by one; of more only how many

Moved = Callable[[], tuple[int, int]]
"""(received, sent) bytes so far."""


class Speed:
    """Of a growing number: per second over the last ``window_s``."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def at(self, now: float, value: float) -> float:
        """Note ``value`` and return the speed; 0 for the first."""
        self._points.append((now, value))
        while len(self._points) > 2 and self._points[1][0] <= now - self._window_s:
            self._points.popleft()
        then, old = self._points[0]
        return max(0.0, value - old) / (now - then) if now > then else 0.0


@dataclass(slots=True)
class View:
    """What is known about the run now.

    Attributes:
        total: outer steps; None when the learners' budget ends the run, not a number of rounds.
        expected: learners configured.
        step: committed rounds.
        connected: ids now here.
        lags: per learner its versions behind in the last round it answered; None where it missed the last one.
        waiting: what the run waits for, in one sentence.
        line: of the last round in words.
    """

    total: int | None
    expected: int
    step: int = 0
    connected: tuple[int, ...] = ()
    lags: dict[int, int | None] = field(default_factory=dict)
    waiting: str = ""
    line: str = ""
    rounds_per_s: float = 0.0
    received: int = 0
    sent: int = 0
    received_per_s: float = 0.0
    sent_per_s: float = 0.0

    @property
    def left(self) -> str:
        """The time left in words, or nothing."""
        if self.total is None:
            return ""
        if self.rounds_per_s <= 0:
            return "time left unknown"
        seconds = (self.total - self.step) / self.rounds_per_s
        minutes, hours = divmod(round(seconds), 60)[0], round(seconds) // 3600
        if hours:
            return f"{hours} h {minutes % 60} min left"
        return f"{minutes} min {round(seconds) % 60} s left" if minutes else f"{seconds:.0f} s left"

    @property
    def traffic(self) -> str:
        """Bytes a second and in all."""
        return (
            f"{self.received / 1e6:.1f} MB in, {self.sent / 1e6:.1f} MB out "
            f"({self.received_per_s / 1e6:.1f} and {self.sent_per_s / 1e6:.1f} MB/s now)"
        )

    @property
    def learners(self) -> str:
        """Who is here and how far behind; who is not."""
        head = f"{len(self.connected)} of {self.expected} connected"
        away = sorted(self.lags.keys() - set(self.connected))
        if len(self.connected) + len(away) <= _SHOWN:
            told = [f"#{learner} {self._lag(learner)}" for learner in self.connected]
            told += [f"#{learner} away" for learner in away]
        else:
            lags = [self.lags[learner] for learner in self.connected if learner in self.lags]
            late, behind = lags.count(None), sum(bool(lag) for lag in lags)
            told = [f"{lags.count(0)} fresh", f"{behind} behind", f"{late} late", f"{len(away)} away"]
        return f"{head}: {', '.join(told)}" if told else head

    def _lag(self, learner: int) -> str:
        if learner not in self.lags:
            return "new"
        lag = self.lags[learner]
        if lag is None:
            return "late"
        return f"{lag} behind" if lag else "fresh"


class Progress:
    """Rounds done, rate, time left; learners and their lag; bytes, for which ``moved`` is asked from any thread."""

    def __init__(self, policy: SyncerPolicy, moved: Moved) -> None:
        self._budget = policy.budget_learner_steps  # the learners' steps end the process then, not the total
        self.view = View(policy.total_steps if self._budget is None else None, policy.learners)
        self._moved = moved
        self._rounds = Speed(_ROUNDS_WINDOW_S)
        self._received, self._sent = Speed(_BYTES_WINDOW_S), Speed(_BYTES_WINDOW_S)
        self._fragments = 1
        self._next_line = 0.0
        self._panel: Panel | None = None
        if policy.progress == "auto" and self._budget is None and sys.stderr.isatty() and find_spec("rich") is not None:
            from syncer.terminal import Panel

            self._panel = Panel(self._picture)

    def committed(self, line: MeasuredLine, connected: Iterable[int]) -> None:
        """A merge line was written; ``connected`` are the ids now here."""
        view, now = self.view, time.monotonic()
        view.step = line["step"]
        view.rounds_per_s = self._rounds.at(now, view.step)
        view.line = f"{len(line['responded'])} of {len(line['expected'])} answered, round {line['ms']:.0f} ms"
        self._fragments = max(self._fragments, line["fragment"] + 1)
        answered = {one["id"]: -(-one["staleness"] // self._fragments) for one in line["responders"]}
        # Made anew: the panel's thread may be reading the old one.
        view.lags = {**view.lags, **dict.fromkeys(line["missed_grace"]), **answered}
        view.connected = tuple(connected)
        if self._panel is None and now >= self._next_line:
            self._next_line = now + _EVERY_S
            self._say()

    def standing(self, connected: Iterable[int], waiting: str) -> None:
        """Who is here and what is awaited, for the panel."""
        self.view.connected, self.view.waiting = tuple(connected), waiting

    @property
    def live(self) -> bool:
        """Is there a panel, which wants to know between rounds too?"""
        return self._panel is not None

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._panel is not None:
            self.view.waiting = ""
            self._panel.close()
            self._panel = None

    def _now(self) -> View:
        """The view with the speeds of this moment; a run that stands still slows down."""
        view, now = self.view, time.monotonic()
        view.received, view.sent = self._moved()
        view.received_per_s = self._received.at(now, view.received)
        view.sent_per_s = self._sent.at(now, view.sent)
        return view

    def _picture(self) -> Picture:
        view = self._now()
        lines = {
            "rounds": f"{view.step}/{view.total}  {view.rounds_per_s:.2f} a second, {view.left}",
            "learners": view.learners,
            "last round": view.line or "none yet",
            "bytes": view.traffic,
            "waiting for": view.waiting,
        }
        return view.step, view.total or 0, lines

    def _say(self) -> None:
        view = self._now()
        text = f"{view.line}, {view.rounds_per_s:.2f} rounds/s, {view.traffic}; {view.learners}"
        if view.total is None:
            log.info("step %d, until learners have made %d local steps: %s", view.step, self._budget, text)
        else:
            log.info("step %d of %d: %s; %s", view.step, view.total, text, view.left)
