"""Points in parameter space that an inner optimizer keeps beside a parameter, and that must move along with it.

A schedule-free optimizer trains at y and keeps z; the average x lies between them. A broadcast moves y: if z stayed
where it was, every later step would pull y back towards this learner's own past. Momenta and other averages of
gradients are directions, not points, and stay.

Source: Defazio et al., "The Road Less Scheduled" (2024), and the ``schedulefree`` package, whose state this reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_POINT = "z"


def points_beside(optimizers: Sequence[torch.optim.Optimizer], parameter: Tensor) -> list[Tensor]:
    """The points kept beside ``parameter``, of its shape; only optimizers with ``train()`` and ``eval()`` keep any."""
    states = [optimizer.state.get(parameter, {}) for optimizer in optimizers if _has_modes(optimizer)]
    return [state[_POINT] for state in states if isinstance(state.get(_POINT), Tensor)]


def _has_modes(optimizer: torch.optim.Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
