"""Frames: every message whole, byte by byte and with junk behind it; every violation; what is lent and when."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.wire_by_hand import CASES, LAYOUT_G, at_boundary, chunk, chunks, frame, golden, limits_to, same
from yeto_torch.wire.chunks import Reassembler
from yeto_torch.wire.constants import BULK_TYPES, Direction, MessageType
from yeto_torch.wire.errors import LocalError, PeerError
from yeto_torch.wire.frames import Frame, FrameReader
from yeto_torch.wire.limits import FirstFrameLimits
from yeto_torch.wire.messages import decode

UP, DOWN = Direction.TO_SYNCER, Direction.TO_LEARNER


def reader_of(direction: Direction | None) -> FrameReader:
    """A group's reader, or that of a fresh socket."""
    if direction is None:
        return FrameReader(FirstFrameLimits())
    limits = limits_to(direction)
    return FrameReader(limits, Reassembler(limits.max_inner, limits.max_partials, limits.max_reserved_bytes))


def feed(reader: FrameReader, raw: bytes, step: int | None = None) -> list[Frame]:
    """Write ``raw`` into what the reader lends, at most ``step`` bytes at a time."""
    frames, view = [], memoryview(raw)
    while view:
        room = reader.buffer()
        count = min(len(room), len(view), step or len(view))
        room[:count] = view[:count]
        whole = reader.received(count)
        view = view[count:]
        if whole is not None:
            frames.append(whole)
    return frames


WAYS = [(case, way) for case in CASES for way in (case.ways or (None,))]


@pytest.mark.parametrize(("case", "way"), WAYS, ids=[str(case) for case, _ in WAYS])
def test_a_frame_comes_out_whole_however_it_comes_in(case, way):
    forms = [case.raw]
    if case.message.TYPE in BULK_TYPES:
        forms += [b"".join(chunks(case.raw, 0, [])), b"".join(chunks(case.raw, 5, [1, 13, 20]))]
        forms.append(b"".join(reversed(chunks(case.raw, 2**64 - 1, [9, 14]))))
    for raw in forms:
        for step in (None, 1, 3):
            reader = reader_of(way)
            (whole,) = feed(reader, raw, step)
            assert at_boundary(reader)
            assert same(decode(whole.kind, whole.payload), case.message)
            for size in range(1, len(raw)):
                cut = reader_of(way)
                assert not feed(cut, raw[:size])
                assert at_boundary(cut) == (size in _boundaries(raw))


@pytest.mark.parametrize(("case", "way"), WAYS, ids=[str(case) for case, _ in WAYS])
def test_junk_behind_a_frame_costs_the_group_but_not_the_frame(case, way):
    reader = reader_of(way)
    (whole,) = feed(reader, case.raw)
    with pytest.raises(PeerError, match="magic"):
        feed(reader, b"junk" + bytes(9))
    assert same(decode(whole.kind, whole.payload), case.message)
    with pytest.raises(LocalError):
        reader.received(1)


def _boundaries(raw: bytes) -> set[int]:
    """Offsets at which a frame ends, by walking the headers."""
    ends, at = set(), 0
    while at < len(raw):
        at += 13 + struct.unpack_from("<Q", raw, at + 5)[0]
        ends.add(at)
    return ends


def test_many_frames_in_one_piece():
    raw = b"".join(case.raw for case in CASES if DOWN in case.ways)
    expected = [case.message for case in CASES if DOWN in case.ways]
    for step in (None, 7):
        got = [decode(f.kind, f.payload) for f in feed(reader_of(DOWN), raw, step)]
        assert all(map(same, got, expected))
        assert len(got) == len(expected)


def test_the_golden_chunk_pair():
    for order in [("first", "second"), ("second", "first")]:
        (whole,) = feed(reader_of(DOWN), b"".join(golden(f"chunk_pair_{name}") for name in order))
        message = decode(whole.kind, whole.payload)
        assert (message.fragment, message.version) == (0, 0)
        assert struct.unpack("<2f", message.data) == (1.0, -2.0)


