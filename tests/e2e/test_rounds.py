"""Rounds as scripted learners see them, over real sockets: who counts, who is waited for, and for how long.

Source: v4 §Rounds, v4 §Quorum and grace (attempts); rulings §6.
"""

import socket
import struct
import time

import numpy as np
import pytest

from tests.support.processes import overriding
from tests.support.scripted_learner import ScriptedLearner, random_values
from tests.support.waiting import until
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.messages import BcastFragment, PullReq
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

AT_ONCE_S = 1.0  # what must not wait for any limit; the limits here are a minute
SLACK_S = 2.0  # a busy machine may be late, never early

ONE = Layout((Fragment(MergeMode.AVG, (Tensor("a", ()), Tensor("b", ()))),))
TWO = Layout((Fragment(MergeMode.AVG, (Tensor("a", (3,)),)), Fragment(MergeMode.RDA, (Tensor("b", (2, 2)),))))


@pytest.fixture
def fleet(processes):
    """Starts a syncer and its scripted learners; each has the first weights of every fragment."""

    def start(*overrides, learners, total_steps, layout=ONE, initial=None, **options):
        keys = {
            "schedule.sync_interval_steps": "0",
            "schedule.quorum_timeout_s": "60",
            "schedule.grace_ms": "0",
            "schedule.pipeline": "1",
            "merge.delta_correction": "none",
        }
        syncer = processes.syncer(*overriding(keys, overrides), learners=learners, total_steps=total_steps, **options)
        peers = [ScriptedLearner(syncer.address, i, layout) for i in range(learners)]
        peers[0].init(initial or random_values(layout, 1))
        return syncer, peers

    return start


def zeros(pull, layout=ONE):
    return np.zeros(layout.fragments[pull.fragment].numel, np.float32)


def values(message):
    return np.frombuffer(message.data, "<f4").tolist()


def test_two_scalars_and_four_rounds_worked_by_hand(fleet):
    """buf = 0.5 buf + D, theta -= 0.5 (D + 0.5 buf), D = minus the weighted mean of what the learners moved by."""
    syncer, peers = fleet(
        "outer.lr=0.5", "outer.momentum=0.5", learners=2, total_steps=4, initial=[np.array([1.0, -2.0], np.float32)]
    )
    rounds = [  # (delta, steps, tokens) of both learners, and what the scalars must become
        [([0.5, -1.0], 1, 10), ([0.5, -1.0], 1, 10), [1.375, -2.75]],  # D = (-0.5, 1), buf = D
        [([-0.25, 0.5], 1, 10), ([-0.25, 0.5], 1, 10), [1.25, -2.5]],  # D = (0.25, -0.5), buf = 0
        [([1.0, 0.0], 1, 10), ([0.0, 2.0], 4, 20), [1.625, -1.75]],  # both weigh 100: D = (-0.5, -1), buf = D
        [([7.0, 7.0], 3, 0), ([-9.0, 9.0], 1, 0), [1.6875, -1.625]],  # no tokens: D = 0, buf = (-0.25, -0.5)
    ]
    for step, (*answers, wanted) in enumerate(rounds, start=1):
        for peer, (delta, c_steps, c_tokens) in zip(peers, answers, strict=True):
            peer.answer(peer.pull(step=step), np.array(delta, np.float32), c_steps=c_steps, c_tokens=c_tokens)
        for peer in peers:
            if step < len(rounds):
                assert values(peer.next(BcastFragment, version=step)) == wanted
            else:
                assert peer.cut()[1][0].tolist() == wanted
                peer.ack(step)
    assert syncer.wait() == 0
    assert [told["contribution"] for line in syncer.merges() for told in line["responders"]] == [0.5] * 6 + [0.0] * 2


def test_the_quorum_follows_learners_as_they_come_and_go(fleet):
    syncer, (zero, one) = fleet("schedule.quorum=2", learners=2, total_steps=5)

    def answer(pull, *present):
        for peer in present:
            own = peer.pull(step=pull) if isinstance(pull, int) else pull
            peer.answer(own, zeros(own) + 0.1, c_steps=1 + peer.learner_id, c_tokens=7)

    answer(1, zero, one)
    for peer in (zero, one):
        peer.pull(step=2, attempt=1)
    one.close()
    answer(zero.pull(step=2, attempt=2), zero)  # an attempt that needed two is launched again for the one who is left
    alone = zero.pull(step=3)
    again = ScriptedLearner(syncer.address, 1, ONE)
    again.next(BcastFragment, version=2)
    answer(alone, zero)  # the other joined within this round and is asked from the next one on
    answer(4, zero, again)
    for peer in (zero, again):
        peer.pull(step=5, attempt=1)
    zero.close()
    answer(again.pull(step=5, attempt=2), again)
    again.cut()
    again.ack(5)
    assert syncer.wait() == 0
    lines = syncer.merges()
    assert [line["quorum"] for line in lines] == [2, 1, 1, 2, 1]
    assert [line["attempt"] for line in lines] == [1, 2, 1, 1, 2]
    assert [line["responded"] for line in lines] == [[0, 1], [0], [0], [0, 1], [1]]
    for line in lines:
        assert abs(sum(told["contribution"] for told in line["responders"]) - 1) < 1e-12
        assert line["expected"] == line["responded"]


