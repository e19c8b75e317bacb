"""How many lines a stranger can make us write: so many a minute, and then how many were kept back.

It decides on lines, not on what they say. Whatever a peer can cause without end is told through one of these.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncer.core import effects as fx

_WINDOW_S = 60.0


class RateLimiter:
    """So many ``lines`` in one minute."""

    def __init__(self, lines: int) -> None:
        self._lines = lines
        self._used = self._kept_back = 0
        self._window_ends = float("-inf")

    def take(self, now: float) -> int | None:
        """None: this line is one too many. Else how many were kept back since the last one."""
        if now >= self._window_ends:
            self._used, self._window_ends = 0, now + _WINDOW_S
        if self._used >= self._lines:
            self._kept_back += 1
            return None
        self._used += 1
        kept_back, self._kept_back = self._kept_back, 0
        return kept_back

    def tell(
        self, event: str, fields: Mapping[str, object], text: str, now: float, *, warning: bool = False
    ) -> list[fx.Effect]:
        """A line for the tape and one for the log, or none; both say how many were kept back."""
        kept_back = self.take(now)
        if kept_back is None:
            return []
        left_out = {"left_out": kept_back} if kept_back else {}
        return [fx.Note(event, {**fields, **left_out}), fx.Say(text + remark(kept_back), warning)]


def remark(kept_back: int) -> str:
    """What to append to a line of the log."""
    return f" ({kept_back} such lines before it were left out)" if kept_back else ""
