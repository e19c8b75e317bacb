"""The small models and loops that the checks share: nothing random but by a seed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn


def network(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def holding(**tensors: torch.Tensor) -> nn.Module:
    """A module whose parameters have these names and values."""
    model = nn.Module()
    for name, values in tensors.items():
        model.register_parameter(name, nn.Parameter(values))
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, batch: int = 0) -> torch.Tensor:
    return model(torch.full((2, 4), 1.0 + batch / 8)).square().sum()


def train(model: nn.Module, optimizer: Any, steps: int = 1, scheduler: Any = None) -> None:
    for batch in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def push_all(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    """Steps with a gradient of one everywhere, for models that compute nothing."""
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def scaled_step(model: nn.Module, optimizer: Any, scaler: Any, overflow: bool = False) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()
    if overflow:
        next(model.parameters()).grad.view(-1)[0] = float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # GradScaler about its older contract
        scaler.step(optimizer)
    scaler.update()


def closure_of(model: nn.Module, optimizer: Any, calls: list[float]) -> Any:
    """A closure as torch's manual writes it; every call is noted."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        calls.append(loss.item())
        return loss

    return closure


def same(one: nn.Module, other: nn.Module) -> bool:
    """Equal bit for bit, dtypes included."""
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def same_state(one: Any, other: Any) -> bool:
    """Are two (nested) state dicts equal bit for bit?"""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)
