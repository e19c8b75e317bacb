"""How hard an outer step drives the model: its gain along the learners' progress, and the momentum within a limit.

With D the weighted mean of a round's answers (signed outer gradients as decoded, before any correction), g the merged
gradient and b the momentum before the step, the parameters move by -lr (g + mu (mu b + g)). How far that goes along
the learners' mean progress -D, in units of that progress, needs no parameters:

    gain       = lr ((1 + mu) <g, D> + mu^2 <b, D>) / <D, D>
    drive      = lr ((1 + mu) + mu^2 <b, D> / <g, D>), the gain over that of g itself: what rda or iso make of a mean's
                 norm is the merge mode's, this is the outer step's
    agreement  = |D| / (mean of the answers' norms): 1 where all point one way, 1 / sqrt(M) where nothing is shared
    lag        = cosine of D and b: does this round go on where the rounds before it went? Below 0 the learners are on
                 their way back: the steps before went too far

Under plain averaging gain and drive are the same, and 1 with lr 1 and no momentum: the fleet moves to where its
learners are. Under a steady direction it is lr / (1 - mu), where each round is orthogonal to all before it lr (1 + mu),
and where they alternate lr (1 + 2 mu) / (1 + mu).

A drive has an upper limit only: a small one is slow and not harmful. The cap is the largest mu' <= mu that keeps within
it, the root of a parabola; rounded down to 12 bits, so that the last bit of a sum decides nothing. A learning rate
above the limit is too large by itself, and mu' = 0. Where the merged gradient does not go along the learners' mean
there is no drive and no cap. All of it follows from the round and the momentum: a resumed run caps as the first one
did.

Estimated on a fixed sample, 64 stretches spread evenly over the fragment: 1/256 of it, but at least 2^12 and at most
2^14 values; to a few per cent. Sums are f64.

Source: v4 §Outer step; the gain and the cap are ours
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from syncer.merge.blocks import ordered_sum

STRETCHES = 64
SHORTEST, LONGEST = 64, 256  # values of a stretch
_MOMENTUM_STEPS = 4096
_LEAST_ALONG = 1e-6  # a merged gradient across the mean has no drive; iso's shortest are longer


@dataclass(frozen=True, slots=True)
class Alignment:
    """One round's inner products, as far as the gain needs them.

    Attributes:
        along: <g, D> / <D, D>.
        carried: <b, D> / <D, D>.
        agreement: see the top of this file; 0 to 1 but for rounding.
        lag: the same, -1 to 1 but for rounding; None while there is no momentum.
    """

    along: float
    carried: float
    agreement: float
    lag: float | None

    def gain(self, lr: float, mu: float) -> float:
        """Of a step with this learning rate and momentum coefficient."""
        return lr * ((1.0 + mu) * self.along + mu * mu * self.carried)

    def drive(self, lr: float, mu: float) -> float | None:
        """The gain over that of the merged gradient itself; None where that goes nowhere along the mean, or back."""
        return self.gain(lr, mu) / self.along if self.along > _LEAST_ALONG else None

    def capped(self, lr: float, mu: float, limit: float) -> float:
        """The momentum coefficient, ``mu`` itself or less, with which the drive stays within ``limit``, or 0."""
        drive = self.drive(lr, mu)
        if drive is None or not drive > limit:
            return mu
        left = limit / lr - 1.0  # for mu' + mu'^2 carried / along
        if left <= 0:
            return 0.0
        root = math.sqrt(max(0.0, 1.0 + 4.0 * left * self.carried / self.along))
        most = 2.0 * left / (1.0 + root)  # this form loses no digits, whatever the sign of ``carried``
        return min(mu, math.floor(most * _MOMENTUM_STEPS) / _MOMENTUM_STEPS)


@dataclass(frozen=True, slots=True)
class MeanAnswer:
    """What the answers say of themselves, before they are merged. ``mean``: D as far as it is looked at, [k]."""

    mean: NDArray[np.float64]
    square: float
    carried: float
    agreement: float
    lag: float | None

    def against(self, merged: Tensor) -> Alignment:
        """With the merged gradient [n] f32 they lead to."""
        along = float(sampled([merged])[0] @ self.mean) / self.square
        return Alignment(along, self.carried, self.agreement, self.lag)


def mean_answer(gradients: Sequence[Tensor], weights: Sequence[float], momentum: Tensor) -> MeanAnswer | None:
    """Look at a round's answers; None where their mean has no direction: no weight, or all of them zero.

    Args:
        gradients: one [n] f32 per member, signed outer gradients as decoded; not modified.
        weights: one f64 per member.
        momentum: [n] f32, the fragment's momentum before the step; not modified.
    """
    total = ordered_sum(weights)
    if not total > 0:
        return None
    *answers, before = sampled([*gradients, momentum])
    shares = [weight / total for weight in weights]
    mean = np.zeros_like(before)
    for share, answer in zip(shares, answers, strict=True):
        mean += share * answer
    square, carried, momentum_square = (float(a @ b) for a, b in ((mean, mean), (before, mean), (before, before)))
    if not square > 0:
        return None
    norms = [share * math.sqrt(float(answer @ answer)) for share, answer in zip(shares, answers, strict=True)]
    lag = carried / math.sqrt(square * momentum_square) if momentum_square > 0 else None
    return MeanAnswer(mean, square, carried / square, math.sqrt(square) / ordered_sum(norms), lag)


def sampled(tensors: Sequence[Tensor]) -> NDArray[np.float64]:
    """What is looked at of flat f32 or bf16 tensors of one length, in order: [tensors, k] f64, on the CPU."""
    numel = tensors[0].numel()
    count, every = STRETCHES, numel // STRETCHES
    size = min(max(every // 256, SHORTEST), LONGEST)
    if every <= size:  # a small fragment is one stretch
        count, every, size = 1, numel, numel
    parts = [tensor[: count * every].view(count, every)[:, :size].float() for tensor in tensors]
    found: NDArray[np.float32] = torch.stack(parts).cpu().numpy()  # one trip
    return found.astype(np.float64).reshape(len(tensors), -1)
