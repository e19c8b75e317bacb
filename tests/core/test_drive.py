"""When the syncer says that its outer step over-drives the fleet, how often, and in which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.drive import MERGES, Driven, DriveWatch
from tests.support.coordinator_desk import Desk, syncer_policy

LIMIT = 1.25


def commits(watch, drives, fragment=0, *, agreement=0.75, lag=0.5, enough=0.375, lr=0.7, mu=0.9):
    return [watch.committed(fragment, Driven(drive, 2 * drive, agreement, lag, enough), lr, mu) for drive in drives]


def test_it_speaks_once_in_one_sentence_with_the_numbers_and_the_cure():
    watch = DriveWatch(LIMIT)
    *before, text = commits(watch, [1.5] * MERGES)
    assert before == [None] * (MERGES - 1)
    assert text == (
        "the outer step over-drives fragment 0: over its last 8 merges it went 1.50 times as far along the learners' "
        "mean progress as the merge itself, where 1.25 is the limit (gain 3.00, agreement 0.75, lag cosine 0.50); "
        "lower outer.momentum from 0.9 to about 0.38, or set outer.guard=cap, which does so merge by merge"
    )
    assert commits(watch, [9.0] * 100) == [None] * 100
    assert commits(watch, [9.0] * 100, fragment=1) == [None] * 100


@pytest.mark.parametrize(
    ("is_capped", "changes"),
    [(True, {"enough": 0.2}), (False, {"enough": 0.0}), (False, {"mu": 0.0})],
    ids=["capped already", "no momentum is small enough", "there is none"],
)
def test_where_momentum_is_no_cure_the_rate_is(is_capped, changes):
    text = commits(DriveWatch(LIMIT, is_capped=is_capped), [2.5] * MERGES, lr=2.0, **changes)[-1]
    assert text.endswith("; lower outer.lr from 2 to about 1, momentum alone is no cure")
    assert "guard" not in text


def test_every_fragment_is_smoothed_by_itself():
    watch = DriveWatch(LIMIT)
    for _ in range(50):
        assert commits(watch, [1.2], fragment=0) == [None]
    assert commits(watch, [2.0] * (MERGES - 1), fragment=1) == [None] * (MERGES - 1)
    assert "fragment 1: " in commits(watch, [2.0], fragment=1)[0]


def test_single_excesses_are_noise_and_lasting_ones_are_not():
    watch = DriveWatch(LIMIT)
    assert commits(watch, [1.0] * MERGES + [2.0]) == [None] * (MERGES + 1)
    assert any(commits(watch, [2.0] * MERGES))


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-3, 3)), max_size=80))
def test_it_speaks_at_the_first_fragment_whose_mean_is_above_the_limit(script):
    """A dumb twin: all gains of a fragment kept, and weighted at the end."""
    watch, seen, said = DriveWatch(LIMIT), {}, 0
    for fragment, gain in script:
        gains = seen.setdefault(fragment, [])
        gains.append(gain)
        mean = sum(gains[:MERGES]) / len(gains[:MERGES])
        for later in gains[MERGES:]:
            mean = mean * (1 - 1 / MERGES) + later / MERGES
        is_due = not said and len(gains) >= MERGES and mean > LIMIT + 1e-9
        text = commits(watch, [gain], fragment)[0]
        if abs(mean - LIMIT) > 1e-9 or said:
            assert (text is not None) == is_due
        said += text is not None
    assert said <= 1


def test_the_coordinator_warns_and_says_so_once():
    desk = Desk(syncer_policy(1)).assemble()
    hard = ev.StepMeasured(0, Driven(9.0, 9.0, 1.0, 0.0, 0.1), 0.7, 0.5)
    for _ in range(2 * MERGES):
        desk.tell(hard)
    (warning,) = [said for said in desk.all(fx.Say) if said.warning]
    assert warning.text.startswith("the outer step over-drives fragment 0: ")
