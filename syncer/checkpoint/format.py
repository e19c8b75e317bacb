"""The checkpoint's bytes, V1 to V3: what they are, and which of them to believe.

Decides: the order of the fields, and whether a file is a whole and lawful checkpoint. Buffers in, buffers out.
Must not know: paths, file objects, torch, what a resuming run wants (``resume.py``).

    V1: u32 0xD1705A7E                        | u64 step | body
    V2: u32 0xD1705A7F | u8 backend           | u64 step | body
    V3: u32 0xD1705A80 | u8 backend | fp[32]  | u64 step | body | trailer (absent, fp, or fp + tag + contract)
    body:    u32 F, F x { u64 version, u64 numel, f32 params[numel], f32 momentum[numel] },
             u32 entries, entries x { u32 learner, u64 merges, u64 steps, u64 tokens }, learner ids ascending
    trailer: fp[32] | u32 0x52544353 | contract[32]

Little-endian, nothing padded. Tensors are written from and read into their own memory, never through a copy:
whatever the size of the model, a write needs no further memory and a read a quarter of one piece.

Source: v4 §Checkpoints (V1, V2, V3 and their prefixes); rulings §7.

* pure
"""

from __future__ import annotations

import math
import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.constants import HASH_BYTES, U32_MAX, U64_MAX
from yeto_torch.wire.errors import LocalError, StateError
from yeto_torch.wire.layout import version_at

FileVersion: TypeAlias = Literal[1, 2, 3]

PIECE_BYTES = 8 * 1024 * 1024  # the most that is handed over at once
MAGICS: dict[int, FileVersion] = {0xD1705A7E: 1, 0xD1705A7F: 2, 0xD1705A80: 3}
TRAILER_TAG = 0x52544353  # "SCTR"

