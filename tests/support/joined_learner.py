"""A small model and its optimizer joined to a scripted syncer, and waits for what the learner has heard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.support.scripted_syncer import WAIT_S, ScriptedGroup, ScriptedSyncer
from yeto_torch import YetoOuterOptimizer
from yeto_torch.learner.session import Session


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def model_of(**tensors: torch.Tensor) -> torch.nn.Module:
    """A module whose parameters have these names and values."""
    model = torch.nn.Module()
    for name, values in tensors.items():
        model.register_parameter(name, torch.nn.Parameter(values.clone()))
    return model


def join(
    syncer: ScriptedSyncer,
    model: torch.nn.Module,
    inner: torch.optim.Optimizer | list[torch.optim.Optimizer] | None = None,
    **arguments: Any,
) -> YetoOuterOptimizer:
    """An optimizer that dials ``syncer``; plain SGD, f32, one connection and no waiting unless told otherwise."""
    arguments = {
        "learner_id": 1,
        "run_id": "tests",
        "wire_dtype": "f32",
        "streams": 0,
        "wait_for_start": False,
        "connect_timeout_s": WAIT_S,
        "final_timeout_s": WAIT_S,
        **arguments,
    }
    inner = torch.optim.SGD(model.parameters(), lr=0.1) if inner is None else inner
    return YetoOuterOptimizer(inner, model, syncer=syncer.address, **arguments)


def started(
    syncer: ScriptedSyncer,
    model: torch.nn.Module,
    values: list[torch.Tensor],
    version: int = 0,
    *,
    tokens: int | None = None,
    **arguments: Any,
) -> tuple[YetoOuterOptimizer, ScriptedGroup]:
    """An optimizer that has adopted ``values``, one per fragment, at its first step, which moved nothing by itself."""
    optimizer = join(syncer, model, **arguments)
    group = syncer.group(len(syncer.groups) - 1 if syncer.groups else 0)
    group.broadcast_all(version, values)
    heard(optimizer, **{f"f{f}": (f, version) for f in range(len(values))})
    zero_gradients(model)
    optimizer.step(tokens=tokens)
    return optimizer, group


def await_session(optimizer: YetoOuterOptimizer, true: Callable[[Session], bool]) -> None:
    """Block until ``true(session)``; what the learner's reader threads do wakes this up."""
    link = optimizer._learner.link
    with link.lock:
        assert link._attention.wait_for(lambda: true(link.session), WAIT_S), link.waiting_for()


def heard(optimizer: YetoOuterOptimizer, **versions_and_pulls: tuple[int, int]) -> None:
    """Wait until broadcasts have arrived: ``heard(o, f0=(0, 3))`` is version 3 of fragment 0."""
    for fragment, version in versions_and_pulls.values():
        await_session(
            optimizer,
            lambda s, f=fragment, v=version: s._slots[f].heard is not None and s._slots[f].heard.version == v,
        )


def pulled(optimizer: YetoOuterOptimizer, fragment: int, step: int, attempt: int = 1) -> None:
    """Wait until this pull has arrived."""
    await_session(
        optimizer,
        lambda s: (
            s._slots[fragment].pull is not None
            and (s._slots[fragment].pull.step, s._slots[fragment].pull.attempt) == (step, attempt)
        ),
    )


def zero_gradients(model: torch.nn.Module) -> None:
    gradients(model, (torch.zeros_like(p) for p in model.parameters()))


def gradients(model: torch.nn.Module, values: Iterable[torch.Tensor]) -> None:
    """Set every parameter's gradient."""
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.grad = value.reshape(parameter.shape).to(parameter.dtype)


def flat(optimizer: YetoOuterOptimizer, model: torch.nn.Module, fragment: int) -> torch.Tensor:
    """[numel] f32 values of a fragment, in wire order."""
    named = dict(model.named_parameters())
    tensors = optimizer.layout.fragments[fragment].tensors
    return torch.cat([named[t.name].detach().float().reshape(-1) for t in tensors])
