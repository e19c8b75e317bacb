"""The coordinator as a whole: assembling, rounds, commits, and what the operator is told."""

import pytest

from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.admission import ResumePoint
from syncer.core.events import Member
from syncer.core.lifecycle import Phase
from tests.support.coordinator_desk import Desk, hello, syncer_policy
from yeto_torch.wire.constants import U64_MAX

OTHER = b"\x33" * 32


def desk(learners=2, fragments=2, resumed=None, merges=True, **policy):
    return Desk(syncer_policy(learners, **policy), fragments=fragments, resumed=resumed, merges=merges)


def kinds(effects, *wanted):
    """The names of effects in order, without what is only told."""
    return [
        type(e).__name__ for e in effects if isinstance(e, wanted or fx.Effect) and not isinstance(e, (fx.Say, fx.Note))
    ]


def checkpoint(step, check=lambda *_: None, ledger=()):
    return ResumePoint(step, ledger, check)


class TestAssembling:
    def test_nothing_is_pulled_before_every_fragment_and_every_learner_is_there(self):
        d = desk(learners=2)
        d.join(0)
        d.tell(ev.InitArrived(Member(0, 1), 0, "x"))
        d.join(1)
        d.wait(3600.0)
        assert not d.all(fx.SendPull)
        d.tell(ev.InitArrived(Member(0, 1), 1, "y"))
        assert d.coordinator.phase is Phase.RUNNING
        assert [p.member for p in d.latest(fx.SendPull)] == [Member(0, 1), Member(1, 1)] * 2

    def test_a_new_generation_gets_what_is_initialised_and_the_rest_when_assembled(self):
        d = desk(learners=2)
        d.join(0)
        d.tell(ev.InitArrived(Member(0, 1), 0, "x"))
        d.join(1)
        assert d.latest(fx.Broadcast) == [fx.Broadcast(0, 0, (Member(1, 1),))]
        d.tell(ev.InitArrived(Member(0, 1), 1, "y"))
        assert d.latest(fx.Broadcast) == [
            fx.Broadcast(0, 0, (Member(0, 1),)),
            fx.Broadcast(1, 0, (Member(0, 1), Member(1, 1))),
        ]

    def test_a_learner_is_admitted_before_anything_is_sent_to_it(self):
        d = desk(learners=1)
        d.join(0)
        d.init()
        assert kinds(d.orders)[:2] == ["Admit", "Initialize"]
        d.join(0, 2)
        assert kinds(d.new) == ["Admit", "Broadcast", "Broadcast"]

    def test_the_first_init_of_a_fragment_wins(self):
        d = desk(learners=2)
        d.join(0)
        d.tell(ev.InitArrived(Member(0, 1), 0, "first"))
        d.join(0, 2)
        d.tell(ev.InitArrived(Member(0, 2), 0, "second"))
        assert d.all(fx.Initialize) == [fx.Initialize(0, "first")]

    def test_init_after_the_start_is_ignored(self):
        d = desk().assemble()
        assert not d.tell(ev.InitArrived(Member(0, 1), 0, "late"))

    def test_only_learner_0_may_initialise(self):
        d = desk()
        d.join(1)
        d.tell(ev.InitArrived(Member(1, 1), 0, "x"))
        assert [e.member for e in d.latest(fx.Expel)] == [Member(1, 1)]
        assert not d.all(fx.Initialize)
        assert d.notes("leave")[0]["id"] == 1

    @pytest.mark.parametrize(("every", "path", "saved"), [(1, "c", [0]), (8, "c", [0]), (0, "c", []), (8, None, [])])
    def test_the_initial_state_is_durable_before_it_is_broadcast(self, every, path, saved):
        d = desk(every=every, path=path).assemble()
        assert [e.step for e in d.all(fx.SaveCheckpoint)] == saved
        if saved:
            order = kinds(d.orders, fx.Initialize, fx.SaveCheckpoint, fx.Broadcast)
            assert order[:4] == ["Initialize", "Initialize", "SaveCheckpoint", "Broadcast"]

    def test_a_refused_hello_joins_nothing(self):
        d = desk(session=None)
        d.join(0)
        d.join(1, contract=OTHER)
        assert [e.ticket for e in d.latest(fx.RefuseHello)] == [2]
        assert 1 not in d.members
        assert d.notes("reject")[0]["what"] == "hello"

    def test_a_replayed_hello_does_not_disturb_the_living_group(self):
        d = desk().assemble()
        d.join(1, 1)
        assert "admitted before" in d.latest(fx.RefuseHello)[0].text
        assert not d.push(1, 1, base_version=0) or not d.latest(fx.RefuseHello)
        d.push(0, 1)
        assert d.coordinator.committed == 1


