"""A relay between learners and a syncer: it records what passes, and does to it what networks do.

Learners dial the relay; where it leads may be changed (``target``), so that a syncer may come back on another port;
while nobody is there, a connection waits. A rule sees every piece before it passes: it may let it through, cut it
short, hold it, or end the connection. Per connection two threads, both ending with it.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from tests.support.raw_sockets import accepted
from yeto_torch.wire.constants import MessageType
from yeto_torch.wire.messages import DataHello, Hello, Message, decode, decode_hello

PIECE_BYTES = 1 << 16
PATIENCE_S = 30.0


class CutError(Exception):
    """A rule's way to end a connection."""


@dataclass(eq=False)
class Pipe:
    """One relayed connection.

    Attributes:
        up, down: what has passed to and from the syncer.
        number: in order of arrival, from 0.
    """

    number: int
    client: socket.socket
    server: socket.socket
    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)
    broken: bool = False

    def cut(self) -> None:
        """Both ends see the connection end."""
        self.broken = True
        for sock in (self.client, self.server):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @property
    def first(self) -> Hello | DataHello | None:
        """What the learner opened it with."""
        for kind, payload in frames(self.up):
            return decode_hello(payload) if kind is MessageType.HELLO else decode(kind, payload)  # type: ignore[return-value]
        return None


Rule = Callable[[Pipe, bool, bytes], bytes]
"""(pipe, towards the syncer?, the next bytes) -> the bytes that pass. May block, or raise CutError."""


class Proxy:
    """Listens on a free port and relays to ``target``; None = nobody is there.

    Args:
        rate: bytes per second of every connection and direction together; None = as fast as it goes.
        record: keep what passes.
    """

    def __init__(self, target: str | None, rate: float | None = None, *, record: bool = True) -> None:
        self.target, self.rate, self.record = target, rate, record
        self.rule: Rule = lambda _pipe, _up, data: data
        self.pipes: list[Pipe] = []
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._over = threading.Event()
        self._listening = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._listening.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._over.set()
        self._listening.join(10.0)
        self.cut()

    def cut(self) -> None:
        """End every connection there is now."""
        for pipe in list(self.pipes):
            pipe.cut()

    def messages(self, *, up: bool) -> Iterator[tuple[Hello, Message]]:
        """Every whole message that has passed in one direction, group by group, with the HELLO of its group."""
        groups: dict[tuple[int, int], tuple[Hello, list[Pipe]]] = {}
        for pipe in list(self.pipes):
            first = pipe.first
            if isinstance(first, Hello):
                groups[first.learner_id, first.generation] = (first, [pipe])
        for pipe in list(self.pipes):
            first = pipe.first
            if isinstance(first, DataHello) and (first.learner_id, first.generation) in groups:
                groups[first.learner_id, first.generation][1].append(pipe)
        for hello, pipes in groups.values():
            partial: dict[int, bytearray] = {}
            for pipe in pipes:
                for kind, payload in frames(pipe.up if up else pipe.down):
                    if kind in (MessageType.HELLO, MessageType.DATA_HELLO):
                        continue
                    if kind is not MessageType.CHUNK:
                        yield hello, decode(kind, payload)
                        continue
                    number, total, offset = struct.unpack_from("<QQQ", payload)
                    whole = partial.setdefault(number, bytearray(total + 8))  # behind the message: bytes received
                    whole[offset : offset + len(payload) - 24] = payload[24:]
                    received = int.from_bytes(whole[total:], "little") + len(payload) - 24
                    whole[total:] = received.to_bytes(8, "little")
                    if received == total:
                        for inner, body in frames(whole[:total]):
                            yield hello, decode(inner, body)

    def _accept(self) -> None:
        for client in accepted(self._listener):
            threading.Thread(target=self._relay, args=(client,), name="proxy", daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        server = self._reach()
        if server is None:
            client.close()
            return
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            pipe = Pipe(len(self.pipes), client, server)
            self.pipes.append(pipe)
        back = threading.Thread(target=self._pump, args=(pipe, False), name=f"proxy {pipe.number}", daemon=True)
        back.start()
        self._pump(pipe, True)
        back.join()
        client.close()
        server.close()

    def _reach(self) -> socket.socket | None:
        """A connection to the target, as soon as there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._over.is_set() and time.monotonic() < deadline:
            with suppress(OSError, AttributeError):
                host, _, port = self.target.rpartition(":")  # type: ignore[union-attr]  # None: nobody is there
                server = socket.create_connection((host, int(port)), 10.0)
                server.settimeout(None)
                return server
            self._over.wait(0.02)
        return None

    def _pump(self, pipe: Pipe, up: bool) -> None:
        source, sink = (pipe.client, pipe.server) if up else (pipe.server, pipe.client)
        passed = pipe.up if up else pipe.down
        try:
            while data := source.recv(PIECE_BYTES):
                data = self.rule(pipe, up, data)
                self._take_time(len(data))
                if self.record:
                    passed += data
                sink.sendall(data)
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)  # the other direction may still have something to say
        except (OSError, CutError):
            pipe.cut()
        if not up:  # the syncer's end comes last: nothing more can follow
            pipe.cut()

    def _take_time(self, nbytes: int) -> None:
        if self.rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self.rate
            pause = self._free_at - now
        time.sleep(pause)


def frames(data: bytes | bytearray) -> Iterator[tuple[MessageType, memoryview]]:
    """The whole frames at the beginning of ``data``."""
    view, at = memoryview(bytes(data)), 0
    while at + 13 <= len(view):
        magic, kind, length = struct.unpack_from("<IBQ", view, at)
        assert magic == 0xD170C0DE, f"no frame at byte {at}"
        if at + 13 + length > len(view):
            return
        yield MessageType(kind), view[at + 13 : at + 13 + length]
        at += 13 + length


class Halfway:
    """A rule that holds one connection in the middle of a message, until ``cut`` ends it.

    Only for connections without data streams, where messages are plain frames.

    Args:
        kind: of the message.
        up: towards the syncer?
        skip: how many of that kind pass before.
    """

    def __init__(self, kind: MessageType, *, up: bool, skip: int = 0) -> None:
        self._kind, self._up, self._skip = kind, up, skip
        self._rests: dict[Pipe, bytes] = {}  # of every pipe what follows its last whole frame
        self._halfway = threading.Event()
        self._over = threading.Event()

    def __call__(self, pipe: Pipe, up: bool, data: bytes) -> bytes:
        if up is not self._up or self._halfway.is_set():
            return data
        before = len(self._rests.get(pipe, b""))
        stream, at = self._rests.get(pipe, b"") + data, 0
        while at + 13 <= len(stream):
            _, kind, length = struct.unpack_from("<IBQ", stream, at)
            middle = at + 13 + length // 2
            if kind == self._kind and self._skip == 0 and len(stream) >= middle:
                sink = pipe.server if up else pipe.client
                sink.sendall(data[: max(0, middle - before)])
                self._halfway.set()
                self._over.wait(PATIENCE_S)
                raise CutError
            if at + 13 + length > len(stream):
                break
            self._skip -= kind == self._kind
            at += 13 + length
        self._rests[pipe] = stream[at:]
        return data

    def wait(self, timeout_s: float = 60.0) -> None:
        """Until half of the message has passed."""
        assert self._halfway.wait(timeout_s), f"no {self._kind.name} came by"

    def cut(self) -> None:
        self._over.set()
