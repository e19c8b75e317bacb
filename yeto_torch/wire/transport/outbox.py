"""What goes out next, on which socket: the sending half of one connection group, without sockets or threads.

It decides the order of frames, what a newer message replaces, when a bulk message is sliced and where its slices
go. It must not know sockets, locks or clocks; time is an argument.

    stream 0   HEARTBEAT, then everything else first in, first out
    streams 1+ slices of bulk messages, round robin over the streams attached when the message is sliced

    bulk is    | when
    held       | streams were declared, not all are attached, and ``stream_wait_s`` has not passed
    plain      | no stream was declared, or none is attached: on stream 0, in its order
    sliced     | otherwise, and only once a data stream has nothing to do

Bounded by construction: a queued message has a key, its type and fragment, and a newer one of that key takes its
place in the queue. Slicing late keeps a message replaceable up to the last moment. Messages that are sliced but
not sent are limited in number and bytes.

Source: v4 §Streams and chunks (control on stream 0, slices round-robin over data streams); rulings §1.6, §1.8.

* pure
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.chunks import Slicer
from yeto_torch.wire.constants import SLICE_BYTES
from yeto_torch.wire.errors import LocalError, PeerError
from yeto_torch.wire.messages import Error, Heartbeat, Message, encode, is_bulk

OnSent = Callable[[], None]
_Key = tuple[int, ...]

# Messages that are sliced and unsent, per data stream: slices dealt to a slow stream must not idle the others at once.
_SLICED_MESSAGES_PER_STREAM = 2


@dataclass(slots=True, eq=False)
class _Queued:
    """A message that waits; ``order`` is its place, inherited from the one it replaced."""

    order: int
    message: Message
    on_sent: OnSent | None


@dataclass(slots=True, eq=False)
class _Shipment:
    """One message on its way, as ``left`` frames that have not been sent yet."""

    left: int
    on_sent: OnSent | None
    sliced: bool


@dataclass(slots=True, eq=False)
class Job:
    """One frame to be written to one stream, as parts in order."""

    stream: int
    parts: tuple[Buffer, ...]
    nbytes: int
    shipment: _Shipment


class Outbox:
    """The sending half of a group with ``num_streams`` data streams, as HELLO declared. Not thread-safe by itself."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._hold_until = float("inf")
        self._slicer = Slicer()
        self._order = 0
        self._first: _Queued | None = None  # a heartbeat, or the last word
        self._control: dict[_Key, _Queued] = {}
        self._bulk: dict[_Key, _Queued] = {}
        self._lanes: dict[int, deque[Job]] = {}  # frames that wait, per attached data stream
        self._sliced_messages = 0
        self._sliced_bytes = 0
        self._writing: set[int] = set()
        self.ended = False  # the last word was given

    def start(self, hold_until: float) -> None:
        """Bulk may go at ``hold_until``, or as soon as every declared stream is attached."""
        self._hold_until = hold_until

    def attach(self, index: int) -> None:
        """Data stream ``index`` (0-based) is there. Raises PeerError when it cannot be."""
        if not 0 <= index < self._num_streams:
            raise PeerError(f"data stream {index}: HELLO declared {self._num_streams}, counted from 0")
        if index + 1 in self._lanes:
            raise PeerError(f"data stream {index} is attached already")
        self._lanes[index + 1] = deque()
        self._lanes = dict(sorted(self._lanes.items()))

    def put(self, message: Message, on_sent: OnSent | None = None) -> None:
        """Queue a message; one of the same type and fragment that still waits is replaced and never sent."""
        if isinstance(message, Heartbeat):
            self._first = _Queued(0, message, on_sent)
            return
        fragment = getattr(message, "fragment", None)
        key = (message.TYPE,) if fragment is None else (message.TYPE, fragment)
        queue = self._bulk if is_bulk(message) else self._control
        old = queue.get(key)
        self._order += 1
        queue[key] = _Queued(self._order if old is None else old.order, message, on_sent)

    def last_word(self, error: Error) -> None:
        """Drop everything that has not begun and let ``error`` follow whatever is half-sent on stream 0."""
        self._control.clear()
        self._bulk.clear()
        for jobs in self._lanes.values():
            jobs.clear()
        self._first = _Queued(0, error, None)
        self.ended = True

    def pending(self) -> bool:
        """Is anything not handed over yet? After a last word only stream 0 matters."""
        if self.ended:
            return self._first is not None or 0 in self._writing
        queued = self._first is not None or bool(self._control) or bool(self._bulk)
        return queued or bool(self._writing) or any(self._lanes.values())

    def at_once(self, message: Message, now: float) -> tuple[Buffer, ...] | None:
        """The frame of ``message``, if it would be the very next one on stream 0 and nothing is being written there.

        It is the caller's then to send; ``begun`` takes what is left of it.
        """
        if 0 in self._writing or self._first is not None or self._control or self._bulk:
            return None
        return encode(message) if not is_bulk(message) or self._plain(now) else None

    def begun(self, parts: Sequence[Buffer]) -> Job:
        """The rest of a frame that was sent at once in part; its writer calls ``done``."""
        self._writing.add(0)
        return Job(0, tuple(parts), sum(map(len, parts)), _Shipment(1, None, sliced=False))

    def next_deadline(self, now: float) -> float | None:
        """When held bulk may go although streams are missing; None if nothing waits for that."""
        return self._hold_until if self._bulk and self._held(now) else None

    def refill(self, now: float) -> set[int]:
        """Slice what may be sliced now; the data streams that were given work."""
        given: set[int] = set()
        while self._may_slice(now):
            key = next(iter(self._bulk))
            queued = self._bulk.pop(key)
            slices = self._slicer.slice(encode(queued.message), tuple(self._lanes))
            shipment = _Shipment(len(slices), queued.on_sent, sliced=True)
            self._sliced_messages += 1
            for stream, parts in slices:
                job = Job(stream, parts, sum(map(len, parts)), shipment)
                self._sliced_bytes += job.nbytes
                self._lanes[stream].append(job)
                given.add(stream)
        return given

    def has_plain(self, now: float) -> bool:
        """Is there a frame for stream 0?"""
        return self._first is not None or bool(self._control) or (bool(self._bulk) and self._plain(now))

    def take(self, stream: int, now: float) -> Job | None:
        """The next frame for ``stream``; its writer then calls ``done`` before it takes another."""
        if stream in self._writing:
            raise LocalError(f"stream {stream} takes a frame before its last one was done")
        if stream == 0:
            queued = self._take_plain(now)
            if queued is None:
                return None
            parts = encode(queued.message)
            self._writing.add(0)
            return Job(0, parts, sum(map(len, parts)), _Shipment(1, queued.on_sent, sliced=False))
        jobs = self._lanes[stream]
        if not jobs:
            return None
        self._writing.add(stream)
        return jobs.popleft()

    def done(self, job: Job) -> OnSent | None:
        """The last byte of ``job`` was handed over; what to call if that completed its message."""
        self._writing.discard(job.stream)
        shipment = job.shipment
        shipment.left -= 1
        if shipment.sliced:
            self._sliced_bytes -= job.nbytes
            if shipment.left == 0:
                self._sliced_messages -= 1
        return shipment.on_sent if shipment.left == 0 else None

    def _held(self, now: float) -> bool:
        return len(self._lanes) < self._num_streams and now < self._hold_until

    def _plain(self, now: float) -> bool:
        return not self._lanes and not self._held(now)

    def _may_slice(self, now: float) -> bool:
        lanes = self._lanes
        return (
            bool(self._bulk and lanes)
            and not self._held(now)
            and self._sliced_messages < _SLICED_MESSAGES_PER_STREAM * len(lanes)
            and self._sliced_bytes < SLICE_BYTES * len(lanes)
            and any(not jobs and stream not in self._writing for stream, jobs in lanes.items())
        )

    def _take_plain(self, now: float) -> _Queued | None:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        queues = [self._control, self._bulk] if self._plain(now) else [self._control]
        heads = [(next(iter(queue.values())).order, queue) for queue in queues if queue]
        if not heads:
            return None
        _, queue = min(heads, key=lambda head: head[0])
        return queue.pop(next(iter(queue)))