class TestResuming:
    def test_it_starts_at_once_with_everybody(self):
        d = desk(learners=2, resumed=checkpoint(3)).assemble()
        assert d.coordinator.phase is Phase.RUNNING
        assert [(p.step, p.fragment) for p in d.all(fx.SendPull)][::2] == [(4, 1), (5, 0)]
        assert [(b.fragment, b.version) for b in d.all(fx.Broadcast)][:2] == [(0, 3), (1, 2)]

    def test_it_starts_with_a_quorum_after_the_start_grace(self):
        d = desk(learners=3, quorum=2, start_grace_s=60.0, resumed=checkpoint(3))
        d.join(0)
        d.wait(1000.0)
        d.join(2)
        d.wait(59.9)
        assert d.coordinator.phase is Phase.ASSEMBLING
        d.wait(0.1)
        assert d.coordinator.phase is Phase.RUNNING
        assert d.pulled(4) == [Member(0, 1), Member(2, 1)]

    def test_the_start_grace_begins_anew_when_the_quorum_was_lost(self):
        d = desk(learners=3, quorum=2, start_grace_s=60.0, resumed=checkpoint(3))
        d.join(0)
        d.join(1)
        d.wait(50.0)
        d.leave(1)
        d.wait(5.0)
        d.join(1, 2)
        d.wait(59.0)
        assert d.coordinator.phase is Phase.ASSEMBLING
        d.wait(1.0)
        assert d.coordinator.phase is Phase.RUNNING

    def test_a_fresh_run_waits_for_everybody(self):
        d = desk(learners=3, quorum=1)
        d.join(0)
        d.init()
        d.wait(100_000.0)
        assert d.coordinator.phase is Phase.ASSEMBLING

    def test_init_is_ignored_because_the_state_is_there(self):
        d = desk(learners=2, resumed=checkpoint(3))
        d.join(0)
        d.tell(ev.InitArrived(Member(0, 1), 0, "x"))
        assert not d.all(fx.Initialize)

    def test_a_finished_run_goes_straight_to_its_end(self):
        d = desk(learners=2, total_steps=4, resumed=checkpoint(4)).assemble()
        assert d.coordinator.phase is Phase.FINALIZING
        assert not d.all(fx.SendPull)
        assert kinds(d.orders, fx.Broadcast, fx.WriteFinal, fx.SendCut)[-3:] == ["WriteFinal", "SendCut", "SendCut"]
        assert d.latest(fx.SendCut)[0] == fx.SendCut(Member(0, 1), 4, (3, 4))

    def test_a_finished_run_needs_no_quorum_to_end(self):
        d = desk(learners=3, quorum=3, total_steps=4, start_grace_s=20.0, resumed=checkpoint(4))
        d.join(2)
        d.wait(20.0)
        d.ack(2)
        assert d.finish.code == 0

    def test_the_ledger_goes_on(self):
        resumed = checkpoint(3, ledger=((0, 3, 30, 300), (5, 1, 2, 3)))
        d = desk(learners=1, quorum=1, path="c", every=1, resumed=resumed).assemble()
        d.push(0, 4, c_steps=7, c_tokens=70)
        assert d.latest(fx.SaveCheckpoint)[0].ledger == ((0, 4, 37, 370), (5, 1, 2, 3))

    def test_what_only_a_hello_can_tell_refuses_that_hello_only(self):
        d = desk(learners=1, resumed=checkpoint(3, lambda _l, _f, contract: "no" if contract == OTHER else None))
        d.join(0, 1, contract=OTHER)
        assert d.latest(fx.RefuseHello)[0].text == "no"
        d.join(0, 2)
        assert d.coordinator.phase is Phase.RUNNING


