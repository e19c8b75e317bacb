"""Real sockets for transport tests: loopback pairs, a peer that speaks raw bytes, a recorder of callbacks, a rig."""

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.support.waiting import until
from tests.support.wire_by_hand import limits_to, plain_layout
from yeto_torch.wire.constants import Direction, WireDType
from yeto_torch.wire.layout import WireLayout
from yeto_torch.wire.messages import Message, encode
from yeto_torch.wire.transport.group import Closed, Group
from yeto_torch.wire.transport.sockets import Stream, refuse

PATIENCE_S = 20.0  # a deadline for what should take milliseconds, on a busy machine
SMALL_BUFFER = 4096  # the kernel doubles and rounds it

LAYOUT = plain_layout(10, 1_000, 100_000)  # f32: 40 bytes, 4 kB, 400 kB


def loopback(buffer: int | None = None) -> tuple[socket.socket, socket.socket]:
    """Two ends of one TCP connection, optionally with small kernel buffers."""
    with socket.socket() as listener:
        if buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        near = socket.socket()
        if buffer:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def raw(message: Message) -> bytes:
    """A message as the bytes of its frame."""
    return b"".join(encode(message))


def in_thread(call: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=call, args=args, daemon=True)
    thread.start()
    return thread


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Whoever dials, until the listener is closed."""
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        yield sock


def reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Recorder:
    """Both callbacks of a group; everything is kept in order of arrival."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.stamps: list[float] = []
        self.closed: list[Closed] = []
        self.late: list[Message] = []  # what came after on_closed: must stay empty
        self.changed = threading.Condition()

    def on_message(self, message: Message, now: float) -> None:
        with self.changed:
            (self.late if self.closed else self.messages).append(message)
            self.stamps.append(now)
            self.changed.notify_all()

    def on_closed(self, closed: Closed) -> None:
        with self.changed:
            self.closed.append(closed)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S), f"have {self.messages[:9]}, closed {self.closed}"

    def wait_messages(self, count: int) -> list[Message]:
        self.wait(lambda: len(self.messages) >= count or bool(self.closed))
        assert len(self.messages) >= count, f"closed early: {self.closed}"
        return self.messages

    def wait_closed(self) -> Closed:
        self.wait(lambda: bool(self.closed))
        return self.closed[0]


class RawPeer:
    """The other side as bare sockets: index 0 is the control stream, i + 1 data stream i."""

    def __init__(self, socks: list[socket.socket]) -> None:
        self.socks = socks
        for sock in socks:
            sock.settimeout(PATIENCE_S)

    def say(self, raw: bytes, stream: int = 0) -> None:
        self.socks[stream].sendall(raw)

    def exactly(self, count: int, stream: int = 0) -> bytes:
        out = bytearray()
        while len(out) < count:
            part = self.socks[stream].recv(count - len(out))
            assert part, f"stream {stream} closed after {len(out)} of {count} bytes"
            out += part
        return bytes(out)

    def frame(self, stream: int = 0) -> tuple[int, bytes]:
        """The next frame as (type, payload)."""
        magic, kind, length = struct.unpack("<IBQ", self.exactly(13, stream))
        assert magic == 0xD170C0DE
        return kind, self.exactly(length, stream)

    def frames(self, stream: int = 0) -> list[tuple[int, bytes]]:
        """All frames until the group closes this socket."""
        out = []
        while not self.at_end(stream):
            out.append(self.frame(stream))
        return out

    def at_end(self, stream: int = 0) -> bool:
        try:
            return self.socks[stream].recv(1, socket.MSG_PEEK) == b""
        except ConnectionError:
            return True

    def readable(self, *streams: int, within_s: float = 0.0) -> list[int]:
        """The streams with bytes (or an end) to read."""
        chosen = streams or tuple(range(len(self.socks)))
        ready, _, _ = select.select([self.socks[s] for s in chosen], [], [], within_s)
        return [s for s in chosen if self.socks[s] in ready]

    def close(self) -> None:
        for sock in self.socks:
            sock.close()


