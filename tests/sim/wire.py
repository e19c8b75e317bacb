"""The network at the level of bytes: real outboxes, frames, slices, readers and reassembly; only sockets are missing.

A pipe splits what is written into pieces of any size, and a frame takes its time to be written, so that slices of one
message overtake each other, control overtakes bulk, and a cut leaves half a frame behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.sim.network import EOF, Connection, End
from tests.sim.world import SafetyError, World
from yeto_torch.wire.chunks import Reassembler
from yeto_torch.wire.errors import CongestedError, PeerError
from yeto_torch.wire.frames import Frame, FrameReader
from yeto_torch.wire.limits import FirstFrameLimits, GroupLimits
from yeto_torch.wire.messages import (
    BcastFragment,
    FinalFragment,
    Hello,
    InitParams,
    Message,
    PushFragment,
    decode,
    decode_hello,
    encode,
)
from yeto_torch.wire.transport.outbox import Job, Outbox

_STREAM_WAIT_S = 2.0


class ByteConnection(Connection):
    """A connection group of bytes.

    Args:
        limits: of what arrives, by the name of the receiving end.
        kernel_bytes: what a socket's buffers hold.
    """

    def __init__(
        self, world: World, streams: int, latency_s: float, limits: dict[str, GroupLimits], kernel_bytes: int
    ) -> None:
        self._limits, self._kernel_bytes = limits, kernel_bytes
        self._tables = {n: Reassembler(o.max_inner, o.max_partials, o.max_reserved_bytes) for n, o in limits.items()}
        self._outboxes = {name: Outbox(streams) for name in limits}
        self._attached: dict[str, set[int]] = {name: {0} for name in limits}
        self._writing: dict[tuple[str, int], Job] = {}
        self._admitted = False
        super().__init__(world, streams, latency_s)
        self._outboxes["learner"].start(world.now + _STREAM_WAIT_S)
        for stream in range(1, streams + 1):
            world.after(world.rng.uniform(0.0, 0.5), self._attach, self.learner, stream)

    # Joining

    def hello(self, hello: Hello, arrived: Callable[[Hello], None]) -> None:
        frame = _read_first(b"".join(bytes(part) for part in encode(hello)))
        super().hello(decode_hello(frame.payload), arrived)

    def admit(self) -> None:
        self._admitted = True
        self._outboxes["syncer"].start(self.world.now + _STREAM_WAIT_S)
        self.pipes[self.syncer][0].open()
        for stream in self._attached["learner"] - {0}:
            self.world.after(self.world.rng.uniform(0.0, 1.0), self._attach, self.syncer, stream)
        self._kick(self.syncer)

    def _attach(self, end: End, stream: int) -> None:
        """A data stream is there, for this side."""
        if end.closed or stream in self._attached[end.name]:
            return
        self._outboxes[end.name].attach(stream - 1)
        self._attached[end.name].add(stream)
        self.pipes[end][stream].open()
        if end is self.learner and self._admitted:
            self.world.after(self.world.rng.uniform(0.0, 1.0), self._attach, self.syncer, stream)
        self._kick(end)

    # Writing

    def send(self, end: End, message: Message, on_sent: Callable[[], None] | None, not_before: float) -> None:
        del not_before  # a stream of bytes cannot hold back one message
        self._outboxes[end.name].put(message, on_sent)
        self._kick(end)

    def close(self, end: End, error: str | None, *, flush: bool) -> None:
        if flush:
            self._flush(end)
        super().close(end, error, flush=flush)

    def encoded(self, message: Message) -> bytes:
        return b"".join(bytes(part) for part in encode(message))

    def _kick(self, end: End) -> None:
        """This side's writers take what they may."""
        if end.closed:
            return
        outbox = self._outboxes[end.name]
        outbox.refill(self.world.now)
        for stream in sorted(self._attached[end.name]):
            if (end.name, stream) not in self._writing and (job := outbox.take(stream, self.world.now)) is not None:
                self._write(end, job)
                self._drained(end, job)
        if (deadline := outbox.next_deadline(self.world.now)) is not None:
            self.world.at(deadline, self._kick, end)

    def _write(self, end: End, job: Job) -> None:
        self._writing[end.name, job.stream] = job
        data, pipe = b"".join(bytes(part) for part in job.parts), self.pipes[self.other(end)][job.stream]
        while data:
            size = self.world.rng.choice([1, 5, 30, 200, 2000])
            pipe.put(data[:size])
            data = data[size:]

    def _drained(self, end: End, job: Job) -> None:
        """A frame is written once the kernel's buffer takes its last byte; a stalled stream holds its writer up."""
        pipe = self.pipes[self.other(end)][job.stream]
        if pipe.pending_bytes <= self._kernel_bytes:
            pipe.on_delivered = lambda: None
            self.world.after(0.0, self._written, end, job)
        else:
            pipe.on_delivered = lambda: self._drained(end, job)

    def _written(self, end: End, job: Job) -> None:
        if end.closed or self._writing.get((end.name, job.stream)) is not job:
            return
        del self._writing[end.name, job.stream]
        on_sent = self._outboxes[end.name].done(job)
        if on_sent is not None:
            on_sent()
        self._kick(end)

    def _flush(self, end: End) -> None:
        """Everything queued goes out now."""
        self._outboxes[end.name].start(self.world.now)
        while self._outboxes[end.name].pending():
            for stream in sorted(self._attached[end.name]):
                if (job := self._writing.get((end.name, stream))) is not None:
                    self._written(end, job)
            self._kick(end)

    # Reading

    def receiver(self, end: End, stream: int) -> Callable[[Any], None]:
        limits = self._limits[end.name]
        reader = FrameReader(limits, self._tables[end.name])

        def deliver(item: Any) -> None:
            if item is EOF:
                end.shut("the peer closed the connection")
                return
            try:
                for frame in _frames(reader, item):
                    end.take(_message(frame, limits, stream))
            except CongestedError as congestion:
                if end is self.learner:
                    raise SafetyError(f"the learner cannot bear its syncer: {congestion}") from congestion
                super(ByteConnection, self).close(end, None, flush=False)
                end.on_closed(f"violation: {congestion}", None)
            except PeerError as violation:
                raise SafetyError(f"the {end.name} finds its honest peer in violation: {violation}") from violation

        return deliver


def _frames(reader: FrameReader, data: bytes) -> list[Frame]:
    frames = []
    while data:
        buffer = reader.buffer()
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        data = data[size:]
        if (frame := reader.received(size)) is not None:
            frames.append(frame)
    return frames


def _message(frame: Frame, limits: GroupLimits, stream: int) -> Message:
    """A frame's message, checked as the transport's group checks it."""
    message = decode(frame.kind, frame.payload)
    if isinstance(message, (InitParams, PushFragment, BcastFragment, FinalFragment)):
        limits.check_bulk(message)
    elif stream:
        raise PeerError(f"{frame.kind.name} on a data stream")
    return message


def _read_first(data: bytes) -> Frame:
    """HELLO, byte by byte, under the limits of a fresh socket."""
    reader = FrameReader(FirstFrameLimits())
    frames = [frame for byte in data for frame in _frames(reader, bytes([byte]))]
    assert len(frames) == 1
    return frames[0]
