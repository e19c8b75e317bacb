"""Slices: golden pair, round robin, coverage without copies; reassembly against a dumb twin on random input."""

import itertools
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.wire_by_hand import golden
from yeto_torch.wire import chunks as module
from yeto_torch.wire.buffers import LARGE_BYTES, allocate
from yeto_torch.wire.chunks import Reassembler, Slicer
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.messages import BcastFragment, encode

SLICE = 4 * 1024 * 1024


def parse(parts) -> tuple[int, int, int, bytes]:
    """(msg_id, total, offset, bytes) of one CHUNK frame."""
    raw = b"".join(parts)
    magic, kind, length, msg_id, total, offset = struct.unpack_from("<IBQQQQ", raw)
    assert (magic, kind, length) == (0xD170C0DE, 9, len(raw) - 13)
    return msg_id, total, offset, raw[37:]


# ---------------------------------------------------------------------------------------------------- out


def test_the_golden_pair(monkeypatch):
    monkeypatch.setattr(module, "SLICE_BYTES", 20)
    message = encode(BcastFragment(0, 0, struct.pack("<2f", 1, -2)))
    (_, first), (_, second) = Slicer().slice(message, [1])
    assert b"".join(first) == golden("chunk_pair_first")
    assert b"".join(second) == golden("chunk_pair_second")


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    streams=st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True).map(sorted),
)
def test_slices_cover_the_message_and_go_round(sizes, streams):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_BYTES", 16)
        slicer, turn = Slicer(), 0
        for number, size in enumerate(sizes):
            parts = encode(BcastFragment(number, 1, bytes(range(size))))
            inner = b"".join(parts)
            slices = slicer.slice(parts, streams)
            seen = b""
            for stream, chunk in slices:
                msg_id, total, offset, data = parse(chunk)
                assert (msg_id, total, offset) == (number, len(inner), len(seen))
                assert stream == streams[turn % len(streams)]
                seen, turn = seen + data, turn + 1
                assert len(data) == 16 or len(seen) == total
            assert seen == inner


@pytest.mark.parametrize("size", [1, SLICE - 25, SLICE - 24, 2 * SLICE - 25, 2 * SLICE + 3])
def test_real_slices_are_4_mib_and_share_the_tensor(size):
    tensor = bytearray(size)
    slices = Slicer().slice(encode(BcastFragment(0, 1, tensor)), [1, 2])
    assert [sum(map(len, parts)) - 37 for _, parts in slices[:-1]] == [SLICE] * (len(slices) - 1)
    assert sum(sum(map(len, parts)) - 37 for _, parts in slices) == 25 + size
    tensor[-1] = 5
    assert slices[-1][1][-1][-1] == 5


# ---------------------------------------------------------------------------------------------------- in


@dataclass
class Twin:
    """Reassembly as one would explain it: a set of the bytes taken per message, and sums."""

    max_inner: int
    max_partials: int
    max_reserved: int
    open: dict[int, tuple[int, set[int]]] = field(default_factory=dict)
    done: dict[int, set[int]] = field(default_factory=dict)

    def legal(self, msg_id: int, total: int, offset: int, size: int) -> bool:
        if size < 1 or not 13 <= total <= self.max_inner or offset + size > total:
            return False
        if msg_id not in self.open:
            reserved = sum(length for length, _ in self.open.values())
            if len(self.open) >= self.max_partials or reserved + total > self.max_reserved:
                return False
            self.open[msg_id] = (total, set())
        length, taken = self.open[msg_id]
        bytes_ = set(range(offset, offset + size))
        if length != total or taken & bytes_:
            return False
        taken |= bytes_
        return True


steps = st.tuples(
    st.integers(0, 3), st.sampled_from([12, 13, 20, 20, 20, 33, 64, 65]), st.integers(0, 66), st.integers(0, 40)
)


@given(st.lists(steps, max_size=30))
def test_reserve_accepts_exactly_what_the_twin_accepts(sequence):
    ours, twin = Reassembler(64, 3, 110), Twin(64, 3, 110)
    for step in sequence:
        legal = twin.legal(*step)
        try:
            room = ours.reserve(*step)
        except PeerError:
            assert not legal
            return
        assert legal
        assert len(room) == step[3]
        assert len(ours) == len(twin.open)
        assert ours.reserved_bytes == sum(length for length, _ in twin.open.values())