def test_a_joiner_enters_at_the_next_launch_and_the_old_generation_may_still_answer(fleet):
    syncer, peers = fleet("schedule.quorum=3", learners=3, total_steps=3)
    old = peers[2]
    pull = old.pull(step=1)
    new = ScriptedLearner(syncer.address, 2, ONE)
    new.next(BcastFragment, version=0)
    new.answer(PullReq(0, 1, 1), zeros(pull) + 100)  # it was not asked
    until(lambda: syncer.events("reject"), "its answer is refused")
    old.answer(pull, zeros(pull) + 1)
    for peer in peers[:2]:
        peer.answer(peer.pull(step=1), zeros(pull) + 1)
    first = new.next(BcastFragment, version=1)
    assert values(first) == values(peers[0].next(BcastFragment, version=1))
    old.close()  # its end does not take the new generation with it
    until(lambda: syncer.events("leave"), "the old generation is gone")
    for step in (2, 3):
        for peer in (*peers[:2], new):
            peer.answer(peer.pull(step=step), zeros(pull))
    for peer in (*peers[:2], new):
        peer.cut()
        peer.ack(3)
    assert syncer.wait() == 0
    assert not any(isinstance(m, BcastFragment) and m.version == 1 for m in old.seen)
    members = [[member["generation"] for member in line["responded_members"]] for line in syncer.merges()]
    here = [peer.generation for peer in peers[:2]]
    assert members == [[*here, old.generation], [*here, new.generation], [*here, new.generation]]
    assert [line["attempt"] for line in syncer.merges()] == [1, 1, 1]
    assert syncer.merges()[0]["rejected"] == {"unexpected_member": 1}


def test_the_reason_of_every_refusal_and_retry_is_on_the_tape(fleet):
    syncer, peers = fleet("schedule.quorum=2", "schedule.quorum_timeout_s=1", learners=2, total_steps=3, layout=TWO)
    zero, one = peers
    pull = zero.pull(step=1)
    zero.answer(pull, zeros(pull, TWO))
    zero.answer(pull, zeros(pull, TWO))  # duplicate
    zero.answer(PullReq(0, 7, 1), zeros(pull, TWO))  # no such round
    asked = one.pull(step=1)
    one.answer(asked, zeros(pull, TWO), base=5)  # a future base
    retry = until(lambda: syncer.events("retry"), "the deadline")[0]  # a base that is refused leaves one of two
    assert {k: retry[k] for k in ("step", "attempt", "quorum", "answered", "expected")} == {
        "step": 1,
        "attempt": 1,
        "quorum": 2,
        "answered": 1,
        "expected": [0, 1],
    }
    one.answer(asked, zeros(pull, TWO))  # too late: of the attempt before
    twin = ScriptedLearner(syncer.address, 0, TWO, generation=zero.generation)
    assert "was admitted before" in twin.wait_closed().peer_error
    for step in (1, 2, 3):
        for peer in peers:
            again = peer.pull(step=step, attempt=2 if step == 1 else 1)
            peer.answer(again, zeros(again, TWO))
    for peer in peers:
        peer.cut()
        peer.ack(3)
    assert syncer.wait() == 0
    reasons = [(line["what"], line["id"], line["reason"]) for line in syncer.events("reject")]
    assert [reason for what, i, reason in reasons if (what, i) == ("push", 0)] == ["duplicate", "out of round"]
    assert [reason for what, i, reason in reasons if (what, i) == ("push", 1)] == ["future base", "out of round"]
    assert [(i, "admitted before" in reason) for what, i, reason in reasons if what == "hello"] == [(0, True)]
    assert syncer.merges()[0]["rejected"] == {"duplicate": 1, "out_of_round": 2, "future_base": 1}
    assert syncer.merges()[1]["rejected"] == {}
    assert [line["event"] for line in syncer.events("start")] == ["start"]
    assert [(line["step"], line["code"]) for line in syncer.events("end")] == [(3, 0)]
    for line in syncer.events("reject"):  # and in the log
        assert any(line["reason"] in said for said in syncer.lines)


def test_within_seconds_the_log_says_who_is_missing_and_what_is_awaited(processes):
    syncer = processes.syncer(
        "schedule.quorum=2", "schedule.grace_ms=0", "schedule.sync_interval_steps=0", learners=2, total_steps=2
    )
    zero = ScriptedLearner(syncer.address, 0, ONE)
    zero.init(random_values(ONE, 1))
    syncer.wait_for(r"waiting for assembling: learner 1 is not connected$", 10)
    one = ScriptedLearner(syncer.address, 1, ONE)
    pull = zero.pull(step=1)
    zero.answer(pull, zeros(pull))
    syncer.wait_for(r"waiting for round 1 attempt 1: 1 of 2, missing learner 1$", 10)
    one.answer(one.pull(step=1), zeros(pull))
    zero.pull(step=2)
    zero.close()
    one.close()
    syncer.wait_for(r"waiting for step 1: no learner is connected$", 10)


