"""Merge mode avg: the weighted mean of signed outer gradients.

Source: v4 §Merging; rulings §4
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from syncer.merge import pieces
from syncer.merge.pieces import Values
from syncer.merge.weights import total_weight


def average(gradients: Sequence[Values], weights: Sequence[float], out: Tensor) -> float:
    """``out = sum of f32(w / W) * d`` over the members, in their order.

    Args:
        gradients: one [n] f32 per member; read once each, in order. See ``weighted_sum`` for what a list may save.
        weights: one f64 per member, their sum positive.
        out: [n] f32 on the same device, overwritten.

    Returns:
        The norm of ``out``, in f64.
    """
    whole = total_weight(weights)
    length = pieces.Norm(out)
    pieces.weighted_sum(out, gradients, [weight / whole for weight in weights], length=length)
    return length.value()
