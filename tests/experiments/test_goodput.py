"""Failures in virtual time against what can be worked out on paper."""

from __future__ import annotations

from statistics import fmean

import pytest

from experiments.goodput import RESTART, closed_forms, decoupled, elastic, run_trace, stalled
from experiments.specs import Trace


@pytest.mark.parametrize(("learners", "up", "repair"), [(2, 300.0, 30.0), (4, 300.0, 30.0), (4, 1000.0, 10.0)])
def test_synchronous_training_loses_what_the_formula_says(learners, up, repair):
    traces = [Trace(seed, learners, up=up, repair=repair) for seed in range(100)]
    expected = closed_forms(traces[0])
    assert fmean(map(stalled, traces)) == pytest.approx(expected["stalled_formula"], abs=0.015)
    # the formula counts a restart twice where two overlap, so that it may be a little too low
    assert -0.005 < fmean(map(elastic, traces)) - expected["elastic_formula"] < 0.015


def test_machines_that_never_fail_lose_nothing():
    calm = Trace(0, up=1e12)
    assert stalled(calm) == elastic(calm) == 1.0
    assert closed_forms(calm)["elastic_formula"] == pytest.approx(1.0)


def test_the_fleet_loses_what_is_overwritten_and_no_more_when_nobody_fails():
    found = decoupled(Trace(0, up=1e12, steps=960))
    assert found["made"] == pytest.approx(1.0, abs=0.01)
    assert found["decoupled"] == pytest.approx(1.0, abs=0.005)
    assert found["of_ideal"] == pytest.approx(23 / 24, abs=0.02)


def test_under_failures_the_fleet_stays_below_its_bound():
    found = [run_trace(Trace(seed, steps=400)) for seed in range(3)]
    assert fmean(trace["decoupled"] for trace in found) < found[0]["decoupled_bound"] + 0.02
    assert all(trace["of_ideal"] < trace["made"] <= 1.0 for trace in found)
    assert all(trace["of_ideal"] < trace["decoupled"] for trace in found)
    assert found[0] == run_trace(Trace(0, steps=400))
    assert RESTART > 0
