"""Outliers: which answers of a round have too large a norm to be merged.

Decides from the answers' l2 norms alone. It must not know tensors, or what becomes of an answer that is left out.

An answer is left out when its norm exceeds ``ratio`` times the median of its round. The median is over the answers that
could move the model (weight and norm above zero); where their number is even it is the lower of the middle two, so that
one giant among two or four cannot pull it up. With a ratio of at least 1 the answer in the middle always stays: no
round is left empty.

Source: the key ``merge.max_norm_ratio``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncer.core.events import Member, PushArrived


@dataclass(frozen=True, slots=True)
class Outlier:
    """An answer that is not merged, its norm, and the median it was held against."""

    member: Member
    norm: float
    median: float


def find_outliers(answers: Sequence[PushArrived], ratio: float | None) -> tuple[Outlier, ...]:
    """The answers to leave out, in their order; none without a ``ratio``."""
    if ratio is None:
        return ()
    norms = sorted(answer.norm for answer in answers if _counts(answer))
    if not norms:
        return ()
    median = norms[(len(norms) - 1) // 2]
    return tuple(
        Outlier(answer.member, answer.norm, median)
        for answer in answers
        if _counts(answer) and answer.norm > ratio * median
    )


def _counts(answer: PushArrived) -> bool:
    return answer.weight > 0 and answer.norm > 0
