"""Merge mode avg: the weighted mean of signed outer gradients.

Source: v4 §Merging (the weighted mean); rulings §4.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from syncer.merge.blocks import ordered_sum
from syncer.merge.members import Members


def average(members: Members, weights: Sequence[float], out: Tensor) -> float:
    """``out = sum of f32(w / W) * d`` over the members, in their order.

    Args:
        members: what they sent, [n] each.
        weights: one f64 per member, their sum positive.
        out: [n] f32 on the same device, overwritten.

    Returns:
        The norm of ``out``, in f64.
    """
    total = ordered_sum(weights)
    return members.sum([weight / total for weight in weights], out)