class TestRounds:
    def test_the_pipeline_asks_for_distinct_fragments_in_order(self):
        d = desk(fragments=3, pipeline=2).assemble()
        assert [(p.step, p.fragment) for p in d.all(fx.SendPull)][::2] == [(1, 0), (2, 1)]
        d.push(0, 2)
        d.push(1, 2)
        assert d.coordinator.committed == 0, "round 2 is merged and waits for round 1"
        assert d.attempt(3) == 1
        assert not d.pulled(3)
        d.push(0, 1)
        d.push(1, 1)
        assert [c.step for c in d.latest(fx.Commit)] == [1, 2]
        assert [(p.step, p.fragment) for p in d.latest(fx.SendPull)][::2] == [(3, 2), (4, 0)]

    def test_merges_that_end_out_of_order_are_committed_in_order(self):
        d = desk(pipeline=2, merges=False).assemble()
        for step in (1, 2):
            d.push(0, step)
            d.push(1, step)
        assert [m.step for m in d.all(fx.Merge)] == [1, 2]
        assert not d.tell(ev.MergeDone(2))
        d.tell(ev.MergeDone(1))
        assert kinds(d.new, fx.Commit, fx.Record, fx.Broadcast) == ["Commit", "Record", "Broadcast"] * 2

    def test_answers_are_merged_by_member_whatever_came_first(self):
        d = desk(learners=3, quorum=3, pipeline=1).assemble()
        for learner in (2, 0, 1):
            d.push(learner, 1, c_tokens=10 + learner)
        merge = d.all(fx.Merge)[0]
        assert [r.member.learner_id for r in merge.responses] == [0, 1, 2]
        assert merge.weights == (100.0, 121.0, 144.0)

    @pytest.mark.parametrize(("every", "due"), [(1, True), (2, True), (3, False), (0, False)])
    def test_the_effects_of_one_commit_and_their_order(self, every, due):
        d = desk(path="c", every=every, pipeline=1).assemble()
        for step in (1, 2):
            d.push(0, step)
            d.push(1, step)
        expected = ["Commit", "Record", *(["SaveCheckpoint"] if due else []), "Broadcast"]
        assert kinds(d.new, fx.Commit, fx.Record, fx.SaveCheckpoint, fx.Broadcast) == expected
        assert d.latest(fx.Broadcast) == [fx.Broadcast(1, 2, (Member(0, 1), Member(1, 1)))]

    def test_the_last_commit_is_not_broadcast_and_its_checkpoint_is_the_final_one(self):
        d = desk(path="c", every=1, total_steps=1).assemble()
        d.push(0, 1)
        d.push(1, 1)
        assert kinds(d.new)[1:] == ["Commit", "Record", "Drain", "WriteFinal", "SendCut", "SendCut"]

    def test_the_ledger_counts_a_response_once_at_its_commit(self):
        d = desk(pipeline=1, path="c", every=1).assemble()
        d.push(0, 1, c_steps=3, c_tokens=30)
        d.push(0, 1, c_steps=9, c_tokens=90)
        d.push(1, 1, c_steps=2, c_tokens=20)
        assert [e.ledger for e in d.all(fx.SaveCheckpoint)] == [(), ((0, 1, 3, 30), (1, 1, 2, 20))]

    def test_a_checkpoint_holds_the_ledger_of_its_own_step(self):
        """Rounds 1 and 2 are decided together; the file of step 1 must not count round 2."""
        d = desk(learners=1, quorum=1, pipeline=2, path="c", every=1, merges=False).assemble()
        d.push(0, 1)
        d.push(0, 2)
        d.tell(ev.MergeDone(2))
        d.tell(ev.MergeDone(1))
        saved = d.latest(fx.SaveCheckpoint)
        assert [(e.step, e.ledger) for e in saved] == [(1, ((0, 1, 1, 10),)), (2, ((0, 2, 2, 20),))]

    def test_no_claim_of_tokens_makes_a_ledger_that_no_checkpoint_can_hold(self):
        d = desk(learners=1, quorum=1, path="c", every=1).assemble()
        for step in (1, 2):
            d.push(0, step, c_tokens=U64_MAX)
        assert d.latest(fx.SaveCheckpoint)[0].ledger == ((0, 2, 2, U64_MAX),)

    def test_a_joiner_neither_counts_nor_blocks_and_enters_at_the_next_launch(self):
        d = desk(learners=3, quorum=2, pipeline=1, grace_ms=0).assemble()
        d.leave(2)
        d.push(0, 1)
        d.join(2, 2)
        assert d.latest(fx.Broadcast) == [fx.Broadcast(f, 0, (Member(2, 2),)) for f in range(2)]
        d.push(2, 1)
        assert d.notes("reject")[-1]["reason"] == "unexpected member"
        d.push(1, 1)
        assert d.coordinator.committed == 1
        assert d.pulled(2) == [Member(0, 1), Member(1, 1), Member(2, 2)]

    def test_a_killed_learner_costs_one_relaunch_and_no_deadline(self):
        d = desk(learners=2, quorum=2, pipeline=1).assemble()
        d.push(0, 1)
        before = d.now
        d.leave(1)
        assert d.now == before
        assert d.pulled(1, 2) == [Member(0, 1)]
        assert d.notes("retry") == [{"step": 1, "attempt": 1, "quorum": 2, "answered": 1, "expected": [0, 1]}]
        d.push(0, 1, attempt=1)
        assert d.notes("reject")[-1]["reason"] == "out of round", "an answer to a discarded attempt stays out"
        d.push(0, 1, attempt=2)
        assert d.coordinator.committed == 1
        assert d.line(1)["attempt"] == 2

    def test_quorum_one_two_one_as_learners_come_and_go(self):
        d = desk(learners=2, quorum=2, pipeline=1, fragments=1).assemble()
        d.leave(1)
        d.push(0, 1)
        d.join(1, 2)
        d.push(0, 2)
        d.push(0, 3)
        d.push(1, 3, c_tokens=30)
        d.leave(0)
        d.push(1, 4)
        assert [d.line(t)["quorum"] for t in (1, 2, 3, 4)] == [1, 1, 2, 1]
        for step, ids in ((1, [0]), (2, [0]), (3, [0, 1]), (4, [1])):
            assert d.line(step)["responded"] == ids
            assert sum(r["contribution"] for r in d.line(step)["responders"]) == pytest.approx(1.0)

    def test_nobody_here_means_no_empty_round_and_no_new_attempt(self):
        d = desk(learners=2, pipeline=1).assemble()
        d.leave(0)
        d.leave(1)
        d.wait(3600.0)
        assert d.attempt(1) == 2, "one relaunch while learner 1 was still there"
        assert d.coordinator.next_deadline() is None
        d.join(0, 2)
        assert d.pulled(1, 3) == [Member(0, 2)]

    def test_the_deadline_expires_an_attempt_and_captures_who_is_there_now(self):
        d = desk(learners=3, quorum=3, quorum_timeout_s=10, pipeline=1).assemble()
        d.push(0, 1)
        d.join(1, 2)
        d.wait(9.9)
        assert d.attempt(1) == 1
        d.wait(0.1)
        assert d.pulled(1, 2) == [Member(0, 1), Member(1, 2), Member(2, 1)]

    def test_an_accepted_answer_outlives_its_connection(self):
        d = desk(learners=2, quorum=2, pipeline=1).assemble()
        d.push(0, 1)
        d.leave(0)
        d.push(1, 1)
        assert d.coordinator.committed == 1
        assert d.line(1)["responded"] == [0, 1]

    def test_a_superseded_generation_may_finish_its_attempt_and_gets_no_broadcast(self):
        d = desk(learners=2, quorum=2, pipeline=1).assemble()
        old = d.members[0]
        d.join(0, 2)
        d.push(old, 1)
        d.push(1, 1)
        assert d.line(1)["responded_members"] == [{"id": 0, "generation": 1}, {"id": 1, "generation": 1}]
        assert d.all(fx.Broadcast)[-1].members == (Member(0, 2), Member(1, 1))
        assert d.pulled(2) == [Member(0, 2), Member(1, 1)]
        d.leave(old)
        assert d.coordinator.waiting_for() == "round 2 attempt 1: 0 of 2, missing learners 0, 1"

    def test_pushes_of_a_group_that_is_gone_are_not_used(self):
        d = desk(pipeline=1).assemble()
        member = d.members[0]
        d.leave(0)
        assert not [e for e in d.push(member, 1) if isinstance(e, (fx.Note, fx.Merge))]

    def test_rejections_are_counted_since_the_previous_merge_line(self):
        d = desk(pipeline=1, fragments=1).assemble()
        d.push(0, 1)
        d.push(0, 1)
        d.push(0, 1)
        d.push(1, 1, base_version=1)
        d.push(1, 7)
        d.push(1, 1)
        assert d.line(1)["rejected"] == {"duplicate": 2, "future_base": 1, "out_of_round": 1}
        d.push(0, 2)
        d.push(1, 2)
        assert d.line(2)["rejected"] == {}

    def test_a_flood_of_rejections_does_not_fill_tape_or_log(self):
        d = desk(pipeline=1, fragments=1).assemble()
        for _ in range(200):
            d.push(0, 9)
        assert len(d.notes("reject")) == 64
        d.wait(60.0)
        d.push(0, 9)
        assert len(d.notes("reject")) == 65
        d.push(0, 1, attempt=d.attempt(1))
        d.push(1, 1, attempt=d.attempt(1))
        assert d.line(1)["rejected"]["out_of_round"] == 201, "every one is counted"

    def test_staleness_is_measured_against_the_launch_base(self):
        d = desk(learners=1, quorum=1, fragments=1).assemble()
        for step in (1, 2, 3):
            d.push(0, step, base_version=0)
        assert [d.line(t)["responders"][0]["staleness"] for t in (1, 2, 3)] == [0, 1, 2]

    def test_a_budget_report_is_a_violation_where_there_is_no_budget(self):
        d = desk().assemble()
        d.tell(ev.BudgetReported(d.members[1], 10))
        assert [e.member for e in d.latest(fx.Expel)] == [Member(1, 1)]
        assert d.pulled(1, 2) == [Member(0, 1)], "nothing later from that group is awaited"

    def test_too_many_superseded_groups_are_released(self):
        d = desk(learners=1).assemble()
        for generation in range(2, 8):
            d.join(0, generation)
        assert [e.member for e in d.all(fx.Release)] == [Member(0, 1), Member(0, 1), Member(0, 2)]


