"""Which round comes next and when."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.core.events import Member
from syncer.core.pace import Pace
from syncer.core.rounds import RoundState
from syncer.core.schedule import Schedule
from tests.support.coordinator_desk import schedule_policy
from yeto_torch.wire.layout import version_at

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "schedule.json").read_text(encoding="utf-8"))
MEMBERS = (Member(0, 1), Member(1, 1))


def schedule(fragments=3, total=10, committed=0, **changes):
    policy = schedule_policy(**changes)
    return Schedule(policy, fragments, total, committed, Pace(policy))


def ready(plan, step):
    plan.rounds[step].state = RoundState.READY


def test_the_version_law_equals_the_golden_values():
    golden = [tuple(map(int, word)) for word in VECTORS["version_law"]["text"].split()]
    assert [schedule(fragments=3, committed=step).versions for step in range(7)] == golden


@given(st.integers(1, 7), st.integers(0, 60))
def test_the_version_law_equals_a_dumb_twin(fragments, step):
    """Twin: play the rounds."""
    versions = [0] * fragments
    for t in range(1, step + 1):
        versions[(t - 1) % fragments] = t
    assert [version_at(f, step, fragments) for f in range(fragments)] == versions


@pytest.mark.parametrize(("pipeline", "fragments", "window"), [(1, 3, 1), (2, 3, 2), (3, 3, 3), (9, 3, 3), (2, 1, 1)])
def test_rounds_in_flight_never_exceed_pipeline_or_fragments(pipeline, fragments, window):
    plan = schedule(fragments=fragments, pipeline=pipeline)
    opened = []
    while (at := plan.earliest_launch()) is not None and at <= 0.0:
        opened.append(plan.open_next(MEMBERS, 0.0))
    assert [r.step for r in opened] == list(range(1, window + 1))
    assert len({r.fragment for r in opened}) == window, "rounds in flight target distinct fragments"


def test_nothing_is_launched_beyond_the_last_step():
    plan = schedule(total=4, committed=3, pipeline=3)
    assert plan.open_next(MEMBERS, 0.0).step == 4
    assert plan.earliest_launch() is None
    assert schedule(total=4, committed=4).complete
    assert schedule(total=4, committed=4).earliest_launch() is None


def test_commits_are_strictly_ascending_whatever_gets_ready_first():
    plan = schedule(pipeline=3)
    for _ in range(3):
        plan.open_next(MEMBERS, 0.0)
    ready(plan, 3)
    ready(plan, 2)
    assert plan.pop_ready() is None
    ready(plan, 1)
    assert [r.step for r in iter(plan.pop_ready, None)] == [1, 2, 3]
    assert plan.committed == 3
    assert plan.versions == (1, 2, 3)


def test_a_new_round_starts_from_the_version_its_fragment_has_then():
    plan = schedule(fragments=2, pipeline=2)
    for _ in range(2):
        plan.open_next(MEMBERS, 0.0)
    ready(plan, 1)
    assert plan.pop_ready() is not None
    third = plan.open_next(MEMBERS, 0.0)
    assert (third.step, third.fragment, third.base_version) == (3, 0, 1)


def test_the_throttle_runs_from_launch_to_launch_and_reads_the_newest_estimate():
    policy = schedule_policy(sync_interval_steps=6.0, pipeline=2)
    pace = Pace(policy)
    plan = Schedule(policy, 3, 10, 0, pace)
    assert plan.earliest_launch() == float("-inf")
    plan.open_next(MEMBERS, 100.0)
    assert plan.earliest_launch() == 100.0, "no estimate yet: only the floor holds back"
    pace.observe_step(MEMBERS[0], 1, 100.0)
    pace.observe_step(MEMBERS[0], 2, 104.0)
    assert plan.earliest_launch() == 100.0 + 6.0 * 4.0 / 3
    plan.open_next(MEMBERS, 108.0)
    assert plan.earliest_launch() is None, "the window is full, whatever the time"
