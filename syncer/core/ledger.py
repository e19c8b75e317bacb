"""Cumulative merges, local steps and tokens per logical learner; part of every checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from syncer.core.events import PushArrived

Entry = tuple[int, int, int]


class Ledger:
    """Counts what entered the model; a response counts once, at its round's commit."""

    def __init__(self, entries: Iterable[tuple[int, int, int, int]] = ()) -> None:
        self._entries: dict[int, Entry] = {i: (merges, steps, tokens) for i, merges, steps, tokens in entries}

    def add(self, response: PushArrived) -> None:
        merges, steps, tokens = self._entries.get(response.member.learner_id, (0, 0, 0))
        self._entries[response.member.learner_id] = (
            merges + 1,
            steps + response.c_steps,
            tokens + response.c_tokens,
        )

    def rows(self) -> tuple[tuple[int, int, int, int], ...]:
        """(learner id, merges, steps, tokens), ascending by id."""
        return tuple((i, *self._entries[i]) for i in sorted(self._entries))
