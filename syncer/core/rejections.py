"""Answers and HELLOs that did not count: counted for the tape, told to the operator, and never flooding either.

Source: v4 §Generations (rejected deterministically); rulings §6.6.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from syncer.core import effects as fx
from syncer.core.events import HelloArrived
from syncer.core.rate_limiter import RateLimiter

_LINES = 64  # a minute on the tape and in the log, for HELLOs and for answers each: strangers must not silence learners


class Rejections:
    """Counts since the last merge line, and so many lines per minute."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._limiters: defaultdict[str, RateLimiter] = defaultdict(lambda: RateLimiter(_LINES))

    def count(self, reason: str) -> None:
        """One more answer did not count, for the next merge line."""
        self._counts[reason] += 1

    def take_counts(self) -> dict[str, int]:
        """The counts since the last call."""
        counts = dict(self._counts)
        self._counts.clear()
        return counts

    def hello(self, event: HelloArrived, reason: str, now: float) -> list[fx.Effect]:
        """Turn a HELLO away and tell it."""
        told = self.lines(now, "hello", event.hello.learner_id, reason)
        return [fx.RefuseHello(event.ticket, reason), *told]

    def lines(self, now: float, what: str, learner_id: int, reason: str, **fields: int) -> list[fx.Effect]:
        """The tape line and log line of one refusal; nothing once this minute has had its lines."""
        at = "".join(f", {key} {value}" for key, value in fields.items())
        text = f"refused a {what} of learner {learner_id}{at}: {reason}"
        note = {"what": what, "id": learner_id, "reason": reason, **fields}
        return self._limiters[what].tell("reject", note, text, now, warning=True)
