"""What the fragments are in numbers: merge modes, element counts and, for iso, rows and columns.

``WireLayout`` is what HELLO carries and all that the syncer needs to size, decode and merge. It has no names in it:
those are the learner's, in ``model_layout``.

Source: v4 §Layout and fingerprint (the numeric layout, which drives decoding); rulings §2.2; version law: rulings §7.

* pure
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

from yeto_torch.wire.constants import U64_MAX, MergeMode, WireDType
from yeto_torch.wire.errors import PeerError


@dataclass(frozen=True, slots=True)
class WireFragment:
    """One fragment as HELLO describes it: ``numels[i]`` values of tensor i; ``dims[i]`` = (rows, cols) under iso."""

    mode: MergeMode
    numels: tuple[int, ...]
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def numel(self) -> int:
        return sum(self.numels)


@dataclass(frozen=True)
class WireLayout:
    """The numeric layout: enough to size, decode and merge, with no names in it."""

    fragments: tuple[WireFragment, ...]

    def __len__(self) -> int:
        return len(self.fragments)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Values per fragment."""
        return tuple(fragment.numel for fragment in self.fragments)

    def nbytes(self, fragment: int, dtype: WireDType) -> int:
        """Tensor bytes of one fragment in ``dtype``."""
        return dtype.nbytes(self.numels[fragment])

    def max_nbytes(self, dtype: WireDType) -> int:
        return max(dtype.nbytes(numel) for numel in self.numels)

    @cached_property
    def encoded(self) -> bytes:
        """The layout section of HELLO."""
        parts: list[bytes] = []
        for fragment in self.fragments:
            parts.append(struct.pack("<BI", fragment.mode, len(fragment.numels)))
            parts.append(struct.pack(f"<{len(fragment.numels)}Q", *fragment.numels))
            if fragment.mode is MergeMode.ISO:
                parts.extend(struct.pack("<QQ", rows, cols) for rows, cols in fragment.dims)
        return b"".join(parts)

    @staticmethod
    def decode(
        payload: memoryview, offset: int, fragments: int, known: WireLayout | None = None
    ) -> tuple[WireLayout, int]:
        """Read ``fragments`` descriptors at ``offset``; returns the layout and the offset behind it.

        Bytes that are those of ``known`` are not read again: it is returned itself. No vector is built from a count
        that the bytes present cannot back. Raises PeerError.
        """
        if known is not None and fragments == len(known):
            end = offset + len(known.encoded)
            if bytes(payload[offset:end]) == known.encoded:
                return known, end
        left = len(payload) - offset
        if not 1 <= fragments <= left // 5:
            raise PeerError(f"HELLO names {fragments} fragments, but {left} bytes can hold 1 to {left // 5}")
        out: list[WireFragment] = []
        total = 0
        for index in range(fragments):
            fragment, offset = _decode_fragment(payload, offset, index)
            total += fragment.numel
            if total > U64_MAX:
                raise PeerError("HELLO layout: the number of values overflows 64 bits")
            out.append(fragment)
        return WireLayout(tuple(out)), offset


def _decode_fragment(payload: memoryview, offset: int, index: int) -> tuple[WireFragment, int]:
    where = f"HELLO layout, fragment {index}"
    if len(payload) - offset < 5:
        raise PeerError(f"{where}: truncated")
    mode, tensors = struct.unpack_from("<BI", payload, offset)
    offset += 5
    if mode > 2:
        raise PeerError(f"{where}: merge mode {mode} is not 0 (avg), 1 (rda) or 2 (iso)")
    left = len(payload) - offset
    if not 1 <= tensors <= left // 8:
        raise PeerError(f"{where}: {tensors} tensors, but {left} bytes can hold 1 to {left // 8}")
    numels = struct.unpack_from(f"<{tensors}Q", payload, offset)
    offset += 8 * tensors
    if min(numels) < 1:
        raise PeerError(f"{where}: a tensor of 0 values")
    dims: tuple[tuple[int, int], ...] = ()
    if mode == MergeMode.ISO:
        if len(payload) - offset < 16 * tensors:
            raise PeerError(f"{where}: truncated rows and columns")
        flat = struct.unpack_from(f"<{2 * tensors}Q", payload, offset)
        offset += 16 * tensors
        dims = tuple(zip(flat[0::2], flat[1::2], strict=True))
        for (rows, cols), numel in zip(dims, numels, strict=True):
            if rows < 1 or cols < 1 or rows * cols != numel:
                raise PeerError(f"{where}: {rows} x {cols} is not a matrix of {numel} values")
    return WireFragment(MergeMode(mode), numels, dims), offset


def version_at(fragment: int, step: int, fragments: int) -> int:
    """The version of ``fragment`` once ``step`` rounds are committed: the last t <= step with (t-1) mod F = fragment.

    This is the version law a checkpoint must obey; 0 before the fragment's first round.
    """
    if step < fragment + 1:
        return 0
    return fragment + 1 + fragments * ((step - fragment - 1) // fragments)
