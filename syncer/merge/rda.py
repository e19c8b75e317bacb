"""Merge mode rda: average length and average direction, each on its own.

A plain mean of gradients that disagree is short; rda keeps the weighted mean of their lengths and gives it the
weighted mean of their directions.

Source: v4 §Merging; rulings §4
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from syncer.merge import pieces
from syncer.merge.average import average
from syncer.merge.correction import Corrected
from syncer.merge.pieces import Norm, Products, Values
from syncer.merge.weights import total_weight

MIN_DIRECTION = 1e-12  # below, the directions cancel: there is no mean direction to scale
_SAFE_DIRECTION = 0.1  # from here on ||u|| may be reckoned from inner products: what f32 makes of u is below 1e-6 of it


def radial_directional_average(
    gradients: Sequence[Values], weights: Sequence[float], out: Tensor, known: Products | None = None
) -> float:
    """``out = R / ||u|| * u`` with ``R = sum w n / W`` and ``u = sum w / (W n) * d``, n the members' f64 norms.

    A member of norm 0 has no direction but counts in W and R. Directions that cancel fall back to ``average``.

    Args:
        gradients: one [n] f32 per member; corrected ones are fetched once, and once more in the fallback.
        weights: one f64 per member, their sum positive.
        out: [n] f32 on the same device, overwritten.
        known: of the members of a list, where they have been multiplied already.

    Returns:
        The norm of ``out`` as the formula has it: R, or that of the average.
    """
    whole = total_weight(weights)
    if not isinstance(gradients, Corrected):
        known = pieces.products(gradients) if known is None else known
        norms = known.norms
        moved = [index for index, length in enumerate(norms) if length != 0]
        directions = [gradients[index] for index in moved]
        factors = [weights[index] / whole / norms[index] for index in moved]
    else:
        norms, direction = _directions(gradients, weights, whole, out)
    if not any(norms):
        out.zero_()
        return 0.0
    radius = pieces.total([length * weight for length, weight in zip(norms, weights, strict=True)]) / whole
    if not isinstance(gradients, Corrected):
        assert known is not None
        direction = _reckoned(known, weights, whole)
        if direction > _SAFE_DIRECTION:
            pieces.weighted_sum(out, directions, factors, radius / direction)
            return radius
        length = Norm(out)
        pieces.weighted_sum(out, directions, factors, length=length)
        direction = length.value()
    if direction < MIN_DIRECTION:
        return average(gradients, weights, out)
    pieces.scale(out, radius / direction)
    return radius


def _reckoned(known: Products, weights: Sequence[float], whole: float) -> float:
    """``||u||`` of two members that both have a direction; 0 where it must be measured."""
    if known.cross is None or not all(known.norms):
        return 0.0
    (m, n), (v, w) = known.norms, [weight / whole for weight in weights]
    return math.sqrt(max(0.0, v * v + w * w + 2.0 * v * w * (known.cross / m / n)))


def _directions(gradients: Corrected, weights: Sequence[float], whole: float, out: Tensor) -> tuple[list[float], float]:
    """``out = u`` of members that share one memory, each used up before the next is fetched; their norms, and u's."""
    norms: list[float] = []
    length: Norm | None = None
    for index, weight in enumerate(weights):
        gradient, own = gradients.fetch(index)
        if own != 0:
            factor, length = weight / whole / own, Norm(out) if index == len(weights) - 1 else None
            if any(norms):
                pieces.add(out, gradient, factor, length=length)
            else:
                pieces.weighted_sum(out, [gradient], [factor], length=length)
        norms.append(own)
    if not any(norms):
        return norms, 0.0
    return norms, pieces.norm(out) if length is None else length.value()
