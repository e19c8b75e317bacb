"""What a tensor is now, or how far it is from another, in one trip over memory: subtracted, judged, rounded.

A fragment is larger than any cache, so each step that is made for all of it costs as much as copying it, and so does
memory that the kernel must clear first. Here all steps are made for a piece while it is in the cache, and of an answer
in bf16 no f32 whole ever exists.

Numpy subtracts and judges, since it wakes no other threads and asks for few calls; torch converts, which numpy does in
several passes, in parts that it does not share out to threads either. This file must not know fragments or the wire.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yeto_torch.protocol.codec.sound import PIECE as PART
from yeto_torch.protocol.codec.sound import is_piece_sound

_Floats = npt.NDArray[np.float32]

_PIECE = 2 * PART  # values: 256 KiB of f32


class Snapshots:
    """Takes them, one at a time, and owns what one piece needs: two times 256 KiB, used when something is converted."""

    def __init__(self) -> None:
        self._wide, self._local = _Piece(), _Piece()

    def take(self, local: Tensor, base: Tensor | None, out: Tensor) -> bool:
        """``local - base``, or ``local`` alone, into ``out``; computed in f32. All are [n] and on the CPU.

        Args:
            local: any float dtype, contiguous.
            base: f32 or bf16, at any address.
            out: f32, or bf16: then rounded to nearest even.

        Returns:
            Whether every value was finite and at most 2^100 in magnitude, before rounding; ``out`` is undefined if not.
        """
        locals_ = _Source(local, self._local)
        bases = None if base is None else _Source(base, self._wide)
        targets = torch.split(out, PART)
        array = out.numpy() if out.dtype is torch.float32 else None
        with np.errstate(all="ignore"):
            for first in range(0, out.numel(), _PIECE):
                count = min(_PIECE, out.numel() - first)
                wide = self._wide.array[:count] if array is None else array[first : first + count]
                if bases is None:
                    np.copyto(wide, locals_.read(first, count))
                else:
                    np.subtract(locals_.read(first, count), bases.read(first, count), out=wide)
                if not is_piece_sound(wide):
                    return False
                if array is None:
                    self._wide.give(targets[first // PART : -(-(first + count) // PART)])
        return True


class _Piece:
    """Memory for one piece in f32, as an array and as the parts that torch takes."""

    def __init__(self) -> None:
        whole = torch.empty(_PIECE)
        self.array: _Floats = whole.numpy()
        self._parts = torch.split(whole, PART)

    def take(self, sources: tuple[Tensor, ...]) -> None:
        for part, source in zip(self._parts, sources, strict=False):
            (part if source.numel() == PART else part[: source.numel()]).copy_(source)

    def give(self, targets: tuple[Tensor, ...]) -> None:
        for part, target in zip(self._parts, targets, strict=False):
            target.copy_(part if target.numel() == PART else part[: target.numel()])


class _Source:
    """A tensor [n] as f32, piece by piece: itself where it can be, else through ``piece``."""

    def __init__(self, values: Tensor, piece: _Piece) -> None:
        is_itself = values.dtype is torch.float32 and values.data_ptr() % 4 == 0  # numpy is slow at odd addresses
        self._array: _Floats | None = values.numpy() if is_itself else None
        self._parts = () if is_itself else torch.split(values, PART)
        self._piece = piece

    def read(self, first: int, count: int) -> _Floats:
        """Values [first, first + count), until the next call."""
        if self._array is not None:
            return self._array[first : first + count]
        self._piece.take(self._parts[first // PART : -(-(first + count) // PART)])
        return self._piece.array[:count]