# ---------------------------------------------------------------------------------------------------- violations

INNER = frame(5, struct.pack("<IQ", 0, 1) + bytes(16))

VIOLATIONS = {
    "wrong magic": (DOWN, frame(3, bytes(16), magic=0xD170C0DF), "magic"),
    "type 0": (DOWN, frame(0), "type 0"),
    "type 15": (DOWN, frame(15), "type 15"),
    "type 255": (UP, frame(255, length=2**64 - 1), "type 255"),
    "a learner's PULL_REQ": (UP, frame(3, bytes(16)), "PULL_REQ is not legal"),
    "a syncer's PUSH": (DOWN, frame(4, bytes(64)), "PUSH_FRAGMENT is not legal"),
    "a second HELLO": (UP, frame(1, golden("hello_g")), "HELLO is not legal"),
    "a late DATA_HELLO": (UP, golden("data_hello_frame"), "DATA_HELLO is not legal"),
    "ERROR to the syncer": (UP, frame(10, b"x"), "ERROR is not legal"),
    "a first PULL_REQ": (None, frame(3, bytes(16)), "first frame"),
    "a first CHUNK": (None, chunk(0, 33, 0, b"x"), "first frame"),
    "a HELLO of 16 MiB and 1": (None, frame(1, length=2**24 + 1), "16777216"),
    "a DATA_HELLO of 17": (None, frame(8, length=17), "16"),
    "PULL_REQ of 17": (DOWN, frame(3, length=17), "at most 16"),
    "SHUTDOWN of 1": (DOWN, frame(7, length=1), "at most 0"),
    "ERROR of 65537": (DOWN, frame(10, length=65_537), "65536"),
    "BCAST one byte too long": (DOWN, frame(5, length=12 + 24 + 1), "at most 36"),
    "a length of 2^64 - 1": (DOWN, frame(5, length=2**64 - 1), "at most"),
    "CHUNK without an envelope": (DOWN, frame(9), "carries nothing"),
    "an empty CHUNK": (DOWN, chunk(0, 33, 0, b""), "carries nothing"),
    "a CHUNK over 4 MiB": (DOWN, frame(9, length=24 + 4 * 2**20 + 1), "at most"),
    "a CHUNK past its message": (DOWN, chunk(0, 33, 30, bytes(4)), "past"),
    "an offset near 2^64": (DOWN, chunk(0, 33, 2**64 - 1, b"x"), "past"),
    "a message of 12 bytes": (DOWN, chunk(0, 12, 0, b"x"), "12 bytes"),
    "a message over the inner limit": (DOWN, chunk(0, 13 + 36 + 1, 0, b"x"), "50 bytes"),
    "the same CHUNK twice": (DOWN, chunk(0, 33, 0, b"xy") * 2, "overlaps"),
    "a CHUNK over another": (DOWN, chunk(0, 33, 4, b"xy") + chunk(0, 33, 3, b"xy"), "overlaps"),
    "a total that changes": (DOWN, chunk(0, 33, 0, b"xy") + chunk(0, 34, 4, b"x"), "earlier"),
    "CHUNK in CHUNK": (DOWN, chunk(0, 13 + 25, 0, chunk(1, 33, 0, b"x")[: 13 + 25]), "inside CHUNK"),
    "control in CHUNK": (DOWN, chunk(0, 29, 0, golden("pull_frame")), "inside CHUNK"),
    "SHUTDOWN in CHUNK": (DOWN, chunk(0, 13, 0, golden("shutdown_frame")), "inside CHUNK"),
    "an inner type of the other direction": (UP, chunk(0, len(INNER), 0, INNER), "BCAST_FRAGMENT is not legal"),
    "an inner magic": (DOWN, chunk(0, 33, 0, bytes(33)), "magic"),
    "an inner length too small": (DOWN, chunk(0, 41, 0, frame(5, bytes(28), length=27)), "were sent"),
    "an inner length too large": (DOWN, chunk(0, 41, 0, frame(5, bytes(28), length=29)), "were sent"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
@pytest.mark.parametrize("step", [None, 1])
def test_a_violation_is_a_peer_error_and_final(name, step):
    way, raw, why = VIOLATIONS[name]
    reader = reader_of(way)
    with pytest.raises(PeerError, match=why):
        feed(reader, raw, step)
    with pytest.raises(LocalError):
        reader.received(1)


def test_header_checks_come_in_order():
    """Magic before type before length: one header is wrong in all three, and is mended step by step."""
    for raw, why in [
        (frame(77, magic=1, length=2**64 - 1), "magic"),
        (frame(77, length=2**64 - 1), "type 77"),
        (frame(4, length=2**64 - 1), "not legal"),
        (frame(5, length=2**64 - 1), "at most"),
    ]:
        with pytest.raises(PeerError, match=why):
            feed(reader_of(DOWN), raw)


@pytest.mark.parametrize("way", [None, UP, DOWN])
@given(raw=st.binary(min_size=1, max_size=200), seed=st.randoms(use_true_random=False))
def test_random_bytes_never_do_more_than_raise_peer_error(way, raw, seed):
    if seed.random() < 0.7:  # past the magic
        raw = frame(seed.choice([*MessageType, 99]), raw, length=seed.choice([len(raw), 16, 25, 40, 2**63]))
    try:
        for whole in feed(reader_of(way), raw, seed.choice([None, 1, 5])):
            assert isinstance(whole.kind, MessageType)
    except PeerError:
        return


# ---------------------------------------------------------------------------------------------------- lending


def test_nothing_is_allocated_before_the_header_is_checked(monkeypatch):
    asked = []
    monkeypatch.setattr("yeto_torch.wire.frames.allocate", lambda n, *_: asked.append(n) or memoryview(bytearray(n)))
    with pytest.raises(PeerError):
        feed(reader_of(None), frame(1, length=2**24 + 1))
    assert asked == []
    feed(reader_of(None), frame(1, length=2**24))
    assert asked == [2**24]


def test_the_reader_lends_exactly_what_belongs_together():
    reader = reader_of(DOWN)
    raw = chunk(3, len(INNER), 0, INNER[:20])
    lent = []
    at = 0
    while at < len(raw):
        room = reader.buffer()
        lent.append(len(room))
        room[:] = raw[at : at + len(room)]
        reader.received(len(room))
        at += len(room)
    assert lent == [13, 24, 20]


def test_payloads_are_writable_and_belong_to_one_frame():
    reader = reader_of(DOWN)
    first, second = feed(reader, INNER + INNER)
    first.payload[12] = 9
    assert second.payload[12] == 0


def test_two_sockets_share_one_table():
    limits = limits_to(DOWN)
    table = Reassembler(limits.max_inner, limits.max_partials, limits.max_reserved_bytes)
    left, right = FrameReader(limits, table), FrameReader(limits, table)
    pieces = chunks(INNER, 0, [15])
    half = len(pieces[0]) - 1
    assert not feed(left, pieces[0][:half])
    assert not feed(right, pieces[1])  # later bytes are there first, the first ones are reserved
    (whole,) = feed(left, pieces[0][half:])
    assert bytes(whole.payload) == INNER[13:]
    assert len(table) == 0


def test_a_chunk_needs_a_table():
    with pytest.raises(LocalError, match="table"):
        feed(FrameReader(limits_to(DOWN)), chunk(0, 33, 0, b"x"))


def test_limits_may_change_between_frames():
    reader = FrameReader(FirstFrameLimits())
    assert feed(reader, frame(1, golden("hello_g")))
    reader.limits = limits_to(UP)
    assert feed(reader, frame(6, bytes(12)))
    assert LAYOUT_G.wire == reader.limits.layout