class TestTime:
    def test_a_punctual_answer_behind_slow_work_is_not_late(self):
        """The merge of round 1 took until 11.0; the answer came at 9.0, before the deadline at 10.0."""
        d = desk(learners=2, quorum=2, quorum_timeout_s=10, pipeline=2, merges=False).assemble()
        d.push(0, 1)
        d.push(1, 1)
        d.push(0, 2)
        d.now = 11.0
        d.tell(ev.MergeDone(1), tick=False)
        d.tell(ev.RoundSynced(1, 2.0), tick=False)
        d.now = 9.0
        d.push(1, 2, tick=False)
        assert [m.step for m in d.all(fx.Merge)] == [1, 2]
        assert not d.notes("retry")

    def test_the_moment_of_arrival_decides_not_the_moment_of_handling(self):
        d = desk(learners=2, quorum=2, quorum_timeout_s=10, pipeline=1).assemble()
        d.now = 9.999
        d.push(0, 1, tick=False)
        d.now = 10.0
        d.push(1, 1, tick=False)
        assert d.notes("reject")[-1]["reason"] == "out of round"
        assert d.notes("retry")

    def test_only_a_drained_inbox_launches(self):
        d = desk(learners=1, quorum=1, pipeline=1, fragments=1).assemble()
        d.push(0, 1, tick=False)
        assert not d.latest(fx.SendPull)
        d.tick()
        assert [p.step for p in d.latest(fx.SendPull)] == [2]

    def test_grace_waits_for_the_others_and_no_longer(self):
        d = desk(learners=3, quorum=2, pipeline=1, grace_ms=700).assemble()
        d.wait(1.0)
        d.push(0, 1)
        d.push(1, 1)
        d.wait(0.6)
        assert d.coordinator.committed == 0
        d.wait(0.1)
        assert d.coordinator.committed == 1
        line = d.line(1)
        assert (line["quorum_ms"], line["grace_ms"], line["missed_grace"]) == (1000.0, pytest.approx(700.0), [2])
        d.push(2, 1, attempt=1)
        assert d.notes("reject")[-1]["reason"] == "out of round"

    def test_a_latecomer_inside_the_window_counts_and_ends_it(self):
        d = desk(learners=3, quorum=2, pipeline=1, grace_ms=700).assemble()
        d.push(0, 1)
        d.push(1, 1)
        d.wait(0.5)
        d.push(2, 1)
        assert d.coordinator.committed == 1
        assert d.line(1)["responded"] == [0, 1, 2]

    @pytest.mark.parametrize(("tokens", "window_ms"), [(10, 0.0), (0, 5000.0)])
    def test_without_weight_the_whole_window_is_waited(self, tokens, window_ms):
        """Fast steps make the adaptive window nothing, unless those that answered have no data left."""
        d = desk(learners=2, quorum=1, pipeline=1, fragments=1, grace_ms=5000).assemble()
        for learner in (0, 1):
            d.tell(ev.BeatArrived(d.members[learner], 0))
        d.wait(0.01)
        for learner in (0, 1):
            d.tell(ev.BeatArrived(d.members[learner], 100))
        d.push(0, 1, c_tokens=tokens, local_step=101)
        d.wait(4.9)
        assert d.coordinator.committed == (tokens > 0)
        d.push(1, 1, c_tokens=10)
        assert d.line(1)["grace_ms"] == pytest.approx(window_ms)
        assert d.line(1)["responded"] == ([0] if tokens else [0, 1])

    def test_a_round_without_any_weight_is_committed_all_the_same(self):
        d = desk(learners=2, quorum=2, pipeline=1, fragments=1).assemble()
        d.push(0, 1, c_tokens=0)
        d.push(1, 1, c_tokens=0)
        assert d.coordinator.committed == 1
        assert [r["contribution"] for r in d.line(1)["responders"]] == [0.0, 0.0]

    def test_the_throttle_spaces_launches(self):
        d = desk(learners=1, quorum=1, pipeline=1, fragments=2, min_round_interval_ms=3000).assemble()
        d.push(0, 1)
        assert not d.pulled(2)
        assert d.coordinator.waiting_for() == "step 1: throttled until the next launch"
        d.wait(2.9)
        assert not d.pulled(2)
        d.wait(0.1)
        assert d.pulled(2)

    def test_a_relaunch_is_not_throttled(self):
        d = desk(learners=2, quorum=2, pipeline=1, min_round_interval_ms=60_000).assemble()
        d.leave(1)
        assert d.pulled(1, 2) == [Member(0, 1)]

    def test_nothing_is_due_when_only_an_answer_can_help(self):
        d = desk(learners=1, quorum=1, quorum_timeout_s=10).assemble()
        assert d.coordinator.next_deadline() == 10.0
        d.leave(0)
        assert d.coordinator.next_deadline() is None


