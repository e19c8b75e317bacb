"""Slices out and slices in: how one bulk message travels over several sockets.

``Slicer`` decides which 4 MiB slice goes to which stream; ``Reassembler`` decides whether a slice may be received
and lends its place in the message. Neither knows sockets or locks: the sockets of a group share one Reassembler
behind the transport's lock, reserving before they receive and committing after.

    reserve: id new -> allocate the message; range free -> lent      commit: bytes received == total -> whole message
    violations: total < 13 or over the limit; total changed; end past total; any overlap with what is received or
    reserved; too many partial messages, reserved bytes (both are congestion) or disjoint ranges

Source: v4 §Streams and chunks (4 MiB slices of whole inner frames); rulings §1.6, §1.7.

* pure
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from yeto_torch.wire.buffers import Buffer, allocate
from yeto_torch.wire.constants import (
    CHUNK_ENVELOPE,
    CHUNK_ENVELOPE_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_INTERVALS,
    SLICE_BYTES,
    MessageType,
)
from yeto_torch.wire.errors import CongestedError, PeerError

# Tensor bytes begin 17 (INIT), 25 (BCAST, FINAL) or 61 bytes (PUSH) into their message: with these before it they lie
# where f32 values may lie, and are worked on there, without a copy.
_LEAD_BYTES = 3
_CHUNK_HEAD = struct.Struct(HEADER.format + CHUNK_ENVELOPE.format[1:])  # frame header and chunk envelope in one


class Slicer:
    """Cuts inner frames into CHUNK frames, round robin; the turn runs on across messages."""

    def __init__(self) -> None:
        self._next_msg_id = 0
        self._turn = 0

    def slice(self, parts: Sequence[Buffer], streams: Sequence[int]) -> list[tuple[int, tuple[Buffer, ...]]]:
        """One inner frame, given as parts, as (stream, parts of one CHUNK frame) in order; nothing is copied.

        ``streams`` are the data streams attached now, ascending and not empty.
        """
        views = [memoryview(part).cast("B") for part in parts]
        total = sum(len(view) for view in views)
        msg_id, self._next_msg_id = self._next_msg_id, self._next_msg_id + 1
        out: list[tuple[int, tuple[Buffer, ...]]] = []
        for offset in range(0, total, SLICE_BYTES):
            size = min(SLICE_BYTES, total - offset)
            head = _CHUNK_HEAD.pack(MAGIC, MessageType.CHUNK, CHUNK_ENVELOPE_BYTES + size, msg_id, total, offset)
            out.append((streams[self._turn % len(streams)], (head, *_window(views, offset, size))))
            self._turn += 1
        return out


def _window(views: Sequence[memoryview], offset: int, size: int) -> Iterator[memoryview]:
    """The views that make up bytes [offset, offset + size) of the concatenation."""
    for view in views:
        if offset < len(view) and size > 0:
            piece = view[offset : offset + size]
            yield piece
            size -= len(piece)
            offset = 0
        else:
            offset -= min(offset, len(view))


class _Partial:
    """One message on its way: its buffer, the ranges taken (merged, sorted), the bytes received."""

    __slots__ = ("buffer", "ends", "received", "starts")

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.received = 0

    def take(self, start: int, end: int) -> int:
        """Mark [start, end) as taken; returns the change in the number of disjoint ranges. Raises on overlap."""
        index = bisect_right(self.starts, start)
        if (index and self.ends[index - 1] > start) or (index < len(self.starts) and self.starts[index] < end):
            raise PeerError(f"CHUNK [{start}, {end}) overlaps bytes already sent")
        joins_left = index > 0 and self.ends[index - 1] == start
        joins_right = index < len(self.starts) and self.starts[index] == end
        if joins_left and joins_right:
            self.ends[index - 1] = self.ends.pop(index)
            self.starts.pop(index)
            return -1
        if joins_left:
            self.ends[index - 1] = end
            return 0
        if joins_right:
            self.starts[index] = start
            return 0
        self.starts.insert(index, start)
        self.ends.insert(index, end)
        return 1


class Reassembler:
    """The table of partial messages of one group, shared by its sockets. Not thread-safe by itself.

    Args:
        max_inner: bytes of the largest inner frame.
        max_partials: messages open at once.
        max_reserved_bytes: bytes that the open messages together may hold; twice as many with those that came in one
            piece, or are whole and not dealt with yet.
        room: memory for so many bytes; what it holds does not matter.

    Attributes:
        reserved_bytes: held by partial messages now.
    """

    def __init__(
        self, max_inner: int, max_partials: int, max_reserved_bytes: int, room: Callable[[int], memoryview] = allocate
    ) -> None:
        self._room = room
        self._max_inner, self._max_partials, self._max_reserved = max_inner, max_partials, max_reserved_bytes
        self._partials: dict[int, _Partial] = {}
        self.reserved_bytes = self._held = 0
        self._intervals = 0

    def __len__(self) -> int:
        return len(self._partials)

    def reserve(self, msg_id: int, total: int, offset: int, size: int) -> memoryview:
        """The place of bytes [offset, offset + size) of message ``msg_id``, to be received into. Raises PeerError."""
        if size < 1:
            raise PeerError("CHUNK carries nothing")
        if not HEADER_BYTES <= total <= self._max_inner:
            raise PeerError(f"CHUNK of a message of {total} bytes, legal are {HEADER_BYTES} to {self._max_inner}")
        end = offset + size
        if end > total:
            raise PeerError(f"CHUNK [{offset}, {end}) reaches past its message of {total} bytes")
        partial = self._partials.get(msg_id)
        if partial is None:
            partial = self._open(msg_id, total)
        elif len(partial.buffer) != total:
            raise PeerError(f"CHUNK says its message has {total} bytes, earlier ones said {len(partial.buffer)}")
        self._intervals += partial.take(offset, end)
        if self._intervals > MAX_INTERVALS:
            raise PeerError(f"more than {MAX_INTERVALS} disjoint chunk ranges are open")
        return partial.buffer[offset:end]

    def commit(self, msg_id: int, size: int) -> memoryview | None:
        """``size`` reserved bytes have arrived; the whole message once all have."""
        partial = self._partials[msg_id]
        partial.received += size
        if partial.received < len(partial.buffer):
            return None
        del self._partials[msg_id]
        self.reserved_bytes -= len(partial.buffer)
        self._intervals -= len(partial.starts)
        return partial.buffer

    def hold(self, nbytes: int) -> None:
        """A message that comes in one piece will take so much memory, until ``release``. Raises PeerError."""
        self._check_room(nbytes)
        self._held += nbytes

    def keep(self, nbytes: int) -> None:
        """A message that became whole keeps its memory, until ``release``."""
        self._held += nbytes

    def release(self, nbytes: int) -> None:
        """What was held or kept has been dealt with."""
        self._held -= nbytes

    def drop(self) -> None:
        """Forget every open message: nobody waits for them any more. What still comes of them must not be committed."""
        self._partials.clear()
        self.reserved_bytes = self._intervals = 0

    def _check_room(self, nbytes: int) -> None:
        total, most = self.reserved_bytes + self._held + nbytes, 2 * self._max_reserved
        if total > most:
            raise CongestedError(f"messages on their way would take {total} bytes, at most {most} are legal")

    def _open(self, msg_id: int, total: int) -> _Partial:
        if len(self._partials) >= self._max_partials:
            raise CongestedError(f"more than {self._max_partials} partial messages are open")
        reserved, most = self.reserved_bytes + total, self._max_reserved
        if reserved > most:
            raise CongestedError(f"partial messages would reserve {reserved} bytes, at most {most} are legal")
        self._check_room(total)
        partial = self._partials[msg_id] = _Partial(self._room(total + _LEAD_BYTES)[_LEAD_BYTES:])
        self.reserved_bytes += total
        return partial