_V3_PREFIX = struct.Struct(f"<IB{HASH_BYTES}sQI")  # magic, backend, fingerprint, step, fragments
_FRAGMENT_HEAD = struct.Struct("<QQ")  # version, numel
_LEDGER_ENTRY = struct.Struct("<IQQQ")  # learner, merges, steps, tokens
_TRAILER = struct.Struct(f"<{HASH_BYTES}sI{HASH_BYTES}s")
_SMALLEST_FRAGMENT_BYTES = _FRAGMENT_HEAD.size + 8  # one value and its momentum
_LEDGER_BATCH = 4096  # entries handed over at once


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What one learner has contributed since the run began: accepted merges, inner steps, tokens."""

    learner: int
    merges: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FragmentRecord:
    """One fragment: its version, and parameters and momentum as raw little-endian f32 bytes, 4 * numel each."""

    version: int
    params: Buffer
    momentum: Buffer

    @property
    def numel(self) -> int:
        return memoryview(self.params).nbytes // 4


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint without its tensors: all that a decision to resume may look at."""

    version: FileVersion
    backend: int | None
    fingerprint: bytes | None
    contract: bytes | None
    step: int
    numels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A consistent cut of the coordinator.

    Attributes:
        version: file format; only 3 can be written.
        backend: 0 = scalar, 1 = torch-svd; None in V1.
        fingerprint: 32 bytes; None in V1 and V2.
        contract: 32 bytes; None where the file carries none.
        step: committed rounds.
        fragments: in layout order.
        ledger: learner ids ascending.
    """

    version: FileVersion
    backend: int | None
    fingerprint: bytes | None
    contract: bytes | None
    step: int
    fragments: Sequence[FragmentRecord]
    ledger: Sequence[LedgerEntry]

    @property
    def facts(self) -> CheckpointFacts:
        numels = tuple(fragment.numel for fragment in self.fragments)
        return CheckpointFacts(self.version, self.backend, self.fingerprint, self.contract, self.step, numels)


# Writing


def write_parts(snapshot: Snapshot) -> Iterator[Buffer]:
    """The V3 file, trailer and all, in parts of at most 8 MiB; tensor parts are views of the snapshot's own memory.

    Raises LocalError at once, before the first part, when the snapshot is not one that could be read back.
    """
    backend, fingerprint, contract = _writable(snapshot)
    return _parts(snapshot, backend, fingerprint, contract)


def _parts(snapshot: Snapshot, backend: int, fingerprint: bytes, contract: bytes) -> Iterator[Buffer]:
    yield _V3_PREFIX.pack(0xD1705A80, backend, fingerprint, snapshot.step, len(snapshot.fragments))
    for fragment in snapshot.fragments:
        yield _FRAGMENT_HEAD.pack(fragment.version, fragment.numel)
        yield from pieces(fragment.params)
        yield from pieces(fragment.momentum)
    yield struct.pack("<I", len(snapshot.ledger))
    for start in range(0, len(snapshot.ledger), _LEDGER_BATCH):
        batch = snapshot.ledger[start : start + _LEDGER_BATCH]
        yield b"".join(_LEDGER_ENTRY.pack(e.learner, e.merges, e.steps, e.tokens) for e in batch)
    yield _TRAILER.pack(fingerprint, TRAILER_TAG, contract)


def pieces(buffer: Buffer) -> Iterator[memoryview]:
    """``buffer`` as views of at most 8 MiB, in order."""
    view = memoryview(buffer).cast("B")
    for start in range(0, view.nbytes, PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def _writable(snapshot: Snapshot) -> tuple[int, bytes, bytes]:
    backend, fingerprint, contract = snapshot.backend, snapshot.fingerprint, snapshot.contract
    if snapshot.version != 3 or backend not in (0, 1) or fingerprint is None or contract is None:
        raise LocalError("only a V3 snapshot with backend, fingerprint and contract can be written")
    if len(fingerprint) != HASH_BYTES or len(contract) != HASH_BYTES:
        raise LocalError("a snapshot's fingerprint and contract are 32 bytes each")
    count = len(snapshot.fragments)
    if not 1 <= count <= U32_MAX or not 0 <= snapshot.step <= U64_MAX:
        raise LocalError(f"a snapshot of {count} fragments at step {snapshot.step} cannot be written")
    for index, fragment in enumerate(snapshot.fragments):
        nbytes = memoryview(fragment.params).nbytes
        if nbytes == 0 or nbytes % 4 or memoryview(fragment.momentum).nbytes != nbytes:
            raise LocalError(f"fragment {index}: parameters and momentum are not equally many f32 values")
        if fragment.version != version_at(index, snapshot.step, count):
            raise LocalError(f"fragment {index} has version {fragment.version} at step {snapshot.step}")
    last = -1
    for entry in snapshot.ledger:
        counters = (entry.merges, entry.steps, entry.tokens)
        if not last < entry.learner <= U32_MAX or not all(0 <= counter <= U64_MAX for counter in counters):
            raise LocalError(f"ledger entry {entry} is out of order or out of range")
        last = entry.learner
    return backend, fingerprint, contract


# Reading


class _Remaining:
    """How many bytes of the file nobody has asked for yet: nothing larger is ever allocated."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def claim(self, nbytes: int, what: str) -> None:
        if nbytes > self.nbytes:
            raise StateError(f"truncated: {what} needs {nbytes} bytes and {self.nbytes} are left")
        self.nbytes -= nbytes


def parse(size: int) -> Generator[memoryview, None, Snapshot]:
    """Read a checkpoint of ``size`` bytes: yields views to be filled with the next bytes, returns the snapshot.

    Every view must be filled whole, in order, before the generator is resumed; together they cover the file. No
    count is believed beyond the bytes that are there, so nothing is allocated that the file could not fill.
    Raises StateError with what is wrong, as half a sentence that whoever knows the file's name completes.
    """
    left = _Remaining(size)
    (magic,) = struct.unpack("<I", (yield from _take(left, 4, "the magic number")))
    version = MAGICS.get(magic)
    if version is None:
        raise StateError(f"not a checkpoint: it starts with {magic:#010x}")
    backend = (yield from _take(left, 1, "the backend"))[0] if version >= 2 else None
    if backend not in (None, 0, 1):
        raise StateError(f"backend {backend} is neither 0 (scalar) nor 1 (torch-svd)")
    fingerprint = bytes((yield from _take(left, HASH_BYTES, "the fingerprint"))) if version == 3 else None
    step, count = struct.unpack("<QI", (yield from _take(left, 12, "step and fragment count")))
    if not 1 <= count <= left.nbytes // _SMALLEST_FRAGMENT_BYTES:
        raise StateError(f"it claims {count} fragments, which {left.nbytes} bytes cannot hold")
    fragments = []
    for index in range(count):
        record = yield from _fragment(left, index, version_at(index, step, count), step)
        fragments.append(record)
    ledger = yield from _ledger(left)
    contract = yield from _trailer(left, fingerprint)
    return Snapshot(version, backend, fingerprint, contract, step, tuple(fragments), ledger)


