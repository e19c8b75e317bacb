"""What the wrapper does beyond any torch optimizer: steps it counts, several inner optimizers, what it refuses.

What it has in common with every optimizer is asked by ``tests/contract``, of a living fleet.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.contract.loop import loss_of, network, same, scaled_step, train
from tests.support.joined_learner import join, vector, zero_gradients
from tests.support.scripted_syncer import ScriptedSyncer
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


# ---------------------------------------------------------------------------------------------- identity


def test_groups_state_and_defaults_are_the_inner_optimizers_own(wrap):
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = wrap(model, inner)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "AdamW" in repr(optimizer)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy], ids=["deepcopy", "copy"])
def test_a_copy_fails_with_a_sentence(wrap, copier):
    optimizer = wrap(network())
    with pytest.raises(TypeError, match="state_dict"):
        copier(optimizer)


def test_only_plain_optimizers_can_be_wrapped(wrap, syncer):
    model = network()
    for bad in (wrap(model), model, []):
        with pytest.raises(ValueError, match="inner"):
            join(syncer, model, bad)


# ---------------------------------------------------------------------------------------------- step and hooks


def test_step_hooks_get_the_wrapper_and_run_once(wrap):
    model = network()
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
    model = network()
    optimizer = wrap(model)
    optimizer.register_step_pre_hook(lambda _o, args, kwargs: (args, {**kwargs, "tokens": 7}))
    train(model, optimizer)
    assert optimizer._learner.tokens == 7
    optimizer.register_step_pre_hook(lambda *_: "nonsense")
    with pytest.raises(RuntimeError, match="pre-hook"):
        train(model, optimizer)


@pytest.mark.parametrize("several", [False, True])
def test_a_step_is_one_local_step_however_often_its_closure_runs(wrap, several):
    model = network()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4)
    optimizer = wrap(model, [torch.optim.SGD([p], lr=0.1) for p in model.parameters()] if several else lbfgs)
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure, tokens=5)
    assert len(calls) == 3 if several else len(calls) > 3
    assert (optimizer._learner.local_step, optimizer._learner.tokens) == (3, 15)


def test_a_step_that_raises_is_no_local_step(wrap):
    model = network()
    optimizer = wrap(model)

    def closure():
        raise RuntimeError("the data set is not there")

    with pytest.raises(RuntimeError, match="data set"):
        optimizer.step(closure)
    assert optimizer._learner.local_step == 0


@pytest.mark.parametrize("tokens", [-1, 1.5, "many"])
def test_tokens_are_whole_and_not_negative(wrap, tokens):
    model = network()
    optimizer = wrap(model)
    zero_gradients(model)
    with pytest.raises((ValueError, TypeError)):
        optimizer.step(tokens=tokens)
    optimizer.step(tokens=0)
    optimizer.step(tokens=torch.tensor(3))
    assert optimizer._learner.tokens == 3


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


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: Scaled(p, lr=0.1),
    ],
    ids=["plain", "fused", "takes the scaler"],
)
def test_a_step_that_the_scaler_skips_is_no_local_step(wrap, make):
    model = network()
    inner = make(model.parameters())
    optimizer = wrap(model, inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    made = []
    for overflow in (True, False, False, True, False):
        scaled_step(model, optimizer, scaler, overflow)
        made.append(optimizer._learner.local_step)
    assert made == [0, 1, 2, 2, 3]
    assert optimizer._learner.tokens == 3
    if isinstance(inner, Scaled):
        assert inner.scalers == (scaler,) * 5
        optimizer.step()
        assert inner.scalers[-1] is None
        assert optimizer._learner.local_step == 4


def test_a_step_of_the_scaler_without_any_gradient_counts_as_the_inner_optimizer_takes_it(wrap):
    """A fused optimizer makes its step; for another one GradScaler stops the loop before it."""
    model = network()
    for fused, steps in ((True, 1), (False, 0)):
        optimizer = wrap(model, torch.optim.AdamW(model.parameters(), fused=fused))
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with nullcontext() if fused else pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)
        assert optimizer._learner.local_step == steps


@pytest.mark.parametrize("fused", [True, False])
def test_the_scaler_unscales_for_several_optimizers(wrap, fused):
    """Also for fused ones, which would do it by themselves if they were alone."""
    model, plain = network(), network()
    parts = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.2, fused=fused)]
    others = [torch.optim.SGD([plain.weight], lr=0.1), torch.optim.AdamW([plain.bias], lr=0.2, fused=fused)]
    optimizer = wrap(model, parts)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for overflow in (True, False, False):
        scaled_step(model, optimizer, scaler, overflow)
    for _ in range(2):
        plain.zero_grad()
        loss_of(plain).backward()
        for other in others:
            other.step()
    assert same(model, plain)
    assert optimizer._learner.local_step == 2


# ---------------------------------------------------------------------------------------------- state


def test_after_loading_the_wrappers_groups_are_still_the_inner_ones(wrap):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(model, inner)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.025
    assert inner.param_groups[0]["lr"] == 0.025
    groups = inner.param_groups
    optimizer.param_groups = groups[:]  # as Accelerate does
    assert inner.param_groups == groups


def test_several_optimizers_are_one(wrap):
    model, plain = network(), network()
    parts = [torch.optim.SGD([model.weight], lr=0.1, momentum=0.9), torch.optim.AdamW([model.bias], lr=0.2)]
    optimizer = wrap(model, parts)
    others = [torch.optim.SGD([plain.weight], lr=0.1, momentum=0.9), torch.optim.AdamW([plain.bias], lr=0.2)]
    train(model, optimizer, 3)
    for batch in range(3):
        plain.zero_grad()
        loss_of(plain, batch).backward()
        for other in others:
            other.step()
    assert same(model, plain)
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


def muon_and_adamw(model):
    """Muon takes matrices only: the usual reason for two optimizers over one model."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    return [torch.optim.Muon([model.weight], lr=0.02), torch.optim.AdamW([model.bias], lr=0.1)]