class TestTheEnd:
    def ended(self, learners=2, **policy):
        d = desk(learners, total_steps=1, pipeline=1, fragments=1, **policy).assemble()
        for learner in range(learners):
            d.push(learner, 1)
        assert d.coordinator.phase is Phase.FINALIZING
        return d

    def test_the_marker_follows_the_last_ack_and_precedes_every_shutdown(self):
        d = self.ended(path="c", mark_final=True)
        d.ack(0)
        assert not d.all(fx.WriteMarker)
        assert not d.all(fx.SendShutdown)
        d.ack(1)
        assert kinds(d.new) == ["WriteMarker", "SendShutdown", "SendShutdown", "Finish"]
        assert d.finish == fx.Finish(0)
        assert [e.text for e in d.latest(fx.Say)] == ["all learners acknowledged final cut"]

    def test_without_marking_there_is_no_marker(self):
        d = self.ended(path="c")
        d.ack(0)
        d.ack(1)
        assert not d.all(fx.WriteMarker)
        assert d.finish.code == 0

    def test_reconnect_during_delivery_is_served_again_and_acks_from_there(self):
        d = self.ended()
        d.leave(1)
        d.ack(0)
        assert d.coordinator.waiting_for() == "final cut: acknowledgement missing from learners 1"
        d.join(1, 2)
        assert kinds(d.new) == ["Admit", "Broadcast", "SendCut"]
        d.ack(1)
        assert [e.member for e in d.all(fx.SendShutdown)] == [Member(0, 1), Member(1, 2)]

    def test_a_lost_ack_is_sent_again_by_the_next_generation(self):
        d = self.ended()
        d.ack(0)
        d.leave(1)  # its acknowledgement was on the way
        d.wait(20.0)
        d.join(1, 2)
        d.ack(1)
        assert d.finish.code == 0

    def test_an_accepted_ack_survives_its_connection_and_gets_no_shutdown(self):
        d = self.ended()
        d.ack(0)
        d.leave(0)
        d.ack(1)
        assert [e.member for e in d.all(fx.SendShutdown)] == [Member(1, 1)]
        assert d.finish.code == 0

    @pytest.mark.parametrize("step", [0, 2, 1 << 40])
    def test_an_ack_of_another_step_is_a_violation(self, step):
        d = self.ended()
        d.ack(0, step)
        assert [e.member for e in d.latest(fx.Expel)] == [Member(0, 1)]
        assert d.coordinator.waiting_for() == "final cut: acknowledgement missing from learners 0, 1"

    def test_an_ack_before_the_end_is_a_violation(self):
        d = desk().assemble()
        d.ack(0, 0)
        assert "before the run has ended" in d.latest(fx.Expel)[0].text

    def test_the_cut_goes_to_current_generations_only(self):
        d = desk(2, total_steps=1, pipeline=1, fragments=1).assemble()
        old = d.members[0]
        d.join(0, 2)
        d.push(old, 1)
        d.push(1, 1)
        assert [e.member for e in d.all(fx.SendCut)] == [Member(0, 2), Member(1, 1)]
        d.ack(old, 1)
        assert "before the final cut was sent on this connection" in d.latest(fx.Expel)[0].text

    def test_who_was_not_there_at_the_freeze_is_refused_and_not_awaited(self):
        d = desk(3, quorum=2, total_steps=1, pipeline=1, fragments=1, grace_ms=0).assemble()
        d.leave(2)
        d.push(0, 1)
        d.push(1, 1)
        d.join(2, 2)
        assert "the run is ending" in d.latest(fx.RefuseHello)[0].text
        d.ack(0)
        d.ack(1)
        assert d.finish.code == 0

    def test_the_wait_is_bounded_and_names_the_missing(self):
        d = self.ended(learners=3, ack_timeout_s=30, path="c", mark_final=True)
        d.ack(1)
        d.wait(29.9)
        assert d.finish is None
        d.wait(0.1)
        assert d.finish.code == 1
        assert "by learners 0, 2" in d.finish.text
        assert not d.all(fx.WriteMarker)
        assert not d.all(fx.SendShutdown)

    def test_the_time_it_takes_to_write_the_state_is_not_taken_from_the_learners(self):
        d = desk(2, total_steps=1, pipeline=1, fragments=1, ack_timeout_s=30).assemble()
        d.push(0, 1)
        d.push(1, 1, tick=False)
        d.now += 100.0  # the checkpoint and the final state of a large model
        d.tick()
        d.wait(29.9)
        assert d.finish is None
        d.wait(0.1)
        assert d.finish.code == 1

    def test_nobody_at_the_freeze_writes_the_state_and_fails(self):
        d = desk(2, total_steps=1, pipeline=1, fragments=1, merges=False, path="c", mark_final=True).assemble()
        for learner in (0, 1):
            d.push(learner, 1)
        d.leave(0)
        d.leave(1)
        d.tell(ev.MergeDone(1))
        assert kinds(d.new) == ["Commit", "Record", "Drain", "WriteFinal", "Finish"]
        assert d.finish.code == 1

    def test_who_joins_while_the_pool_drains_sees_the_last_step_once_it_is_durable(self):
        d = desk(2, total_steps=1, pipeline=1, fragments=1, path="c", every=1).assemble()
        d.drains = False
        d.push(0, 1)
        d.push(1, 1)
        assert d.coordinator.waiting_for() == "step 1: the SVD pool to finish"
        d.join(1, 2)
        assert kinds(d.new) == ["Admit"]
        d.tell(ev.Drained())
        assert kinds(d.new) == ["WriteFinal", "SendCut", "Broadcast", "SendCut"]
        assert d.latest(fx.Broadcast) == [fx.Broadcast(0, 1, (Member(1, 2),))]
        assert [e.member for e in d.latest(fx.SendCut)] == [Member(0, 1), Member(1, 2)]

    def test_pushes_after_the_end_are_out_of_round(self):
        d = self.ended()
        d.push(0, 1, attempt=1)
        assert d.notes("reject")[-1]["reason"] == "out of round"

    def test_after_the_end_nothing_has_an_effect(self):
        d = self.ended()
        d.ack(0)
        d.ack(1)
        assert not d.tell(ev.HelloArrived(99, hello(0, 77)))
        assert not d.tell(ev.Interrupted())
        assert not d.wait(1e6)
        assert d.coordinator.next_deadline() is None
        assert d.coordinator.waiting_for() == "nothing: the run is over"


