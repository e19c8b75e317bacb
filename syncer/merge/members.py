"""What the members of a round sent for one tensor, as the merge modes ask for it: a sum, or a sum of directions.

Members are ordered by (learner id, generation), and that order fixes the bits. ``Corrected`` is the other kind.

Source: v4 §Merging (formulas take signed outer gradients); rulings §4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from syncer.merge.blocks import Products, Values, products, weighted_sum

_SAFE_DIRECTION = 0.1  # from here on ||u|| may be reckoned from inner products: what f32 makes of u is below 1e-6 of it


@dataclass(frozen=True, slots=True)
class Directions:
    """``u = sum of f32(share / norm) * d`` over the members that have a direction.

    Attributes:
        norms: of all members, in f64.
        norm: of u, in f64; 0 where nobody has a direction.
        put: writes ``f32(factor) * u``.
    """

    norms: list[float]
    norm: float
    put: Callable[[float], float]


class Members(Protocol):
    """The gradients of one tensor, [n] f32 or bf16 each; ``out`` is [n] f32 on their device."""

    def sum(self, factors: Sequence[float], out: Tensor) -> float:
        """``out = sum of f32(factors) * d``; the norm of that, in f64."""
        ...

    def directions(self, shares: Sequence[float], out: Tensor) -> Directions:
        """The sum of directions, which ``put`` then writes to ``out``; that is overwritten already now."""
        ...


class Uncorrected:
    """The gradients as they came. ``known``: their products, where they have been multiplied already."""

    def __init__(self, gradients: Sequence[Values], known: Products | None = None) -> None:
        self._gradients, self._known = gradients, known

    def sum(self, factors: Sequence[float], out: Tensor) -> float:
        return weighted_sum(out, self._gradients, factors, measured=True)

    def directions(self, shares: Sequence[float], out: Tensor) -> Directions:
        known = products(self._gradients) if self._known is None else self._known
        moved = [index for index, norm in enumerate(known.norms) if norm != 0]
        if not moved:
            return Directions(known.norms, 0.0, lambda _: 0.0)
        gradients = [self._gradients[index] for index in moved]
        put = partial(weighted_sum, out, gradients, [shares[index] / known.norms[index] for index in moved])
        reckoned = _reckoned(known, shares)
        if reckoned > _SAFE_DIRECTION:
            return Directions(known.norms, reckoned, put)  # one trip instead of two
        return Directions(known.norms, put(measured=True), lambda factor: weighted_sum(out, [out], [factor]))


def _reckoned(known: Products, shares: Sequence[float]) -> float:
    """``||u||`` of two members that both have a direction; 0 where it must be measured."""
    if known.cross is None or not all(known.norms):
        return 0.0
    (m, n), (v, w) = known.norms, shares
    return math.sqrt(max(0.0, v * v + w * w + 2.0 * v * w * (known.cross / m / n)))
