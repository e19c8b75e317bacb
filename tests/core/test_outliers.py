"""Outliers: what is left out of a merge, against an oracle; and what the run makes of it.

Source: docs/operating.md and docs/tape.md, ``merge.max_norm_ratio``.
"""

from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.core import effects as fx
from syncer.core.events import Member
from syncer.core.outliers import find_outliers
from tests.support.coordinator_desk import Desk, answer, syncer_policy

norms = st.floats(0, 1e40) | st.integers(0, 5)
rounds = st.lists(st.tuples(norms, st.sampled_from([0, 1, 10])), max_size=9)


def answers(*pairs):
    """Answers of learners 0, 1, ... with these (norm, tokens)."""
    return [answer(Member(i, 1), 1, norm=norm, c_tokens=tokens) for i, (norm, tokens) in enumerate(pairs)]


def left_out(found):
    return [outlier.member.learner_id for outlier in found]


@given(rounds, st.floats(1, 1e9, exclude_min=True))
def test_left_out_is_what_exceeds_the_median_and_never_everybody(pairs, ratio):
    found = find_outliers(answers(*pairs), ratio)
    counting = {i: norm for i, (norm, tokens) in enumerate(pairs) if norm > 0 and tokens > 0}
    if not counting:
        assert found == ()
        return
    middle = median_low(counting.values())
    assert left_out(found) == [i for i, norm in counting.items() if norm > ratio * middle]
    assert len(found) < len(counting)
    assert all(o.median == middle and o.norm == counting[o.member.learner_id] for o in found)


@given(rounds)
def test_without_a_ratio_nothing_is_left_out(pairs):
    assert find_outliers(answers(*pairs), None) == ()


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 1), (1e6, 1)], [1]),  # of two, the smaller is the median
        ([(10, 1), (1, 1), (9.9, 1)], []),  # 10 does not exceed 10 times 1 ...
        ([(1, 1), (1, 1), (10.001, 1)], [2]),  # ... what lies above does
        ([(5, 1)], []),
        ([(0, 1), (0, 1), (1, 1)], []),  # zeros say nothing about what is usual
        ([(0.001, 0), (0.001, 0), (1, 1)], []),  # nor does what weighs nothing
        ([(1, 1), (1, 1), (1e9, 0)], []),  # and it moves nothing either
        ([(1, 1), (2, 1), (50, 1), (60, 1)], [2, 3]),
        ([(3e38, 1), (2e38, 1), (1e38, 1)], []),
    ],
)
def test_known_rounds(pairs, expected):
    assert left_out(find_outliers(answers(*pairs), 10)) == expected


def guarded(learners=3, **policy):
    return Desk(syncer_policy(learners, quorum=learners, max_norm_ratio=10.0, **policy), merges=False).assemble()


def answer_all(desk, step, norms):
    for learner, norm in enumerate(norms):
        desk.push(learner, step, norm=norm, c_tokens=10 * (1 + learner), gradient=f"gradient of {learner}")


class TestInARun:
    def test_the_merge_gets_only_what_is_kept_in_order(self):
        desk = guarded()
        answer_all(desk, 1, [1.0, 1e7, 2.0])
        (merge,) = desk.all(fx.Merge)
        assert [r.gradient for r in merge.responses] == ["gradient of 0", "gradient of 2"]
        assert merge.weights == (100.0, 900.0)

    def test_an_ordinary_round_is_merged_whole_and_says_so(self):
        desk = guarded()
        answer_all(desk, 1, [1.0, 3.0, 2.0])
        (merge,) = desk.all(fx.Merge)
        assert len(merge.responses) == 3
        assert desk.notes("reject") == []

    def test_the_log_and_the_tape_name_it_before_the_merge(self):
        desk = guarded()
        answer_all(desk, 1, [1.0, 1e7, 2.0])
        (note,) = desk.notes("reject")
        assert (note["what"], note["id"], note["step"], note["attempt"]) == ("push", 1, 1, 1)
        assert note["reason"] == "norm 1e+07 exceeds 10 times the round's median, 2"
        said = [effect.text for effect in desk.all(fx.Say) if effect.warning]
        assert said == [f"refused a push of learner 1, step 1, attempt 1: {note['reason']}"]
        kinds = [type(effect) for effect in desk.new]
        assert kinds.index(fx.Note) < kinds.index(fx.Merge)

    def test_the_merge_line_stays_truthful(self):
        desk = Desk(syncer_policy(3, quorum=3, max_norm_ratio=10.0)).assemble()
        answer_all(desk, 1, [1.0, 1e7, 2.0])
        line = desk.line(1)
        assert line["rejected"] == {"norm": 1}
        assert line["left_out_members"] == [{"id": 1, "generation": 1, "norm": 1e7, "median_norm": 2.0}]
        assert line["responded"] == [0, 1, 2], "it did answer"
        assert [r["weight"] for r in line["responders"]] == [100.0, 400.0, 900.0]
        assert [r["contribution"] for r in line["responders"]] == [0.1, 0.0, 0.9]
        answer_all(desk, 2, [1.0, 1.0, 1.0])
        assert desk.line(2)["rejected"] == {}
        assert desk.line(2)["left_out_members"] == []

    def test_counts_stand_on_the_line_of_their_own_round(self):
        """Two rounds in flight: the second is decided on before the first is committed."""
        desk = Desk(syncer_policy(2, quorum=2, max_norm_ratio=10.0, pipeline=2)).assemble()
        desk.push(0, 1, norm=1.0)
        desk.push(0, 2, norm=1.0)
        desk.push(1, 2, norm=1e7)
        assert desk.all(fx.Record) == []
        desk.push(1, 1, norm=1.0)
        assert desk.line(1)["rejected"] == {}
        assert desk.line(2)["rejected"] == {"norm": 1}

    def test_the_ledger_counts_what_entered_the_model(self):
        desk = Desk(syncer_policy(3, quorum=3, max_norm_ratio=10.0, every=1, path="c")).assemble()
        answer_all(desk, 1, [1.0, 1e7, 2.0])
        (checkpoint,) = desk.latest(fx.SaveCheckpoint)
        assert checkpoint.ledger == ((0, 1, 1, 10), (2, 1, 1, 30))

    def test_one_commit_keeps_its_order(self):
        desk = Desk(syncer_policy(3, quorum=3, max_norm_ratio=10.0, every=1, path="c")).assemble()
        answer_all(desk, 1, [1.0, 1e7, 2.0])
        wanted = (fx.Merge, fx.Commit, fx.Record, fx.SaveCheckpoint, fx.Broadcast)
        kinds = [type(effect) for effect in desk.new if isinstance(effect, wanted)]
        assert tuple(kinds) == wanted

    def test_a_flood_of_giants_does_not_flood_the_log(self):
        desk = Desk(syncer_policy(3, quorum=3, max_norm_ratio=10.0, total_steps=200)).assemble()
        for step in range(1, 101):
            answer_all(desk, step, [1.0, 1.0, 1e9])
        assert len(desk.notes("reject")) == 64
        assert all(desk.line(step)["rejected"] == {"norm": 1} for step in range(1, 101))
