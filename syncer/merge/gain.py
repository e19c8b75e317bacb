"""How hard an outer step drives the model: its gain along the learners' progress, and the limit of ``outer.guard=cap``.

With D the weighted mean of a round's answers (signed outer gradients as decoded, before any correction), g the merged
gradient and b the momentum before the step, the parameters move by -lr (g + mu (mu b + g)). How far that goes along
the learners' mean progress -D, in units of that progress, needs no parameters:

    gain       = lr ((1 + mu) <g, D> + mu^2 <b, D>) / <D, D>
    agreement  = |D| / (mean of the answers' lengths): 1 where all point one way, 1 / sqrt(M) where nothing is shared
    lag        = cosine of D and b: does this round go on where the rounds before it went? Below 0 the learners are on
                 their way back: the steps before went too far

Plain averaging has gain 1: the fleet moves to where its learners are. Under a steady direction the gain is
lr / (1 - mu), where each round is orthogonal to all before it lr (1 + mu), and where they alternate
lr (1 + 2 mu) / (1 + mu).
``GAIN_LIMIT`` is the upper end of the band; it has no lower end, since a gain below 1 is slow and not harmful.

The cap is the largest mu' <= mu with which the gain stays within the limit, the root of a parabola; rounded down to 12
bits, so that the last bit of a sum decides nothing. Where even mu' = 0 is above the limit the learning rate is too
large, and mu' = 0. It follows from the round and the momentum alone: a resumed run caps as the first one did.

Estimated on a fixed subset, blocks of 4 KiB spread evenly: 1/64 of a fragment, and at least 2^14 and at most 2^16
values. Sums are f64.

Source: the key ``outer.guard``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncer.merge.weights import total_weight

GAIN_LIMIT = 1.25
BLOCK = 1024  # values
FEWEST_BLOCKS, MOST_BLOCKS = 16, 64
_MOMENTUM_STEPS = 4096


@dataclass(frozen=True, slots=True)
class Drive:
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

    def capped(self, lr: float, mu: float, limit: float = GAIN_LIMIT) -> float:
        """The momentum coefficient, ``mu`` itself or less, with which the gain stays within ``limit``, or 0."""
        if not self.gain(lr, mu) > limit:
            return mu
        room = limit / lr - self.along  # what is left for mu' along + mu'^2 carried
        if room <= 0:
            return 0.0
        root = math.sqrt(max(0.0, self.along**2 + 4.0 * self.carried * room))
        most = 2.0 * room / (self.along + root)  # this form loses no digits, whatever the sign of ``carried``
        return min(mu, math.floor(most * _MOMENTUM_STEPS) / _MOMENTUM_STEPS)


@dataclass(frozen=True, slots=True)
class Answers:
    """What the answers say of themselves, before they are merged. ``mean``: D, sampled, [k] f64."""

    mean: Tensor
    square: float
    carried: float
    agreement: float
    lag: float | None

    def drive(self, merged: Tensor) -> Drive:
        """With the merged gradient [n] f32 they lead to."""
        along = float(torch.dot(sampled(merged), self.mean)) / self.square
        return Drive(along, self.carried, self.agreement, self.lag)


def answers_of(gradients: Sequence[Tensor], weights: Sequence[float], momentum: Tensor) -> Answers | None:
    """Look at a round's answers; None where their mean has no direction: no weight, or all of them zero.

    Args:
        gradients: one [n] f32 per member, signed outer gradients as decoded; not modified.
        weights: one f64 per member.
        momentum: [n] f32, the fragment's momentum before the step; not modified.
    """
    whole = total_weight(weights)
    if not whole > 0:
        return None
    before = sampled(momentum)
    mean = torch.zeros_like(before)
    sums = []
    for gradient, weight in zip(gradients, weights, strict=True):
        part = sampled(gradient)
        sums.append(torch.dot(part, part))
        mean += part.mul_(weight / whole)
    sums += [torch.dot(mean, mean), torch.dot(before, mean), torch.dot(before, before)]
    *squares, square, inner, momentum_square = torch.stack(sums).tolist()
    if not square > 0:
        return None
    length = sum(weight * math.sqrt(own) for weight, own in zip(weights, squares, strict=True)) / whole
    lag = inner / math.sqrt(square * momentum_square) if momentum_square > 0 else None
    return Answers(mean, square, inner / square, math.sqrt(square) / length, lag)


def sampled(values: Tensor) -> Tensor:
    """The values of [n] f32 that are looked at, in order, as fresh f64 on the same device."""
    numel = values.numel()
    blocks = min(max(numel // (64 * BLOCK), FEWEST_BLOCKS), MOST_BLOCKS)
    if numel <= blocks * BLOCK:
        return values.to(torch.float64)
    stride = (numel - BLOCK) // (blocks - 1)
    return values.unfold(0, BLOCK, stride)[:blocks].to(torch.float64).reshape(-1)


def outer_momentum(guard: str, drive: Drive | None, lr: float, mu: float) -> float:
    """The momentum coefficient of a commit under ``outer.guard``: ``mu`` itself unless it says ``cap``."""
    return drive.capped(lr, mu) if guard == "cap" and drive is not None else mu
