"""The learner budget: one exact report from everybody closes the process; anything else voids the experiment."""

from dataclasses import replace

import pytest

from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.cutoff import Cutoff
from syncer.core.events import Member
from syncer.core.lifecycle import Phase
from tests.support.coordinator_desk import Desk, syncer_policy
from yeto_torch.wire.constants import MessageType

BUDGET = 40


def desk(learners=2, *, merges=True, **policy):
    whole = replace(syncer_policy(learners, path="c", **policy), budget_learner_steps=BUDGET)
    return Desk(whole, merges=merges).assemble()


def report(d, learner, steps=BUDGET):
    member = d.members[learner] if isinstance(learner, int) else learner
    return d.tell(ev.BudgetReported(member, steps))


def written(d):
    published = (fx.SaveCheckpoint, fx.WriteFinal, fx.WriteMarker, fx.SendCut, fx.SendShutdown)
    return [type(e).__name__ for e in d.all(published)]


def test_reports_are_collected_one_from_each():
    cutoff = Cutoff(BUDGET, 2, 10.0)
    assert not cutoff.closed
    assert cutoff.report(1, BUDGET, 5.0) is None
    assert (cutoff.closed, cutoff.complete, cutoff.missing, cutoff.deadline) == (True, False, (0,), 15.0)
    assert cutoff.report(0, BUDGET, 9.0) is None
    assert (cutoff.complete, cutoff.deadline) == (True, 15.0)


@pytest.mark.parametrize(
    ("reports", "words"),
    [([(0, 39)], "reported 39 local steps, the budget is 40"), ([(0, 40), (0, 40)], "reported its budget twice")],
)
def test_a_wrong_or_second_report_voids(reports, words):
    cutoff = Cutoff(BUDGET, 2, 10.0)
    assert words in [cutoff.report(learner, steps, 0.0) for learner, steps in reports][-1]


def test_the_first_report_closes_issuance_and_cancels_whole_rounds():
    d = desk(pipeline=2)
    d.push(0, 1)
    report(d, 1)
    assert d.notes("cutoff") == [{"step": 0, "first": 1, "cancelled": [1, 2]}]
    d.push(0, 2)
    d.push(1, 1, attempt=1)
    assert [n["reason"] for n in d.notes("reject")] == ["out of round", "out of round"]
    d.wait(5.0)
    assert d.attempt(1) == 1
    assert not d.all(fx.Commit)
    assert d.coordinator.waiting_for() == "cut-off: budget reports missing from learners 0"


def test_a_merge_that_ends_after_the_cut_off_is_cancelled_too():
    d = desk(merges=False, pipeline=1)
    d.push(0, 1)
    d.push(1, 1)
    report(d, 0)
    assert not d.tell(ev.MergeDone(1))
    report(d, 1)
    assert d.coordinator.committed == 0
    assert d.finish.code == 0


def test_all_reports_drain_the_pool_write_an_unmarked_checkpoint_and_end():
    d = desk(every=0)
    d.push(0, 1)
    d.push(1, 1)
    report(d, 0)
    report(d, 1)
    kinds = [type(e).__name__ for e in d.new if not isinstance(e, (fx.Note, fx.Say))]
    assert kinds == ["Drain", "SaveCheckpoint", "Finish"]
    assert d.finish == fx.Finish(0)
    assert "learner-budget cutoff checkpoint written" in [e.text for e in d.all(fx.Say)]
    assert written(d) == ["SaveCheckpoint"]


@pytest.mark.parametrize(
    ("play", "words"),
    [
        (lambda d: report(d, 0, BUDGET + 1), "reported 41 local steps"),
        (lambda d: (report(d, 0), report(d, 0)), "twice"),
        (lambda d: (report(d, 0), d.join(0, 2), report(d, Member(0, 2))), "twice"),
        (lambda d: (report(d, 0), d.wait(10.0)), "no budget report within 10 s of the first one from learners 1"),
        (lambda d: (d.push(0, 1), d.push(1, 1)), "before a learner used up its budget"),
        (
            lambda d: d.tell(ev.GroupLost(d.members[0], "trailing bytes", MessageType.BUDGET_DONE)),
            "malformed budget report (trailing bytes)",
        ),
    ],
)
def test_what_voids_the_experiment_ends_it_without_a_checkpoint(play, words):
    d = desk(every=0, total_steps=1)
    play(d)
    assert d.finish.code == 1
    assert words in d.finish.text
    assert len(d.all(fx.Finish)) == 1
    assert not written(d)
    assert isinstance(d.orders[-1], fx.Finish), "nothing is told or done behind the end"


