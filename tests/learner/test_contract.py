"""What training code expects of a torch optimizer, of one that is joined to a syncer."""

import copy
import inspect
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.support_learner_syncer import ScriptedSyncer
from tests.support.support_learner_world import gradients, join, model_of, vector, zero_gradients
from yeto_torch import YetoOuterOptimizer


@pytest.fixture(scope="module")
def syncer():
    with ScriptedSyncer() as syncer:
        yield syncer


@pytest.fixture
def wrap(syncer):
    """wrap(model, inner, ...) -> a joined optimizer, closed at the end of the test."""
    made = []

    def make(model, inner=None, **arguments):
        made.append(join(syncer, model, inner, **arguments))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 3)


def loss_of(model):
    return model(torch.ones(2, 4)).square().sum()


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------- identity


@runtime_checkable
class Stateful(Protocol):
    """The structural type some trainers check for."""

    state: Any
    defaults: Any
    param_groups: Any
    step: Callable
    zero_grad: Callable
    state_dict: Callable
    load_state_dict: Callable


def test_it_is_an_optimizer_before_any_step(wrap):
    model = linear()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = wrap(model, inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, Stateful)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "AdamW" in repr(optimizer)


def test_wrapping_changes_no_bit_and_makes_no_step(wrap):
    model, plain = linear(), linear()
    hooks = []
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inner.register_step_pre_hook(lambda *_: hooks.append("step"))
    optimizer = wrap(model, inner, learner_id=0)
    assert equal(model, plain)
    assert hooks == []
    assert not inner.state
    assert optimizer.stats.merges == 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_without_broadcasts_it_trains_as_the_plain_optimizer_bit_for_bit(wrap, kind):
    model, plain = linear(), linear()
    train(model, wrap(model, kind(model.parameters(), lr=0.05)), 5)
    train(plain, kind(plain.parameters(), lr=0.05), 5)
    assert equal(model, plain)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy], ids=["deepcopy", "copy"])
def test_a_copy_fails_with_a_sentence(wrap, copier):
    optimizer = wrap(linear())
    with pytest.raises(TypeError, match="state_dict"):
        copier(optimizer)


def test_only_plain_optimizers_can_be_wrapped(wrap, syncer):
    model = linear()
    for bad in (wrap(model), model, []):
        with pytest.raises(ValueError, match="inner"):
            join(syncer, model, bad)


# ---------------------------------------------------------------------------------------------- step and hooks


def test_step_hooks_get_the_wrapper_and_run_once(wrap):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(model, inner)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(("pre", o is optimizer)))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(("post", o is optimizer)))
    inner.register_step_post_hook(lambda o, *_: seen.append(("inner", o is inner)))
    optimizer._patch_step_function()  # as torch does on several occasions
    everywhere = register_optimizer_step_post_hook(lambda *_: seen.append(("global", True)))
    try:
        train(model, optimizer)
    finally:
        everywhere.remove()
    assert seen == [("pre", True), ("inner", True), ("global", True), ("post", True)]


def test_a_pre_hook_may_replace_the_arguments(wrap):
    model = linear()
    optimizer = wrap(model)
    optimizer.register_step_pre_hook(lambda _o, args, kwargs: (args, {**kwargs, "tokens": 7}))
    train(model, optimizer)
    assert optimizer._learner.tokens == 7
    optimizer.register_step_pre_hook(lambda *_: "nonsense")
    with pytest.raises(RuntimeError, match="pre-hook"):
        train(model, optimizer)


def test_a_closure_is_run_and_its_value_returned(wrap):
    model = linear()
    optimizer = wrap(model, torch.optim.LBFGS(model.parameters(), max_iter=3))
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    before = loss_of(model).item()
    assert optimizer.step(closure).item() == pytest.approx(before)
    assert len(calls) > 1
    assert loss_of(model).item() < before


@pytest.mark.parametrize("tokens", [-1, 1.5, "many"])
def test_tokens_are_whole_and_not_negative(wrap, tokens):
    model = linear()
    optimizer = wrap(model)
    zero_gradients(model)
    with pytest.raises((ValueError, TypeError)):
        optimizer.step(tokens=tokens)
    optimizer.step(tokens=0)
    optimizer.step(tokens=torch.tensor(3))
    assert optimizer._learner.tokens == 3


def test_zero_grad_reaches_every_parameter(wrap):
    model = linear()
    optimizer = wrap(model)
    loss_of(model).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------------------------------------- schedulers

