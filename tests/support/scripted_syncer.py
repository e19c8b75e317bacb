"""A syncer whose every word is scripted by a test: real sockets and frames, no decisions of its own.

It speaks through the treaty and the transport, so a test says ``group.broadcast(0, 3, values)`` and reads what the
learner really sent. Waiting is for messages, always with a deadline.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import torch

from tests.support.raw_sockets import accepted
from yeto_torch.wire.codec import decode, encode
from yeto_torch.wire.constants import Direction, MessageType, WireDType
from yeto_torch.wire.errors import LocalError, PeerError
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import (
    BcastFragment,
    DataHello,
    FinalFragment,
    FinalManifest,
    Hello,
    Message,
    PullReq,
    PushFragment,
    Shutdown,
    decode_hello,
)
from yeto_torch.wire.messages import decode as decode_message
from yeto_torch.wire.transport.group import Closed, Group
from yeto_torch.wire.transport.sockets import read_first_frame, tune

WAIT_S = 20.0
M = TypeVar("M")


class ScriptedGroup:
    """One connection group of a learner, seen from the syncer."""

    def __init__(self, hello: Hello, control: socket.socket) -> None:
        self.hello, self.control = hello, control
        self.data: list[socket.socket] = []
        self.messages: list[Message] = []
        self.taken: set[int] = set()
        self.closed: Closed | None = None
        self.changed = threading.Condition()
        self.group = Group(
            control,
            GroupLimits(hello.layout, hello.dtype, Direction.TO_SYNCER, pipeline=8),
            hello.num_streams,
            on_message=self._on_message,
            on_closed=self._on_closed,
            name="scripted syncer",
        )
        self.group.start()

    def _on_message(self, message: Message, _now: float) -> None:
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def _on_closed(self, closed: Closed) -> None:
        with self.changed:
            self.closed = closed
            self.changed.notify_all()

    @property
    def is_whole(self) -> bool:
        """Are all data streams attached?"""
        return len(self.data) == self.hello.num_streams

    # what the syncer says

    def broadcast(self, fragment: int, version: int, values: torch.Tensor) -> None:
        """``values``: [numel] f32; they travel in the bulk dtype."""
        assert self.group.send(BcastFragment(fragment, version, encode(values, self.hello.dtype.bulk)))

    def broadcast_all(self, version: int, values: Iterable[torch.Tensor]) -> None:
        for fragment, value in enumerate(values):
            self.broadcast(fragment, version, value)

    def pull(self, fragment: int, step: int, attempt: int = 1) -> None:
        assert self.group.send(PullReq(fragment, step, attempt))

    def cut(self, step: int, versions: tuple[int, ...], values: Iterable[torch.Tensor]) -> None:
        for fragment, value in enumerate(values):
            assert self.group.send(FinalFragment(fragment, versions[fragment], encode(value, WireDType.F32)))
        assert self.group.send(FinalManifest(step, versions))

    def shutdown(self) -> None:
        assert self.group.send(Shutdown())

    def raw(self, data: bytes) -> None:
        """Bytes of no known meaning on the control stream."""
        self.control.sendall(data)

    def error(self, text: str) -> None:
        self.group.close(error=text)

    def cut_off(self) -> None:
        """The connection is lost."""
        self.group.close()

    # what the learner said

    def next(self, kind: type[M], timeout_s: float = WAIT_S, where: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of that kind that no call returned yet."""
        found = self.maybe(kind, timeout_s, where)
        assert found is not None, f"no {kind.__name__} came; {self.closed}; got {self.messages}"
        return found

    def maybe(self, kind: type[M], timeout_s: float, where: Callable[[M], bool] = lambda _: True) -> M | None:
        """The same, or None if none comes in time."""

        def search() -> int | None:
            for index, message in enumerate(self.messages):
                if index not in self.taken and isinstance(message, kind) and where(message):
                    return index
            return None

        with self.changed:
            self.changed.wait_for(lambda: search() is not None, timeout_s)
            index = search()
            if index is None:
                return None
            self.taken.add(index)
            return self.messages[index]  # type: ignore[return-value]

    def push(self, **fields: int) -> PushFragment:
        """The next PUSH whose fields are these."""
        return self.next(PushFragment, where=lambda m: all(getattr(m, k) == v for k, v in fields.items()))

    def delta(self, push: PushFragment) -> torch.Tensor:
        return decode(push.data, self.hello.layout.numels[push.fragment], self.hello.dtype)

    def wait_closed(self, timeout_s: float = WAIT_S) -> Closed:
        with self.changed:
            assert self.changed.wait_for(lambda: self.closed is not None, timeout_s), "the group stays open"
            assert self.closed is not None
            return self.closed


class ScriptedSyncer:
    """Listens on a free port of this machine and collects the groups that say HELLO.

    ``receive_bytes``: the kernel's receive buffer per connection; small, a learner soon feels that nobody reads.
    """

    def __init__(self, mac_key: bytes | None = None, port: int = 0, receive_bytes: int | None = None) -> None:
        self._mac_key = mac_key
        self.groups: list[ScriptedGroup] = []
        self.refused: list[str] = []
        self._changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", port))
        if receive_bytes is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._accept, name="scripted-syncer", daemon=True)
        self._thread.start()

    def __enter__(self) -> ScriptedSyncer:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def group(self, index: int, timeout_s: float = WAIT_S) -> ScriptedGroup:
        """The index-th group that ever said HELLO, with all its data streams."""
        with self._changed:

            def ready() -> bool:
                return len(self.groups) > index and self.groups[index].is_whole

            assert self._changed.wait_for(ready, timeout_s), f"{len(self.groups)} groups; refused: {self.refused}"
            return self.groups[index]

    def down(self) -> None:
        """Stop listening and drop every connection."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_S)
        for group in self.groups:
            group.cut_off()
        for group in self.groups:
            group.group.join(WAIT_S)

    def _accept(self) -> None:
        for sock in accepted(self._listener):
            tune(sock)
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        try:
            frame = read_first_frame(sock, WAIT_S)
            if frame.kind is MessageType.HELLO:
                group = ScriptedGroup(decode_hello(frame.payload, mac_key=self._mac_key), sock)
                with self._changed:
                    self.groups.append(group)
                    self._changed.notify_all()
                return
            hello = decode_message(frame.kind, frame.payload)
            assert isinstance(hello, DataHello)
            group = next(g for g in self.groups if g.hello.generation == hello.generation)
            group.group.attach(hello.stream_index, sock)
            with self._changed:
                group.data.append(sock)
                self._changed.notify_all()
        except (OSError, PeerError, LocalError, StopIteration) as error:
            self.refused.append(str(error))
            sock.close()
