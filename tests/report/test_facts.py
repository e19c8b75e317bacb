"""The facts of a tape, against small runs worked out by hand; and what is no tape."""

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncer.report.columns import columns_of
from syncer.report.facts import facts_of
from syncer.tape import merges
from tests.support.invented_tapes import START, answer, event, merge, start, written
from yeto_torch.wire.errors import StateError


def facts(lines, **arguments):
    return facts_of(columns_of(lines), **arguments)


BY_HAND = [
    start(),
    event("join", 0.25, id=0, generation=100),
    event("join", 0.5, id=1, generation=101),
    event("reject", 0.75, what="hello", id=7, reason="another run"),
    merge(1, [answer(0, 3.0), answer(1, 1.0)], ms=100.0, gnorm=8.0),
    merge(2, [answer(0, 2.0, c_steps=6), answer(1, 2.0, c_steps=2)], ms=200.0, gnorm=4.0),
    merge(3, [answer(0)], missed=[1], ms=300.0, gnorm=2.0, rejected={"out_of_round": 2}),
    event("leave", 3.5, id=1, generation=101, reason="the peer closed the control stream"),
    merge(4, [answer(0, staleness=2)], ms=1000.0, gnorm=1.0, attempt=3, quorum_ms=None, rejected={"norm": 1}),
    event("final", 4.5, step=4, expected=[0]),
    event("end", 5.0, step=4, code=0),
]


def test_a_run_of_four_rounds_by_hand():
    summary = facts(BY_HAND).summary
    assert (summary.outcome, summary.reason) == ("complete", "")
    assert (summary.rounds, summary.last_step, summary.total_steps, summary.starts) == (4, 4, 8, 1)
    assert (summary.superseded, summary.fragments) == (0, 2)
    assert summary.learners == 3  # 0, 1 and the one that was refused
    assert (summary.began, summary.ended, summary.duration_s) == (START, START + 5, 5.0)
    assert summary.pace == 60.0  # three seconds from the first commit to the fourth
    assert (summary.answers, summary.captured, summary.nbytes) == (6, 7, 6000.0)
    assert summary.answered == 6 / 7
    assert summary.fresh == 5 / 6
    assert (summary.ms_median, summary.ms_longest) == (250.0, 1000.0)
    assert summary.ms_p95 == pytest.approx(300 + 0.85 * 700)
    assert summary.retries == 2
    assert summary.rejected == (("out_of_round", 2), ("norm", 1))
    assert summary.refused == 1


def test_its_learners_by_hand():
    zero, one, stranger = facts(BY_HAND).learners
    assert (zero.id, zero.captured, zero.answered, zero.joins, zero.leaves) == (0, 4, 4, 1, 0)
    assert (one.id, one.captured, one.answered, one.joins, one.leaves) == (1, 3, 2, 1, 1)
    assert (stranger.id, stranger.captured, stranger.answered, stranger.share) == (7, 0, 0, 0.0)
    assert zero.share == pytest.approx((0.75 + 0.5 + 1 + 1) / 4)
    assert one.share == pytest.approx((0.25 + 0.5) / 4)
    assert (zero.c_steps, one.c_steps) == ((4 + 6 + 4 + 4) / 4, 3.0)
    assert (zero.behind, one.behind) == (0.25, 0.0)  # two outer steps are one version, with two fragments
    assert (zero.nbytes, one.nbytes) == (4000.0, 2000.0)


