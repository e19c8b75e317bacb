"""Checks of what a loop does with an optimizer between steps: schedules, saved state, groups, odd parameters."""

from __future__ import annotations

import copy
import inspect
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.contract.loop import adamw, holding, network, push_all, same, same_state, sgd, train
from tests.contract.registry import check
from tests.contract.stepping import pair
from tests.contract.subjects import Subject

# ---------------------------------------------------------------------------------------------- schedules

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=3),
}
CYCLES = ("OneCycleLR", "CyclicLR")
COMPOSED = ("ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")


def classes_of_torch() -> set[str]:
    """Every scheduler that this torch has."""
    found = inspect.getmembers(lr_scheduler, inspect.isclass)
    return {n for n, c in found if issubclass(c, lr_scheduler.LRScheduler) and not n.startswith("_")} - {"LRScheduler"}


def driven(name: str, model: nn.Module, optimizer: Any) -> list[tuple[float, Any]]:
    """Rate and momentum after every step under a schedule; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if name == "SequentialLR":  # torch's own constructor calls a deprecated spelling
            warnings.filterwarnings("ignore", "The epoch parameter")
        schedule = SCHEDULES[name](optimizer)
        seen = []
        for _ in range(6):
            train(model, optimizer)
            schedule.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
            group = optimizer.state_dict()["param_groups"][0]
            seen.append((group["lr"], group.get("momentum", group.get("betas"))))
    return seen


def scheduled_as_plain(subject: Subject, *names: str, kind: Callable[[nn.Module], Any] = sgd) -> None:
    for name in names:
        model, optimizer, plain, reference = pair(subject, kind)
        rates = driven(name, model, optimizer)
        assert rates == driven(name, plain, reference), name
        assert len(set(rates)) > 1, name
        assert same(model, plain), name


@check("schedules", "`OneCycleLR` and `CyclicLR` cycle momentum, and Adam's betas; warnings are errors")
def momentum_cycles(subject: Subject) -> None:
    scheduled_as_plain(subject, *CYCLES, kind=sgd)
    scheduled_as_plain(subject, *CYCLES, kind=adamw)


@check("schedules", "`ReduceLROnPlateau`, `SequentialLR`, `ChainedScheduler`; warnings are errors")
def composed_schedules(subject: Subject) -> None:
    scheduled_as_plain(subject, *COMPOSED, kind=adamw)


@check("schedules", "every other scheduler class of torch; warnings are errors")
def other_schedules(subject: Subject) -> None:
    scheduled_as_plain(subject, *sorted(SCHEDULES.keys() - {*CYCLES, *COMPOSED}))


# ---------------------------------------------------------------------------------------------- state


@check("state", "`state_dict()` is exactly the inner optimizer's")
def exact_state(subject: Subject) -> None:
    model = network()
    inner = adamw(model)
    optimizer = subject.wrap(model, inner)
    train(model, optimizer, 2)
    assert same_state(optimizer.state_dict(), inner.state_dict())


@check("state", "what it saves loads into the plain optimizer, and the other way round")
def exchangeable_state(subject: Subject) -> None:
    model, optimizer, plain, reference = pair(subject, adamw)
    train(model, optimizer, 2)
    train(plain, reference, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(model, optimizer, 2)
    train(plain, reference, 2)
    assert same(model, plain)


@check("state", "after loading, a rate set through `param_groups` is the one that counts")
def rate_after_loading(subject: Subject) -> None:
    model, optimizer, plain, reference = pair(subject)
    for network_, stepper in ((model, optimizer), (plain, reference)):
        train(network_, stepper)
        stepper.load_state_dict(stepper.state_dict())
        stepper.param_groups[0]["lr"] = 0.003
        train(network_, stepper)
    assert same(model, plain)


@check("state", "after loading, `state` is what was loaded")
def state_after_loading(subject: Subject) -> None:
    model, optimizer, _, _ = pair(subject)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], saved["state"][0]["momentum_buffer"])


@check("state", "saved, read with `weights_only=True` in a new process: the next step is equal bit for bit")
def saved_and_loaded(subject: Subject) -> None:
    model = network()
    optimizer = subject.wrap(model, adamw(model))
    train(model, optimizer, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        train(model, optimizer)
        there = torch.load(subject.load_and_step(model, path), weights_only=True)
    assert same_state(there, dict(model.state_dict()))


@check("state", "a deep copy of the loop's checkpoint, loaded later, continues bit for bit")
def copied_checkpoint(subject: Subject) -> None:
    model, optimizer, _, _ = pair(subject, adamw)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 20)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    train(model, optimizer, 3, schedule)
    checkpoint = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
    train(model, optimizer, 3, schedule)
    expected = copy.deepcopy(model)
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    train(model, optimizer, 3, schedule)
    assert same(model, expected)


@check("state", "a trainer's 20 steps with a schedule, stopped after 10, saved and resumed, are the 20 of one go")
def resumed_training(subject: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trainer.pt"
        for resume in (False, True):
            model, optimizer, plain, reference = pair(subject, adamw)
            schedule = lr_scheduler.CosineAnnealingLR(optimizer, 20)
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            if resume:
                saved = torch.load(path, weights_only=True)
                for name, part in parts.items():
                    part.load_state_dict(saved[name])
            train(model, optimizer, 10, schedule)
            torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    schedule = lr_scheduler.CosineAnnealingLR(reference, 20)
    train(plain, reference, 10, schedule)
    train(plain, reference, 10, schedule)
    assert same(model, plain)
    assert same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])


# ---------------------------------------------------------------------------------------------- groups, parameters


@check("groups", "`add_param_group` joins a parameter with the inner defaults")
def added_group(subject: Subject) -> None:
    model = network()
    inner = sgd(model)
    optimizer = subject.wrap(model, inner)
    optimizer.add_param_group({"params": [inner.param_groups[0]["params"].pop()], "lr": 0.5})
    assert [(g["lr"], g["momentum"]) for g in optimizer.param_groups] == [(0.1, 0.9), (0.5, 0.9)]
    before = model.bias.clone()
    train(model, optimizer)
    assert torch.allclose(model.bias, before - 0.5 * model.bias.grad)


@check("groups", "a new trainable parameter is trained, or refused with one clear error")
def new_parameter(subject: Subject) -> None:
    model, optimizer, _, _ = pair(subject)
    new = nn.Parameter(torch.ones(2))
    try:
        optimizer.add_param_group({"params": [new]})
    except ValueError as error:
        assert "new trainable parameter of shape (2,)" in str(error)  # noqa: PT017  # both ends are legal
        assert len(optimizer.param_groups) == 1
        return
    new.grad = torch.ones(2)
    train(model, optimizer)
    assert new.grad is None
    assert len(optimizer.state_dict()["param_groups"]) == 2


@check("groups", "300 groups of one tensor each")
def many_groups(subject: Subject) -> None:
    models = [holding(**{f"p{i}": torch.full((2,), float(i)) for i in range(300)}) for _ in range(2)]
    ours, theirs = (
        torch.optim.SGD([{"params": [p], "lr": i / 1000} for i, p in enumerate(m.parameters())]) for m in models
    )
    optimizer = subject.wrap(models[0], ours)
    assert len(optimizer.param_groups) == 300
    push_all(models[0], optimizer, 2)
    push_all(models[1], theirs, 2)
    assert same(*models)


@check("parameters", "0-d, (0, 4), transposed and channels-last parameters")
def odd_parameters(subject: Subject) -> None:
    def odd() -> nn.Module:
        return holding(
            scalar=torch.tensor(2.0),
            empty=torch.ones(0, 4),
            turned=torch.arange(6.0).reshape(2, 3).t(),
            images=torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
        )

    model, plain = odd(), odd()
    optimizer, reference = subject.wrap(model, sgd(model)), sgd(plain)
    strides = [p.stride() for p in model.parameters()]
    push_all(model, optimizer, 2)
    push_all(plain, reference, 2)
    assert same(model, plain)
    assert strides == [p.stride() for p in model.parameters()]


@check("parameters", "bf16 parameters and their state, saved and loaded")
def narrow_parameters(subject: Subject) -> None:
    model, plain = (holding(narrow=torch.arange(8.0).bfloat16()) for _ in range(2))
    optimizer, reference = subject.wrap(model, adamw(model)), adamw(plain)
    push_all(model, optimizer, 2)
    push_all(plain, reference, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    push_all(model, optimizer, 2)
    push_all(plain, reference, 2)
    assert same(model, plain)
    assert same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])


@check("parameters", "what the optimizer does not hold stays as it is")
def unheld_parameters(subject: Subject) -> None:
    model, plain = network(), network()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = subject.wrap(model, torch.optim.SGD([model.weight], lr=0.1))
    assert len(caught) <= 1
    train(model, optimizer, 2)
    assert torch.equal(model.bias, plain.bias)
    assert not torch.equal(model.weight, plain.weight)
