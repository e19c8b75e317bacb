"""What an inner optimizer remembers of parameters that went bad: judged, and forgotten.

Decides which state is spoilt. It must not know anchors, fragments or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from yeto_torch.learner.shards import own

Agree = Callable[[Sequence[bool]], Sequence[bool]]


def forget(optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[Tensor], agree: Agree = tuple) -> None:
    """Drop the optimizer state of those ``parameters`` whose state is not finite; it starts anew at the next step.

    ``agree`` is given one verdict per parameter and returns those that count: several ranks must forget the same.
    """
    spoilt = agree([not all(_is_finite(o.state.get(p)) for o in optimizers) for p in parameters])
    for parameter, drop in zip(parameters, spoilt, strict=True):
        for optimizer in optimizers:
            if drop and parameter in optimizer.state:
                del optimizer.state[parameter]


def _is_finite(state: object) -> bool:
    """Are all tensors of one parameter's optimizer state finite?"""
    values = state.values() if isinstance(state, dict) else ()
    return all(bool(torch.isfinite(own(v)).all()) for v in values if isinstance(v, Tensor))