SCHEDULERS = {
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
}


def test_every_scheduler_of_torch_is_here():
    classes = {
        name
        for name, item in vars(lr_scheduler).items()
        if inspect.isclass(item) and issubclass(item, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_drives_the_wrapper_as_it_drives_the_plain_optimizer(wrap, name):
    rates = []
    for wrapped in (True, False):
        model = linear()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = wrap(model, inner) if wrapped else inner
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if name == "SequentialLR":  # torch's own constructor calls a deprecated spelling
                warnings.filterwarnings("ignore", "The epoch parameter")
            scheduler = SCHEDULERS[name](optimizer)
            seen = []
            for _ in range(6):
                train(model, optimizer)
                scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
                seen.append(inner.param_groups[0]["lr"])
        rates.append(seen)
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


# ---------------------------------------------------------------------------------------------- GradScaler


class Scaled(torch.optim.SGD):
    """An optimizer that handles the scaler itself, as GradScaler's older contract has it."""

    _step_supports_amp_scaling = True
    scalers = ()

    def step(self, closure=None, *, grad_scaler=None):
        self.scalers = (*self.scalers, grad_scaler)
        if grad_scaler is None:
            return super().step(closure)
        grad_scaler.unscale_(self)
        if not any(float(v) for v in grad_scaler._found_inf_per_device(self).values()):
            super().step(closure)
        return None


def scaled_step(model, optimizer, scaler, overflow=False):
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()
    if overflow:
        next(model.parameters()).grad[0, 0] = float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # GradScaler on its older contract
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: Scaled(p, lr=0.1),
    ],
    ids=["plain", "fused", "takes the scaler"],
)
def test_the_scaler_sees_the_plain_optimizer_and_a_skipped_step_is_no_local_step(wrap, make):
    model, plain = linear(), linear()
    optimizer, reference = wrap(model, make(model.parameters())), make(plain.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for overflow in (True, False, False, True, False):
        scaled_step(model, optimizer, scalers[0], overflow)
        scaled_step(plain, reference, scalers[1], overflow)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert equal(model, plain)
    assert optimizer._learner.local_step == 3
    if isinstance(reference, Scaled):
        assert all(scaler is scalers[0] for scaler in optimizer._inner[0].scalers)
        optimizer.step()
        assert optimizer._inner[0].scalers[-1] is None


def test_a_scaler_step_without_any_gradient_fails_as_the_plain_one_does(wrap):
    model, plain = linear(), linear()
    messages = []
    for optimizer in (wrap(model), torch.optim.SGD(plain.parameters(), lr=0.1)):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError) as error:
            scaler.step(optimizer)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_skipped_first_step_warns_no_more_than_the_plain_optimizer(wrap, wrapped):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(model, inner) if wrapped else inner
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaled_step(model, optimizer, scaler, overflow=True)
        scheduler.step()
    assert ["before `optimizer.step()`" in str(w.message) for w in caught] == [True]


# ---------------------------------------------------------------------------------------------- state


def test_the_state_dict_is_exactly_the_inner_optimizers(wrap):
    model = linear()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = wrap(model, inner)
    train(model, optimizer, 2)
    one, other = optimizer.state_dict(), inner.state_dict()
    assert one.keys() == other.keys()
    assert one["param_groups"] == other["param_groups"]
    assert all(one["state"][k][n] is other["state"][k][n] for k in other["state"] for n in other["state"][k])


def test_after_loading_the_wrappers_groups_are_still_the_inner_ones(wrap):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(model, inner)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.025
    assert inner.param_groups[0]["lr"] == 0.025
    groups = inner.param_groups
    optimizer.param_groups = groups[:]  # as Accelerate does
    assert inner.param_groups == groups


def test_state_hooks_get_the_wrapper(wrap):
    model = linear()
    optimizer = wrap(model)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(("save", o is optimizer)))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("loaded", o is optimizer)))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert seen == [("save", True), ("loaded", True)]


LOAD_AND_STEP = """
    import sys, torch
    from yeto_torch import YetoOuterOptimizer
    saved = torch.load(sys.argv[1], weights_only=True)
    model = torch.nn.Linear(4, 3)
    model.load_state_dict(saved["model"])
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    where = {"syncer": sys.argv[2], "learner_id": 1, "run_id": "r", "wait_for_start": False}
    with YetoOuterOptimizer(inner, model, **where) as optimizer:
        optimizer.load_state_dict(saved["optimizer"])
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), sys.argv[1] + ".out")
"""


