"""The loop between the door and the coordinator, with both of them real: time passes only as far as what has arrived
by then is handed on."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from syncer import reception
from syncer.actor import Actor, Inbox
from syncer.core.coordinator import Coordinator
from syncer.core.events import BeatArrived, Member
from syncer.server import Server
from syncer.tape import Tape, merges
from tests.support.coordinator_desk import PROFILE, syncer_policy
from tests.support.scripted_learner import ScriptedLearner, random_values
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

WAIT_S = 20.0
LAYOUT = Layout((Fragment(MergeMode.AVG, (Tensor("a", (4,)),)),))
GRACE_S = 0.2


def actor_of(policy, coordinator, folder):
    inbox, cpu = Inbox(), torch.device("cpu")
    return Actor(policy, coordinator, cpu, Tape(folder / "tape"), Server(policy, cpu, inbox.post), inbox)


@pytest.fixture
def fleet(tmp_path):
    """(actor, server, two learners, tape): one answer is a quorum, the other is waited for for ``GRACE_S``."""
    policy = syncer_policy(2, quorum=1, quorum_timeout_s=60, grace_ms=int(1000 * GRACE_S), pipeline=1)
    actor = actor_of(policy, Coordinator(policy, PROFILE), tmp_path)
    server = actor.server
    address = server.listen()
    threading.Thread(target=actor.run, daemon=True).start()
    peers = [ScriptedLearner(address, i, LAYOUT) for i in range(2)]
    peers[0].init(random_values(LAYOUT, 1))
    yield actor, server, peers, tmp_path / "tape"
    for peer in peers:
        peer.close()
    server.close()


class Slow:
    """Decoding that takes as long as the test says, for answers that begin with ``MARK``."""

    MARK = 7.0

    def __init__(self, monkeypatch):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._decode = reception.decode_gradient
        monkeypatch.setattr(reception, "decode_gradient", self)

    def __call__(self, data, *arguments):
        if np.frombuffer(data, "<f4")[0] == self.MARK:
            self.begun.set()
            assert self.go_on.wait(WAIT_S)
        return self._decode(data, *arguments)


def values(first):
    return np.array([first, 0, 0, 0], np.float32)


@pytest.mark.parametrize("others", ["are silent", "speak"])
def test_an_answer_that_arrived_in_time_is_not_late_because_it_takes_long_to_decode(fleet, monkeypatch, others):
    actor, server, (zero, one), tape = fleet
    slow = Slow(monkeypatch)
    pulls = [peer.pull(step=1) for peer in (zero, one)]
    one.answer(pulls[1], values(Slow.MARK))
    assert slow.begun.wait(WAIT_S)
    arrived_at = server.settled_until(float("inf"))
    zero.answer(pulls[0], values(1.0))  # the quorum
    window_over = threading.Event()
    window_over.wait(2 * GRACE_S)
    if others == "speak":
        zero.heartbeat()
        window_over.wait(GRACE_S)
    assert not merges(tape)
    assert server.settled_until(float("inf")) == arrived_at
    assert actor._patience_s() != 0.0, "it sleeps until the answer is there"
    slow.go_on.set()
    zero.pull(step=2)
    (line,) = merges(tape)
    assert line["responded"] == [0, 1]
    assert server.settled_until(123.0) == 123.0


def test_an_answer_that_turns_out_to_be_malformed_stops_no_clock(fleet, monkeypatch):
    _, server, (zero, one), tape = fleet
    slow = Slow(monkeypatch)
    pulls = [peer.pull(step=1) for peer in (zero, one)]
    one.answer(pulls[1], np.array([Slow.MARK, np.nan, 0, 0], np.float32))
    assert slow.begun.wait(WAIT_S)
    zero.answer(pulls[0], values(1.0))
    slow.go_on.set()
    assert "not finite" in one.wait_closed().peer_error
    zero.pull(step=2)
    (line,) = merges(tape)
    assert line["responded"] == [0]
    assert server.settled_until(123.0) == 123.0


def test_a_flood_of_events_holds_up_no_deadline(tmp_path):
    """Time passes between the batches of a backlog, and never past what has arrived and is not handled."""
    told: list[tuple[str, float]] = []

    class Diary(Coordinator):
        def handle(self, event, now):
            told.append(("event", now))
            return super().handle(event, now)

        def on_time(self, now):
            told.append(("time", now))
            return super().on_time(now)

    policy = syncer_policy(1)
    actor = actor_of(policy, Diary(policy, PROFILE), tmp_path)
    for number in range(1000):
        actor.inbox.post(BeatArrived(Member(0, 1), 1 + number), float(number))
    for _ in range(3):
        actor._turn()
    kinds = [kind for kind, _ in told]
    assert 0 < kinds.index("time") < 500
    times = [now for _, now in told]
    assert times == sorted(times)
    assert times[-1] < 1000
    actor.server.close()
