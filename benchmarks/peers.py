"""A fleet of scripted learners on one thread: they say what a learner says, and compute nothing.

With them a syncer can be measured with many learners, and without the memory of any. Each has one socket and answers
every pull at once with the same bytes; where a socket is full, the others go on, as they would on machines of their
own. Nothing is kept of a broadcast but its version.
"""

from __future__ import annotations

import secrets
import selectors
import socket
from collections.abc import Callable

from benchmarks.harness import clock
from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.constants import Direction, WireDType
from yeto_torch.wire.frames import Frame, FrameReader
from yeto_torch.wire.layout import WireLayout
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import BcastFragment, Hello, InitParams, PullReq, PushFragment, decode, encode
from yeto_torch.wire.transport.sockets import Stream, tune

WAIT_S = 300.0
_BYTES = {WireDType.F32: b"\x00\x00\x00\x3c", WireDType.BF16: b"\x00\x3c"}  # the value 0.0078, over and over


class Peer:
    """One scripted learner: its socket and what it knows."""

    def __init__(self, learner_id: int, address: tuple[str, int], hello: Hello, limits: GroupLimits) -> None:
        self.learner_id = learner_id
        self.socket = socket.create_connection(address, WAIT_S)
        tune(self.socket)
        self.stream = Stream(0, self.socket)
        self.reader = FrameReader(limits)
        self.versions: dict[int, int] = {}
        self.newest = 0
        self.pulls: list[PullReq] = []
        self.unsent: list[Buffer] = []
        self.steps = 0
        self.stream.write(encode(hello), WAIT_S)


class Fleet:
    """``learners`` scripted learners of one session.

    Args:
        address: ``host:port``.
        layout: what they claim to train.
        dtype: f32 or bf16.
    """

    def __init__(self, address: str, learners: int, layout: WireLayout, dtype: WireDType) -> None:
        host, _, port = address.rpartition(":")
        self._layout, self._dtype = layout, dtype
        limits = GroupLimits(layout, dtype, Direction.TO_LEARNER)
        size = layout.max_nbytes(dtype)
        self._data = memoryview(_BYTES[dtype] * (size // len(_BYTES[dtype])))
        self._selector = selectors.DefaultSelector()
        self.peers: list[Peer] = []
        for learner_id in range(learners):
            generation = secrets.randbelow(2**63) + 1
            hello = Hello(learner_id, generation, dtype, layout, bytes(32), bytes(range(32)), None, 0)
            peer = Peer(learner_id, (host, int(port)), hello, limits)
            self.peers.append(peer)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        for fragment in range(len(layout)):
            self.peers[0].stream.write(encode(InitParams(fragment, self._values(fragment))), WAIT_S)
        self._serve_until(lambda: all(len(peer.versions) == len(layout) for peer in self.peers), 0)

    def rounds(self, count: int) -> float:
        """Serve ``count`` rounds, at least 2; seconds per round, from the first one's end to the last one's."""
        start, ends = self.version, []
        for version in range(start + 1, start + count + 1):
            self._serve_until(lambda version=version: self.version >= version, start + count)
            ends.append(clock())
        return (ends[-1] - ends[0]) / (count - 1)

    @property
    def version(self) -> int:
        """The newest round whose broadcast all have seen."""
        return min(peer.newest for peer in self.peers)

    def close(self) -> None:
        self._selector.close()
        for peer in self.peers:
            peer.socket.close()

    def _values(self, fragment: int) -> memoryview:
        return self._data[: self._layout.nbytes(fragment, self._dtype)]

    def _serve_until(self, done: Callable[[], bool], last_round: int) -> None:
        """Read whatever comes until ``done()``; pulls of rounds up to ``last_round`` are answered, others kept."""
        self._answer_all(last_round)
        deadline = clock() + WAIT_S
        while not done():
            if clock() > deadline:
                raise RuntimeError(f"no round within {WAIT_S:g} s: the fleet stands at version {self.version}")
            for key, ready in self._selector.select(1.0):
                if ready & selectors.EVENT_WRITE:
                    self._send(key.data)
                if ready & selectors.EVENT_READ:
                    self._read(key.data, last_round)

    def _read(self, peer: Peer, last_round: int) -> None:
        count = peer.socket.recv_into(peer.reader.buffer())
        if count == 0:
            raise RuntimeError(f"the syncer closed the connection of learner {peer.learner_id}")
        frame = peer.reader.received(count)
        if frame is not None:
            self._take(peer, frame, last_round)

    def _take(self, peer: Peer, frame: Frame, last_round: int) -> None:
        message = decode(frame.kind, frame.payload)
        if isinstance(message, BcastFragment):
            peer.versions[message.fragment] = message.version
            peer.newest = max(peer.newest, message.version)
        elif isinstance(message, PullReq):
            peer.pulls.append(message)
            self._answer(peer, last_round)
        else:
            raise RuntimeError(f"learner {peer.learner_id} was told {message}")

    def _answer_all(self, last_round: int) -> None:
        for peer in self.peers:
            self._answer(peer, last_round)

    def _answer(self, peer: Peer, last_round: int) -> None:
        while peer.pulls and peer.pulls[0].step <= last_round:
            pull = peer.pulls.pop(0)
            peer.steps += 1
            base = peer.versions[pull.fragment]
            data = self._values(pull.fragment)
            push = PushFragment(peer.learner_id, pull.fragment, pull.step, pull.attempt, base, peer.steps, 1, 10, data)
            peer.unsent.extend(encode(push))
        if peer.unsent:
            self._send(peer)

    def _send(self, peer: Peer) -> None:
        """What the kernel takes now; the rest when it has room again."""
        peer.unsent = list(peer.stream.write_now(peer.unsent))
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(peer.socket).events != events:
            self._selector.modify(peer.socket, events, peer)
