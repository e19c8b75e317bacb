"""What some tensors are now, or how far they are from others, in one trip over memory: subtracted, judged, rounded.

A fragment is larger than any cache, so each step that is made for all of it costs as much as copying it, and so does
memory that the kernel must clear first. Here all steps are made for a piece while it is in the cache, and of an answer
in bf16 no f32 whole ever exists.

Numpy subtracts and judges, since it wakes no other threads and asks for few calls; torch converts, which numpy does in
several passes, in parts that it does not share out to threads either. This file must not know fragments or the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yeto_torch.wire.codec import kernels
from yeto_torch.wire.codec.sound import PIECE as PART
from yeto_torch.wire.codec.sound import is_piece_sound
from yeto_torch.wire.errors import LocalError

_Floats = npt.NDArray[np.float32]

_PIECE = 2 * PART  # values: 256 KiB of f32


class Snapshots:
    """Takes them, one at a time, and owns what one piece needs: two times 256 KiB, used when something is converted."""

    def __init__(self) -> None:
        self._wide, self._local = _Piece(), _Piece()

    def take(self, tensors: Iterable[Tensor], base: Tensor | None, out: Tensor) -> bool:
        """``tensors`` one behind the other, less ``base`` if there is one, into ``out``; computed in f32, on the CPU.

        Args:
            tensors: of any float dtypes, each flat and contiguous; [n] together.
            base: [n] f32 or bf16, at any address.
            out: [n] f32, or bf16: then rounded to nearest even.

        Returns:
            Whether every value was finite and at most 2^100 in magnitude, before rounding; ``out`` is undefined if not.
        """
        if kernels.compiled is not None:
            return self._take_compiled(kernels.compiled, tensors, base, out)
        locals_ = _Row(tensors, self._local)
        bases = None if base is None else _Base(base, self._wide)
        targets = torch.split(out, PART)
        array = out.numpy() if out.dtype is torch.float32 else None
        with np.errstate(all="ignore"):
            for first in range(0, out.numel(), _PIECE):
                count = min(_PIECE, out.numel() - first)
                wide = self._wide.array[:count] if array is None else array[first : first + count]
                if bases is None:
                    np.copyto(wide, locals_.read(count))
                else:
                    np.subtract(locals_.read(count), bases.read(first, count), out=wide)
                if not is_piece_sound(wide):
                    return False
                if array is None:
                    self._wide.give(targets[first // PART : -(-(first + count) // PART)])
        return True

    def _take_compiled(self, kernels: Any, tensors: Iterable[Tensor], base: Tensor | None, out: Tensor) -> bool:
        """The same, tensor by tensor; what is not f32 is widened a piece at a time."""
        start, (is_half_base, is_half_out) = 0, (t is not None and t.dtype is torch.bfloat16 for t in (base, out))
        target, anchor = out.view(torch.uint8).numpy(), None if base is None else base.view(torch.uint8).numpy()
        before, behind = (2 if is_half_base else 4), out.itemsize
        for tensor in tensors:
            for values in self._widened(tensor):
                end = start + values.size
                part = None if anchor is None else anchor[start * before : end * before]
                if not kernels.subtract(values, part, is_half_base, target[start * behind : end * behind], is_half_out):
                    return False
                start = end
        if start != out.numel():
            raise LocalError(f"a snapshot of {start} values into room for {out.numel()}")
        return True

    def _widened(self, tensor: Tensor) -> Iterator[_Floats]:
        if tensor.dtype is torch.float32:
            yield tensor.numpy()
            return
        for part in torch.split(tensor, PART):
            self._local.take((part,))
            yield self._local.array[: part.numel()]


class _Piece:
    """Memory for one piece in f32, as an array, as a tensor, and as the parts that torch takes."""

    def __init__(self) -> None:
        self.tensor = torch.empty(_PIECE)
        self.array: _Floats = self.tensor.numpy()
        self._parts = torch.split(self.tensor, PART)

    def take(self, sources: tuple[Tensor, ...]) -> None:
        for part, source in zip(self._parts, sources, strict=False):
            (part if source.numel() == PART else part[: source.numel()]).copy_(source)

    def give(self, targets: tuple[Tensor, ...]) -> None:
        for part, target in zip(self._parts, targets, strict=False):
            target.copy_(part if target.numel() == PART else part[: target.numel()])


class _Row:
    """Tensors as one row of f32, read from its beginning to its end, piece by piece.

    A piece that lies in one f32 tensor is that tensor's own memory. Any other is put together in ``piece``, so that
    many small tensors cost a copy each, and no more steps than one large one.
    """

    def __init__(self, tensors: Iterable[Tensor], piece: _Piece) -> None:
        self._tensors, self._piece = iter(tensors), piece
        self._next(torch.empty(0))

    def _next(self, tensor: Tensor) -> None:
        self._tensor, self._left = tensor, tensor.numel()
        self._array: _Floats | None = tensor.numpy() if tensor.dtype is torch.float32 else None

    def read(self, count: int) -> _Floats:
        """The next ``count`` values; they stay until the next call."""
        while self._left == 0:
            self._next(next(self._tensors))
        if self._array is not None and self._left >= count:
            self._left -= count
            at = self._array.size - self._left
            return self._array[at - count : at]
        filled = 0
        while filled < count:
            if self._left == 0:
                self._next(next(self._tensors))
            size = min(self._left, count - filled, PART)
            at = self._tensor.numel() - self._left
            if self._array is not None:
                self._piece.array[filled : filled + size] = self._array[at : at + size]
            else:
                self._piece.tensor[filled : filled + size].copy_(self._tensor[at : at + size])
            filled, self._left = filled + size, self._left - size
        return self._piece.array[:count]


class _Base:
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
