"""When to dial again, when to give up, when to say so: the policy behind ``link``'s loop.

Decides pauses and limits from what it is told; ``now`` is an argument. It must not know sockets or the session.

A broadcast is the proof that a connection serves its purpose: it resets the pause, the count and the complaints.

Source: rulings §5.9, §5.14.
"""

from __future__ import annotations

import random

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
COMPLAIN_EVERY_S = 10.0


class Redial:
    """One learner's attempts. ``limit``: redials without a broadcast in between before giving up; None = never."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._redials = 0
        self._pause_s = FIRST_PAUSE_S
        self._complained_at: float | None = None
        self.cause = ""  # why the last attempt or connection ended

    @property
    def exhausted(self) -> bool:
        """Would another attempt be one too many?"""
        return self._limit is not None and self._redials > self._limit

    def succeeded(self) -> None:
        """A broadcast arrived."""
        self._redials, self._pause_s, self._complained_at = 0, FIRST_PAUSE_S, None

    def failed(self, cause: str, now: float) -> bool:
        """An attempt failed; is it time to say so? At the first failure, then every 10 s."""
        self.cause = cause
        if self._complained_at is not None and now - self._complained_at < COMPLAIN_EVERY_S:
            return False
        self._complained_at = now
        return True

    def next_pause_s(self) -> float:
        """How long to wait before the next attempt: 1 s, doubling up to 30 s, each up to half longer by chance."""
        pause_s = min(LAST_PAUSE_S, self._pause_s * random.uniform(1.0, 1.5))
        self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
        self._redials += 1
        return pause_s
