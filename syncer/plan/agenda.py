"""Virtual time: what happens when, one thing at a time, in the order of its moment.

It must not know what happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Agenda:
    """``now`` is in seconds and moves only from one entry to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call ``action(*arguments)`` at ``when``, or now if that has passed."""
        heapq.heappush(self._entries, (max(when, self.now), next(self._numbers), action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, action, *arguments)

    def run(self, until_s: float) -> None:
        """Let everything happen that is due before ``until_s``."""
        while self._entries and self._entries[0][0] <= until_s:
            self.now, _, action, arguments = heapq.heappop(self._entries)
            action(*arguments)
        self.now = max(self.now, until_s)