class TestInterrupt:
    def test_running_saves_the_last_contiguous_commit_and_abandons_the_rest(self):
        d = desk(path="c", every=0, pipeline=2, merges=False).assemble()
        for step in (1, 2):
            d.push(0, step)
            d.push(1, step)
        d.tell(ev.MergeDone(1))
        d.tell(ev.Interrupted())
        assert kinds(d.new) == ["SaveCheckpoint", "Finish"]
        assert [e.step for e in d.latest(fx.SaveCheckpoint)] == [1]
        assert d.finish.code == 130
        assert not d.finish.terminal, "learners may redial: a restart takes them up again"
        assert not d.tell(ev.MergeDone(2))

    @pytest.mark.parametrize(("when", "saves"), [("alone", []), ("joined", []), ("initialised", [0])])
    def test_while_assembling_there_may_be_nothing_to_save(self, when, saves):
        d = desk(path="c", every=0)
        if when != "alone":
            d.join(0)
        if when == "initialised":
            d.init()
        d.tell(ev.Interrupted())
        assert [e.step for e in d.latest(fx.SaveCheckpoint)] == saves
        assert d.finish.code == 130

    def test_finalizing_has_saved_already(self):
        d = desk(1, total_steps=1, pipeline=1, fragments=1, path="c").assemble()
        d.push(0, 1)
        d.tell(ev.Interrupted())
        assert kinds(d.new) == ["Finish"]

    def test_without_a_path_nothing_is_saved(self):
        d = desk().assemble()
        d.tell(ev.Interrupted())
        assert kinds(d.new) == ["Finish"]


