"""Which values may be sent, or computed with: bounded ones, which are finite and at most 2^100 in magnitude.

Source: rulings §3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yeto_torch.wire.codec import kernels
from yeto_torch.wire.constants import MAX_MAGNITUDE
from yeto_torch.wire.errors import PeerError

BLOCK = 1 << 15
"""Values that are worked on at once: 128 KiB of f32, and the most for which torch wakes no other threads."""


def is_bounded(values: Tensor) -> bool:
    """Whether every one of ``values`` [n], of any float dtype and device, is finite and at most 2^100 in magnitude."""
    values = values.detach()
    if values.device.type != "cpu":
        return is_block_bounded(values)
    if kernels.compiled is not None and values.dtype in (torch.float32, torch.bfloat16):
        array = values.contiguous().view(torch.uint8).numpy()
        return bool(kernels.compiled.is_bounded(array, values.dtype is torch.bfloat16))
    return all(is_block_bounded(block) for block in torch.split(values, BLOCK))


def is_block_bounded(values: Tensor) -> bool:
    """The same by torch, at once: of a block that is in the cache, or on a GPU."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)  # NaN wins both, and fails both comparisons
    return bool(low.item() >= -MAX_MAGNITUDE and high.item() <= MAX_MAGNITUDE)


def check_bounded(values: Tensor) -> None:
    """Raise PeerError unless all ``values``, [n] f32 or bf16 that came from a peer, are bounded."""
    if not is_bounded(values):
        if bool(torch.isfinite(values).all()):
            raise PeerError("tensor bytes hold a value above 2^100 in magnitude")
        raise PeerError("tensor bytes hold a value that is not finite")
