"""Merge mode rda: average norm and average direction, each on its own.

A plain mean of gradients that disagree is short; rda keeps the weighted mean of their norms and gives it the
weighted mean of their directions.

Source: v4 §Merging (radii and directions averaged apart, per tensor); rulings §4.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from syncer.merge.average import average
from syncer.merge.blocks import ordered_sum
from syncer.merge.members import Members

MIN_DIRECTION = 1e-12  # below, the directions cancel: there is no mean direction to scale


def radial_directional_average(members: Members, weights: Sequence[float], out: Tensor) -> float:
    """``out = R / ||u|| * u`` with ``R = sum w n / W`` and ``u = sum w / (W n) * d``, n the members' f64 norms.

    A member of norm 0 has no direction but counts in W and R. Directions that cancel fall back to ``average``.

    Args:
        members: what they sent, [n] each.
        weights: one f64 per member, their sum positive.
        out: [n] f32 on the same device, overwritten.

    Returns:
        The norm of ``out`` as the formula has it: R, or that of the average.
    """
    total = ordered_sum(weights)
    found = members.directions([weight / total for weight in weights], out)
    if not any(found.norms):
        out.zero_()
        return 0.0
    if found.norm < MIN_DIRECTION:
        return average(members, weights, out)
    radius = ordered_sum([norm * weight for norm, weight in zip(found.norms, weights, strict=True)]) / total
    found.put(radius / found.norm)
    return radius
