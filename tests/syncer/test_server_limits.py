"""What strangers may hold of the door, each limit hit: HELLOs by number and bytes, early sockets, refusals, lines."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Thread

import pytest
import torch

from syncer import descriptors
from syncer import server as door
from syncer.core import events as ev
from syncer.core.events import Member
from syncer.reception import Decoding, Reception
from tests.support.coordinator_desk import CONTRACT, FINGERPRINT, hello, layout_of, session_policy, syncer_policy
from tests.support.waiting import until
from tests.support.wire_by_hand import frame
from tests.syncer.test_server import Caller, Door
from yeto_torch.wire.constants import MessageType
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.messages import DataHello, FinalAck, Heartbeat, Hello, Message, PushFragment, decode_hello

KIB, MIB = 1 << 10, 1 << 20


def of_bytes(nbytes: int, generation: int = 1, learner: int = 0) -> Hello:
    """A HELLO whose layout takes about so many bytes."""
    return hello(learner, generation, layout_of(*[1] * (nbytes // 13)))


@pytest.fixture
def entrance() -> Iterator[Door]:
    entrance = Door()
    yield entrance
    entrance.close()


def error_text(caller: Caller) -> str:
    said = caller.read()
    assert said is not None
    assert said.kind is MessageType.ERROR
    return bytes(said.payload).decode()


class TestHello:
    def test_before_there_is_a_session_it_may_be_long(self, entrance):
        entrance.call(of_bytes(MIB))
        assert len(entrance.next(ev.HelloArrived).hello.layout) == MIB // 13

    def test_once_there_is_one_it_may_be_64_kib_or_as_long_as_the_session_s(self, entrance):
        entrance.admit(of_bytes(100, 1))
        entrance.call(of_bytes(63 * KIB, 2))
        assert entrance.next(ev.HelloArrived).hello.generation == 2
        assert "65536 are legal here" in error_text(entrance.call(of_bytes(66 * KIB, 3)))

    def test_the_session_s_own_length_stays_legal_with_every_option(self, entrance):
        first = of_bytes(MIB)
        entrance.admit(first)
        entrance.call(replace(first, generation=2, profile=b"p" * 32))
        again = entrance.next(ev.HelloArrived).hello
        assert again.profile == b"p" * 32
        assert again.layout is first.layout, "one layout in memory, however many repeat it"
        assert "are legal here" in error_text(entrance.call(of_bytes(MIB + KIB, 3)))

    def test_only_a_few_long_ones_are_read_at_once(self, entrance):
        with entrance.server._reading_long:
            callers = [entrance.call(of_bytes(65 * KIB, generation)) for generation in range(1, 5)]
            until(lambda: entrance.server._long_hellos._value == 0, "four HELLOs that wait for each other")
            assert entrance.call(of_bytes(65 * KIB, 5)).read() is None, "a bare close"
            entrance.call(of_bytes(100, 6))
            assert entrance.next(ev.HelloArrived).hello.generation == 6, "a short one need not wait"
        assert {entrance.next(ev.HelloArrived).hello.generation for _ in callers} == {1, 2, 3, 4}
        until(lambda: entrance.server._long_hellos._value == door._MAX_LONG_HELLOS, "all four to be read")

    def test_the_bytes_of_those_that_wait_for_the_actor_are_limited(self, entrance):
        first = entrance.call(of_bytes(5 * MIB, 1))
        ticket = entrance.next(ev.HelloArrived).ticket  # one alone may be as long as it likes
        assert entrance.call(of_bytes(KIB, 2)).read() is None
        entrance.server.refuse(ticket, "no")
        assert error_text(first) == "no"
        for generation in (3, 4):
            entrance.call(of_bytes(KIB, generation))
            entrance.next(ev.HelloArrived)

    def test_and_so_is_their_number(self, entrance, monkeypatch):
        monkeypatch.setattr(door, "_MAX_TICKETS", 2)
        for generation in (1, 2):
            entrance.call(of_bytes(KIB, generation))
            entrance.next(ev.HelloArrived)
        assert entrance.call(of_bytes(KIB, 3)).read() is None

    def test_one_that_no_memory_can_hold_is_dropped(self, entrance, monkeypatch):
        def no_memory(*_args: object) -> None:
            raise MemoryError("no memory for a message")

        monkeypatch.setattr(door, "read_first_frame", no_memory)
        assert entrance.call(of_bytes(KIB)).read() is None


class TestSilence:
    def test_the_oldest_of_too_many_silent_sockets_makes_room(self):
        entrance = Door(session_policy(max_pending_handshakes=2))
        try:
            callers = [entrance.call(b"") for _ in range(3)]
            assert callers[0].read() is None
            assert all(caller.is_open(0.1) for caller in callers[1:])
        finally:
            entrance.close()

    def test_a_first_frame_is_whole_in_time_or_the_socket_is_closed(self):
        entrance = Door(session_policy(handshake_timeout_s=0.2))
        try:
            whole = frame(1, of_bytes(100).payload())
            callers = [entrance.call(whole[:cut]) for cut in (0, 1, 12, 13, 40, len(whole) - 1)]
            assert [caller.read() for caller in callers] == [None] * 6
            entrance.call(whole)
            entrance.next(ev.HelloArrived)
        finally:
            entrance.close()

    def test_early_data_sockets_are_limited_too(self, entrance, monkeypatch):
        monkeypatch.setattr(door, "_MAX_EARLY", 2)
        early = []
        for generation in range(7, 10):
            early.append(entrance.call(DataHello(0, generation, 0)))
            until(
                lambda n=generation: any(e.member == Member(0, n) for e in [*entrance.server._early.values()]),
                "it waits",
            )
        assert early[0].read() is None
        assert all(caller.is_open(0.1) for caller in early[1:])


class TestRefusals:
    def test_only_so_many_are_told_why_at_once(self, monkeypatch):
        monkeypatch.setattr(door, "_MAX_REFUSALS", 1)
        entrance = Door()
        try:
            wrong = replace(of_bytes(100), learner_id=9)
            first = entrance.call(wrong)
            assert "learner id 9" in error_text(first)  # it does not close, and so is waited for
            assert entrance.call(wrong).read() is None
            first.sock.close()
            until(lambda: entrance.server._refusals._value == 1, "the refusal to end")
            assert "learner id 9" in error_text(entrance.call(wrong))
        finally:
            entrance.close()

    def test_the_log_gets_so_many_lines_a_minute(self, entrance, caplog):
        with caplog.at_level(logging.WARNING, logger="syncer"):
            for number in range(100):
                raw = Caller(entrance.address, replace(of_bytes(20), learner_id=100 + number))
                assert "is not one of" in error_text(raw)
                raw.sock.close()
        lines = [record.getMessage() for record in caplog.records if "refused a connection" in record.getMessage()]
        assert len(lines) == door._REFUSAL_LINES


def test_where_descriptors_are_few_strangers_get_a_quarter_for_each_purpose(monkeypatch):
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (128, 4096))
    entrance = Door()
    try:
        assert entrance.server._at_most(1024) == 32
        assert entrance.server._refusals._value == 32
    finally:
        entrance.close()


def test_the_layout_of_a_hello_is_compared_as_bytes():
    raw = memoryview(of_bytes(100).payload())
    known = layout_of(*[1] * 7)
    assert decode_hello(raw, known=known).layout is known
    other = layout_of(*[1] * 6, 2)
    found = decode_hello(raw, known=other)
    assert found.layout is not other
    assert found.layout == known
    # one more fragment than the known one, whose bytes it begins with
    longer = hello(0, 1, layout_of(*[1] * 8)).payload()
    assert len(decode_hello(memoryview(longer), known=known).layout) == 8
    assert struct.pack("<I", 7) in bytes(raw)
    assert FINGERPRINT + CONTRACT in bytes(raw)


class Crowd:
    """A group's inbound side whose actor has no time: what it is told, and how it says that it has dealt with one."""

    def __init__(self, pipeline: int = 1) -> None:
        self.told: list[ev.Event] = []
        self.handled: list[Callable[[], None]] = []
        said = hello(1, 1, layout_of(4))
        policy = syncer_policy(2, pipeline=pipeline)
        self.reception = Reception(
            policy, torch.device("cpu"), self._post, Decoding(self._post), Member(1, 1), said, lambda _: None
        )

    def _post(self, event: ev.Event, _now: float, handled: Callable[[], None] | None) -> None:
        assert handled is not None
        self.told.append(event)
        self.handled.append(handled)

    def speak(self, message: Message, times: int) -> Thread:
        """A reader with so many messages; it is held back where the limit is."""
        reader = Thread(target=lambda: [self.reception.take(message, 0.0) for _ in range(times)], daemon=True)
        reader.start()
        return reader


class TestInbox:
    @pytest.mark.parametrize(
        ("message", "limit"),
        [(Heartbeat(1, 5), 64), (FinalAck(7), 64), (PushFragment(1, 0, 1, 1, 0, 1, 1, 1, bytes(16)), 4)],
        ids=["heartbeats", "acknowledgements", "tensors"],
    )
    def test_a_reader_waits_until_the_actor_has_dealt_with_enough(self, message, limit):
        crowd = Crowd(pipeline=1)
        reader = crowd.speak(message, limit + 3)
        until(lambda: len(crowd.told) == limit, "as many as may wait")
        assert reader.is_alive()
        for done in range(3):
            crowd.handled[done]()
            until(lambda n=done: len(crowd.told) == limit + n + 1, "one more for each that is done")
        reader.join(20)
        assert not reader.is_alive()

    def test_a_refused_tensor_takes_no_place(self):
        crowd = Crowd(pipeline=1)
        nan = PushFragment(1, 0, 1, 1, 0, 1, 1, 1, struct.pack("<4f", 0, 0, 0, float("nan")))
        for _ in range(20):
            with pytest.raises(PeerError, match="not finite"):
                crowd.reception.take(nan, 0.0)
        assert not crowd.told
