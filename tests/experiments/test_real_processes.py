"""The experiments of real processes, at their smallest."""

from __future__ import annotations

import pytest

from experiments.kills import run_kills
from experiments.specs import Kills, Wire
from experiments.wire import count_bytes


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["f32", "bf16", "q4"])
def test_the_bytes_at_the_sockets_are_those_of_the_formula(wire):
    found = count_bytes(Wire(2, 8, wire, rounds=16))
    assert abs(found["deviation"]) < 2.0
    assert found["told_down"] == found["down"]  # the product's own count, HELLOs aside
    assert 0 <= found["up"] - found["told_up"] < 4096
    assert found["steps"] >= 16 / 4 * 8 * 0.9  # the throttle held: H steps between merges of a fragment


@pytest.mark.slow
def test_both_sides_survive_kills():
    found = run_kills(Kills(1, learners=2, interval=8, step_s=0.05, up=200.0, repair=20.0, steps=400))
    assert found["kills_decoupled"] > 0
    assert found["kills_synchronous"] > 0
    assert 0 < found["decoupled"] <= 1
    assert 0 < found["synchronous"] <= 1
