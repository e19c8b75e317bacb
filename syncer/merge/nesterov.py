"""The outer step: Nesterov momentum in f32, whole or not at all.

    buf <- mu * buf + d        theta <- theta - lr * (d + mu * buf)

Parameters stop at 2^100, the largest magnitude that may travel: what lawful but absurd answers make of a model must
still be a broadcast that every learner takes. No other run ever comes near it.

Every product and every sum is rounded by itself (see ``blocks``): the bits are then the same on every processor, and
those of ``torch.optim.SGD(nesterov=True)`` wherever that does not fuse them.

Source: v4 §Outer step (f32 Nesterov); rulings §4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from syncer.merge import kernels
from syncer.merge.blocks import F32_MAX, blocks, largest, product
from yeto_torch.wire import codec
from yeto_torch.wire.constants import MAX_MAGNITUDE
from yeto_torch.wire.errors import LocalError, RunError

_SAFE = 2.0**126  # magnitudes bounded by this cannot reach infinity by rounding
_ROUNDING = 1.0 + 2.0**-18  # what f32 may add to a bound, or to a norm, that is reckoned in f64


@dataclass(slots=True)
class Bounds:
    """No value of the parameters, and none of the momentum, is larger in magnitude.

    Whoever owns the tensors may keep theirs from step to step: it is moved on with each, and measured again only when
    it says too little. That saves reading both tensors twice.
    """

    params: float = math.inf
    momentum: float = math.inf

    def measure(self, params: Tensor, momentum: Tensor) -> None:
        self.params, self.momentum = largest(params), largest(momentum)

    def step(self, peak: float, lr: float, mu: float) -> tuple[Bounds, float]:
        """Those behind a step along a gradient that reaches ``peak``, and the largest magnitude on the way there."""
        buffer = abs(mu) * self.momentum + peak
        update = abs(lr) * (peak + abs(mu) * buffer)
        behind = Bounds((self.params + update) * _ROUNDING, buffer * _ROUNDING)
        return behind, max(buffer, peak + abs(mu) * buffer, update) + self.params


def nesterov_step(
    params: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    lr: float,
    mu: float,
    bounds: Bounds | None = None,
    norm: float | None = None,
    copy: Tensor | None = None,
) -> None:
    """One outer step, in place on ``params`` and ``momentum``.

    Args:
        params, momentum: [n] f32, overwritten.
        gradient: [n] f32, the merged signed outer gradient; not modified.
        lr, mu: learning rate and momentum coefficient, used as f32.
        bounds: of params and momentum, kept by the caller; moved on.
        norm: of the gradient, where it is known: no value is larger, so it need not be read for that.
        copy: [n] f32 or bf16 on the same device, becomes what ``params`` are behind the step, rounded to nearest even.

    Raises:
        RunError: the gradient, or the state after the step, would not be finite. Neither buffer is touched then.
        LocalError: the tensors do not match.
    """
    if not (params.shape == momentum.shape == gradient.shape and params.dim() == 1):
        raise LocalError("outer step: parameters, momentum and gradient are not flat tensors of one length")
    peak = largest(gradient) if norm is None else norm * _ROUNDING
    if not math.isfinite(peak):
        raise RunError("the merged outer gradient is not finite")
    bounds = Bounds() if bounds is None else bounds
    behind, most = bounds.step(peak, lr, mu)
    if not most < MAX_MAGNITUDE:
        bounds.measure(params, momentum)
        behind, most = bounds.step(largest(gradient), lr, mu)
    if not most < _SAFE and not _stays_finite(params, momentum, gradient, lr, mu):
        raise RunError("the outer step would make parameters or momentum non-finite")
    is_plain = most < MAX_MAGNITUDE and max(abs(lr), abs(mu)) <= F32_MAX
    if kernels.compiled is not None and params.device.type == "cpu" and is_plain:
        target = None if copy is None else copy.view(torch.uint8).numpy()
        kernels.compiled.nesterov_step(params.numpy(), momentum.numpy(), gradient.numpy(), lr, mu, target)
    else:
        _advance_all(params, momentum, gradient, lr, mu, not most < MAX_MAGNITUDE)
        if copy is not None:
            codec.copy(params, copy)
    bounds.params, bounds.momentum = min(behind.params, MAX_MAGNITUDE), behind.momentum


def _advance_all(params: Tensor, momentum: Tensor, gradient: Tensor, lr: float, mu: float, is_clipped: bool) -> None:
    for p, m, d in blocks(params, momentum, gradient):
        _advance(p, m, d, lr, mu)
        if is_clipped:
            p.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)


def _stays_finite(params: Tensor, momentum: Tensor, gradient: Tensor, lr: float, mu: float) -> bool:
    """The step rehearsed on copies, block by block."""
    for p, m, d in blocks(params, momentum, gradient):
        behind = p.clone()
        _advance(behind, m.clone(), d, lr, mu)
        # momentum that overflowed has taken the parameter with it
        if not bool(behind.isfinite().all()):
            return False
    return True


def _advance(params: Tensor, momentum: Tensor, gradient: Tensor, lr: float, mu: float) -> None:
    product(momentum, mu, momentum).add_(gradient)
    update = product(momentum, mu).add_(gradient)
    params.sub_(product(update, lr, update))
