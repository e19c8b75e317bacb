"""The verdict on evidence that is invented here: what a valid experiment leaves behind, and every way to differ."""

import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.benchmark.summary import document, holds, table
from syncer.benchmark.verdict import Evidence, Process, Saved, judge, stretches
from yeto_torch.wire.errors import StateError
from yeto_torch.wire.layout import version_at

BUDGET, TOKENS = 48, {0: 1536, 1: 768, 2: 1}
IDENTITY = (1, b"\x11" * 32, b"\x22" * 32)


def answer(learner, base, steps, tokens):
    return {
        "id": learner,
        "generation": 7,
        "base_version": base,
        "c_steps": steps,
        "c_tokens": tokens,
        "weight": tokens**2 / steps,
    }


def merge(step, fragments, responders, quorum):
    return {"step": step, "fragment": (step - 1) % fragments, "quorum": quorum, "responders": responders}


def lines_of(cut=5, fragments=3, learners=2):
    """A tape: ``cut`` ordinary rounds with one answer each, then the consolidation."""
    lines = [{"event": "start", "step": 0, "time": 1.0}]
    lines += [{"event": "join", "id": i, "time": 2.0 + i} for i in range(learners)]
    lines += [merge(t, fragments, [answer(t % learners, 0, t, 10 * t)], learners // 2 + 1) for t in range(1, cut + 1)]
    lines += [{"event": "cutoff", "step": cut}, {"event": "end", "step": cut, "code": 0, "time": 33.0}]
    lines += [{"event": "start", "step": cut, "time": 40.0}]
    lines += [{"event": "join", "id": i, "time": 50.0 - i} for i in range(learners)]
    for t in range(cut + 1, cut + fragments + 1):
        base = version_at((t - 1) % fragments, cut, fragments)
        lines.append(merge(t, fragments, [answer(i, base, BUDGET, TOKENS[i]) for i in range(learners)], learners))
    return [*lines, {"event": "final", "step": cut + fragments}, {"event": "end", "code": 0, "time": 51.5}]


def saved(step, fragments, lines, marker=None):
    ledger = {}
    for line in lines:
        if "event" not in line and line["step"] <= step:
            for entry in line["responders"]:
                merges, steps, tokens = ledger.get(entry["id"], (0, 0, 0))
                ledger[entry["id"]] = (merges + 1, steps + entry["c_steps"], tokens + entry["c_tokens"])
    versions = tuple(version_at(f, step, fragments) for f in range(fragments))
    return Saved(step, versions, IDENTITY, ledger, marker)


def evidence(cut=5, fragments=3, learners=2, lines=None):
    """A valid experiment; ``lines`` replaces its tape alone."""
    honest, last = lines_of(cut, fragments, learners), cut + fragments
    return Evidence(
        learners,
        BUDGET,
        Process(0),
        Process(0),
        (Process(0),) * learners,
        saved(cut, fragments, honest),
        saved(last, fragments, honest, marker=last),
        stretches(honest if lines is None else lines),
    )


def told(found):
    return [deviation for check in judge(found) for deviation in check.deviations]


@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 3))
def test_a_valid_experiment_of_any_size_passes(cut, fragments, learners):
    checks = judge(evidence(cut, fragments, learners))
    assert holds(checks)
    assert [check.name for check in checks] == [
        "cut-off process",
        "cut-off checkpoint",
        "consolidation process",
        "learners",
        "tape",
        "budgets",
        "checkpoint",
        "marker",
        "ledger",
    ]


@given(st.data())
def test_any_line_that_is_lost_is_missed(data):
    lines = lines_of()
    numbers = [n for n, line in enumerate(lines) if line.get("event") in (None, "start", "cutoff")]
    lost = data.draw(st.sampled_from(numbers))
    del lines[lost]
    assert told(evidence(lines=lines))


def consolidation(lines, step):
    """The merge line of a step, to be tampered with."""
    return next(line for line in lines if line.get("step") == step and "event" not in line)


