"""Learner processes die in the middle of a message, or fall asleep: the others go on, and whoever is back catches up.

Source: v4 §Generations, v4 §Final cut (membership); rulings §6.8.
"""

import itertools
import signal
import struct
import threading
import time

import numpy as np
import pytest

from tests.support.real_learners import Learner, same_weights, start_script, training, wait_all
from tests.support.relay import Halfway, Proxy
from tests.support.saved_parameters import saved, saved_step
from tests.support.scripted_learner import ScriptedLearner
from tests.support.toy_model import flat, toy
from tests.support.waiting import until
from yeto_torch.fragments import build_layout
from yeto_torch.wire.constants import MessageType
from yeto_torch.wire.model_layout import contract_hash

RUN = {"run_id": "deaths", "fragments": 3, "wire_dtype": "f32"}
AT_ONCE_S = 2.0  # a relaunch on a busy machine; every limit is a minute


@pytest.mark.parametrize(
    ("kind", "up", "skip", "victim"),
    [
        (MessageType.INIT_PARAMS, True, 1, 0),  # one fragment is initialised, the next one half
        (MessageType.PUSH_FRAGMENT, True, 4, 1),
        (MessageType.FINAL_FRAGMENT, False, 1, 1),
    ],
    ids=["in mid-INIT", "in mid-PUSH", "in mid-final"],
)
def test_a_learner_killed_in_the_middle_of_a_message(processes, kind, up, skip, victim):
    total = 40
    syncer = processes.syncer(
        "schedule.sync_interval_steps=0", "schedule.quorum_timeout_s=60", "schedule.grace_ms=0",
        "checkpoint.mark_final=true", learners=2, total_steps=total,
    )  # fmt: skip
    out = processes.folder / "victim.npz"
    with Proxy(syncer.address) as proxy:
        proxy.rule = rule = Halfway(kind, up=up, skip=skip)
        first = start_script(processes, proxy.address, victim, seed=7, width=200, optimizer=RUN | {"streams": 0})
        other = Learner(syncer.address, 1 - victim, model=toy(1, 200), pace_s=0.02, **RUN)
        with training(other):
            rule.wait()
            commits = len(syncer.merges())
            killed_at = time.time()
            first.kill()
            rule.cut()
            if kind is MessageType.PUSH_FRAGMENT:
                until(lambda: len(syncer.merges()) > commits + 1, "the other one goes on alone")
                other.free.clear()  # until the second one is there
            second = start_script(processes, proxy.address, victim, seed=8, width=200, out=out, optimizer=RUN)
            until(lambda: len(syncer.events("join")) == 3, "it is back")
            other.free.set()
            (ours,) = wait_all([other])
            assert second.wait() == 0, second.told()
    assert syncer.wait() == 0, syncer.told()
    assert same_weights(ours, list(np.load(out).values()), saved(syncer.checkpoint))
    assert (syncer.folder / "checkpoint.final").exists()
    lines = syncer.merges()
    assert [line["step"] for line in lines] == list(range(1, total + 1))
    (died,) = [line for line in syncer.events("leave") if line["time"] < syncer.events("join")[2]["time"]]
    assert died["id"] == victim
    assert died["time"] - killed_at < AT_ONCE_S
    if kind is MessageType.PUSH_FRAGMENT:
        after = next(line for line in lines if line["time"] > died["time"])
        assert after["time"] - died["time"] < AT_ONCE_S
        # a round that was full already is merged all the same; of those launched since, the dead one is not part
        asked = next(line for line in lines if line["time"] - line["ms"] / 1000 > died["time"])
        assert died["generation"] not in [member["generation"] for member in asked["responded_members"]]


class Rounds:
    """Two scripted learners that keep rounds going without moving anything."""

    def __init__(self, syncer, layout):
        contract = contract_hash(layout.fingerprint, RUN["run_id"])
        self.peers = [ScriptedLearner(syncer.address, i, layout, contract=contract) for i in (0, 1)]
        for peer in self.peers:
            peer.serve(lambda peer, pull: np.zeros(peer.layout.fragments[pull.fragment].numel, np.float32))


@pytest.mark.parametrize(
    ("limit", "seconds", "width", "reason"),
    [
        ("write_timeout_s", 1, 500, "is stalled: not a byte was accepted for 1 s"),
        ("idle_timeout_s", 2, 24, "no byte came for session.idle_timeout_s=2 s"),
    ],
    ids=["write", "idle"],
)
def test_a_learner_that_sleeps_is_closed_and_catches_up_when_it_wakes(processes, limit, seconds, width, reason):
    """Under ``write`` its sockets are full at once; under ``idle`` nothing is heard from who has sent heartbeats."""
    model = toy(0, width)
    layout = build_layout([(name, tuple(p.shape)) for name, p in model.named_parameters()], fragments=RUN["fragments"])
    heard = threading.Event()

    def watch(_pipe, up, data):
        if up and struct.pack("<IBQ", 0xD170C0DE, MessageType.HEARTBEAT, 12) in data:
            heard.set()
        return data

    def start(total, **options):
        return processes.syncer(
            "schedule.quorum=2", "schedule.sync_interval_steps=0", "schedule.grace_ms=15", "checkpoint.every=0",
            "schedule.min_round_interval_ms=15", f"session.{limit}={seconds}", "checkpoint.resume=auto", learners=3,
            total_steps=total, **options,
        )  # fmt: skip

    syncer = start(1_000_000)
    with Proxy(syncer.address, record=False) as proxy:
        proxy.rule = watch
        out = processes.folder / "sleeper.npz"
        sleeper = start_script(processes, proxy.address, 2, width=width, out=out, optimizer=RUN | {"streams": 1})
        Rounds(syncer, layout).peers[0].init(flat(model, layout))
        sleeper.wait_for(r"^step \d\d")
        if limit == "idle_timeout_s":
            assert heard.wait(60), "no heartbeat"
        before, slept_at = len(syncer.merges()), time.time()
        sleeper.signal(signal.SIGSTOP)
        gone = until(lambda: syncer.events("leave"), f"it is closed by session.{limit}")[0]
        meanwhile = [line["time"] for line in syncer.merges()[before:] if line["time"] < gone["time"]]
        sleeper.signal(signal.SIGCONT)
        until(lambda: len(syncer.events("join")) == 4, "it is back")
        back = syncer.events("join")[3]
        until(lambda: _answers(syncer, back) > 5, "it answers again")

        syncer.signal(signal.SIGINT)  # and so that the run may end: the same with a few steps to go
        assert syncer.wait() == 130
        last = start(saved_step(syncer.checkpoint) + 9)
        proxy.target = last.address
        peers = Rounds(last, layout).peers
        assert last.wait() == 0, last.told()
        assert sleeper.wait() == 0, sleeper.told()
        finals = [peer.cut()[1] for peer in peers]

    assert gone["id"] == back["id"] == 2
    assert gone["generation"] != back["generation"]
    assert reason in gone["reason"]
    assert seconds - 0.5 < gone["time"] - slept_at < 20  # full sockets or a busy machine may add to it
    assert len(meanwhile) >= 10  # the others went on
    assert max(later - earlier for earlier, later in itertools.pairwise([slept_at, *meanwhile])) < AT_ONCE_S
    assert same_weights(list(np.load(out).values()), *finals, saved(last.checkpoint))


def _answers(syncer, joined):
    member = {"id": joined["id"], "generation": joined["generation"]}
    return sum(member in line["responded_members"] for line in syncer.merges())
