"""The hostile table against the machines alone: readers, limits, reassembly, decoding, coordinator.

One session of two honest learners lives through the whole table; after every entry it must commit its next round.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.events import Member
from syncer.reception import Decoding, Reception
from tests.support.coordinator_desk import Desk, hello, syncer_policy
from tests.wire.hostile import ATTACKS, LAYOUT, LEARNERS, PIPELINE, STRANGER, Attack, Ends, Scene, attacks
from yeto_torch.wire.chunks import Reassembler
from yeto_torch.wire.constants import Direction, MessageType, WireDType
from yeto_torch.wire.errors import CongestedError, PeerError
from yeto_torch.wire.frames import Frame, FrameReader
from yeto_torch.wire.limits import FirstFrameLimits, GroupLimits
from yeto_torch.wire.messages import BcastFragment, DataHello, FinalFragment, InitParams, PushFragment, decode_hello
from yeto_torch.wire.messages import decode as decode_message
from yeto_torch.wire.transport.outbox import Outbox

Outcome = tuple[Ends, str]


def feed(reader: FrameReader, data: bytes, piece: int, take: Callable[[Frame], None]) -> None:
    """Bytes as they would come from a socket, at most ``piece`` at once."""
    at = 0
    while at < len(data):
        view = reader.buffer()
        count = min(len(view), piece, len(data) - at)
        view[:count] = data[at : at + count]
        at += count
        frame = reader.received(count)
        if frame is not None:
            take(frame)


class Session:
    """A coordinator, two honest learners, and what one stranger after the other does to it."""

    def __init__(self, dtype: WireDType) -> None:
        self.dtype, self.piece = dtype, 1 << 30
        self.desk = Desk(syncer_policy(LEARNERS, 10**7, quorum=2, pipeline=PIPELINE, grace_ms=0))
        self.desk.layout = LAYOUT
        for learner in range(LEARNERS):
            self.desk.join(learner, dtype=dtype)
        self.desk.init()
        self.desk.leave(STRANGER)
        self.generation = 1
        self.outboxes: dict[Member, Outbox] = {self.desk.members[0]: Outbox(0)}

    def next_round(self) -> fx.Record:
        """The honest learners answer what they were asked; the merge line of the commit."""
        step = self.desk.coordinator.committed + 1
        for learner in (0, 1):
            self.desk.push(learner, step)
        assert self.desk.coordinator.committed == step, "the honest session does not progress"
        (record,) = [record for record in self.desk.orders if isinstance(record, fx.Record)][-1:]
        del self.desk.orders[:-20]
        return record

    def fresh(self) -> int:
        self.generation += 1
        return self.generation

    def first(self, attack: Attack) -> Outcome:
        """A fresh socket."""
        scene = Scene(self.dtype, generation=self.fresh(), honest=1, dead=1, streams=2 if attack.needs == "own" else 0)
        if attack.needs == "own":
            member = self.desk.join(STRANGER, scene.generation, num_streams=2, dtype=self.dtype)
            self.outboxes[member] = Outbox(2)
            self.outboxes[member].attach(0)
        reader, frames = FrameReader(FirstFrameLimits()), []
        try:
            for _, data in attack.says(scene):
                feed(reader, data, self.piece, frames.append)
            return self._first_frame(frames[0]) if frames else (Ends.WAITS, "")
        except PeerError as violation:
            return Ends.ERROR, str(violation)

    def _first_frame(self, frame: Frame) -> Outcome:
        if frame.kind is MessageType.DATA_HELLO:
            said = decode_message(frame.kind, frame.payload)
            assert isinstance(said, DataHello)
            outbox = self.outboxes.get(Member(said.learner_id, said.generation))
            if outbox is None:
                return Ends.WAITS, ""
            outbox.attach(said.stream_index)
            return Ends.ALIVE, ""
        self.desk.tell(ev.HelloArrived(10**6 + self.generation, decode_hello(frame.payload, LEARNERS)))
        refused = self.desk.latest(fx.RefuseHello)
        return (Ends.ERROR, refused[0].text) if refused else (Ends.ALIVE, "")

    def group(self, attack: Attack) -> Outcome:
        """A connection group of the stranger."""
        member = self.desk.join(STRANGER, self.fresh(), num_streams=attack.streams, dtype=self.dtype)
        if attack.asked:
            self.next_round()
        step = self.desk.coordinator.committed + 1
        scene = Scene(self.dtype, attack.streams, member.generation, pull=((step - 1) % 2, step, 1))
        return Conversation(self, member, scene).hold(attack)


class Conversation:
    """What one group's sockets deliver, as its readers and the door see it."""

    def __init__(self, session: Session, member: Member, scene: Scene) -> None:
        self.session, self.member = session, member
        self.limits = GroupLimits(LAYOUT, scene.dtype, Direction.TO_SYNCER, PIPELINE)
        limits = self.limits
        self.table = Reassembler(limits.max_inner, limits.max_partials, limits.max_reserved_bytes)
        self.readers = [FrameReader(limits, self.table) for _ in range(1 + scene.streams)]
        self.scene = scene
        said = hello(STRANGER, member.generation, LAYOUT, num_streams=scene.streams, dtype=scene.dtype)
        policy = session.desk.policy
        self.reception = Reception(
            policy, torch.device("cpu"), self._post, Decoding(self._post), member, said, lambda _: None
        )

    def hold(self, attack: Attack) -> Outcome:
        try:
            for stream, data in attack.says(self.scene):
                feed(self.readers[stream], data, self.session.piece, self._take)
                assert self.table.reserved_bytes <= self.limits.max_reserved_bytes
        except CongestedError as congestion:
            return Ends.CLOSED, str(congestion)
        except PeerError as violation:
            return Ends.ERROR, str(violation)
        for effect in self.session.desk.orders:
            if isinstance(effect, fx.Expel) and effect.member == self.member:
                return Ends.ERROR, effect.text
        return Ends.ALIVE, ""

    def _take(self, frame: Frame) -> None:
        message = decode_message(frame.kind, frame.payload)
        if isinstance(message, InitParams | PushFragment | BcastFragment | FinalFragment):
            self.limits.check_bulk(message)
        self.reception.take(message, self.session.desk.now)

    def _post(self, event: ev.Event, _now: float, handled: Callable[[], None] | None) -> None:
        self.session.desk.tell(event)
        if handled is not None:
            handled()


