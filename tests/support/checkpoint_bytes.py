"""Checkpoints for tests: a small snapshot, an encoder of its own for every format, and ways to damage a file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from syncer.checkpoint.format import FragmentRecord, LedgerEntry, Snapshot, parse

FINGERPRINT, CONTRACT = b"\x11" * 32, b"\x22" * 32
VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "checkpoint.json").read_text(encoding="utf-8"))
V3_BARE = bytes.fromhex(VECTORS["checkpoint_v3_bare"]["hex"])
V3 = bytes.fromhex(VECTORS["checkpoint_v3"]["hex"])
_BODY = V3_BARE[37:]  # step and all that follows it, the same in every format
V1 = struct.pack("<I", 0xD1705A7E) + _BODY
V2 = struct.pack("<IB", 0xD1705A7F, 0) + _BODY


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def golden_snapshot() -> Snapshot:
    """What ``V3`` holds."""
    fragments = (FragmentRecord(3, f32(1.5, -2), f32(0.25, 0)), FragmentRecord(2, f32(4), f32(-1)))
    ledger = (LedgerEntry(0, 3, 72, 4096), LedgerEntry(1, 2, 48, 2048))
    return Snapshot(3, 0, FINGERPRINT, CONTRACT, 3, fragments, ledger)


def parse_bytes(data: bytes, lent: list[object] | None = None) -> Snapshot:
    """Run the reader over ``data``; it must ask for exactly all of it. ``lent`` collects the memory it lends."""
    reader, offset = parse(len(data)), 0
    try:
        while True:
            view = next(reader)
            view[:] = data[offset : offset + view.nbytes]
            offset += view.nbytes
            if lent is not None:
                lent.append(view.obj)
    except StopIteration as done:
        assert offset == len(data)
        return done.value


def content(snapshot: Snapshot) -> tuple[object, ...]:
    """A snapshot as values that compare."""
    fragments = [(f.version, bytes(f.params), bytes(f.momentum)) for f in snapshot.fragments]
    return snapshot.version, snapshot.facts, fragments, list(snapshot.ledger)


def boundaries() -> dict[str, int]:
    """Offsets in ``V3`` at which a field begins."""
    names = ("magic", "backend", "fingerprint", "step", "fragments", "version", "numel", "params", "momentum")
    offsets = dict(zip(names, (0, 4, 5, 37, 45, 49, 57, 65, 73), strict=True))
    offsets |= {"version_1": 81, "numel_1": 89, "params_1": 97, "momentum_1": 101}
    return offsets | {"ledger": 105, "entry": 109, "entry_1": 137, "trailer": 165, "tag": 197, "contract": 201}


def damaged() -> Iterator[tuple[str, bytes]]:
    """Files that must be refused, by name."""
    at = boundaries()
    for name, data in (("v1", V1), ("v2", V2), ("v3-bare", V3_BARE), ("v3", V3)):
        whole = {len(V3_BARE), len(V3_BARE) + 32} if name.startswith("v3") else set()
        for length in range(len(data)):
            if length not in whole:
                yield f"{name}-cut-at-{length}", data[:length]
        yield f"{name}-one-byte-more", data + b"\0"
    for name in ("v1", "v2"):
        yield f"{name}-with-trailer", (V1 if name == "v1" else V2) + V3[at["trailer"] :]
    for name in ("magic", "step", "fragments", "version", "numel", "version_1", "numel_1", "ledger", "trailer", "tag"):
        width = {"magic": 4, "fragments": 4, "ledger": 4, "tag": 4, "trailer": 32}.get(name, 8)
        for bit in range(8 * width):
            yield f"{name}-bit-{bit}", _flipped(V3, at[name], bit)
    for bit in range(8 * 32):
        yield f"fingerprint-bit-{bit}", _flipped(V3, at["fingerprint"], bit)
    for bit in range(1, 8):
        yield f"backend-bit-{bit}", _flipped(V3, at["backend"], bit)
    for name, width in (("fragments", 4), ("numel", 8), ("numel_1", 8), ("ledger", 4)):
        for bits in (8 * width, 8 * width - 1, 31, 30, 24):
            yield f"{name}-absurd-{bits}", _replaced(V3, at[name], ((1 << bits) - 1).to_bytes(width, "little"))
        yield f"{name}-zero", _replaced(V3, at[name], bytes(width))
    for name in ("params", "momentum", "params_1", "momentum_1"):
        for bad in (float("nan"), float("inf"), float("-inf")):
            yield f"{name}-{bad}", _replaced(V3, at[name], f32(bad))
    yield "ledger-equal-ids", _replaced(V3, at["entry_1"], bytes(4))
    yield "ledger-descending-ids", _replaced(V3, at["entry"], struct.pack("<I", 7))
    yield "text", b"this is no checkpoint at all, but a text of some length\n" * 9
    yield "zeros", bytes(4096)


def _flipped(data: bytes, offset: int, bit: int) -> bytes:
    where = offset + bit // 8
    return _replaced(data, where, bytes([data[where] ^ (1 << bit % 8)]))


def _replaced(data: bytes, offset: int, patch: bytes) -> bytes:
    return data[:offset] + patch + data[offset + len(patch) :]
