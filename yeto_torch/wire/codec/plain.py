"""f32 and bf16: rounding to bf16, both back to f32, and distances; judged on the way.

bf16 is the upper half of an f32. Beside each compiled loop stands what torch does without it, to the same bits.

Source: v4 §Messages (tensors are contiguous bytes in the session dtype); rulings §3.1, §3.2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yeto_torch.wire.codec import kernels
from yeto_torch.wire.codec.bounds import BLOCK, check_bounded, is_block_bounded
from yeto_torch.wire.errors import PeerError

_BF16_MAX = float(torch.finfo(torch.bfloat16).max)
_Bytes = npt.NDArray[np.uint8]


def round_to_bf16(values: Tensor, out: Tensor) -> None:
    """[n] f32 -> ``out`` [n] bf16, both on one device: nearest even, saturating."""
    if values.device.type != "cpu":
        out.copy_(values.clamp(-_BF16_MAX, _BF16_MAX))
    elif kernels.compiled is not None:
        kernels.compiled.round_to_bf16(values.contiguous().numpy(), out.view(torch.int16).numpy())
    else:
        for source, target in zip(torch.split(values, BLOCK), torch.split(out, BLOCK), strict=True):
            target.copy_(source.clamp(-_BF16_MAX, _BF16_MAX))


def decode(source: Tensor, out: Tensor, negate: bool) -> None:
    """``source`` [n] f32 or bf16 -> ``out`` [n] f32, or bf16 too. Raises PeerError for a value that is not bounded."""
    if kernels.compiled is not None:
        raw, is_half = source.view(torch.uint8).numpy(), source.dtype is torch.bfloat16
        array = (out.view(torch.int16) if out.dtype is torch.bfloat16 else out).numpy()
        is_good = kernels.compiled.decode(raw, array, is_half, negate)
    else:
        is_good = _decode(source, out, negate)
    if not is_good:
        check_bounded(source)
        raise PeerError("tensor bytes changed while they were decoded")


def _decode(source: Tensor, out: Tensor, negate: bool) -> bool:
    for values, target in zip(torch.split(source, BLOCK), torch.split(out, BLOCK), strict=True):
        target.copy_(values)
        if negate:
            target.neg_()
        if not is_block_bounded(target):
            return False
    return True


def subtract(
    local: npt.NDArray[np.float32], base: _Bytes | None, is_base_bf16: bool, out: _Bytes, is_out_bf16: bool
) -> bool:
    """``local`` [n], less ``base`` if there is one, into ``out``; whether every value was bounded, before rounding.

    It takes arrays, for a slice of one costs a tenth of a tensor's.

    Args:
        base, out: the bytes of [n] f32 or bf16, at any address; bf16 is rounded to nearest even.
    """
    if kernels.compiled is not None:
        return bool(kernels.compiled.subtract(local, base, is_base_bf16, out, is_out_bf16))
    if not local.size:
        return True  # torch views no bytes of length 0 as something longer
    values, target = torch.from_numpy(local), _viewed(out, is_out_bf16)
    anchor = values if base is None else _viewed(base, is_base_bf16)
    for wide, less, into in zip(*(torch.split(tensor, BLOCK) for tensor in (values, anchor, target)), strict=True):
        distance = wide if base is None else wide - less  # bf16 is widened on the way: exact
        if not is_block_bounded(distance):
            return False
        into.copy_(distance)
    return True


def _viewed(data: _Bytes, is_bf16: bool) -> Tensor:
    return torch.from_numpy(data).view(torch.bfloat16 if is_bf16 else torch.float32)