def _take(left: _Remaining, nbytes: int, what: str) -> Generator[memoryview, None, bytearray]:
    left.claim(nbytes, what)
    buffer = bytearray(nbytes)
    yield memoryview(buffer)
    return buffer


def _fragment(left: _Remaining, index: int, lawful: int, step: int) -> Generator[memoryview, None, FragmentRecord]:
    head = yield from _take(left, _FRAGMENT_HEAD.size, f"the head of fragment {index}")
    version, numel = _FRAGMENT_HEAD.unpack(head)
    if version != lawful:
        raise StateError(f"fragment {index} has version {version}, but at step {step} it must have {lawful}")
    if not 1 <= numel <= left.nbytes // 8:
        raise StateError(f"fragment {index} claims {numel} values, which {left.nbytes} bytes cannot hold")
    params = yield from _values(left, 4 * numel, f"the parameters of fragment {index}")
    momentum = yield from _values(left, 4 * numel, f"the momentum of fragment {index}")
    return FragmentRecord(version, params, momentum)


def _values(left: _Remaining, nbytes: int, what: str) -> Generator[memoryview, None, memoryview]:
    left.claim(nbytes, what)
    try:
        buffer = bytearray(nbytes)
    except MemoryError:
        raise StateError(f"{what}: {nbytes} bytes of memory are not to be had") from None
    for start in range(0, nbytes, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, nbytes)
        yield memoryview(buffer)[start:stop]
        _check_finite(buffer, start, stop, what)
    return memoryview(buffer)


def _check_finite(buffer: bytearray, start: int, stop: int, what: str) -> None:
    """Refuse NaN and infinity among the f32 values in buffer[start:stop]."""
    # The top byte of a value that is not finite is 0x7f or 0xff. Finite values of that kind lie above 1.7e38 and
    # hardly occur, so that the exact look at every value is hardly ever paid for.
    top = buffer[start + 3 : stop : 4]
    if b"\x7f" not in top and b"\xff" not in top:
        return
    for index, (value,) in enumerate(struct.iter_unpack("<f", memoryview(buffer)[start:stop])):
        if not math.isfinite(value):
            raise StateError(f"{what}: value {start // 4 + index} is {value}")


def _ledger(left: _Remaining) -> Generator[memoryview, None, tuple[LedgerEntry, ...]]:
    (count,) = struct.unpack("<I", (yield from _take(left, 4, "the ledger's length")))
    if count > left.nbytes // _LEDGER_ENTRY.size:
        raise StateError(f"its ledger claims {count} learners, which {left.nbytes} bytes cannot hold")
    entries: list[LedgerEntry] = []
    while len(entries) < count:
        batch = min(_LEDGER_BATCH, count - len(entries))
        raw = yield from _take(left, batch * _LEDGER_ENTRY.size, "the ledger")
        for learner, merges, steps, tokens in _LEDGER_ENTRY.iter_unpack(raw):
            if entries and learner <= entries[-1].learner:
                raise StateError(f"its ledger lists learner {learner} after learner {entries[-1].learner}")
            entries.append(LedgerEntry(learner, merges, steps, tokens))
    return tuple(entries)


def _trailer(left: _Remaining, fingerprint: bytes | None) -> Generator[memoryview, None, bytes | None]:
    """The contract, or None. Only V3 has a trailer: none, the fingerprint, or the whole of it."""
    legal = (0,) if fingerprint is None else (0, HASH_BYTES, _TRAILER.size)
    if left.nbytes not in legal:
        raise StateError(f"{left.nbytes} bytes follow the ledger where {' or '.join(map(str, legal))} may")
    if not left.nbytes:
        return None
    raw = bytes((yield from _take(left, left.nbytes, "the trailer")))
    if raw[:HASH_BYTES] != fingerprint:
        raise StateError("the fingerprints in its header and its trailer differ")
    if len(raw) == HASH_BYTES:
        return None
    _, tag, contract = _TRAILER.unpack(raw)
    if tag != TRAILER_TAG:
        raise StateError(f"its trailer is tagged {tag:#010x} instead of {TRAILER_TAG:#010x}")
    return bytes(contract)