def drop(step):
    return lambda lines: lines.remove(consolidation(lines, step))


def twice(lines):
    lines.insert(lines.index(consolidation(lines, 7)), copy.deepcopy(consolidation(lines, 7)))


def swapped(lines):
    a, b = lines.index(consolidation(lines, 6)), lines.index(consolidation(lines, 7))
    lines[a], lines[b] = lines[b], lines[a]


def one_more(lines):
    lines.insert(-2, merge(9, 3, consolidation(lines, 6)["responders"], 2))


def change(step, learner=None, **fields):
    def tamper(lines):
        line = consolidation(lines, step)
        (line if learner is None else line["responders"][learner]).update(fields)

    return tamper


def without(step, learner):
    return lambda lines: consolidation(lines, step)["responders"].pop(learner)


def a_stranger(lines):
    consolidation(lines, 7)["responders"].append(answer(5, 4, BUDGET, 1))


def doubled(lines):
    consolidation(lines, 7)["responders"].append(consolidation(lines, 7)["responders"][0])


def third_start(lines):
    lines.insert(-2, {"event": "start", "step": 7})


def no_cutoff(lines):
    lines.remove({"event": "cutoff", "step": 5})


@pytest.mark.parametrize(
    ("tamper", "sentence"),
    [
        (drop(7), "round 7 is missing on the tape"),
        (drop(2), "round 2 is missing on the tape"),
        (twice, "round 7 is on the tape 2 times"),
        (swapped, "rounds 6 to 8 are not in order on the tape"),
        (one_more, "round 9 is on the tape, where only 6 to 8 belong"),
        (change(7, fragment=2), "round 7 merged fragment 2, its turn was fragment 0"),
        (without(7, 1), "round 7 was merged without learner 1"),
        (a_stranger, "round 7 was merged from learners [0, 1, 5], the fleet is 0 to 1"),
        (doubled, "round 7 was merged from learners [0, 1, 0], the fleet is 0 to 1"),
        (change(7, quorum=1), "round 7 needed 1 answers, not 2"),
        (
            change(7, 1, base_version=1),
            "round 7: learner 1 answered from version 1 of fragment 0, resumed was version 4",
        ),
        (change(7, 1, c_steps=47), "in round 7 learner 1 answered for 47 local steps, the budget is 48"),
        (change(8, 1, c_tokens=767), "in round 8 learner 1 counted 767 tokens, in round 6 768"),
        (change(7, 1, weight=1.0), "in round 7 learner 1 weighed 1.0, tokens² / steps is 12288.0"),
        (third_start, "the tape tells of 3 starts, not of two"),
        (no_cutoff, "the tape tells of no cut-off, the checkpoint is at step 5"),
        (lambda lines: lines[0].update(step=1), "the processes started at steps 1 and 5, not at 0 and 5"),
        (lambda lines: lines.clear(), "the tape tells of 0 starts, not of two"),
    ],
)
def test_a_tape_that_differs_is_told_in_a_sentence(tamper, sentence):
    lines = lines_of()
    tamper(lines)
    assert sentence in told(evidence(lines=lines))


def test_a_missing_record_is_also_seen_in_the_ledger():
    lines = lines_of()
    drop(7)(lines)
    checks = {check.name: check.deviations for check in judge(evidence(lines=lines))}
    assert checks["tape"] == ("round 7 is missing on the tape",)
    assert len(checks["ledger"]) == 2
    assert not checks["budgets"]


