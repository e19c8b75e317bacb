"""Directional correction (heloco): turn a gradient that fights the fragment's momentum towards it.

Stale or drifted learners push against the way the fleet moves. Three cases by the cosine c of gradient and momentum:
c >= 0.2 is left alone; 0 <= c < 0.2 is blended with the momentum's direction at unchanged length; c < 0 has part of
its opposing component taken out. How much, the confidence ``a / (a + 3 b)``, grows with the gradient's length a against
the momentum's, b.

The momentum is a sum: under a steady direction it is 1 / (1 - mu) gradients long, and at mu = 0.9 a gradient as long as
any before it has the confidence 1 / 31. ``heloco-normalized`` weighs the gradient against (1 - mu) b instead, the
momentum as a mean: 1 / 4 at every mu. Direction, angle and everything else stay as they are.

Source: v4 §Merging; rulings §4; the normalised one is ours
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor

from syncer.merge import kernels, pieces
from syncer.merge.pieces import Values

MIN_NORM = 1e-8  # a shorter gradient or momentum has no direction to speak of
ALIGNED_COSINE = 0.2


def correction_of(word: str, mu: float) -> float:
    """What ``merge.delta_correction`` is to ``merge_fragment``: the share of the momentum's length that is weighed.

    0 for ``none``, which is no correction, 1 for ``heloco``, 1 - mu for ``heloco-normalized``. Raises ValueError.
    """
    shares = {"none": 0.0, "heloco": 1.0, "heloco-normalized": 1.0 - mu}
    if word not in shares:
        raise ValueError(f"delta_correction={word!r}: must be one of {', '.join(shares)}")
    return shares[word]


def correct(gradient: Tensor, momentum: Tensor, share: float = 1.0) -> Values:
    """The corrected gradient of one member and one tensor; ``gradient`` itself where nothing is to be corrected.

    Args:
        gradient: [n] f32, a signed outer gradient; not modified.
        momentum: [n] f32, the tensor's momentum before the step; not modified.
        share: of the momentum's length, for the confidence.
    """
    return Corrected([gradient], momentum, pieces.empty_like(gradient), share)[0]


class Corrected(Sequence[Values]):
    """The members' gradients of one tensor, each corrected when it is fetched.

    A fetched tensor is either the member's own gradient or ``room``, which the next fetch overwrites: whatever the
    number of members, one corrected copy exists.

    Args:
        gradients: one [n] f32 per member; not modified.
        momentum: [n] f32, the tensor's momentum before the step; not modified.
        room: [n] f32 to work in.
        share: of the momentum's length, for the confidence; see ``correction_of``.

    Attributes:
        products: of the gradients as they came, with the momentum.
    """

    def __init__(self, gradients: Sequence[Values], momentum: Tensor, room: Tensor, share: float = 1.0) -> None:
        self._share = share
        self._gradients = gradients
        self._momentum = momentum
        self._room = room
        self.products = pieces.products(gradients, momentum)

    def __len__(self) -> int:
        return len(self._gradients)

    @overload
    def __getitem__(self, index: int) -> Values: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Values]: ...
    def __getitem__(self, index: int | slice) -> Values | Sequence[Values]:
        if isinstance(index, slice):
            raise TypeError("corrected gradients are fetched one at a time")
        return self.fetch(index)[0]

    def fetch(self, index: int) -> tuple[Values, float]:
        """A member's gradient, and its norm in f64."""
        gradient = self._gradients[index]
        cosine = self._cosine(index)
        if cosine is None:
            return gradient, self.products.norms[index]
        a, b = self.products.norms[index], self.products.reference_norm
        confidence = a / (a + 3.0 * (self._share * b) + 1e-8)
        if cosine < 0:
            beta = min(0.5 * -cosine * confidence, 0.5)
            length = pieces.Norm(self._room)
            factors = [(-beta * cosine) * a / b, 1.0]
            pieces.weighted_sum(self._room, [self._momentum, gradient], factors, length=length)
            return self._room, length.value()
        blend = min((1.0 - cosine) * confidence, 1.0)
        return self._room, _turn(gradient, self._momentum, ((1.0 - blend) / a, blend / b, a), self._room)

    @property
    def is_idle(self) -> bool:
        """Do all gradients stay as they are?"""
        return all(self._cosine(index) is None for index in range(len(self)))

    def _cosine(self, index: int) -> float | None:
        """Of a gradient that is to be changed, with the momentum; else None."""
        a, b = self.products.norms[index], self.products.reference_norm
        if a < MIN_NORM or b < MIN_NORM:
            return None
        cosine = self.products.inner[index] / (a * b)
        return cosine if cosine < ALIGNED_COSINE else None


@pieces.unheeded
def _turn(gradient: Values, momentum: Tensor, factors: tuple[float, float, float], out: Tensor) -> float:
    """``t = along * d + towards * m`` in f64, rounded to f32 and scaled to ``length`` by one f32 factor; its norm."""
    along, towards, length = factors
    if kernels.compiled is not None and out.device.type == "cpu":
        square = kernels.compiled.blend(out.numpy(), pieces.as_array(gradient), momentum.numpy(), along, towards)
    else:
        square = _blend(pieces.as_f32(gradient), momentum, along, towards, out)
    own = pieces.Norm(out)
    pieces.scale(out, length / max(math.sqrt(square), MIN_NORM), own)
    return own.value()


def _blend(gradient: Tensor, momentum: Tensor, along: float, towards: float, out: Tensor) -> float:
    room, other = pieces.Wide(out), pieces.Wide(out)
    square: Any = 0.0
    for target, d, m in pieces.pieces(out, gradient, momentum):
        t, turning = room.load(d), other.load(m)
        t *= along
        turning *= towards
        t += turning
        square += pieces.dot(t, t)
        target[:] = t
    return float(square)
