"""The bytes of a checkpoint: golden values, round trips, views instead of copies, and what is not believed."""

import dataclasses
import hashlib
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.checkpoint.format import (
    PIECE_BYTES,
    FragmentRecord,
    LedgerEntry,
    Snapshot,
    parse,
    write_parts,
)
from tests.support.checkpoint_bytes import (
    CONTRACT,
    FINGERPRINT,
    V1,
    V2,
    V3,
    V3_BARE,
    VECTORS,
    boundaries,
    content,
    damaged,
    f32,
    golden_snapshot,
    parse_bytes,
)
from yeto_torch.wire.errors import LocalError, StateError
from yeto_torch.wire.layout import version_at

DAMAGED = dict(damaged())
U32, U64 = 2**32 - 1, 2**64 - 1


def test_the_golden_file_is_written_bit_for_bit():
    data = b"".join(write_parts(golden_snapshot()))
    assert data == V3
    assert len(data) == VECTORS["checkpoint_v3"]["bytes"]
    assert hashlib.sha256(data).hexdigest() == VECTORS["checkpoint_v3"]["sha256"]


def test_the_golden_files_are_read():
    golden = golden_snapshot()
    assert content(parse_bytes(V3)) == content(golden)
    without = dataclasses.replace(golden, contract=None)
    assert content(parse_bytes(V3_BARE)) == content(without)
    assert content(parse_bytes(V3_BARE + FINGERPRINT)) == content(without)
    assert content(parse_bytes(V2)) == content(dataclasses.replace(without, version=2, fingerprint=None))
    assert content(parse_bytes(V1)) == content(dataclasses.replace(without, version=1, fingerprint=None, backend=None))


def test_the_version_law_is_that_of_the_golden_table():
    rows = VECTORS["version_law"]["text"].split()
    assert [[version_at(f, step, 3) for f in range(3)] for step in range(len(rows))] == [
        [int(digit) for digit in row] for row in rows
    ]


@st.composite
def snapshots(draw):
    fragments, step = draw(st.integers(1, 5)), draw(st.integers(0, U64) | st.integers(0, 12))
    values = st.floats(width=32, allow_nan=False, allow_infinity=False)
    records = []
    for index in range(fragments):
        numel = draw(st.integers(1, 6))
        params, momentum = (f32(*draw(st.lists(values, min_size=numel, max_size=numel))) for _ in range(2))
        records.append(FragmentRecord(version_at(index, step, fragments), params, memoryview(momentum)))
    ids = sorted(draw(st.sets(st.integers(0, U32), max_size=4)))
    counter = st.integers(0, U64)
    ledger = tuple(LedgerEntry(learner, draw(counter), draw(counter), draw(counter)) for learner in ids)
    digest = st.binary(min_size=32, max_size=32)
    return Snapshot(3, draw(st.integers(0, 1)), draw(digest), draw(digest), step, tuple(records), ledger)


@given(snapshots())
def test_what_is_written_is_read_back(snapshot):
    assert content(parse_bytes(b"".join(write_parts(snapshot)))) == content(snapshot)


@given(snapshots(), st.data())
def test_every_proper_prefix_is_refused_but_the_two_older_trailers(snapshot, data):
    whole = b"".join(write_parts(snapshot))
    length = data.draw(st.integers(0, len(whole) - 1))
    if length in (len(whole) - 68, len(whole) - 36):
        assert parse_bytes(whole[:length]).contract is None
    else:
        with pytest.raises(StateError):
            parse_bytes(whole[:length])


def test_a_ledger_larger_than_one_batch_comes_back():
    ledger = tuple(LedgerEntry(3 * i, i, i, i) for i in range(10_000))
    snapshot = dataclasses.replace(golden_snapshot(), ledger=ledger)
    assert parse_bytes(b"".join(write_parts(snapshot))).ledger == ledger


def test_tensors_are_lent_in_pieces_never_copied():
    params, momentum = bytearray(2 * PIECE_BYTES + 4), bytearray(2 * PIECE_BYTES + 4)
    fragments = (FragmentRecord(1, memoryview(params), momentum),)
    parts = list(write_parts(dataclasses.replace(golden_snapshot(), step=1, fragments=fragments)))
    lent = [part for part in parts if isinstance(part, memoryview)]
    assert [part.nbytes for part in lent] == [PIECE_BYTES, PIECE_BYTES, 4] * 2
    assert [part.obj is params for part in lent] == [True] * 3 + [False] * 3
    assert all(part.obj is momentum for part in lent[3:])
    assert sum(len(part) for part in parts if not isinstance(part, memoryview)) < 1024


def test_the_reader_lends_the_memory_that_the_snapshot_keeps():
    lent = []
    snapshot = parse_bytes(V3, lent)
    for record in snapshot.fragments:
        for tensor in (record.params, record.momentum):
            assert any(tensor.obj is memory for memory in lent)


def test_arrays_of_floats_may_be_written_as_they_are():
    floats = memoryview(bytearray(f32(1.5, -2))).cast("f")
    golden = golden_snapshot()
    first = FragmentRecord(3, floats, golden.fragments[0].momentum)
    assert first.numel == 2
    changed = dataclasses.replace(golden, fragments=(first, golden.fragments[1]))
    assert b"".join(bytes(part) for part in write_parts(changed)) == V3


def test_damage_is_refused_in_half_a_sentence():
    for name, data in DAMAGED.items():
        with pytest.raises(StateError) as caught:
            parse_bytes(data)
        assert "\n" not in str(caught.value), name
        assert 10 < len(str(caught.value)) < 160, name