class TestLosses:
    def test_continue_goes_on_without_the_lost(self):
        d = desk(path="c", on_loss="continue", loss_after_s=50.0).assemble()
        d.leave(1)
        d.wait(1000.0)
        assert d.finish is None

    def test_stop_ends_the_run_with_a_checkpoint_naming_the_lost(self):
        d = desk(path="c", every=0, on_loss="stop", loss_after_s=50.0, quorum_timeout_s=1000).assemble()
        d.leave(1)
        d.wait(49.9)
        assert d.finish is None
        d.wait(0.1)
        assert kinds(d.new) == ["SaveCheckpoint", "Finish"]
        assert d.finish.code == 1
        assert "learner 1 has been away for 50 s" in d.finish.text

    def test_who_came_back_in_time_is_not_lost(self):
        d = desk(path="c", on_loss="stop", loss_after_s=50.0).assemble()
        d.leave(1)
        d.wait(40.0)
        d.join(1, 2)
        d.wait(200.0)
        assert d.finish is None

    def test_the_loss_of_a_superseded_group_is_none(self):
        d = desk(on_loss="stop", loss_after_s=50.0).assemble()
        d.join(1, 2)
        d.leave(Member(1, 1))
        d.wait(200.0)
        assert d.finish is None

    def test_who_never_came_is_awaited_not_lost(self):
        d = desk(learners=3, on_loss="stop", loss_after_s=50.0)
        d.join(0)
        d.init()
        d.wait(200.0)
        assert d.finish is None

    def test_a_loss_while_assembling_ends_the_run_too(self):
        d = desk(learners=3, path="c", every=0, on_loss="stop", loss_after_s=50.0)
        d.join(0)
        d.join(1)
        d.leave(1)
        d.wait(50.0)
        assert kinds(d.new) == ["Finish"], "no fragment is initialised: there is nothing to save"
        assert "learner 1" in d.finish.text