def assembling(learners=2, **policy):
    return Desk(replace(syncer_policy(learners, path="c", **policy), budget_learner_steps=BUDGET))


def test_reports_before_training_starts_count_and_nothing_is_launched_any_more():
    d = assembling()
    d.join(0)
    report(d, 0)
    assert d.coordinator.waiting_for().startswith("assembling")
    d.join(1)
    d.init()
    assert d.coordinator.phase is Phase.RUNNING
    assert not d.all(fx.SendPull)
    report(d, 1)
    assert d.finish == fx.Finish(0)
    assert [e.step for e in d.all(fx.SaveCheckpoint)] == [0]


def test_the_cut_off_waits_for_the_starting_values():
    d = assembling(learners=1, every=0)
    d.join(0)
    report(d, 0)
    assert d.coordinator.phase is Phase.ASSEMBLING
    d.tell(ev.InitArrived(Member(0, 1), 0, "start"))
    assert not written(d)
    d.tell(ev.InitArrived(Member(0, 1), 1, "start"))
    assert d.finish == fx.Finish(0)
    assert written(d) == ["SaveCheckpoint"]


@pytest.mark.parametrize(
    ("learners", "words"),
    [(1, "learner 0 has not sent all starting values within 10 s"), (2, "no budget report within 10 s")],
)
def test_a_cut_off_that_cannot_be_written_voids(learners, words):
    d = assembling(learners, every=0)
    d.join(0)
    report(d, 0)
    d.wait(9.9)
    assert d.finish is None
    d.wait(0.1)
    assert words in d.finish.text
    assert not written(d)


def test_a_cut_off_process_publishes_no_starting_state():
    d = desk(every=1)
    assert not d.all(fx.SaveCheckpoint)
    d.push(0, 1)
    d.push(1, 1)
    assert [e.step for e in d.all(fx.SaveCheckpoint)] == [1]


def test_a_third_report_while_the_pool_drains_voids():
    d = desk(every=0)
    report(d, 0)
    (drain,) = (e for e in d.coordinator.handle(ev.BudgetReported(d.members[1], BUDGET), d.now) if type(e) is fx.Drain)
    assert d.coordinator.phase is Phase.CUTTING, f"nothing is written before {drain} is done"
    report(d, 1)
    assert "twice" in d.finish.text
    assert not d.tell(ev.Drained())
    assert not written(d)


def test_a_learner_may_leave_and_report_on_its_next_generation():
    d = desk(every=0)
    report(d, 0)
    d.leave(1)
    d.wait(5.0)
    d.join(1, 2)
    assert not d.latest(fx.SendPull), "issuance stays closed"
    report(d, 1)
    assert d.finish == fx.Finish(0)


def test_a_report_of_a_superseded_group_counts():
    d = desk(every=0)
    d.join(0, 2)
    report(d, Member(0, 1))
    report(d, Member(0, 2))
    assert "twice" in d.finish.text


def test_the_first_process_neither_finalises_nor_acknowledges():
    d = desk(every=0)
    report(d, 0)
    d.ack(1, 0)
    assert [e.member for e in d.latest(fx.Expel)] == [Member(1, 1)]
    assert d.finish is None


def test_outside_budget_mode_a_report_is_a_violation_of_that_learner_alone():
    d = Desk(syncer_policy(2)).assemble()
    report(d, 0)
    assert [e.member for e in d.latest(fx.Expel)] == [Member(0, 1)]
    assert d.finish is None


def test_the_timeout_names_everybody_who_has_not_reported():
    d = desk(learners=4, every=0)
    report(d, 2)
    d.wait(10.0)
    assert d.finish.text.endswith("from learners 0, 1, 3")


def test_two_reasons_to_end_at_the_same_moment_end_the_run_once():
    d = desk(on_loss="stop", loss_after_s=10.0, quorum_timeout_s=10)
    report(d, 0)
    d.leave(1)
    d.wait(10.0)
    assert len(d.all(fx.Finish)) == 1
    assert d.coordinator.phase is Phase.FAILED


def test_a_report_of_a_group_that_is_gone_is_not_used():
    d = desk()
    gone = d.members[1]
    d.leave(1)
    assert not report(d, gone, 7)
    assert d.finish is None