def test_a_lost_connection_is_noticed_and_an_answer_cut_in_half_never_counts(fleet):
    layout = Layout((Fragment(MergeMode.AVG, (Tensor("a", (50_000,)),)),))
    syncer, peers = fleet("schedule.quorum=2", learners=3, total_steps=2, layout=layout)
    zero, one, two = peers
    for peer in (one, two):
        peer.pull(step=1)
    push = struct.pack("<IBQ", 0xD170C0DE, 4, 48 + 200_000) + struct.pack("<IIQIQQIQ", 1, 0, 1, 1, 0, 1, 1, 10)
    one.raw(push + bytes(100_000))
    zero.answer(zero.pull(step=1), np.ones(50_000, np.float32))
    closed_at = time.time()
    one.close()
    two.close()
    zero.answer(zero.pull(step=1, attempt=2), np.ones(50_000, np.float32))
    zero.answer(zero.pull(step=2), np.ones(50_000, np.float32))
    zero.cut()
    zero.ack(2)
    assert syncer.wait() == 0
    noticed = {line["id"]: line["time"] - closed_at for line in syncer.events("leave")}
    assert max(noticed[1], noticed[2]) < AT_ONCE_S
    (retry,) = syncer.events("retry")
    assert retry["answered"] <= 1  # the whole one of learner 0 at most
    assert retry["quorum"] == 2
    first, second = syncer.merges()
    assert first["time"] - closed_at < AT_ONCE_S
    assert (first["responded"], first["attempt"], second["attempt"]) == ([0], 2, 1)


def test_the_state_of_the_syncer_wins_over_whoever_comes_back(fleet):
    """All learners die; one returns with other weights, and says so with INIT."""
    syncer, peers = fleet(learners=2, total_steps=2)
    for peer in peers:
        pull = peer.pull(step=1)
        peer.answer(pull, np.array([0.5, 0.25], np.float32))
    agreed = values(peers[0].next(BcastFragment, version=1))
    for peer in peers:
        peer.close()
    until(lambda: len(syncer.events("leave")) == 2, "both are gone")
    fresh = ScriptedLearner(syncer.address, 0, ONE)
    fresh.init([np.array([77.0, 77.0], np.float32)])
    assert values(fresh.next(BcastFragment)) == agreed
    pull = fresh.pull(step=2)
    assert fresh.anchors[0].version == 1
    fresh.answer(pull, zeros(pull))
    _, finals = fresh.cut()
    assert np.abs(finals[0]).max() < 10
    fresh.ack(2)
    assert syncer.wait() == 0


def test_every_time_limit_of_a_round_fires_at_its_value(fleet):
    syncer, peers = fleet(
        "schedule.quorum=2",
        "schedule.quorum_timeout_s=1",
        "schedule.grace_ms=600",
        "schedule.min_round_interval_ms=700",
        "session.handshake_timeout_s=0.8",
        "final.ack_timeout_s=2",
        learners=3,
        total_steps=2,
    )
    silent = socket.create_connection(tuple(syncer.address.split(":")))
    opened_at = time.monotonic()
    zero, one, two = peers

    # quorum_timeout_s: one answer of two; min_round_interval_ms does not hold up the retry of an old round
    asked_at = time.monotonic()
    pull = zero.pull(step=1)
    zero.answer(pull, zeros(pull))
    zero.pull(step=1, attempt=2)
    assert 0.9 < time.monotonic() - asked_at < 1 + SLACK_S

    # handshake_timeout_s
    silent.settimeout(10)
    assert silent.recv(1) == b""
    assert 0.8 <= time.monotonic() - opened_at < 0.8 + SLACK_S
    silent.close()

    # grace_ms: the quorum is here, the third is awaited for the whole window (no estimate of the step time yet)
    answered_at = time.monotonic()
    for peer in (zero, one):
        peer.answer(PullReq(0, 1, 2), zeros(pull))
    zero.next(BcastFragment, version=1)
    assert 0.55 < time.monotonic() - answered_at < 0.6 + SLACK_S
    (line,) = syncer.merges()
    assert (line["attempt"], line["grace_ms"], line["missed_grace"]) == (2, 600, [2])

    # final.ack_timeout_s, and the next launch is not before min_round_interval_ms
    for peer in peers:
        peer.answer(peer.pull(step=2), zeros(pull))
    zero.cut()
    frozen_at = time.monotonic()
    zero.ack(2)
    assert syncer.wait() == 1
    assert 1.8 < time.monotonic() - frozen_at < 2 + SLACK_S
    assert (
        "final cut not acknowledged within 2 s by learners 1, 2: the checkpoint of step 2 is written, unmarked"
        in (syncer.lines[-1])
    )
    assert "not acknowledged within 2 s by learners 1, 2" in syncer.events("end")[0]["reason"]
    assert two.wait_closed().peer_error is not None
