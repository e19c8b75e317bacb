"""Links made of numbers: a message takes as long as its bytes need through every pipe on its way.

A message travels in slices, each handed on when the one before has left the first pipe: several messages share a pipe
fairly, as connections do, and a long one streams through two pipes at once. It must not know what travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from syncer.plan.agenda import Agenda
from yeto_torch.wire.constants import CHUNK_ENVELOPE_BYTES, HEADER_BYTES, SLICE_BYTES

_PIECES = 8  # of one message at most: finer grain costs time and changes nothing


def framed_bytes(payload: int) -> int:
    """Bytes on the wire of a bulk message of ``payload`` bytes: its frame, cut into chunks, each a frame again."""
    inner = HEADER_BYTES + payload
    return inner + -(-inner // SLICE_BYTES) * (HEADER_BYTES + CHUNK_ENVELOPE_BYTES)


class Pipe:
    """One direction of one link, of ``rate`` bytes per second; ``nbytes`` have gone in so far."""

    def __init__(self, agenda: Agenda, rate: float) -> None:
        self._agenda, self._rate = agenda, rate
        self._free_at = 0.0
        self.nbytes = 0

    def send(self, nbytes: int, out: Callable[[], None]) -> None:
        """Call ``out`` when these bytes have left the other end."""
        self._free_at = max(self._agenda.now, self._free_at) + nbytes / self._rate
        self.nbytes += nbytes
        self._agenda.at(self._free_at, out)


class Transfer:
    """One message on its way through ``pipes``; ``arrived`` is called when its last byte is there."""

    def __init__(
        self, agenda: Agenda, nbytes: int, pipes: Sequence[Pipe], latency_s: float, arrived: Callable[[], None]
    ) -> None:
        self._agenda, self._pipes, self._latency_s, self._arrived = agenda, pipes, latency_s, arrived
        pieces = min(_PIECES, max(1, nbytes // 65536))
        self._sizes = [nbytes // pieces] * (pieces - 1)
        self._sizes.append(nbytes - sum(self._sizes))
        self._left = pieces
        self._next()

    def _next(self) -> None:
        if self._sizes:
            size = self._sizes.pop()
            self._pipes[0].send(size, lambda: self._through(size, 1))

    def _through(self, size: int, pipe: int) -> None:
        if pipe == 1:
            self._next()
        if pipe < len(self._pipes):
            self._pipes[pipe].send(size, lambda: self._through(size, pipe + 1))
            return
        self._left -= 1
        if self._left == 0:
            self._agenda.after(self._latency_s, self._arrived)
