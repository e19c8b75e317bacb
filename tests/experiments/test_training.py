"""What every comparison rests on: the same samples, nothing of the held-out text, the same tokens."""

from __future__ import annotations

import math

import pytest
import torch

from experiments import training
from experiments.configs import Alone, Fleet, Training
from experiments.tasks import BLOCK, CHARACTERS, HELD_OUT_EVERY, Characters, make_task
from experiments.training import lr_at, run
from yeto_torch.demos.transformer import ALPHABET, CONTEXT


def test_learners_take_what_the_baseline_takes_in_the_same_order():
    whole, shared = Characters(3, CHARACTERS["char"]).stream(), Characters(3, CHARACTERS["char"]).stream()
    for learners in (2, 4, 8):
        inputs, targets = whole.take(16)
        parts = [shared.take(16 // learners) for _ in range(learners)]
        assert torch.equal(inputs, torch.cat([x for x, _ in parts]))
        assert torch.equal(targets, torch.cat([y for _, y in parts]))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_seeds_differ_in_weights_and_order_but_not_in_what_is_held_out():
    first, second = Characters(0, CHARACTERS["char"]), Characters(1, CHARACTERS["char"])
    assert not torch.equal(first.stream().take(16)[0], second.stream().take(16)[0])
    assert not torch.equal(first.model().embed.weight, second.model().embed.weight)
    assert torch.equal(first.held_out()[0], second.held_out()[0])


def test_no_training_sees_a_held_out_block():
    task = Characters(0, CHARACTERS["char"])
    text, held_out = task._text, task.held_out()[0]
    assert torch.equal(held_out[: BLOCK // CONTEXT].flatten(), text[:BLOCK])
    blocks = torch.split(text, BLOCK)
    kept = sum(len(block) for i, block in enumerate(blocks) if i % HELD_OUT_EVERY)
    assert len(task._train) == kept
    assert torch.equal(task._train[:BLOCK], blocks[1])
    assert abs(kept / len(text) - 0.9) < 0.02


def test_the_schedule_rises_to_its_peak_and_falls_to_a_tenth():
    rates = [lr_at(step / 1000, 2.0) for step in range(1001)]
    top = rates.index(max(rates))
    assert rates[top] == pytest.approx(2.0, rel=1e-3)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)


def test_a_fleet_and_its_baseline_make_as_many_tokens_from_one_beginning(monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINTS", 1)  # to evaluate takes longer than these few steps
    sizes = {"steps": 16, "warm_steps": 8}
    baseline = run(Training("char", 0, 4e-3, **sizes))
    fleet = run(Training("char", 0, 4e-3, fleet=Fleet(2, 4, 4), **sizes))
    assert fleet["tokens"] == baseline["tokens"] == 16 * 16 * CONTEXT
    assert [tokens for tokens, _ in fleet["losses"]] == [tokens for tokens, _ in baseline["losses"]]
    assert len(fleet["losses"]) == 1
    assert fleet["rounds"] == 8
    assert fleet["loss"] < math.log(len(ALPHABET))  # it has learnt something
    assert fleet["loss"] == pytest.approx(baseline["loss"], rel=0.05)
    assert fleet["loss"] != baseline["loss"]


def test_learners_share_no_memory(monkeypatch):
    """Of parameters and optimizer state: what one of them writes no other may read."""
    monkeypatch.setattr(training, "CHECKPOINTS", 1)
    made = []
    original = training.inner_optimizer
    monkeypatch.setattr(training, "inner_optimizer", lambda model: made.append(original(model)) or made[-1])
    run(Training("digits", 0, 2e-3, 12, 8, Fleet(4, 4)))
    owners = [
        {tensor.data_ptr() for state in inner.state.values() for tensor in state.values()}
        | {parameter.data_ptr() for group in inner.param_groups for parameter in group["params"]}
        for inner in made
    ]
    assert len(made) == 5  # the warm start's and four learners'
    assert sum(map(len, owners)) == len(set().union(*owners)) > 0


def test_a_warm_start_that_was_kept_is_the_one_that_would_be_made():
    config = Training("digits", 3, 2e-3, 16, 8, Fleet(2, 4))
    training._WARM.clear()
    fresh, kept = training.run(config), training.run(config)
    assert len(training._WARM) == 1
    assert kept["losses"] == fresh["losses"]


def test_a_machine_alone_makes_the_tokens_of_the_plain_optimizer_and_rounds_of_its_own():
    sizes = {"steps": 16, "warm_steps": 8}
    plain, alone = run(Training("digits", 0, 2e-3, **sizes)), run(Alone("digits", 0, 2e-3, interval=4, **sizes))
    assert alone["tokens"] == plain["tokens"]
    assert alone["rounds"] == 8 + 4  # two of each fragment, and one of each at the end
    assert alone["loss"] != plain["loss"]
    assert alone["loss"] == pytest.approx(plain["loss"], rel=0.2)


def test_without_momentum_and_at_rate_one_a_machine_alone_is_the_plain_optimizer():
    sizes = {"steps": 16, "warm_steps": 8}
    plain = run(Training("digits", 0, 2e-3, **sizes))
    alone = run(Alone("digits", 0, 2e-3, interval=4, lr=1.0, momentum=0.0, **sizes))
    assert alone["loss"] == pytest.approx(plain["loss"], rel=1e-4)


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match=r"task='words': expected one of char, .*digits"):
        make_task("words", 0)