def test_muon_beside_adamw_under_a_schedule_saved_and_resumed(wrap, tmp_path):
    plain = network()
    others = muon_and_adamw(plain)
    schedules = [lr_scheduler.CosineAnnealingLR(other, 10) for other in others]
    for _ in range(6):
        plain.zero_grad()
        loss_of(plain).backward()
        for part in (*others, *schedules):
            part.step()

    model = network()
    for resume in (False, True):
        optimizer = wrap(model, muon_and_adamw(model))
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 10)
        if resume:
            saved = torch.load(tmp_path / "saved.pt", weights_only=True)
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
        for _ in range(3):
            train(model, optimizer)
            schedule.step()
        torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, tmp_path / "saved.pt")
    assert same(model, plain)
    assert optimizer.defaults is optimizer._inner[0].defaults


def test_what_belongs_to_one_optimizer_cannot_be_replaced_for_several(wrap):
    model = network()
    optimizer = wrap(model, [torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)])
    for name, value in (("param_groups", []), ("state", {}), ("defaults", {})):
        with pytest.raises(AttributeError, match=f"{name} of several inner optimizers"):
            setattr(optimizer, name, value)


def test_a_closure_is_run_once_for_several_optimizers(wrap):
    model = network()
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
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(model, inner)
    moved = inner.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.5})
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer.add_param_group({"params": frozen})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5, 0.1]
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9, 0.9]


def test_a_new_trainable_parameter_is_refused_before_and_any_after_the_first_step(wrap):
    model = network()
    optimizer = wrap(model)
    with pytest.raises(ValueError, match="before wrapping"):
        optimizer.add_param_group({"params": iter([torch.nn.Parameter(torch.ones(2))])})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer)
    with pytest.raises(ValueError, match="after the first step"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2), requires_grad=False)]})


# ---------------------------------------------------------------------------------------------- switched off


def test_disabled_it_is_the_plain_optimizer_and_needs_no_configuration(monkeypatch):
    monkeypatch.setenv("YETO_DISABLE", "1")
    model, plain = network(), network()
    with YetoOuterOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()) as optimizer:
        train(model, optimizer, 2)
        optimizer.report_budget(2)
        assert not optimizer.finished
        optimizer.finish()
        assert optimizer.finished
        assert optimizer.stats.merges == 0
        assert [t.name for t in optimizer.layout.tensors] == ["weight", "bias"]
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 2)
    assert same(model, plain)