def test_its_series_by_hand_one_column_a_round():
    series = facts(BY_HAND).series
    assert series.per_column == 1
    assert series.step.tolist() == [1, 2, 3, 4, 5]
    assert series.ends.tolist() == [1, 2, 3, 4]
    assert series.time.tolist() == [START + 1, START + 2, START + 3, START + 4]
    assert series.nbytes_total.tolist() == [2000, 4000, 5000, 6000]
    for band in (series.ms.low, series.ms.middle, series.ms.high):
        assert band.tolist() == [100, 200, 300, 1000]
    assert series.quorum_ms[:3].tolist() == [50, 50, 50]
    assert math.isnan(series.quorum_ms[3])
    assert series.answered.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert series.missed.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert series.contribution.tolist() == [[0.75, 0.5, 1, 1], [0.25, 0.5, 0, 0], [0, 0, 0, 0]]
    assert series.behind.tolist() == [[1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert series.retries.tolist() == [0, 0, 0, 2]
    assert {reason: counts.tolist() for reason, counts in series.rejected.items()} == {
        "out_of_round": [0, 0, 2, 0],
        "norm": [0, 0, 0, 1],
    }
    nan = math.nan
    np.testing.assert_array_equal(series.gnorm_by_fragment, [[8, nan, 2, nan], [nan, 4, nan, 1]])


def test_two_rounds_a_column_keep_the_extremes_and_the_shares():
    series = facts(BY_HAND, most_columns=2).series
    assert series.per_column == 2
    assert series.step.tolist() == [1, 3, 5]
    assert (series.ends.tolist(), series.nbytes_total.tolist()) == ([2, 4], [4000, 6000])
    assert (series.ms.low.tolist(), series.ms.high.tolist()) == ([100, 300], [200, 1000])
    assert series.ms.middle.tolist() == [150, 650]
    assert series.quorum_ms.tolist() == [50, 50]  # the null is no number
    assert series.answered[1].tolist() == [1.0, 0.0]
    assert series.missed[1].tolist() == [0.0, 0.5]
    assert series.contribution.tolist() == [[0.625, 1], [0.375, 0], [0, 0]]
    assert series.behind[:2].tolist() == [[1, 0.5], [0, 0.5]]
    assert series.retries.tolist() == [0, 2]
    assert series.gnorm_by_fragment.tolist() == [[8, 2], [4, 1]]


def test_the_drive_by_hand_and_a_tape_that_is_older_than_it():
    drives = [1.0, 1.5, None, 1.25, -2.0, 3.0]
    lines = [merge(n, [answer(0)], drive=drive, lag_cosine=-0.5) for n, drive in enumerate(drives, start=1)]
    found = facts(lines, most_columns=2)
    assert found.summary.over_driven == 2 / 5
    band = found.series.drive
    assert (band.low.tolist(), band.middle.tolist(), band.high.tolist()) == ([1, -2], [1.25, 1.25], [1.5, 3])
    assert (found.series.lag_cosine.tolist(), found.series.momentum.tolist()) == ([-0.5, -0.5], [0.5, 0.5])
    for line in lines:
        for key in ("gain", "drive", "agreement", "lag_cosine", "momentum"):
            del line[key]
    old = facts(lines)
    assert old.summary.over_driven is None
    assert np.isnan(old.series.drive.middle).all()


def test_a_last_column_with_fewer_rounds_is_divided_by_what_it_has():
    lines = [merge(step, [answer(0), answer(1)]) for step in range(1, 6)]
    lines[4] = merge(5, [answer(0)], missed=[1])
    series = facts(lines, most_columns=3).series
    assert series.step.tolist() == [1, 3, 5, 6]
    assert series.missed.tolist() == [[0, 0, 0], [0, 0, 1]]


def test_a_restart_voids_what_came_after_its_checkpoint():
    lines = [
        start(),
        *[merge(step, [answer(0)], ms=1.0) for step in range(1, 6)],
        start(3, at=20.0),
        *[merge(step, [answer(1)], ms=2.0, time=START + 20 + step) for step in (4, 5)],
    ]
    found = facts(lines)
    assert (found.summary.rounds, found.summary.superseded, found.summary.starts) == (5, 2, 2)
    assert found.series.ms.middle.tolist() == [1, 1, 1, 2, 2]
    assert [row.answered for row in found.learners] == [3, 2]
    assert found.summary.outcome == "open"


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_the_rounds_that_stand_are_those_every_reader_of_tapes_keeps(tmp_path_factory, script):
    lines = [start(number) if is_start else merge(number, [answer(0)]) for is_start, number in script]
    tape = written(tmp_path_factory.mktemp("tape") / "tape", lines)
    columns = columns_of(lines)
    assert columns.step.tolist() == [line["step"] for line in merges(tape)]
    assert columns.superseded == sum(not is_start for is_start, _ in script) - len(columns.step)


@pytest.mark.parametrize(
    ("last", "outcome", "reason"),
    [
        (event("end", 9, step=1, code=1, reason="final cut not acknowledged"), "failed", "final cut not acknowledged"),
        (event("end", 9, step=1, code=130, reason="interrupted at step 1"), "interrupted", "interrupted at step 1"),
        (event("end", 9, step=1, code=0), "complete", ""),
        (event("end", 9, step=1, code="0"), "failed", ""),
        (event("leave", 9, id=0), "failed", ""),  # the end before it stays the last word
        (start(1, 9.0), "open", ""),
    ],
)
def test_how_it_ended(last, outcome, reason):
    summary = facts([start(), merge(1, [answer(0)]), event("end", 5, step=1, code=1), last]).summary
    assert (summary.outcome, summary.reason) == (outcome, reason)


def test_one_round_by_one_learner_of_weight_zero_divides_by_nothing():
    found = facts([merge(1, [answer(0, 0.0)], gnorm=0.0, ms=0.0)])
    assert (found.summary.pace, found.summary.duration_s, found.learners[0].share) == (0.0, 0.0, 0.0)


def test_many_reasons_are_five_and_the_rest():
    counts = {f"reason {number}": number for number in range(1, 9)}
    series = facts([merge(1, [answer(0)], rejected=counts)]).series
    assert {reason: total[0] for reason, total in series.rejected.items()} == {
        **{f"reason {number}": number for number in range(4, 9)},
        "other": 1 + 2 + 3,
    }


@pytest.mark.parametrize(
    ("lines", "held"), [([], "no line"), ([start(), event("join", id=0), event("join", id=1)], "2 join, 1 start")]
)
def test_a_tape_without_a_round_shows_nothing(lines, held):
    with pytest.raises(StateError, match=f"no merged round.*{held}"):
        facts(lines)


WRONG = [
    ("step", -1, "step is -1, must be a whole number"),
    ("step", 10**12 + 1, "step is 1000000000001, must be a whole number from 0 to 1000000000000"),
    ("step", True, "step is True"),
    ("fragment", 1.0, "fragment is 1.0"),
    ("ms", "12", "ms is '12', must be a number"),
    ("ms", None, "ms is None"),
    ("ms", math.nan, "ms is nan"),
    ("ms", -0.5, "ms is -0.5"),
    ("gnorm", math.inf, "gnorm is inf, must be a number from 0 to 1e\\+100 or null"),
    ("quorum_ms", math.nan, "quorum_ms is nan"),
    ("gnorm", 10**400, "gnorm is 1000"),
    ("drive", "hard", "drive is 'hard', must be a number from -1e\\+100 to 1e\\+100 or null"),
    ("drive", math.inf, "drive is inf"),
    ("momentum", -0.1, "momentum is -0.1, must be a number from 0"),
    ("lag_cosine", math.nan, "lag_cosine is nan"),
    ("time", 1e15, "time is 1000000000000000.0, must be a number from 0 to 2.5e\\+11"),
    ("expected", [0, "1"], "expected is '1', must be a whole number from 0 to 4294967295"),
    ("expected", [2**32], "expected is 4294967296"),
    ("expected", [[0]], "wrong kind"),
    ("expected", "all", "wrong kind"),
    ("responders", {}, "wrong kind"),
    ("responders", [0], "wrong kind"),
    ("responders", [{"id": 0}], "staleness is missing"),
    ("responders", [answer(0, contribution=math.nan)], "contribution is nan"),
    ("responders", [answer(-1, contribution=1.0)], "id is -1"),
    ("rejected", ["norm"], "wrong kind"),
    ("rejected", {"norm": "many"}, "rejected norm is 'many'"),
]


@pytest.mark.parametrize(("key", "value", "sentence"), WRONG)
def test_a_wrong_value_is_one_sentence_with_its_line(key, value, sentence):
    lines = [start(), merge(1, [answer(0)]), merge(2, [answer(0)]) | {key: value}, merge(3, [answer(0)])]
    with pytest.raises(StateError, match=f"^line 3: .*{sentence}") as caught:
        facts(lines)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("key", ["fragment", "ms", "expected", "responders", "gnorm", "time"])
def test_a_missing_key_is_named(key):
    line = merge(2, [answer(0)])
    del line[key]
    with pytest.raises(StateError, match=f"^line 2: {key} is missing"):
        facts([start(), line])


@settings(max_examples=60)
@given(st.data())
def test_whatever_one_value_becomes_it_is_facts_or_one_sentence(data):
    """One value anywhere in a good tape is replaced by any JSON."""
    lines = copy.deepcopy(BY_HAND)
    line = data.draw(st.sampled_from(lines))
    key = data.draw(st.sampled_from(sorted(line)))
    scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    value = data.draw(st.recursive(scalar, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
    line[key] = json.loads(json.dumps(value))
    try:
        found = facts(lines)
    except StateError as refusal:
        sentence = str(refusal)
    else:
        sentence = "line 0"
        assert np.isfinite(found.series.nbytes_total).all()
    assert sentence.startswith("line ") or "no merged round" in sentence