class TestWaitingFor:
    def test_every_sentence(self):
        d = desk(learners=2, quorum=2, pipeline=1, merges=False)
        said = [d.coordinator.waiting_for()]
        d.join(0)
        said.append(d.coordinator.waiting_for())
        d.tell(ev.InitArrived(d.members[0], 0, "x"))
        said.append(d.coordinator.waiting_for())
        d.join(1)
        said.append(d.coordinator.waiting_for())
        d.tell(ev.InitArrived(d.members[0], 1, "y"))
        said.append(d.coordinator.waiting_for())
        d.push(0, 1)
        said.append(d.coordinator.waiting_for())
        d.push(1, 1)
        said.append(d.coordinator.waiting_for())
        assert said == [
            "assembling: no learner is connected yet, 2 are awaited",
            "assembling: learner 1 is not connected and learner 0 has not sent all starting values",
            "assembling: learner 1 is not connected and learner 0 has not sent all starting values",
            (
                "assembling: learner 0 has not sent all starting values; if it sent them to an earlier process of the "
                "syncer, restart it"
            ),
            "round 1 attempt 1: 0 of 2, missing learners 0, 1",
            "round 1 attempt 1: 1 of 2, missing learner 1",
            "round 1 attempt 1: merging",
        ]

    def test_rounds_in_flight_are_listed_together(self):
        d = desk(learners=2, quorum=2, pipeline=2).assemble()
        d.push(0, 2)
        assert d.coordinator.waiting_for() == (
            "round 1 attempt 1: 0 of 2, missing learners 0, 1; round 2 attempt 1: 1 of 2, missing learner 1"
        )
        d.push(1, 2)
        assert d.coordinator.waiting_for().endswith("round 2 attempt 1: merged, an earlier round is not committed yet")

    def test_with_nobody_here_it_says_so(self):
        d = desk().assemble()
        d.leave(0)
        d.leave(1)
        assert d.coordinator.waiting_for() == "step 0: no learner is connected"


class TestFloods:
    """What a learner can make us write, in the log and on the tape, ends within a minute."""

    def test_comings_and_goings(self):
        d = Desk(syncer_policy(2, 10))
        for generation in range(1, 1001):
            d.join(0, generation)
            d.leave(0)
        assert len(d.notes("join")) + len(d.notes("leave")) == 256
        assert len(d.all(fx.Say)) < 300
        d.wait(60)
        d.join(0, 2000)
        assert d.notes("join")[-1]["left_out"] == 2000 - 256

    def test_attempts_that_a_flapping_learner_brings_down(self):
        d = Desk(syncer_policy(2, 10, quorum=2)).assemble()
        for generation in range(2, 1000):
            d.leave(1)
            d.join(1, generation)
            d.leave(0)
            d.join(0, generation)
        assert d.attempt(1) > 500
        assert len(d.notes("retry")) == 256
        d.wait(60)
        assert [note["left_out"] for note in d.notes("retry") if "left_out" in note][-1] > 200

    def test_strangers_do_not_silence_what_is_said_of_learners(self):
        d = Desk(syncer_policy(2, 10)).assemble()
        for generation in range(2, 200):
            d.join(1, generation, contract=b"x" * 32)
        d.push(0, 7)
        whats = [note["what"] for note in d.notes("reject")]
        assert whats == ["hello"] * 64 + ["push"]
