"""Step-time estimates, the adaptive grace window and the launch throttle."""

import json
from functools import reduce
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.core.events import Member
from syncer.core.pace import Pace, grace_window_s
from tests.support.coordinator_desk import schedule_policy

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "schedule.json").read_text(encoding="utf-8"))
A, B, C = Member(0, 1), Member(1, 1), Member(2, 1)


def pace(**changes):
    return Pace(schedule_policy(**changes))


def ran(machine, member, *reports):
    """Reports of (seconds, local_step)."""
    for now, local_step in reports:
        machine.observe_step(member, local_step, now)


@pytest.mark.parametrize(
    ("times", "golden"),
    list(zip([(1, 0.5, 0.5), (0.1, 1, 1), (60, 0, 0), (None, 0, 0)], VECTORS["grace"]["f64"], strict=True)),
)
def test_the_grace_window_equals_the_golden_values(times, golden):
    assert grace_window_s(schedule_policy(grace_ms=1000, grace_gamma=0.8, grace_tau=2.0), *times) == pytest.approx(
        golden, rel=1e-12
    )


@given(
    st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.integers(0, 10_000), st.floats(0, 2), st.floats(0, 10)
)
def test_the_grace_window_is_the_clamped_formula(step, quorum, sync, cap_ms, gamma, tau):
    policy = schedule_policy(grace_ms=cap_ms, grace_gamma=gamma, grace_tau=tau)
    raw = gamma * (tau * step - quorum - sync)
    expected = sorted((0.0, raw, cap_ms / 1000))[1] if raw == raw else 0.0
    assert grace_window_s(policy, step, quorum, sync) == pytest.approx(expected)


def test_one_report_is_no_estimate_and_two_are():
    machine = pace()
    ran(machine, A, (10.0, 3))
    assert machine.step_s([A]) is None
    ran(machine, A, (14.0, 5))
    assert machine.step_s([A]) == 2.0


def test_a_report_that_did_not_grow_moves_nothing():
    machine = pace()
    ran(machine, A, (0.0, 5), (3.0, 5), (4.0, 4), (10.0, 10))
    assert machine.step_s([A]) == 2.0, "the time of the last report that grew counts"


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(-2, 5)), max_size=20))
def test_the_estimate_equals_a_dumb_twin(moves):
    """Twin: keep all reports that grew, form all samples, fold them from the left."""
    machine, now, step, grown = pace(), 0.0, 10, []
    for wait, delta in moves:
        now, step = now + wait, step + delta
        machine.observe_step(A, step, now)
        if not grown or step > grown[-1][1]:
            grown.append((now, step))
    samples = [(t1 - t0) / (s1 - s0) for (t0, s0), (t1, s1) in pairwise(grown)]
    expected = reduce(lambda old, new: 0.5 * new + 0.5 * old, samples) if samples else None
    assert machine.step_s([A]) == (None if expected is None else pytest.approx(expected))


def test_a_round_goes_by_its_slowest_member_among_those_with_an_estimate():
    machine = pace()
    ran(machine, A, (0.0, 0), (1.0, 1))
    ran(machine, B, (0.0, 0), (4.0, 1))
    assert machine.step_s([A, B, C]) == 4.0
    assert machine.step_s([A, C]) == 1.0
    assert machine.step_s([C]) is None


def test_a_member_that_left_is_forgotten():
    machine = pace()
    ran(machine, B, (0.0, 0), (4.0, 1))
    machine.forget(B)
    assert machine.step_s([B]) is None
    ran(machine, B, (10.0, 2))
    assert machine.step_s([B]) is None, "nothing of the old connection may enter a new sample"


def test_quorum_and_sync_times_are_smoothed_and_the_newest_counts_at_once():
    machine = pace(grace_ms=100_000, grace_gamma=1.0, grace_tau=1.0)
    ran(machine, A, (0.0, 0), (50.0, 1))
    assert machine.grace_s([A]) == 50.0, "before the first round neither is known"
    machine.observe_quorum(4.0)
    assert machine.grace_s([A]) == 46.0
    machine.observe_quorum(8.0)
    assert machine.grace_s([A]) == 44.0
    machine.observe_sync(10.0)
    assert machine.grace_s([A]) == 34.0, "the first sync is taken whole, not halved against the initial zero"
    machine.observe_sync(20.0)
    assert machine.grace_s([A]) == 29.0


@pytest.mark.parametrize(
    ("h", "floor_ms", "step", "fragments", "interval"),
    [
        (24.0, 0, 0.5, 4, 3.0),
        (24.0, 5000, 0.5, 4, 5.0),
        (0.0, 0, 0.5, 4, 0.0),
        (0.0, 700, 0.5, 4, 0.7),
        (24.0, 0, None, 4, 0.0),
        (24.0, 200, None, 4, 0.2),
        (1.5, 0, 2.0, 1, 3.0),
    ],
)
def test_the_throttle(h, floor_ms, step, fragments, interval):
    machine = pace(sync_interval_steps=h, min_round_interval_ms=floor_ms)
    if step is not None:
        ran(machine, A, (0.0, 0), (step, 1))
    assert machine.launch_interval_s([A], fragments) == pytest.approx(interval)