def test_saved_here_loaded_in_a_new_process_the_next_step_is_the_same(wrap, syncer, tmp_path, root):
    model = linear()
    optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOAD_AND_STEP), str(tmp_path / "saved.pt"), syncer.address],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    train(model, optimizer)
    there = torch.load(tmp_path / "saved.pt.out", weights_only=True)
    assert all(torch.equal(there[name], value) for name, value in model.state_dict().items())


def test_several_optimizers_are_one(wrap):
    model, plain = linear(), linear()
    parts = [torch.optim.SGD([model.weight], lr=0.1, momentum=0.9), torch.optim.AdamW([model.bias], lr=0.2)]
    optimizer = wrap(model, parts)
    others = [torch.optim.SGD([plain.weight], lr=0.1, momentum=0.9), torch.optim.AdamW([plain.bias], lr=0.2)]
    train(model, optimizer, 3)
    for _ in range(3):
        plain.zero_grad()
        loss_of(plain).backward()
        for other in others:
            other.step()
    assert equal(model, plain)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    optimizer.param_groups[1]["lr"] = 0.3
    assert parts[1].param_groups[0]["lr"] == 0.3
    assert set(optimizer.state) == {model.weight, model.bias}

    state = optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0], [1]]
    again = [torch.optim.SGD([model.weight], lr=0.1, momentum=0.9), torch.optim.AdamW([model.bias], lr=0.2)]
    second = wrap(model, again)
    second.load_state_dict(state)
    assert torch.equal(again[1].state[model.bias]["exp_avg"], parts[1].state[model.bias]["exp_avg"])
    assert again[1].param_groups[0]["lr"] == 0.3
    with pytest.raises(ValueError, match="2 parameter groups"):
        wrap(
            model, [torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias]), torch.optim.SGD([vector(1.0)])]
        ).load_state_dict(state)


def test_a_closure_is_run_once_for_several_optimizers(wrap):
    model = linear()
    optimizer = wrap(model, [torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = loss_of(model)
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() > 0
    assert calls == [True]


# ---------------------------------------------------------------------------------------------- groups


def test_parameters_of_the_layout_and_frozen_ones_may_join_before_the_first_step(wrap):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(model, inner)
    moved = inner.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.5})
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer.add_param_group({"params": frozen})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5, 0.1]
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9, 0.9]


def test_a_new_trainable_parameter_is_refused_before_and_any_after_the_first_step(wrap):
    model = linear()
    optimizer = wrap(model)
    with pytest.raises(ValueError, match="before wrapping"):
        optimizer.add_param_group({"params": iter([torch.nn.Parameter(torch.ones(2))])})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer)
    with pytest.raises(ValueError, match="after the first step"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2), requires_grad=False)]})


def test_many_groups_and_odd_parameters(wrap):
    tensors = {f"p{i}": torch.full((2,), float(i)) for i in range(300)}
    tensors |= {"empty": torch.ones(0, 4), "scalar": torch.tensor(2.0), "narrow": torch.ones(3, dtype=torch.bfloat16)}
    model = model_of(**tensors)
    model.turned = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    inner = torch.optim.SGD([{"params": [p], "lr": 0.1} for p in model.parameters()], lr=0.1)
    optimizer = wrap(model, inner)
    assert len(optimizer.param_groups) == 304
    assert "empty" not in {t.name for t in optimizer.layout.tensors}
    gradients(model, (torch.ones_like(p) for p in model.parameters()))
    optimizer.step()
    assert model.scalar.item() == pytest.approx(1.9)
    assert model.turned[2, 1].item() == pytest.approx(4.9)
    inner.load_state_dict(optimizer.state_dict())


# ---------------------------------------------------------------------------------------------- switched off


def test_disabled_it_is_the_plain_optimizer_and_needs_no_configuration(monkeypatch):
    monkeypatch.setenv("YETO_DISABLE", "1")
    model, plain = linear(), linear()
    with YetoOuterOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()) as optimizer:
        train(model, optimizer, 2)
        optimizer.report_budget(2)
        assert not optimizer.finished
        optimizer.finish()
        assert optimizer.finished
        assert optimizer.stats.merges == 0
        assert [t.name for t in optimizer.layout.tensors] == ["weight", "bias"]
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 2)
    assert equal(model, plain)
