"""Checks of what a loop does with an optimizer at every step: hooks, closures, scalers, gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.contract.loop import adamw, closure_of, loss_of, network, same, scaled_step, sgd, train
from tests.contract.registry import check
from tests.contract.subjects import Subject


@runtime_checkable
class Structural(Protocol):
    """The structural type that some trainers check for."""

    state: Any
    defaults: Any
    param_groups: Any
    step: Callable
    zero_grad: Callable
    state_dict: Callable
    load_state_dict: Callable


def pair(subject: Subject, kind: Callable[[nn.Module], Any] = sgd) -> tuple[nn.Module, Any, nn.Module, Any]:
    """A model with the subject's optimizer, and the same model with the plain one."""
    model, plain = network(), network()
    return model, subject.wrap(model, kind(model)), plain, kind(plain)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


# ---------------------------------------------------------------------------------------------- what it is


@check("identity", "is a `torch.optim.Optimizer`")
def is_an_optimizer(subject: Subject) -> None:
    model, optimizer, _, _ = pair(subject)
    assert isinstance(optimizer, torch.optim.Optimizer)
    train(model, optimizer)


@check("identity", "has `state`, `defaults`, `param_groups` and the methods before any step")
def has_the_structure(subject: Subject) -> None:
    _, optimizer, _, plain = pair(subject)
    assert isinstance(optimizer, Structural)
    assert optimizer.defaults == plain.defaults


@check("identity", "wrapping changes no bit of any parameter")
def wrapping_changes_nothing(subject: Subject) -> None:
    model, _, plain, _ = pair(subject)
    assert same(model, plain)


@check("identity", "wrapping makes no step")
def wrapping_makes_no_step(subject: Subject) -> None:
    model, steps = network(), []
    inner = sgd(model)
    inner.register_step_pre_hook(lambda *_: steps.append("step"))
    optimizer = subject.wrap(model, inner)
    assert not steps
    assert not optimizer.state_dict()["state"]


# ---------------------------------------------------------------------------------------------- hooks


@check("hooks", "a step pre-hook runs once per step, and may replace the arguments")
def pre_hook(subject: Subject) -> None:
    model, optimizer, _, _ = pair(subject)
    seen, calls = [], []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(o is optimizer))
    optimizer.register_step_pre_hook(lambda o, _a, k: ((o, closure_of(model, optimizer, calls)), k))
    train(model, optimizer, 2)
    assert seen == [True, True]
    assert len(calls) == 2


@check("hooks", "a step post-hook runs once per step")
def post_hook(subject: Subject) -> None:
    model, optimizer, _, _ = pair(subject)
    seen = []
    optimizer.register_step_post_hook(lambda o, *_: seen.append(o is optimizer))
    train(model, optimizer, 2)
    assert seen == [True, True]


@check("hooks", "torch's global step hooks run once per step")
def global_hooks(subject: Subject) -> None:
    model, optimizer, _, _ = pair(subject)
    seen = []
    before = register_optimizer_step_pre_hook(lambda *_: seen.append("pre"))
    after = register_optimizer_step_post_hook(lambda *_: seen.append("post"))
    try:
        train(model, optimizer, 2)
    finally:
        before.remove()
        after.remove()
    assert seen == ["pre", "post"] * 2


@check("hooks", "`state_dict` and `load_state_dict` hooks run, and may replace the state")
def state_hooks(subject: Subject) -> None:
    _, optimizer, _, _ = pair(subject)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "note"})
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert seen == ["save", "loaded"]


# ---------------------------------------------------------------------------------------------- steps


@check("steps", "`step()` is the plain optimizer's, bit for bit")
def plain_steps(subject: Subject) -> None:
    for kind in (sgd, adamw):
        model, optimizer, plain, reference = pair(subject, kind)
        train(model, optimizer, 5)
        train(plain, reference, 5)
        assert same(model, plain)


@check("steps", "`foreach` and `fused` optimizers step as they do alone")
def foreach_and_fused(subject: Subject) -> None:
    for how in ({"foreach": True}, {"fused": True}):
        model, optimizer, plain, reference = pair(subject, lambda m, h=how: torch.optim.AdamW(m.parameters(), **h))
        train(model, optimizer, 3)
        train(plain, reference, 3)
        assert same(model, plain)


@check("steps", "`step(closure)` calls it once and returns its value")
def step_with_closure(subject: Subject) -> None:
    model, optimizer, plain, reference = pair(subject)
    calls, theirs = [], []
    loss = optimizer.step(closure_of(model, optimizer, calls))
    assert torch.equal(loss, reference.step(closure_of(plain, reference, theirs)))
    assert calls == theirs
    assert same(model, plain)