def test_each_flipped_bit_is_refused_or_lies_where_no_check_can_be():
    at = boundaries()
    free = set(range(at["params"], at["version_1"])) | set(range(at["params_1"], at["ledger"]))
    free |= set(range(at["entry"], at["trailer"])) | set(range(at["contract"], len(V3))) | {at["backend"]}
    silent = set()
    for bit in range(8 * len(V3)):
        flipped = bytearray(V3)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert content(parse_bytes(bytes(flipped))) != content(golden_snapshot())
            silent.add(bit // 8)
        except StateError:
            continue
    assert silent <= free


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("v3-cut-at-3", "truncated: the magic number needs 4 bytes and 3 are left"),
        ("text", "not a checkpoint: it starts with 0x73696874"),
        ("version-bit-2", "fragment 0 has version 7, but at step 3 it must have 3"),
        ("fragments-absurd-32", "it claims 4294967295 fragments, which 184 bytes cannot hold"),
        ("numel-absurd-64", "fragment 0 claims 18446744073709551615 values, which 168 bytes cannot hold"),
        ("ledger-absurd-32", "its ledger claims 4294967295 learners, which 124 bytes cannot hold"),
        ("ledger-equal-ids", "its ledger lists learner 0 after learner 0"),
        ("backend-bit-1", "backend 2 is neither 0 (scalar) nor 1 (torch-svd)"),
        ("v1-one-byte-more", "1 bytes follow the ledger where 0 may"),
        ("v3-one-byte-more", "69 bytes follow the ledger where 0 or 32 or 68 may"),
        ("trailer-bit-0", "the fingerprints in its header and its trailer differ"),
        ("momentum_1-nan", "the momentum of fragment 1: value 0 is nan"),
    ],
)
def test_the_sentence_says_what_is_wrong(damage, sentence):
    with pytest.raises(StateError) as caught:
        parse_bytes(DAMAGED[damage])
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("index", "bits"),
    [
        (0, 0x7F800000),
        (1, 0xFF800000),
        (PIECE_BYTES // 4 - 1, 0x7F800001),
        (PIECE_BYTES // 4, 0xFFC00000),
        (PIECE_BYTES // 4 + 2, 0x7F800000),
    ],
)
def test_one_value_that_is_not_finite_is_found_wherever_it_lies(index, bits):
    params = bytearray(PIECE_BYTES + 12)
    struct.pack_into("<I", params, 4 * index, bits)
    snapshot = dataclasses.replace(golden_snapshot(), step=1, fragments=(FragmentRecord(1, params, params),))
    with pytest.raises(StateError, match=f"the parameters of fragment 0: value {index} is -?(nan|inf)$"):
        parse_bytes(b"".join(write_parts(snapshot)))


@given(st.integers(0, U32), st.integers(0, 7))
def test_any_finite_bits_are_accepted_and_no_others(bits, index):
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    params = bytearray(32)
    struct.pack_into("<I", params, 4 * index, bits)
    data = b"".join(
        write_parts(dataclasses.replace(golden_snapshot(), step=1, fragments=(FragmentRecord(1, params, bytes(32)),)))
    )
    if math.isfinite(value):
        assert bytes(parse_bytes(data).fragments[0].params) == params
    else:
        with pytest.raises(StateError):
            parse_bytes(data)


def test_the_largest_finite_values_are_accepted():
    largest = struct.pack("<2I", 0x7F7FFFFF, 0xFF7FFFFF)
    snapshot = dataclasses.replace(golden_snapshot(), step=1, fragments=(FragmentRecord(1, largest, largest),))
    assert bytes(parse_bytes(b"".join(write_parts(snapshot))).fragments[0].params) == largest


def test_memory_that_cannot_be_had_is_a_sentence():
    head = struct.pack("<IB32sQI", 0xD1705A80, 0, FINGERPRINT, 0, 1) + struct.pack("<QQ", 0, 1 << 58)
    reader, offset = parse(1 << 62), 0
    view = next(reader)
    while offset + view.nbytes < len(head):
        view[:] = head[offset : offset + view.nbytes]
        offset += view.nbytes
        view = next(reader)
    view[:] = head[offset:]
    with pytest.raises(StateError, match=r"the parameters of fragment 0: \d+ bytes of memory are not to be had"):
        next(reader)


_GOLDEN = golden_snapshot()
_FIRST, _SECOND = _GOLDEN.fragments


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"backend": None},
        {"backend": 2},
        {"fingerprint": None},
        {"fingerprint": bytes(31)},
        {"contract": None},
        {"contract": bytes(33)},
        {"step": 4},
        {"step": -1},
        {"step": 2**64},
        {"fragments": ()},
        {"fragments": (_FIRST, dataclasses.replace(_SECOND, params=b""))},
        {"fragments": (_FIRST, dataclasses.replace(_SECOND, params=b"", momentum=b""))},
        {"fragments": (_FIRST, dataclasses.replace(_SECOND, params=b"12345", momentum=b"12345"))},
        {"fragments": (_FIRST, dataclasses.replace(_SECOND, version=4))},
        {"ledger": (LedgerEntry(1, 0, 0, 0), LedgerEntry(1, 0, 0, 0))},
        {"ledger": (LedgerEntry(2**32, 0, 0, 0),)},
        {"ledger": (LedgerEntry(0, 0, 0, 2**64),)},
        {"ledger": (LedgerEntry(0, -1, 0, 0),)},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_snapshot_that_could_not_be_read_back_is_not_begun(change):
    with pytest.raises(LocalError):
        write_parts(dataclasses.replace(_GOLDEN, **change))


def test_facts_are_the_snapshot_without_its_tensors():
    facts = _GOLDEN.facts
    assert (facts.version, facts.backend, facts.fingerprint, facts.contract) == (3, 0, FINGERPRINT, CONTRACT)
    assert (facts.step, facts.numels) == (3, (2, 1))
