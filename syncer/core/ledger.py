"""Cumulative merges, local steps and tokens per logical learner; part of every checkpoint.

A checkpoint keeps them in 64 bits, and what a learner claims to have seen may be anything: counters stop at the top.

Source: v4 §Checkpoints (the cumulative learner ledger); rulings §7.
"""

from __future__ import annotations

from collections.abc import Iterable

from syncer.core.events import PushArrived
from yeto_torch.wire.constants import U64_MAX

LedgerRow = tuple[int, int, int, int]
"""(learner id, merges, steps, tokens)"""


class Ledger:
    """Counts what entered the model; a response counts once, at its round's commit."""

    def __init__(self, entries: Iterable[LedgerRow] = ()) -> None:
        self._entries = {i: (merges, steps, tokens) for i, merges, steps, tokens in entries}

    def add(self, response: PushArrived) -> None:
        merges, steps, tokens = self._entries.get(response.member.learner_id, (0, 0, 0))
        self._entries[response.member.learner_id] = (
            min(merges + 1, U64_MAX),
            min(steps + response.c_steps, U64_MAX),
            min(tokens + response.c_tokens, U64_MAX),
        )

    def rows(self) -> tuple[LedgerRow, ...]:
        """All rows, ascending by id."""
        return tuple((i, *self._entries[i]) for i in sorted(self._entries))
