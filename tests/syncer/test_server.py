"""The door over real sockets: first frames, data sockets that come early or too late, and a machine at its limits."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from syncer import server as door
from syncer.config.policy import SessionPolicy
from syncer.core import events as ev
from syncer.core.events import Member
from syncer.server import Server
from tests.support.coordinator_desk import hello, layout_of, syncer_policy
from yeto_torch.wire.constants import Direction, MessageType
from yeto_torch.wire.frames import Frame, FrameReader
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import BcastFragment, DataHello, Hello, Message, decode, encode

WAIT_S = 20.0
LAYOUT = layout_of(4)
WHO = Member(0, 1)


class Caller:
    """One socket of a learner."""

    def __init__(self, address: str, first: Message | bytes) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), WAIT_S)
        self.sock.sendall(first if isinstance(first, bytes) else b"".join(encode(first)))

    def read(self, timeout_s: float = WAIT_S) -> Frame | None:
        """The next frame, None when the other side has closed. Raises TimeoutError."""
        self.sock.settimeout(timeout_s)
        reader = FrameReader(GroupLimits(LAYOUT, said(0).dtype, Direction.TO_LEARNER), Slices())
        with suppress(ConnectionResetError):  # closed with something unread
            while count := self.sock.recv_into(reader.buffer()):
                frame = reader.received(count)
                if frame is not None:
                    return frame
        return None

    def is_open(self, for_s: float) -> bool:
        """Does nothing come, not even the end?"""
        try:
            return self.read(for_s) is not None
        except TimeoutError:
            return True


class Slices:
    """Room for messages of one slice."""

    def reserve(self, _msg_id: int, total: int, _offset: int, _size: int) -> memoryview:
        self.message = memoryview(bytearray(total))
        return self.message

    def commit(self, _msg_id: int, _size: int) -> memoryview:
        return self.message


class Door:
    """A listening server and the events it hands on; the test plays the actor."""

    def __init__(self, session: SessionPolicy | None = None) -> None:
        self.events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self.server = Server(
            syncer_policy(2, session=session), torch.device("cpu"), lambda event, _now, _handled: self.events.put(event)
        )
        self.address = self.server.listen()
        self.callers: list[Caller] = []

    def call(self, first: Message | bytes) -> Caller:
        caller = Caller(self.address, first)
        self.callers.append(caller)
        return caller

    def next(self, kind: type[ev.Event]) -> ev.Event:
        event = self.events.get(timeout=WAIT_S)
        assert isinstance(event, kind), event
        return event

    def admit(self, message: Hello) -> Caller:
        """A whole control stream: HELLO and admission."""
        caller = self.call(message)
        self.server.admit(self.next(ev.HelloArrived).ticket, Member(message.learner_id, message.generation), message)
        return caller

    def close(self) -> None:
        self.server.close()
        for caller in self.callers:
            caller.sock.close()


@pytest.fixture
def entrance() -> Iterator[Door]:
    entrance = Door()
    yield entrance
    entrance.close()


def said(streams: int, generation: int = 1) -> Hello:
    return hello(0, generation, LAYOUT, num_streams=streams)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """Early data sockets are given up after this long."""
    monkeypatch.setattr(door, "_EARLY_S", 0.2)
    return 0.2


class TestDataSockets:
    @pytest.mark.usefixtures("impatient")
    def test_one_that_is_early_waits_for_its_hello_and_no_longer_than_allowed(self, entrance):
        early = entrance.call(DataHello(0, 1, 0))
        assert early.read() is None, "a bare close"
        early = entrance.call(DataHello(0, 1, 0))
        entrance.admit(said(1))
        entrance.server.send(WHO, BcastFragment(0, 0, bytes(16)))
        assert early.read().kind is MessageType.BCAST_FRAGMENT

    def test_one_whose_hello_waits_for_the_actor_is_not_early(self, entrance, impatient):
        """A long checkpoint must not cost a joining learner its group."""
        control, data = entrance.call(said(1)), entrance.call(DataHello(0, 1, 0))
        ticket = entrance.next(ev.HelloArrived).ticket
        assert data.is_open(4 * impatient)
        entrance.server.admit(ticket, WHO, said(1))
        entrance.server.send(WHO, BcastFragment(0, 0, bytes(16)))
        assert data.read().kind is MessageType.BCAST_FRAGMENT
        assert control.is_open(0.1)

    def test_one_whose_hello_was_refused_is_closed(self, entrance, impatient):
        control, data = entrance.call(said(1)), entrance.call(DataHello(0, 1, 0))
        ticket = entrance.next(ev.HelloArrived).ticket
        assert data.is_open(2 * impatient)
        entrance.server.refuse(ticket, "no")
        frame = control.read()
        assert decode(frame.kind, frame.payload).text == "no"
        assert data.read() is None

    def test_one_of_a_superseded_or_dead_group_is_closed_at_once(self, entrance):
        entrance.admit(said(1, generation=1))
        newest = entrance.admit(said(1, generation=2))
        assert entrance.call(DataHello(0, 1, 0)).read(door._EARLY_S / 2) is None
        newest.sock.close()
        entrance.next(ev.GroupLost)
        assert entrance.call(DataHello(0, 2, 0)).read(door._EARLY_S / 2) is None

    @pytest.mark.parametrize("index", [1, 7])
    def test_one_beyond_what_hello_declared_is_told_so_and_the_group_lives(self, entrance, index):
        control = entrance.admit(said(1))
        frame = entrance.call(DataHello(0, 1, index)).read()
        assert f"data stream {index}" in decode(frame.kind, frame.payload).text
        assert control.is_open(0.1)


class TestWithoutThreads:
    """The system refuses threads for a while; a server that stopped listening then would be lost for good."""

    @pytest.fixture
    def no_threads(self, monkeypatch):
        start, refused = threading.Thread.start, threading.Event()

        def refuse(thread: threading.Thread) -> None:
            if refused.is_set() or not thread.name.startswith(("handshake", "refusal", "learner-0")):
                return start(thread)
            refused.set()
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)

    @pytest.mark.usefixtures("no_threads")
    def test_a_socket_without_a_thread_is_closed_and_the_next_one_served(self, entrance):
        assert entrance.call(said(0)).read() is None
        entrance.call(said(0))
        entrance.next(ev.HelloArrived)

    def test_a_refusal_without_a_thread_is_a_bare_close(self, entrance, request):
        control = entrance.call(said(0))
        ticket = entrance.next(ev.HelloArrived).ticket
        request.getfixturevalue("no_threads")
        entrance.server.refuse(ticket, "no")
        assert control.read() is None

    def test_a_group_without_threads_is_a_lost_group(self, entrance, request):
        control, data = entrance.call(said(1)), entrance.call(DataHello(0, 1, 0))
        ticket = entrance.next(ev.HelloArrived).ticket
        request.getfixturevalue("no_threads")
        entrance.server.admit(ticket, WHO, said(1))
        assert entrance.next(ev.GroupLost).member == WHO
        assert control.read() is None
        assert data.read() is None
