"""The small model that test learners train, and its data: nothing random but by the arguments.

Kept apart from ``real_learners.py``, so that a learner process need not import the test runner.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn

from yeto_torch.fragments import clean_name
from yeto_torch.wire.model_layout import Layout


def toy(seed: int, width: int = 24) -> nn.Module:
    """A model with an averaged fragment (its name says embed) and matrices of several sizes."""
    torch.manual_seed(seed)
    return nn.ModuleDict({"embed": nn.Linear(6, width), "hidden": nn.Linear(width, width), "out": nn.Linear(width, 3)})


def loss_of(model: nn.Module, learner_id: int, step: int) -> torch.Tensor:
    """The loss of one batch."""
    generator = torch.Generator().manual_seed(1000 * learner_id + step)
    x = torch.randn(8, 6, generator=generator)
    out = model["out"](torch.tanh(model["hidden"](torch.tanh(model["embed"](x)))))
    return ((out - x[:, :3].sin()) ** 2).mean()


def flat(model: nn.Module, layout: Layout) -> list[np.ndarray]:
    """A copy of the parameters of every fragment: [numel] f32."""
    named = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    return [
        np.concatenate([named[t.name].detach().float().numpy().ravel() for t in fragment.tensors])
        for fragment in layout.fragments
    ]


def digest(values: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()
