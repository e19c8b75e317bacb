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


def radial_directional_average(
    gradients: Sequence[Tensor], weights: Sequence[float], out: Tensor, norms: Sequence[float] | None = None
) -> float:
    """``out = R / ||u|| * u`` with ``R = sum w n / W`` and ``u = sum w / (W n) * d``, n the members' f64 norms.

    A member of norm 0 has no direction but counts in W and R. Directions that cancel fall back to ``average``.

    Args:
        gradients: one [n] f32 per member; any sequence but a list is fetched once, and once more in the fallback.
        weights: one f64 per member, their sum positive.
        out: [n] f32 on the same device, overwritten.
        norms: of the members, where they are known; with a list only.

    Returns:
        The norm of ``out``, in f64.
    """
    whole = total_weight(weights)
    if isinstance(gradients, list):
        norms = [pieces.norm(gradient) for gradient in gradients] if norms is None else norms
        moved = [index for index, length in enumerate(norms) if length != 0]
        factors = [weights[index] / whole / norms[index] for index in moved]
        direction = pieces.weighted_sum(out, [gradients[index] for index in moved], factors) if moved else 0.0
    else:
        norms, direction = _directions(gradients, weights, whole, out)
    if not any(norms):
        out.zero_()
        return 0.0
    radius = pieces.total([length * weight for length, weight in zip(norms, weights, strict=True)]) / whole
    if direction < MIN_DIRECTION:
        return average(gradients, weights, out)
    return pieces.scale(out, radius / direction)


def _directions(
    gradients: Sequence[Tensor], weights: Sequence[float], whole: float, out: Tensor
) -> tuple[list[float], float]:
    """``out = u`` of members that share one memory, each used up before the next is fetched; their norms, and u's."""
    norms: list[float] = []
    direction = 0.0
    for gradient, weight in zip(gradients, weights, strict=True):
        length = pieces.norm(gradient)
        if length != 0:
            factor = weight / whole / length
            if any(norms):
                direction = pieces.add(out, gradient, factor)
            else:
                direction = pieces.weighted_sum(out, [gradient], [factor])
        norms.append(length)
    return norms, direction
