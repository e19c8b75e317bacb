"""Virtual time: what happens when, one thing at a time, in the order of its moment.

It must not know what happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count


class Agenda:
    """``now`` is in seconds and moves only from one entry to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, partial[None]]] = []
        self._numbers = count()

    def at(self, when: float, action: Callable[..., None], *arguments: object) -> None:
        """Call ``action(*arguments)`` at ``when``, or now if that has passed."""
        heapq.heappush(self._entries, (max(when, self.now), next(self._numbers), partial(action, *arguments)))

    def after(self, seconds: float, action: Callable[..., None], *arguments: object) -> None:
        self.at(self.now + seconds, action, *arguments)

    def run(self, until_s: float) -> None:
        """Let everything happen that is due before ``until_s``."""
        while self._entries and self._entries[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._entries)
            action()
        self.now = max(self.now, until_s)
