"""The hostile table against a living syncer that two honest learners keep using.

After every entry the honest learners must get their next round; at the end threads, descriptors and memory of the
syncer are where they were.
"""

from __future__ import annotations

import re
import time

import pytest

from tests.support.attacked_run import Run
from tests.support.attacker import Intruder, Wire, fresh_generation
from tests.support.waiting import until
from tests.wire.hostile import Attack, Ends, Scene, attacks
from yeto_torch.wire.constants import WireDType

HANDSHAKE_S = 3  # long for a socket on this machine, short for a test
RSS_SLACK_BYTES = 32 << 20  # what the allocator keeps of 200 threads' comings and goings


def first(run: Run, attack: Attack, waiting: list[Wire]) -> tuple[Ends, str]:
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
        waiting.append(wire)
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


def group(run: Run, attack: Attack, _waiting: list[Wire]) -> tuple[Ends, str]:
    """What a connection group lives to see."""
    intruder = Intruder(run.syncer.address, run.dtype, attack.streams)
    try:
        if attack.asked:
            run.next_round()  # the next launch captures it
            pull = intruder.asked(run.step + 1)
        else:
            pull = ((run.step) % 2, run.step + 1, 1)
        before = run.rejected(attack.rejected) if attack.rejected else 0
        intruder.says(attack.says(Scene(run.dtype, attack.streams, intruder.generation, pull=pull)))
        if attack.ends is not Ends.ALIVE:
            text = intruder.wires[0].last_words()
            return (Ends.CLOSED, "") if text is None else (Ends.ERROR, text)
        run.next_round()
        deadline = time.monotonic() + 20
        while attack.rejected and run.rejected(attack.rejected) == before:  # the merge line behind it counts it
            assert time.monotonic() < deadline, f"{attack.name}: not counted"
            run.next_round()
        intruder.asked(run.step + 1)  # it is here, and asked like everybody
        return Ends.ALIVE, ""
    finally:
        intruder.close()


@pytest.mark.parametrize("dtype", list(WireDType), ids=lambda dtype: dtype.name.lower())
def test_the_table(processes, dtype):
    run, waiting = Run(processes, dtype, f"session.handshake_timeout_s={HANDSHAKE_S}"), []
    stages = [(attack, first) for attack in attacks("first", dtype)] if dtype is WireDType.F32 else []
    stages += [(attack, group) for attack in attacks("group", dtype)]
    for number, (attack, play) in enumerate(stages):
        ends, text = play(run, attack, waiting)
        assert ends is attack.ends, (attack.name, ends, text)
        assert re.search(attack.text, text), (attack.name, text)
        run.next_round()
        if number == 20 or len(stages) < 20:
            base, rss = run.vitals(), run.memory()
    for wire in waiting:  # they were only let wait
        until(wire.is_over, "the end of a socket that never spoke to the end", HANDSHAKE_S + 15)
        wire.close()
    until(lambda: all(now <= then for now, then in zip(run.vitals(), base, strict=True)), f"{base}, not {run.vitals()}")
    run.next_round()
    assert run.memory() < rss + RSS_SLACK_BYTES
    run.check_clean()
