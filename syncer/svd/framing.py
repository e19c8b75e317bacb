"""The pipe between the pool and a worker: a fixed header, then the matrix as raw bytes.

    request   magic "YSVQ" | u32 scale  | u64 request id | u64 rows | u64 cols | u64 payload bytes | f32[rows, cols]
    reply     magic "YSVA" | u32 status | u64 request id | u64 rows | u64 cols | u64 payload bytes | payload

Little-endian headers of 40 bytes; matrices row-major in the machine's own f32, both ends being on one machine. A reply
echoes the request's id and shape; its payload is the matrix (status 0) or a sentence in UTF-8 (status 1). Every field
is checked before anything is allocated for it. Matrix bytes go from their tensor's memory into the pipe and from the
pipe into their tensor's memory.

Standard library only: whatever speaks it need not load torch.

Source: v4 §SVD pool (what goes to a child and back); rulings §8.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from enum import IntEnum

from syncer.config.policy import IsoScale
from yeto_torch.wire.errors import StateError

HEADER_BYTES = 40
MAX_NUMEL = 1 << 33  # 32 GiB in f32; beyond what one decomposition can take
MAX_TEXT_BYTES = 4096

_HEADER = struct.Struct("<4sIQQQQ")
_REQUEST, _REPLY = b"YSVQ", b"YSVA"


class Status(IntEnum):
    MATRIX = 0
    FAILED = 1


@dataclass(frozen=True, slots=True)
class Request:
    """Make the spectrum of the [rows, cols] f32 matrix that follows flat."""

    number: int
    scale: IsoScale
    rows: int
    cols: int

    @property
    def payload_bytes(self) -> int:
        return 4 * self.rows * self.cols


def request_header(request: Request) -> bytes:
    return _pack(_REQUEST, request.scale, request, request.payload_bytes)


def parse_request(header: bytes | bytearray) -> Request:
    """Raises StateError on anything that cannot be a request."""
    magic, scale, number, rows, cols, payload_bytes = _HEADER.unpack(header)
    if magic != _REQUEST:
        raise StateError(f"a request begins with {magic!r}")
    if scale not in tuple(IsoScale):
        raise StateError(f"a request with the unknown scale {scale}")
    check_shape(rows, cols)
    request = Request(number, IsoScale(scale), rows, cols)
    if payload_bytes != request.payload_bytes:
        raise StateError(f"a request announces {payload_bytes} bytes for a {rows} x {cols} matrix")
    return request


def matrix_header(request: Request) -> bytes:
    """Goes before the [rows, cols] result."""
    return _pack(_REPLY, Status.MATRIX, request, request.payload_bytes)


def failure_frame(request: Request, text: str) -> bytes:
    """A whole reply: why there is no result."""
    payload = text.encode()[:MAX_TEXT_BYTES]
    return _pack(_REPLY, Status.FAILED, request, len(payload)) + payload


def parse_reply(header: bytes | bytearray, request: Request) -> tuple[Status, int]:
    """Status and payload bytes of the reply to ``request``; raises StateError if it is not that."""
    magic, status, number, rows, cols, payload_bytes = _HEADER.unpack(header)
    if magic != _REPLY or status not in tuple(Status):
        raise StateError(f"sent a malformed frame: it begins with {bytes(header[:8]).hex()}")
    if number != request.number:
        raise StateError(f"answered request {number} instead of {request.number}")
    if (rows, cols) != (request.rows, request.cols):
        raise StateError(f"answered a {request.rows} x {request.cols} matrix with shape {rows} x {cols}")
    if status == Status.MATRIX and payload_bytes != request.payload_bytes:
        raise StateError(f"announced {payload_bytes} bytes for a {rows} x {cols} matrix")
    if status == Status.FAILED and payload_bytes > MAX_TEXT_BYTES:
        raise StateError(f"announced {payload_bytes} bytes of text, more than {MAX_TEXT_BYTES}")
    return Status(status), payload_bytes


def check_shape(rows: int, cols: int) -> None:
    """Raises StateError unless it is the shape of a matrix that may be sent."""
    if rows < 1 or cols < 1 or rows * cols > MAX_NUMEL:
        raise StateError(f"a {rows} x {cols} matrix; the pool takes 1 to {MAX_NUMEL} values")


def _pack(magic: bytes, code: int, request: Request, payload_bytes: int) -> bytes:
    return _HEADER.pack(magic, code, request.number, request.rows, request.cols, payload_bytes)


# ---------------------------------------------------------------------- blocking transfer


def send(fd: int, *parts: bytes | memoryview) -> None:
    """Write every byte of ``parts`` (byte views) in order. Raises OSError when the other end is gone."""
    views = [memoryview(part) for part in parts]
    while views:
        count = os.writev(fd, views)
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]


def receive(fd: int, target: memoryview | bytearray) -> None:
    """Fill ``target`` (a byte view); raises EOFError with the number of bytes that came if the other end closes."""
    view, filled = memoryview(target), 0
    while filled < len(view):
        count = os.readv(fd, [view[filled:]])
        if count == 0:
            raise EOFError(filled)
        filled += count