def judge(session: Session, attack: Attack, outcome: Outcome) -> None:
    """It ended as the table says, and the honest learners notice nothing."""
    ends = Ends.WAITS if attack.resets else attack.ends
    assert outcome[0] is ends, outcome
    assert re.search(attack.text, outcome[1]), outcome
    record = session.next_round()
    if attack.rejected:
        assert record.line["rejected"][attack.rejected] > 0
    if STRANGER in session.desk.members:
        session.desk.leave(STRANGER)
    assert session.desk.finish is None


def test_there_are_enough_attacks_and_none_twice():
    assert len(ATTACKS) >= 80
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


@pytest.mark.parametrize("piece", [1 << 30, 1], ids=["whole", "by-byte"])
@pytest.mark.parametrize("dtype", list(WireDType), ids=lambda dtype: dtype.name.lower())
def test_the_table(dtype, piece):
    session = Session(dtype)
    for attack in attacks("first", dtype) + attacks("group", dtype):
        if not attack.pure:
            continue
        size = sum(len(data) for _, data in attack.says(Scene(dtype)))
        session.piece = piece if size < 20_000 else max(piece, 1 << 16)
        outcome = session.first(attack) if attack.stage == "first" else session.group(attack)
        try:
            judge(session, attack, outcome)
        except AssertionError as failure:
            raise AssertionError(f"{attack.name}: {failure}") from failure
