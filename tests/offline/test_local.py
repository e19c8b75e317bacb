"""The mode without a syncer: the outer step in process, by the syncer's own functions."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from yeto_torch import YetoOuterOptimizer
from yeto_torch.learner.syncs import Sync
from yeto_torch.wire.errors import NonFiniteError, RunError

PLAIN = {"sync_interval_steps": 4, "lr": 0.7, "momentum": 0.9, "delta_correction": "none"}


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def wrapped(model: nn.Module, rules: dict | None = None, lr: float = 0.1, **arguments: object) -> YetoOuterOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return YetoOuterOptimizer(inner, model, syncer="local", local=PLAIN if rules is None else rules, **arguments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        ((model(x) - x[:, :3].sin()) ** 2).mean().backward()
        optimizer.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_outer_step_is_torch_s_nesterov_on_what_was_learnt():
    """One fragment: every 4 steps SGD(nesterov) steps the anchor along anchor minus local, and that is the model."""
    model = model_of()
    twin, outer_model = copy.deepcopy(model), copy.deepcopy(model)
    outer = torch.optim.SGD(outer_model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    inner = torch.optim.SGD(twin.parameters(), lr=0.1)
    optimizer = wrapped(model, fragments=1)
    for cycle in range(5):
        train(model, optimizer, 4, first=4 * cycle)
        train(twin, inner, 4, first=4 * cycle)
        with torch.no_grad():
            for anchor, local in zip(outer_model.parameters(), twin.parameters(), strict=True):
                anchor.grad = anchor - local
            outer.step()
            for anchor, local in zip(outer_model.parameters(), twin.parameters(), strict=True):
                local.copy_(anchor)
        for ours, theirs in zip(values(model), values(twin), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert optimizer.stats.global_step == 5


def test_fragments_take_turns_h_over_f_steps_apart():
    model, told = model_of(), list[Sync]()
    optimizer = wrapped(model, {**PLAIN, "sync_interval_steps": 8}, fragments=4, on_sync=told.append)
    train(model, optimizer, 16)
    assert [(sync.fragment, sync.version, sync.local_step) for sync in told] == [
        (t % 4, t + 1, 2 * (t + 1)) for t in range(8)
    ]
    assert [sync.c_steps for sync in told] == [2, 4, 6, 8, 8, 8, 8, 8]
    assert optimizer.stats.versions == (5, 6, 7, 8)


def test_finish_merges_the_rest_and_ends_it():
    model = model_of()
    optimizer = wrapped(model, {**PLAIN, "sync_interval_steps": 100, "lr": 1.0, "momentum": 0.0}, fragments=2)
    train(model, optimizer, 3)
    learnt = values(model)
    optimizer.finish()
    assert optimizer.finished
    for ours, theirs in zip(values(model), learnt, strict=True):  # lr 1 and no momentum: what was learnt is kept
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    final = values(model)
    with pytest.warns(UserWarning, match="final parameters stay"):
        train(model, optimizer, 1)
    assert all(map(torch.equal, values(model), final))
    optimizer.finish()


def test_alpha_keeps_a_share_of_the_local_value():
    whole, half = model_of(), model_of()
    twin = model_of()
    rules = {**PLAIN, "sync_interval_steps": 2, "lr": 0.5, "momentum": 0.0}
    for model, alpha in ((whole, 0.0), (half, 0.5)):
        train(model, wrapped(model, rules, fragments=1, merge_alpha=alpha), 2)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 2)
    for a, b, local in zip(values(whole), values(half), values(twin), strict=True):
        torch.testing.assert_close(b, 0.5 * a + 0.5 * local)


def test_it_is_the_inner_optimizer_to_everybody_else():
    model = model_of()
    optimizer = wrapped(model)
    plain = torch.optim.SGD(model_of().parameters(), lr=0.1)
    assert optimizer.state_dict() == plain.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, 1)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not optimizer.stats.connected
    assert optimizer.stats.bytes_sent == 0


def test_closed_it_is_the_inner_optimizer_alone():
    model, twin = model_of(), model_of()
    with wrapped(model, {**PLAIN, "sync_interval_steps": 2}) as optimizer:
        pass
    train(model, optimizer, 6)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 6)
    assert all(map(torch.equal, values(model), values(twin)))
    with pytest.raises(RunError, match="closed before finish"):
        optimizer.finish()


@pytest.mark.parametrize("merge", ["rda", "iso"])
@pytest.mark.parametrize("correction", ["heloco", "heloco-normalized", "none"])
def test_it_learns(merge, correction):
    model = model_of()
    rules = {"delta_correction": correction, "iso_scale": "norm"}
    optimizer = wrapped(model, {"sync_interval_steps": 8, **rules}, matrix_merge=merge)
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(99))

    @torch.no_grad()
    def loss() -> float:
        return float(((model(x) - x[:, :3].sin()) ** 2).mean())

    before = loss()
    train(model, optimizer, 200)
    optimizer.finish()
    assert loss() < 0.5 * before


def test_values_that_are_not_finite_are_named():
    model = model_of()
    optimizer = wrapped(model, {**PLAIN, "sync_interval_steps": 1}, fragments=1)
    with torch.no_grad():
        model[0].bias[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"'0\.bias'"):
        optimizer.step()


def test_or_put_back_on_the_last_merge():
    model = model_of()
    start = values(model)
    optimizer = wrapped(model, {**PLAIN, "sync_interval_steps": 1}, fragments=1, on_nonfinite="resync")
    with torch.no_grad():
        model[0].bias[0] = float("nan")
    optimizer.step()
    assert all(map(torch.equal, values(model), start))


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"lr": 0}, r"local\['lr'\]=0: must be a number above 0"),
        ({"momentum": 1.0}, r"local\['momentum'\]=1.0: must be a number from 0, below 1"),
        ({"sync_interval_steps": 0.5}, r"local\['sync_interval_steps'\]=0.5: must be a number from 1"),
        ({"lr": True}, "must be a number"),
        ({"lr": float("nan")}, "must be a number"),
        ({"delta_correction": "yes"}, "must be one of heloco, heloco-normalized, none"),
        ({"iso_scale": 1}, "must be one of mean, norm"),
        ({"outer.lr": 1.0}, "unknown key 'outer.lr'; known are sync_interval_steps, lr"),
    ],
)
def test_a_wrong_rule_is_named(rules, sentence):
    with pytest.raises(ValueError, match=sentence):
        wrapped(model_of(), rules)


def test_rules_without_the_mode_are_refused():
    inner = torch.optim.SGD(model_of().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="goes with syncer='local' alone"):
        YetoOuterOptimizer(inner, model_of(), syncer="127.0.0.1:1", learner_id=0, local={"lr": 1.0})


def test_there_is_no_budget_to_report():
    with pytest.raises(RunError, match="syncer='local' is none"):
        wrapped(model_of()).report_budget(1)
