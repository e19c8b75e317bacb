"""Answers and HELLOs that did not count: counted for the tape, told to the operator, and never flooding either."""

from __future__ import annotations

from collections import Counter

from syncer.core import effects as fx

_MAX_NOTES = 64  # reject lines per window, on the tape and in the log
_WINDOW_S = 60.0


class Rejections:
    """Counts since the last merge line, and a ration of lines per minute."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._notes, self._window_ends = 0, float("-inf")

    def count(self, reason: str) -> None:
        """One more answer did not count, for the next merge line."""
        self._counts[reason] += 1

    def take_counts(self) -> dict[str, int]:
        """The counts since the last call."""
        counts = dict(self._counts)
        self._counts.clear()
        return counts

    def lines(self, now: float, what: str, learner_id: int, reason: str, **fields: int) -> list[fx.Effect]:
        """The tape line and log line of one refusal; nothing once this minute's ration is used up."""
        if now >= self._window_ends:
            self._notes, self._window_ends = 0, now + _WINDOW_S
        self._notes += 1
        if self._notes > _MAX_NOTES:
            return []
        at = "".join(f", {key} {value}" for key, value in fields.items())
        return [
            fx.Note("reject", {"what": what, "id": learner_id, "reason": reason, **fields}),
            fx.Say(f"refused a {what} of learner {learner_id}{at}: {reason}", warning=True),
        ]
