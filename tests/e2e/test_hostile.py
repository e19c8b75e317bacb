"""The hostile table against a living syncer that two honest learners keep using.

After every entry the honest learners must get their next round; at the end threads, descriptors and memory of the
syncer are where they were.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.protocol.hostile import FINGERPRINT, LAYOUT, LEARNERS, Attack, Ends, Scene, attacks
from tests.support.peer import Peer
from tests.support.processes import Syncer, until
from tests.support.stranger import Intruder, Wire, descriptors, fresh_generation, status
from yeto_torch.protocol.constants import MergeMode, WireDType
from yeto_torch.protocol.layout import Fragment, Layout, Tensor
from yeto_torch.protocol.messages import BcastFragment

HANDSHAKE_S = 3  # long for a socket on this machine, short for a test
RSS_SLACK_BYTES = 32 << 20  # what the allocator keeps of 200 threads' comings and goings

NAMED = Layout(
    (
        Fragment(MergeMode.AVG, (Tensor("a", (3,)),)),
        Fragment(MergeMode.RDA, (Tensor("b", (39_000,)), Tensor("c", (1_000,)))),
    )
)
assert NAMED.wire == LAYOUT


class Run:
    """A syncer, and two honest learners that answer when they are told to."""

    def __init__(self, processes, dtype: WireDType, *overrides: str) -> None:
        self.dtype = dtype
        self.syncer: Syncer = processes.syncer(
            f"learners={LEARNERS}",
            "schedule.quorum=2",
            "schedule.pipeline=1",
            "schedule.sync_interval_steps=0",
            "schedule.grace_ms=0",
            "schedule.quorum_timeout_s=3600",
            "checkpoint.every=50",
            f"session.handshake_timeout_s={HANDSHAKE_S}",
            *overrides,
            learners=LEARNERS,
            total_steps=10**6,
        )
        self.peers = [self._peer(learner) for learner in range(LEARNERS)]
        self.peers[0].init([np.zeros(fragment.numel, np.float32) for fragment in NAMED.fragments])
        self.step = 0
        self.next_round()
        self.peers.pop().close()
        self.waiting: list[Wire] = []

    def _peer(self, learner: int) -> Peer:
        layout = Layout(NAMED.fragments)
        layout.__dict__["fingerprint"] = FINGERPRINT  # of the table
        return Peer(self.syncer.address, learner, layout, dtype=self.dtype.name, contract=b"\x22" * 32)

    def next_round(self) -> None:
        """The honest learners answer; the round is merged and broadcast."""
        self.step += 1
        for peer in self.peers[:2]:
            pull = peer.pull(step=self.step)
            peer.answer(pull, np.zeros(NAMED.fragments[pull.fragment].numel, np.float32))
        for peer in self.peers[:2]:
            peer.next(BcastFragment, version=self.step)
            del peer.seen[:-40]
            peer._taken.clear()

    def vitals(self) -> tuple[int, int]:
        """(threads, descriptors) of the syncer."""
        return status(self.syncer.pid, "Threads"), descriptors(self.syncer.pid)

    @property
    def rss(self) -> int:
        return status(self.syncer.pid, "VmRSS")

    def rejected(self, reason: str) -> int:
        """Answers not counted for this reason so far, or because the honest learners were faster."""
        counts = [line["rejected"] for line in self.syncer.merges()]
        return sum(count.get(why, 0) for count in counts for why in {reason, "out_of_round"})


def first(run: Run, attack: Attack) -> tuple[Ends, str]:
    """What a fresh socket lives to see."""
    others: list[Intruder] = []
    scene = Scene(run.dtype, generation=fresh_generation(), honest=run.peers[0].generation)
    if attack.needs:
        others.append(Intruder(run.syncer.address, run.dtype, 2, attach=1 if attack.needs == "own" else 2))
        scene = others[0].scene if attack.needs == "own" else scene
    if attack.needs == "superseded":
        others.append(Intruder(run.syncer.address, run.dtype))
        scene = Scene(run.dtype, superseded=others[0].generation)
    if attack.needs == "dead":
        others[0].close()
        scene = Scene(run.dtype, dead=others[0].generation)
        until(lambda: any(e["generation"] == others[0].generation for e in run.syncer.events("leave")), "its end")
    wire = Wire(run.syncer.address)
    for _, data in attack.says(scene):
        wire.say(data)
    if attack.ends is Ends.WAITS:
        run.waiting.append(wire)
        outcome = (Ends.CLOSED if wire.is_over() else Ends.WAITS), ""
    elif attack.resets:
        wire.reset()
        outcome = Ends.CLOSED, ""
    else:
        text = wire.last_words()
        outcome = (Ends.CLOSED, "") if text is None else (Ends.ERROR, text)
        wire.close()
    for other in others:
        other.close()
    return outcome


def group(run: Run, attack: Attack) -> tuple[Ends, str]:
    """What a connection group lives to see."""
    intruder = Intruder(run.syncer.address, run.dtype, attack.streams)
    try:
        if attack.asked:
            run.next_round()  # the next launch captures it
            pull = intruder.asked(run.step + 1)
        else:
            pull = ((run.step) % 2, run.step + 1, 1)
        intruder.says(attack.says(Scene(run.dtype, attack.streams, intruder.generation, pull=pull)))
        if attack.ends is not Ends.ALIVE:
            text = intruder.wires[0].last_words()
            return (Ends.CLOSED, "") if text is None else (Ends.ERROR, text)
        run.next_round()
        intruder.asked(run.step + 1)  # it is here, and asked like everybody
        return Ends.ALIVE, ""
    finally:
        intruder.close()


@pytest.mark.parametrize("dtype", list(WireDType), ids=lambda dtype: dtype.name.lower())
def test_the_table(processes, dtype):
    run = Run(processes, dtype)
    stages = [(attack, first) for attack in attacks("first", dtype)] if dtype is WireDType.F32 else []
    stages += [(attack, group) for attack in attacks("group", dtype)]
    for number, (attack, play) in enumerate(stages):
        before = run.rejected(attack.rejected) if attack.rejected else 0
        ends, text = play(run, attack)
        assert ends is attack.ends, (attack.name, ends, text)
        assert re.search(attack.text, text), (attack.name, text)
        run.next_round()
        if attack.rejected:
            assert run.rejected(attack.rejected) > before, attack.name
        if number == 20 or len(stages) < 20:
            base, rss = run.vitals(), run.rss
    for wire in run.waiting:  # they were only let wait
        until(wire.is_over, "the end of a socket that never spoke to the end", HANDSHAKE_S + 15)
        wire.close()
    until(lambda: all(now <= then for now, then in zip(run.vitals(), base, strict=True)), f"{base}, not {run.vitals()}")
    run.next_round()
    print("rss", rss >> 20, run.rss >> 20, "hwm", status(run.syncer.pid, "VmHWM") >> 20, run.vitals(), base)
    assert run.rss < rss + RSS_SLACK_BYTES
    assert run.syncer.code is None
    assert not [line for line in run.syncer.lines if "Traceback" in line or "internal error" in line]