@check("steps", "LBFGS calls its closure many times, and is the plain one's bit for bit")
def lbfgs(subject: Subject) -> None:
    model, optimizer, plain, reference = pair(subject, lambda m: torch.optim.LBFGS(m.parameters(), max_iter=4))
    calls, theirs = [], []
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer, calls))
        reference.step(closure_of(plain, reference, theirs))
    assert len(calls) > 3
    assert calls == theirs
    assert same(model, plain)


@check("steps", "gradients accumulated over four batches make one step")
def accumulation(subject: Subject) -> None:
    model, optimizer, plain, reference = pair(subject, adamw)
    for network_, stepper in ((model, optimizer), (plain, reference)):
        for batch in range(8):
            (loss_of(network_, batch) / 4).backward()
            if batch % 4 == 3:
                stepper.step()
                stepper.zero_grad()
    assert same(model, plain)
    assert optimizer.state_dict()["state"][0]["step"] == 2


@check("steps", "`zero_grad` empties gradients, or sets them to None")
def zero_grad(subject: Subject) -> None:
    model, optimizer, _, _ = pair(subject)
    loss_of(model).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------------------------------------- GradScaler


class TakesTheScaler(torch.optim.SGD):
    """GradScaler's older contract: the optimizer gets the scaler itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        if grad_scaler is None:
            return super().step(closure)
        grad_scaler.unscale_(self)
        if not any(float(found) for found in grad_scaler._found_inf_per_device(self).values()):
            super().step(closure)
        return None


def scaled_as_plain(subject: Subject, kind: Callable[[nn.Module], Any]) -> None:
    """Some steps overflow; scale and parameters are the plain ones after each."""
    model, optimizer, plain, reference = pair(subject, kind)
    ours, theirs = scaler(), scaler()
    for overflow in (True, False, False, True, False):
        scaled_step(model, optimizer, ours, overflow)
        scaled_step(plain, reference, theirs, overflow)
        assert ours.get_scale() == theirs.get_scale()
        assert same(model, plain)


@check("scaler", "a step that GradScaler skips changes nothing; the others are plain")
def scaler_skips(subject: Subject) -> None:
    scaled_as_plain(subject, sgd)


@check("scaler", "the same for a fused optimizer, which unscales by itself")
def scaler_fused(subject: Subject) -> None:
    scaled_as_plain(subject, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True))


@check("scaler", "the same for an optimizer whose `step` accepts `grad_scaler`")
def scaler_taken(subject: Subject) -> None:
    scaled_as_plain(subject, lambda m: TakesTheScaler(m.parameters(), lr=0.1))


@check("scaler", "gradients can be unscaled and clipped before the step")
def scaler_clipping(subject: Subject) -> None:
    model, optimizer, plain, reference = pair(subject)
    for network_, stepper in ((model, optimizer), (plain, reference)):
        scale = scaler()
        for batch in range(3):
            stepper.zero_grad()
            scale.scale(loss_of(network_, batch)).backward()
            scale.unscale_(stepper)
            nn.utils.clip_grad_norm_(network_.parameters(), 0.5)
            scale.step(stepper)
            scale.update()
    assert same(model, plain)


@check("scaler", "a scaled step in which no parameter has a gradient ends as the plain one")
def scaler_without_gradients(subject: Subject) -> None:
    for fused in (False, True):
        model, plain = network(), network()
        ends = []
        for network_, wrap in ((model, subject.wrap), (plain, lambda _, inner: inner)):
            stepper = wrap(network_, torch.optim.AdamW(network_.parameters(), fused=fused))
            scale = scaler()
            scale.scale(torch.ones(()))
            try:
                scale.step(stepper)
                ends.append("stepped")
            except AssertionError as error:
                ends.append(str(error))
        assert ends[0] == ends[1]
        assert same(model, plain)


@check("scaler", "a skipped first step gives no scheduler warning beyond the plain one's")
def scaler_warnings(subject: Subject) -> None:
    told = []
    for wrap in (subject.wrap, lambda _, inner: inner):
        model = network()
        optimizer = wrap(model, sgd(model))
        scheduler, scale = lr_scheduler.StepLR(optimizer, 1), scaler()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaled_step(model, optimizer, scale, overflow=True)
            scheduler.step()
            scaled_step(model, optimizer, scale)
            scheduler.step()
        told.append([str(warning.message) for warning in caught])
    assert told[0] == told[1]
