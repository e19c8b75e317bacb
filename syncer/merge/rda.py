"""Merge mode rda: average length and average direction, each on its own.

A plain mean of gradients that disagree is short; rda keeps the weighted mean of their lengths and gives it the
weighted mean of their directions.

Source: protocol v4, merge mode 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from syncer.merge import pieces
from syncer.merge.average import average
from syncer.merge.weights import total_weight

MIN_DIRECTION = 1e-12  # below, the directions cancel: there is no mean direction to scale


def radial_directional_average(gradients: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> Tensor:
    """``out = R / ||u|| * u`` with ``R = sum w n / W`` and ``u = sum w / (W n) * d``, n the members' f64 norms.

    A member of norm 0 has no direction but counts in W and R. Directions that cancel fall back to ``average``.

    Args:
        gradients: one [n] f32 per member; any sequence but a list is fetched once, and once more in the fallback.
        weights: one f64 per member, their sum positive.
        out: [n] f32 on the same device, overwritten and returned.
    """
    whole = total_weight(weights)
    if isinstance(gradients, list):
        norms = [pieces.norm(gradient) for gradient in gradients]
        moved = [index for index, length in enumerate(norms) if length != 0]
        factors = [weights[index] / whole / norms[index] for index in moved]
        pieces.weighted_sum(out, [gradients[index] for index in moved], factors)
    else:
        norms = _directions(gradients, weights, whole, out)
    if not any(norms):
        return out.zero_()
    radius = pieces.total([length * weight for length, weight in zip(norms, weights, strict=True)]) / whole
    direction = pieces.norm(out)
    if direction < MIN_DIRECTION:
        return average(gradients, weights, out)
    pieces.scale(out, radius / direction)
    return out


def _directions(gradients: Sequence[Tensor], weights: Sequence[float], whole: float, out: Tensor) -> list[float]:
    """``out = u`` of members that share one memory, each used up before the next is fetched; returns their norms."""
    norms: list[float] = []
    for gradient, weight in zip(gradients, weights, strict=True):
        length = pieces.norm(gradient)
        if length != 0:
            factor = weight / whole / length
            if any(norms):
                pieces.add(out, gradient, factor)
            else:
                pieces.weighted_sum(out, [gradient], [factor])
        norms.append(length)
    return norms
