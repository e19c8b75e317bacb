"""f32 and bf16: rounding to bf16, and both back to f32, checked on the way.

bf16 is the upper half of an f32. Torch rounds to nearest even and takes unaligned memory; numpy would do the first in
five passes and the second through a copy.

Source: v4 §Messages; rulings §3.1, rulings §3.2
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from yeto_torch.wire.codec import kernels
from yeto_torch.wire.codec.sound import PIECE, check_finite, is_piece_sound
from yeto_torch.wire.errors import PeerError

_CHECKED = 4 * PIECE  # values that are judged together: fewer calls, still in a cache
_BF16_MAX = float(torch.finfo(torch.bfloat16).max)


def round_to_bf16(values: Tensor, out: Tensor) -> None:
    """[n] f32 -> ``out`` [n] bf16, both on the CPU: nearest even, saturating."""
    if kernels.compiled is not None:
        kernels.compiled.round_to_bf16(values.contiguous().numpy(), out.view(torch.int16).numpy())
        return
    array, pieces, targets = values.numpy(), torch.split(values, PIECE), torch.split(out, PIECE)
    with np.errstate(all="ignore"):
        for first in range(0, array.size, _CHECKED):
            part = array[first : first + _CHECKED]
            # sound is more than is asked for, and known sooner; from 2^100 to bf16's largest a clamp changes nothing
            is_safe = is_piece_sound(part)
            for index in range(first // PIECE, -(-(first + part.size) // PIECE)):
                targets[index].copy_(pieces[index] if is_safe else pieces[index].clamp(-_BF16_MAX, _BF16_MAX))


def rounded_on_device(values: Tensor) -> Tensor:
    """[n] f32 -> [n] bf16 where ``values`` are: half as much is downloaded."""
    return values.clamp(-_BF16_MAX, _BF16_MAX).to(torch.bfloat16)


def decode(source: Tensor, out: Tensor, negate: bool) -> None:
    """``source`` [n] f32 or bf16 -> ``out`` [n] f32, or bf16 too. Raises PeerError for a value that is not sound."""
    raw, is_half = source.view(torch.uint8).numpy(), source.dtype is torch.bfloat16
    if kernels.compiled is not None:
        array = (out.view(torch.int16) if out.dtype is torch.bfloat16 else out).numpy()
        if not kernels.compiled.decode(raw, array, is_half, negate):
            check_finite(source)
            raise PeerError("tensor bytes changed while they were decoded")
        return
    if out.dtype is torch.bfloat16:
        check_finite(source)
        out.copy_(source)
        if negate:
            out.neg_()
        return
    array = out.numpy()
    pieces, targets = torch.split(source, PIECE), torch.split(out, PIECE)
    with np.errstate(all="ignore"):
        for first in range(0, array.size, _CHECKED):
            part = array[first : first + _CHECKED]
            if not is_half:
                part.view(np.uint8)[:] = raw[4 * first : 4 * first + part.nbytes]
            else:
                for index in range(first // PIECE, -(-(first + part.size) // PIECE)):
                    targets[index].copy_(pieces[index])
            if negate:
                np.negative(part, out=part)
            if not is_piece_sound(part):
                check_finite(torch.from_numpy(part))
