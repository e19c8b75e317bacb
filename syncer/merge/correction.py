"""Directional correction (heloco): turn a gradient that fights the fragment's momentum towards it.

Stale or drifted learners push against the way the fleet moves. Three cases by the cosine c of gradient and momentum:
c >= 0.2 is left alone; 0 <= c < 0.2 is blended with the momentum's direction at unchanged length; c < 0 has part of
its opposing component taken out. How much grows with the gradient's length against the momentum's.

Source: protocol v4, "Optional directional correction"; the formulas are those of the README's section on merging.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from syncer.merge import pieces

MIN_NORM = 1e-8  # a shorter gradient or momentum has no direction to speak of
ALIGNED_COSINE = 0.2


def correct(gradient: Tensor, momentum: Tensor) -> Tensor:
    """The corrected gradient of one member and one tensor; ``gradient`` itself where nothing is to be corrected.

    Args:
        gradient: [n] f32, a signed outer gradient; not modified.
        momentum: [n] f32, the tensor's momentum before the step; not modified.
    """
    return Corrected([gradient], momentum, pieces.empty_like(gradient))[0]


class Corrected(Sequence[Tensor]):
    """The members' gradients of one tensor, each corrected when it is fetched.

    A fetched tensor is either the member's own gradient or ``room``, which the next fetch overwrites: whatever the
    number of members, one corrected copy exists.

    Args:
        gradients: one [n] f32 per member; not modified.
        momentum: [n] f32, the tensor's momentum before the step; not modified.
        room: [n] f32 to work in.
    """

    def __init__(self, gradients: Sequence[Tensor], momentum: Tensor, room: Tensor) -> None:
        self._gradients = gradients
        self._momentum = momentum
        self._room = room
        self._alignments, self._momentum_norm = pieces.alignment(gradients, momentum)

    def __len__(self) -> int:
        return len(self._gradients)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            raise TypeError("corrected gradients are fetched one at a time")
        gradient = self._gradients[index]
        cosine = self._cosine(index)
        if cosine is None:
            return gradient
        (a, _), b = self._alignments[index], self._momentum_norm
        confidence = a / (a + 3.0 * b + 1e-8)
        if cosine < 0:
            beta = min(0.5 * -cosine * confidence, 0.5)
            return _add_momentum(gradient, self._momentum, (-beta * cosine) * a / b, self._room)
        blend = min((1.0 - cosine) * confidence, 1.0)
        return _turn(gradient, self._momentum, ((1.0 - blend) / a, blend / b, a), self._room)

    @property
    def is_idle(self) -> bool:
        """Do all gradients stay as they are?"""
        return all(self._cosine(index) is None for index in range(len(self)))

    def _cosine(self, index: int) -> float | None:
        """Of a gradient that is to be changed, with the momentum; else None."""
        (a, inner), b = self._alignments[index], self._momentum_norm
        if a < MIN_NORM or b < MIN_NORM:
            return None
        cosine = inner / (a * b)
        return cosine if cosine < ALIGNED_COSINE else None


def _add_momentum(gradient: Tensor, momentum: Tensor, factor: float, out: Tensor) -> Tensor:
    """``d + f32(factor) * m``, product and sum rounded to f32 each."""
    for target, d, m in pieces.pieces(out, gradient, momentum):
        pieces.product(m, factor, target).add_(d)
    return out


def _turn(gradient: Tensor, momentum: Tensor, factors: tuple[float, float, float], out: Tensor) -> Tensor:
    """``t = along * d + towards * m`` in f64, rounded to f32 and scaled to ``length`` by one f32 factor."""
    along, towards, length = factors
    room, other = pieces.scratch(out, torch.float64), pieces.scratch(out, torch.float64)
    square = torch.zeros((), dtype=torch.float64, device=out.device)
    for target, d, m in pieces.pieces(out, gradient, momentum):
        t = room[: d.numel()].copy_(d).mul_(along)
        t += other[: m.numel()].copy_(m).mul_(towards)
        square += torch.dot(t, t)
        target.copy_(t)
    pieces.scale(out, length / max(float(square.sqrt()), MIN_NORM))
    return out
