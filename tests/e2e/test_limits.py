"""What strangers can take of a living syncer: descriptors, connections, memory. The honest learners notice nothing.

The formula of peak memory is that of docs/limits.md.
"""

from __future__ import annotations

import resource
import struct
import threading
import time

import pytest

from tests.support.attacked_run import Run
from tests.support.attacker import Intruder, Wire, fresh_generation
from tests.support.waiting import until
from tests.support.wire_by_hand import frame
from tests.wire.hostile import data_hello, hello
from yeto_torch.wire.constants import Direction, MergeMode, WireDType
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

KIB, MIB = 1 << 10, 1 << 20
BOMB = frame(
    1,
    struct.pack("<HIQBI", 4, 2, 5, 1, 1_290_000)
    + struct.pack("<BIQ", 0, 1, 1) * 1_290_000
    + bytes(64)
    + struct.pack("<H", 0),
)


def test_the_last_descriptors_are_for_checkpoints(processes):
    run = Run(processes, WireDType.F32, "checkpoint.every=1", "session.handshake_timeout_s=2")
    resource.prlimit(run.syncer.pid, resource.RLIMIT_NOFILE, (128, 128))
    crowd = [Wire(run.syncer.address) for _ in range(100)]
    crowd += [Wire(run.syncer.address, data_hello(fresh_generation(), 0)) for _ in range(100)]
    for _ in range(20):
        run.next_round()  # each is durable before it is visible
    assert run.vitals()[1] <= 128 - 32
    newcomer = None
    deadline = time.monotonic() + 30
    while newcomer is None:  # a learner that is not let in dials again, and gets in
        assert time.monotonic() < deadline, "the strangers keep an honest learner out"
        peer = run.peer(2)
        peer.wait(lambda peer=peer: peer.anchors or peer.closed, "an answer of the door")
        newcomer = peer if peer.anchors else None
    run.next_round()
    newcomer.close()
    for wire in crowd:
        wire.close()
    run.check_clean()


def test_layouts_of_16_mib_from_everywhere_cost_nothing_once_there_is_a_session(processes):
    run = Run(processes)
    before = run.memory("VmHWM")
    told: list[str | None] = []

    def bomb() -> None:
        wire = Wire(run.syncer.address, BOMB)
        told.append(wire.last_words())
        wire.close()

    bombers = [threading.Thread(target=bomb) for _ in range(32)]
    for bomber in bombers:
        bomber.start()
    run.next_round()
    for bomber in bombers:
        bomber.join(60)
    assert len(told) == 32
    assert all(text is None or "are legal here" in text for text in told)
    run.next_round()
    assert run.memory("VmHWM") - before < 64 * MIB
    run.check_clean()


def test_hundreds_of_connections_a_second_hold_nobody_up(processes):
    run = Run(processes)
    base, rss = run.vitals(), run.memory()
    knock(run, 600)
    until(lambda: all(now <= then for now, then in zip(run.vitals(), base, strict=True)), f"{base}, not {run.vitals()}")
    assert run.memory() < rss + 32 * MIB
    lines = [line for line in run.syncer.lines if "refused a connection" in line]
    assert len(lines) <= 64 * (1 + len({line[:5] for line in lines}))
    run.check_clean()


def knock(run: Run, connections: int) -> None:
    """So many strangers of every kind, one after the other; a round in between now and then."""
    kinds = (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        frame(1, hello(version=3)),
        frame(1, hello())[:50],
        frame(1, hello(generation=0)),
    )
    for number in range(connections):
        wire = Wire(run.syncer.address, kinds[number % len(kinds)])
        if number % 2:
            wire.reset()
        else:
            wire.close()
        if number % 50 == 0:
            run.next_round()
    run.next_round()


@pytest.mark.hostile
def test_ten_thousand_connections_a_minute_hold_nobody_up(processes):
    run = Run(processes)
    base, rss, began = run.vitals(), run.memory(), time.monotonic()
    slowest = 0.0
    for hundred in range(200):
        knock(run, 100)
        before = time.monotonic()
        run.next_round()
        slowest = max(slowest, time.monotonic() - before)
        ahead = began + 0.6 * (hundred + 1) - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
    rate = 20_000 / (time.monotonic() - began) * 60
    print(f"{rate:.0f} connections a minute, slowest round {slowest:.3f} s, {(run.memory() - rss) / MIB:.0f} MiB more")
    assert slowest < 5
    until(lambda: all(now <= then for now, then in zip(run.vitals(), base, strict=True)), f"{base}, not {run.vitals()}")
    assert run.memory() < rss + 48 * MIB
    run.check_clean()


LARGE = Layout(tuple(Fragment(MergeMode.AVG, (Tensor(name, (1_000_000,)),)) for name in "ab"))


def per_group(limits: GroupLimits, streams: int, pipeline: int) -> int:
    """Bytes that one connection group can make the syncer hold; docs/limits.md."""
    largest, parameters = 4 * max(LARGE.wire.numels), 4 * sum(LARGE.wire.numels)
    received = 2 * limits.max_reserved_bytes
    decoded = (2 * pipeline + 2) * largest
    outgoing = parameters + sum(LARGE.wire.nbytes(f, WireDType.F32) for f in range(len(LARGE)))
    return received + decoded + outgoing + (1 + streams) * 2 * 256 * KIB


def test_two_hundred_hostile_connections_stay_within_the_formula(processes):
    run = Run(processes, WireDType.F32, layout=LARGE)
    for _ in range(3):
        run.next_round()
    base = run.memory("VmHWM")
    streams, generations = 8, 5
    limits = GroupLimits(LARGE.wire, WireDType.F32, Direction.TO_SYNCER, 1)
    wires = fill(run, limits, streams, generations)
    wires += [Wire(run.syncer.address, frame(1, length=64 * KIB) + bytes(60 * KIB)) for _ in range(64)]
    while len(wires) < 200:
        wires.append(Wire(run.syncer.address, data_hello(fresh_generation(), 0)))
    for _ in range(3):
        run.next_round()
    strangers = 64 * (64 * KIB + 256 * KIB) + 256 * (32 + 256) * KIB + 16 * 4 * MIB
    peak = run.memory("VmHWM") - base
    bound = generations * per_group(limits, streams, pipeline=1) + strangers
    print(f"peak +{peak / MIB:.0f} MiB, formula +{bound / MIB:.0f} MiB")
    assert peak > 64 * MIB, "the attack did not fill anything"
    assert peak < bound
    for wire in wires:
        wire.close()
    run.next_round()
    run.check_clean()


def fill(run: Run, limits: GroupLimits, streams: int, generations: int) -> list[Wire]:
    """Every byte a stranger's groups may hold, in partial messages and half-sent plain ones; nobody reads a thing."""
    total, wires = limits.max_inner, []
    for _ in range(generations):
        intruder = Intruder(run.syncer.address, run.dtype, streams, layout=LARGE.wire)
        wires += intruder.wires
        partials = limits.max_reserved_bytes // total
        for number in range(partials):
            intruder.wires[1 + number % streams].say(sliced(number, total))
        plain = 2 * limits.max_reserved_bytes // total - partials
        for stream in range(1 + partials, 1 + min(streams, partials + plain)):
            intruder.wires[stream].say(frame(4, length=total - 13) + bytes(total - 14))
    return wires


def sliced(msg_id: int, total: int) -> bytes:
    """A message of ``total`` bytes in one slice that lacks its last byte."""
    return frame(9, struct.pack("<QQQ", msg_id, total, 0) + bytes(total - 1))
