"""What some tensors are now, or how far they are from others, in one trip over memory: subtracted, judged, rounded.

A fragment is larger than any cache, so each step that is made for all of it costs as much as copying it, and so does
memory that the kernel must clear first. Here all steps are made for a block while it is in the cache, and of an answer
in bf16 no f32 whole ever exists. This file must not know fragments or the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yeto_torch.wire.codec.bounds import BLOCK
from yeto_torch.wire.codec.plain import subtract
from yeto_torch.wire.errors import LocalError


class Snapshots:
    """Takes them, one at a time, and owns what one block needs: 128 KiB, used when something is widened."""

    def __init__(self) -> None:
        self._wide = torch.empty(BLOCK)

    def take(self, tensors: Iterable[Tensor], base: Tensor | None, out: Tensor) -> bool:
        """``tensors`` one behind the other, less ``base`` if there is one, into ``out``; computed in f32, on the CPU.

        Args:
            tensors: of any float dtypes, each flat and contiguous; [n] together.
            base: [n] f32 or bf16, at any address.
            out: [n] f32, or bf16: then rounded to nearest even.

        Returns:
            Whether every value was finite and at most 2^100 in magnitude, before rounding; ``out`` is undefined if not.
        """
        start, (is_half_base, is_half_out) = 0, (t is not None and t.dtype is torch.bfloat16 for t in (base, out))
        target, anchor = out.view(torch.uint8).numpy(), None if base is None else base.view(torch.uint8).numpy()
        before, behind = (2 if is_half_base else 4), out.itemsize
        for tensor in tensors:
            for values in self._widened(tensor):
                end = start + values.size
                part = None if anchor is None else anchor[start * before : end * before]
                if not subtract(values, part, is_half_base, target[start * behind : end * behind], is_half_out):
                    return False
                start = end
        if start != out.numel():
            raise LocalError(f"a snapshot of {start} values into {out.numel()}")
        return True

    def _widened(self, tensor: Tensor) -> Iterator[npt.NDArray[np.float32]]:
        if tensor.dtype is torch.float32:
            yield tensor.numpy()
            return
        for part in torch.split(tensor, BLOCK):
            yield self._wide[: part.numel()].copy_(part).numpy()