@dataclass
class Rig:
    """Makes groups and sees to their end: every one must be able to end all its threads."""

    groups: list[Group] = field(default_factory=list)
    raw: list[RawPeer] = field(default_factory=list)
    gates: list[threading.Event] = field(default_factory=list)

    def group(
        self,
        streams: int = 0,
        *,
        inbound: Direction = Direction.TO_SYNCER,
        attach: int | None = None,
        start: bool = True,
        buffer: int | None = None,
        layout: WireLayout = LAYOUT,
        **options: object,
    ) -> tuple[Group, Recorder, RawPeer]:
        """A group, what it reports, and the bare sockets it talks to; ``attach`` of its data streams are there."""
        count = streams if attach is None else attach
        near, far = zip(*(loopback(buffer) for _ in range(1 + streams)), strict=True)
        recorder, peer = Recorder(), RawPeer(list(far))
        self.raw.append(peer)
        callbacks = {"on_message": recorder.on_message, "on_closed": recorder.on_closed}
        group = Group(near[0], limits_to(inbound, layout, WireDType.F32), streams, **(callbacks | options))
        self.groups.append(group)
        group.spare = near[1:]
        if start:
            group.start()
        for index in range(count):
            group.attach(index, near[1 + index])
        return group, recorder, peer

    def couple(self, streams: int = 0, **options: object) -> tuple[Group, Recorder, Group, Recorder]:
        """(syncer's group, its recorder, learner's group, its recorder), connected and started."""
        pairs = [loopback() for _ in range(1 + streams)]
        made: list[object] = []
        for side, inbound in enumerate((Direction.TO_SYNCER, Direction.TO_LEARNER)):
            recorder = Recorder()
            callbacks = {"on_message": recorder.on_message, "on_closed": recorder.on_closed}
            limits = limits_to(inbound, LAYOUT, WireDType.F32)
            group = Group(pairs[0][side], limits, streams, name=f"side{side}", **(callbacks | options))
            group.start()
            for index in range(streams):
                group.attach(index, pairs[1 + index][side])
            self.groups.append(group)
            made += [group, recorder]
        return tuple(made)

    def gate(self) -> threading.Event:
        """An event that a callback may wait for; opened at the latest when the test ends."""
        self.gates.append(threading.Event())
        return self.gates[-1]

    def finish(self) -> None:
        for gate in self.gates:
            gate.set()
        for peer in self.raw:
            peer.close()
        for group in self.groups:
            group.close()
        for group in self.groups:
            assert group.join(PATIENCE_S), f"{group.name} did not end: {threading.enumerate()}"
            for sock in getattr(group, "spare", ()):
                sock.close()


# ---------------------------------------------------------- what holds for a stream on any socket, with TLS or without


def a_slow_reader_is_waited_for(stream: Stream, read: Callable[[], object], *, pace_s: float) -> None:
    """A write timeout of 0.5 s counts from the last byte that the other side took, not from the beginning."""
    failure: list[tuple[float, str]] = []

    def write() -> None:
        try:
            stream.write([bytes(10**8)], 0.5)
        except TimeoutError as error:
            failure.append((time.monotonic(), str(error)))

    writer = in_thread(write)
    begin, pace = time.monotonic(), threading.Event()
    while time.monotonic() < begin + 1.5:  # three times the timeout: slow, but alive
        read()
        assert not pace.wait(pace_s)
        assert not failure
    stopped = time.monotonic()
    writer.join(PATIENCE_S)
    ((at, text),) = failure
    assert "0.5 s" in text
    assert at - stopped > 0.3


def is_done(closer: threading.Thread, near: socket.socket) -> None:
    """The thread that refuses has ended and closed its socket."""
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert near.fileno() == -1


def a_refusal_is_bounded(near: socket.socket) -> None:
    """A peer that does not read cannot hold up who refuses it."""
    begin = time.monotonic()
    refuse(near, "x" * 60_000)
    assert time.monotonic() - begin < 5
    assert near.fileno() == -1


def a_shutdown_wakes_both_sides(stream: Stream, stalled: Callable[[], bool]) -> None:
    """A writer whose peer does not read, and a reader whose peer says nothing, both end at once."""
    outcome: list[OSError] = []

    def write() -> None:
        try:
            stream.write([bytes(10**7)], 600)
        except OSError as error:
            outcome.append(error)

    writer, reader = in_thread(write), in_thread(stream.discard)
    until(stalled)
    stream.shutdown()
    writer.join(PATIENCE_S)
    reader.join(PATIENCE_S)
    assert not writer.is_alive()
    assert not reader.is_alive()
    assert len(outcome) == 1