@given(data=st.data(), totals=st.lists(st.integers(13, 60), min_size=1, max_size=4))
@settings(max_examples=200)
def test_messages_come_out_whole_in_any_order(data, totals):
    """Slices of several messages are reserved and committed interleaved, as by several sockets."""
    table = Reassembler(64, 4, 4 * 64)
    contents = {msg_id: bytes((msg_id * 61 + i) % 256 for i in range(total)) for msg_id, total in enumerate(totals)}
    todo = []
    for msg_id, content in contents.items():
        cuts = data.draw(st.sets(st.integers(1, len(content) - 1), max_size=6))
        edges = [0, *sorted(cuts), len(content)]
        todo += [(msg_id, start, end) for start, end in itertools.pairwise(edges)]
    todo = data.draw(st.permutations(todo))
    receiving, out = [], {}
    left = {msg_id: len(content) for msg_id, content in contents.items()}
    while todo or receiving:
        if todo and (not receiving or data.draw(st.booleans())):
            msg_id, start, end = todo.pop()
            room = table.reserve(msg_id, len(contents[msg_id]), start, end - start)
            receiving.append((msg_id, start, end, room))
        else:
            msg_id, start, end, room = receiving.pop(data.draw(st.integers(0, len(receiving) - 1)))
            room[:] = contents[msg_id][start:end]
            whole = table.commit(msg_id, end - start)
            left[msg_id] -= end - start
            assert (whole is not None) == (left[msg_id] == 0)
            if whole is not None:
                out[msg_id] = bytes(whole)
    assert out == contents
    assert len(table) == 0
    assert table.reserved_bytes == table._intervals == 0
    table.reserve(0, 64, 0, 64)  # an id may come again once its message is complete


@pytest.mark.parametrize("before_tensor", [13 + 4, 13 + 12, 13 + 48])  # INIT; BCAST and FINAL; PUSH
@pytest.mark.parametrize("total", [2000, LARGE_BYTES + 1])
def test_tensor_bytes_lie_where_f32_values_may_lie(before_tensor, total):
    table = Reassembler(max_inner=2 * LARGE_BYTES, max_partials=4, max_reserved_bytes=4 * LARGE_BYTES)
    table.reserve(1, total, 0, total)
    whole = table.commit(1, total)
    assert len(whole) == total
    assert np.frombuffer(whole[before_tensor:], np.uint8).ctypes.data % 4 == 0


def test_a_violation_names_what_was_wrong():
    table = Reassembler(100, 2, 120)
    table.reserve(1, 50, 10, 10)
    for step, why in [
        ((1, 50, 15, 2), r"\[15, 17\) overlaps"),
        ((1, 50, 19, 1), "overlaps"),
        ((1, 50, 5, 6), "overlaps"),
        ((1, 50, 0, 50), "overlaps"),
        ((1, 51, 30, 1), "earlier ones said 50"),
        ((1, 50, 50, 1), "reaches past"),
        ((1, 50, 2**64 - 1, 1), "reaches past"),
        ((2, 12, 0, 1), "13 to 100"),
        ((2, 101, 0, 1), "13 to 100"),
        ((2, 2**64 - 1, 0, 1), "13 to 100"),
        ((2, 71, 0, 1), "reserve 121 bytes"),
        ((2, 50, 0, 0), "nothing"),
    ]:
        with pytest.raises(PeerError, match=why):
            table.reserve(*step)
    table.reserve(1, 50, 20, 5)  # touching is not overlapping
    table.reserve(1, 50, 9, 1)
    table.reserve(2, 50, 0, 1)
    with pytest.raises(PeerError, match="more than 2 partial"):
        table.reserve(3, 13, 0, 1)


def test_one_byte_chunks_cannot_fill_the_memory(monkeypatch):
    monkeypatch.setattr(module, "MAX_INTERVALS", 100)
    table = Reassembler(10_000, 64, 10**6)
    for number in range(100):
        table.reserve(number % 2, 10_000, 2 * number, 1)
    with pytest.raises(PeerError, match="disjoint"):
        table.reserve(0, 10_000, 9_000, 1)


def test_ranges_that_meet_are_one():
    table = Reassembler(10_000, 1, 10**6)
    for start in (*range(0, 10_000, 2), *range(1, 10_000, 2)):
        table.reserve(0, 10_000, start, 1)
    assert table._intervals == 1


# ---------------------------------------------------------------------------------------------------- memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.parametrize(
    ("nbytes", "large"), [(0, LARGE_BYTES), (7, LARGE_BYTES), (LARGE_BYTES, LARGE_BYTES), (100, 64)]
)
def test_memory_is_zeroed_writable_and_of_that_size(nbytes, large):
    view = allocate(nbytes, large)
    assert (view.nbytes, view.format, view.readonly) == (nbytes, "B", False)
    assert not any(view[:: max(1, nbytes // 50)])
    view[:] = b"\1" * nbytes
    assert bytes(view[-3:]) == b"\1" * min(3, nbytes)


def test_promised_bytes_hold_no_memory():
    before = resident_bytes()
    table = Reassembler(2**30, 64, 2**40)
    rooms = [table.reserve(number, 2**30, 0, 10) for number in range(64)]
    assert len(rooms) == 64
    assert resident_bytes() - before < 2**28  # of 64 GiB that were promised


def test_absurd_sizes_are_memory_errors():
    for nbytes in (2**62, 2**64 - 1):
        with pytest.raises(MemoryError, match=str(nbytes)):
            allocate(nbytes)