@pytest.mark.parametrize(
    "damage",
    [
        {"step": "7"},
        {"responders": None},
        {"responders": [{"id": 0}]},
        {"responders": [answer(0, 0, 1, 1) | {"c_steps": 0}]},
    ],
)
def test_a_damaged_merge_line_is_refused_by_its_round(damage):
    with pytest.raises(StateError, match=f"damaged merge line, of round {damage.get('step', 7)}"):
        stretches([{"event": "start", "step": 0}, merge(7, 3, [], 2) | damage])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cut": "checkpoint x: truncated"}, "the cut-off checkpoint cannot be used: checkpoint x: truncated"),
        ({"final": "gone"}, "the final checkpoint cannot be used: gone"),
        ({"tape": "tape x: gone"}, "tape x: gone"),
        ({"first": Process(1, "void")}, "the cut-off process ended with exit code 1: void"),
        ({"first": Process()}, "the cut-off process could not complete"),
        ({"second": Process(137)}, "the consolidation process ended with exit code 137"),
        ({"fleet": (Process(0), Process(3))}, "learner 1 ended with exit code 3"),
        (
            {"fleet": (Process(0), Process(0, early=" before the final cut"))},
            "learner 1 ended with exit code 0 before the final cut",
        ),
    ],
)
def test_what_ended_badly_or_cannot_be_read(changes, sentence):
    assert told(replace(evidence(), **changes)) == [sentence]


COUNTED = "the cut-off checkpoint counts 9 merges, 9 steps and 9 tokens of learner 1, the tape 3 merges, 9"


def marked(which, marker):
    return lambda e: replace(e, **{which: replace(getattr(e, which), marker=marker)})


@pytest.mark.parametrize(
    ("tamper", "sentence"),
    [
        (marked("cut", 5), "the cut-off checkpoint carries a final marker of step 5"),
        (marked("final", None), "there is no final marker beside the checkpoint"),
        (marked("final", 7), "the final marker names step 7, not C + F = 8"),
        (lambda e: replace(e, final=replace(e.final, step=9)), "the final checkpoint is at step 9, not at C + F = 8"),
        (
            lambda e: replace(e, final=replace(e.final, versions=(7, 5, 6))),
            "fragment 1 is at version 5, at step 8 it must be 8",
        ),
        (
            lambda e: replace(e, final=replace(e.final, identity=(0, *IDENTITY[1:]))),
            "the final checkpoint is of another session or layout than the cut-off checkpoint",
        ),
        (
            lambda e: replace(e, cut=replace(e.cut, ledger={**e.cut.ledger, 1: (9, 9, 9)})),
            COUNTED,
        ),
    ],
)
def test_checkpoints_that_differ(tamper, sentence):
    assert any(deviation.startswith(sentence) for deviation in told(tamper(evidence())))


def test_behind_a_failed_cut_off_nothing_more_is_judged():
    failed = Evidence(2, BUDGET, Process(1, "the experiment is void"), fleet=(Process(), Process()))
    assert [check.name for check in judge(failed)] == ["cut-off process", "learners"]


def test_the_times_are_those_between_the_last_join_and_the_end():
    first, second = stretches(lines_of())
    assert (first.seconds, second.seconds) == (30.0, 1.5)
    assert stretches([{"event": "start", "step": 0}])[0].seconds is None


def test_the_table_ends_with_the_verdict():
    good = evidence()
    lines = table(good, judge(good))
    assert lines[-1] == "PASS: a valid experiment"
    assert len({line.rindex(" ok") for line in lines if line.endswith(" ok")}) == 1
    bad = replace(good, fleet=(Process(0), Process(3)))
    lines = table(bad, judge(bad))
    assert lines[-3:] == ["  - learner 1 ended with exit code 3", "", "FAIL: 1 deviation"]
    assert sum(line.endswith("DEVIATES") for line in lines) == 1


def test_the_document_says_what_the_table_says():
    good = evidence()
    found = document(good, judge(good), None)
    assert (found["valid"], found["cutoff_step"], found["final_step"], found["fragments"]) == (True, 5, 8, 3)
    assert found["seconds"] == {"training": 30.0, "consolidation": 1.5}
    bad = document(replace(good, cut="gone"), judge(replace(good, cut="gone")), None)
    assert (bad["valid"], bad["cutoff_step"]) == (False, None)
