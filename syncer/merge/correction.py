"""Directional correction (heloco): turn a gradient that fights the fragment's momentum towards it.

Stale or drifted learners push against the way the fleet moves. Three cases by the cosine c of gradient and momentum:
c >= 0.2 is left alone; 0 <= c < 0.2 is blended with the momentum's direction at unchanged norm; c < 0 has part of
its opposing component taken out. How much, the confidence ``a / (a + 3 b)``, grows with the gradient's norm a against
the momentum's, b.

The momentum is a sum: under a steady direction it is 1 / (1 - mu) gradients long, and at mu = 0.9 a gradient as long as
any before it has the confidence 1 / 31. ``normalized_share`` weighs the gradient against (1 - mu) b instead, the
momentum as a mean: 1 / 4 at every mu. Direction, angle and everything else stay as they are.

Source: v4 §Merging (each answer against the momentum); rulings §4; the normalised one is ours
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from syncer.merge import kernels
from syncer.merge.blocks import Values, as_array, as_tensor, blocks, norm, products, weighted_sum
from syncer.merge.members import Directions

MIN_NORM = 1e-8  # a shorter gradient or momentum has no direction to speak of
ALIGNED_COSINE = 0.2


def normalized_share(mu: float) -> float:
    """Of the momentum's norm, for momentum as a mean; see the top of this file."""
    return 1.0 - mu


class Corrected:
    """The members' gradients of one tensor, each corrected when it is fetched.

    A fetched tensor is either the member's own gradient or ``scratch``, which the next fetch overwrites: whatever the
    number of members, one corrected copy exists. They are therefore summed one after the other.

    Args:
        gradients: one [n] f32 or bf16 per member; not modified.
        momentum: [n] f32, the tensor's momentum before the step; not modified.
        scratch: [n] f32 to work in.
        share: of the momentum's norm, for the confidence.

    Attributes:
        products: of the gradients as they came, with the momentum.
    """

    def __init__(self, gradients: Sequence[Values], momentum: Tensor, scratch: Tensor, share: float = 1.0) -> None:
        self._gradients, self._momentum, self._scratch, self._share = gradients, momentum, scratch, share
        self.products = products(gradients, momentum)

    @property
    def is_idle(self) -> bool:
        """Do all gradients stay as they are?"""
        return all(self._cosine(index) is None for index in range(len(self._gradients)))

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
            factors = [(-beta * cosine) * a / b, 1.0]
            return self._scratch, weighted_sum(self._scratch, [self._momentum, gradient], factors, measured=True)
        blend = min((1.0 - cosine) * confidence, 1.0)
        square = _blend(gradient, self._momentum, (1.0 - blend) / a, blend / b, self._scratch)
        factor = a / max(math.sqrt(square), MIN_NORM)  # back to the gradient's norm, by one f32 factor
        return self._scratch, weighted_sum(self._scratch, [self._scratch], [factor], measured=True)

    def sum(self, factors: Sequence[float], out: Tensor) -> float:
        return self._sum(lambda index, _: factors[index], out)[1]

    def directions(self, shares: Sequence[float], out: Tensor) -> Directions:
        norms, direction = self._sum(lambda index, own: shares[index] / own if own else None, out)
        return Directions(norms, direction, lambda factor: weighted_sum(out, [out], [factor]))

    def _sum(self, factor_of: Callable[[int, float], float | None], out: Tensor) -> tuple[list[float], float]:
        """Into ``out``, each used up before the next is fetched: the members' norms, and that of the sum.

        ``factor_of`` a member and its norm; None leaves it out.
        """
        norms: list[float] = []
        measured: float | None = 0.0
        is_begun = False
        for index in range(len(self._gradients)):
            gradient, own = self.fetch(index)
            norms.append(own)
            factor = factor_of(index, own)
            if factor is None:
                measured = None if is_begun else 0.0
                continue
            values, factors = ([out, gradient], [1.0, factor]) if is_begun else ([gradient], [factor])
            measured = weighted_sum(out, values, factors, measured=index == len(self._gradients) - 1)
            is_begun = True
        return norms, norm(out) if measured is None else measured

    def _cosine(self, index: int) -> float | None:
        """Of a gradient that is to be changed, with the momentum; else None."""
        a, b = self.products.norms[index], self.products.reference_norm
        if a < MIN_NORM or b < MIN_NORM:
            return None
        cosine = self.products.inner[index] / (a * b)
        return cosine if cosine < ALIGNED_COSINE else None


def _blend(gradient: Values, momentum: Tensor, along: float, towards: float, out: Tensor) -> float:
    """``out = along * d + towards * m`` in f64, rounded to f32; the sum of squares before that rounding."""
    if kernels.compiled is not None and out.device.type == "cpu":
        arrays = out.numpy(), as_array(gradient), momentum.numpy()
        found: float = kernels.compiled.blend(*arrays, along, towards)
        return found
    square = torch.zeros((), dtype=torch.float64, device=out.device)
    for target, d, m in blocks(out, as_tensor(gradient), momentum):
        turned = d.double().mul_(along).add_(m.double().mul_(towards))
        square = square + torch.dot(turned, turned)
        target.copy_(turned)
    return float(square)
