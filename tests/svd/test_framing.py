"""The pipe's frames: every field checked before anything is allocated for it; bytes arrive whole through any pipe."""

import os
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.config.policy import IsoScale
from syncer.svd import framing
from syncer.svd.framing import Request, Status
from yeto_torch.wire.errors import StateError

REQUEST = Request(5, IsoScale.NORM, 3, 4)
HEADER = struct.Struct("<4sIQQQQ")


def test_the_headers_are_these_bytes():
    assert framing.request_header(REQUEST) == HEADER.pack(b"YSVQ", 1, 5, 3, 4, 48)
    assert framing.matrix_header(REQUEST) == HEADER.pack(b"YSVA", 0, 5, 3, 4, 48)
    assert framing.failure_frame(REQUEST, "né") == HEADER.pack(b"YSVA", 1, 5, 3, 4, 3) + "né".encode()
    assert HEADER.size == framing.HEADER_BYTES


@given(
    number=st.integers(0, 2**64 - 1),
    scale=st.sampled_from(IsoScale),
    rows=st.integers(1, 1 << 16),
    cols=st.integers(1, 1 << 16),
)
def test_round_trip(number, scale, rows, cols):
    request = Request(number, scale, rows, cols)
    assert framing.parse_request(framing.request_header(request)) == request
    assert framing.parse_reply(framing.matrix_header(request), request) == (Status.MATRIX, 4 * rows * cols)


@pytest.mark.parametrize(
    "fields",
    [
        (b"YSVA", 0, 5, 3, 4, 48),
        (b"YSVQ", 2, 5, 3, 4, 48),
        (b"YSVQ", 0, 5, 0, 4, 0),
        (b"YSVQ", 0, 5, 3, 0, 0),
        (b"YSVQ", 0, 5, 3, 4, 47),
        (b"YSVQ", 0, 5, 3, 4, 2**64 - 1),
        (b"YSVQ", 0, 5, 2**32, 2**32, 0),  # rows * cols is 0 modulo 2^64
        (b"YSVQ", 0, 5, framing.MAX_NUMEL + 1, 1, 4 * framing.MAX_NUMEL + 4),
        (b"YSVQ", 0, 5, 2**62, 4, 2**64 - 16),
    ],
)
def test_a_malformed_request_is_refused(fields):
    with pytest.raises(StateError):
        framing.parse_request(HEADER.pack(*fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((b"YSVQ", 0, 5, 3, 4, 48), "malformed"),
        ((b"\0\0\0\0", 0, 5, 3, 4, 48), "malformed"),
        ((b"YSVA", 2, 5, 3, 4, 48), "malformed"),
        ((b"YSVA", 0, 6, 3, 4, 48), "answered request 6 instead of 5"),
        ((b"YSVA", 1, 6, 3, 4, 48), "answered request 6 instead of 5"),
        ((b"YSVA", 0, 5, 4, 3, 48), "answered a 3 x 4 matrix with shape 4 x 3"),
        ((b"YSVA", 0, 5, 3, 2**63, 48), "with shape 3 x"),
        ((b"YSVA", 0, 5, 3, 4, 44), "announced 44 bytes"),
        ((b"YSVA", 0, 5, 3, 4, 2**63), "announced 9223372036854775808 bytes"),
        ((b"YSVA", 1, 5, 3, 4, 4097), "4097 bytes of text"),
    ],
)
def test_a_malformed_reply_is_refused(fields, words):
    with pytest.raises(StateError, match=words):
        framing.parse_reply(HEADER.pack(*fields), REQUEST)


def test_a_long_text_is_cut():
    frame = framing.failure_frame(REQUEST, "x" * 10_000)
    assert framing.parse_reply(frame[: framing.HEADER_BYTES], REQUEST) == (Status.FAILED, framing.MAX_TEXT_BYTES)
    assert len(frame) == framing.HEADER_BYTES + framing.MAX_TEXT_BYTES


def test_parts_larger_than_the_pipe_arrive_whole_and_in_order():
    parts = [os.urandom(7), os.urandom(3_000_001), b"", os.urandom(500_000)]
    target = bytearray(sum(map(len, parts)))
    read, write = os.pipe()
    sender = threading.Thread(target=framing.send, args=(write, *parts))
    sender.start()
    framing.receive(read, target)
    sender.join()
    os.close(write)
    assert target == b"".join(parts)
    with pytest.raises(EOFError):
        framing.receive(read, bytearray(1))
    os.close(read)


def test_an_end_in_the_middle_tells_how_much_came():
    read, write = os.pipe()
    os.write(write, b"abc")
    os.close(write)
    with pytest.raises(EOFError) as caught:
        framing.receive(read, bytearray(4))
    os.close(read)
    assert caught.value.args == (3,)


def test_nobody_reads():
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError):
        framing.send(write, b"x")
    os.close(write)
