"""Which values may be sent, or computed with: finite, and at most 2^100 in magnitude.

Source: rulings §3.2
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yeto_torch.wire.codec import kernels
from yeto_torch.wire.constants import MAX_MAGNITUDE
from yeto_torch.wire.errors import PeerError

# Values per piece: 128 KiB of f32, and the most that torch works on without forking threads.
PIECE = 1 << 15
NUMPY_PIECE = 1 << 17  # numpy forks none; a piece of 512 KiB costs few calls and is still in a cache
_INFINITY = float("inf")
_BF16_LIMIT = int(torch.tensor(MAX_MAGNITUDE, dtype=torch.bfloat16).view(torch.int16))  # a power of two: exact


def is_sound(values: Tensor) -> bool:
    """Whether every one of ``values`` [n], of any float dtype and device, is finite and at most 2^100 in magnitude."""
    values = values.detach()
    if values.device.type != "cpu":
        return _has_sound_extremes(values)
    if kernels.compiled is not None and values.dtype in (torch.float32, torch.bfloat16):
        array = values.contiguous().view(torch.uint8).numpy()
        return bool(kernels.compiled.is_sound(array, values.dtype is torch.bfloat16))
    if values.dtype is torch.float32 and values.data_ptr() % 4 == 0:
        array = values.numpy()
        with np.errstate(all="ignore"):
            pieces = (array[first : first + NUMPY_PIECE] for first in range(0, array.size, NUMPY_PIECE))
            return all(is_piece_sound(piece) for piece in pieces)
    if values.dtype is torch.bfloat16 and values.data_ptr() % 2 == 0:
        bits = values.view(torch.int16).numpy()
        return all(_are_bits_sound(bits[first : first + NUMPY_PIECE]) for first in range(0, bits.size, NUMPY_PIECE))
    return all(_has_sound_extremes(piece) for piece in torch.split(values, PIECE))


def is_piece_sound(piece: npt.NDArray[np.float32]) -> bool:
    """``is_sound`` of a few values that are in the cache, aligned. Numpy's warnings are to be off (``np.errstate``).

    First they are asked for the sum of their squares, half the work of finding extremes: where that is finite, every
    value is, and below 2^64. Only where it is not are the extremes looked at.
    """
    return bool(np.dot(piece, piece) < _INFINITY) or _has_sound_extremes(torch.from_numpy(piece))  # NaN is not less


def _are_bits_sound(bits: npt.NDArray[np.int16]) -> bool:
    """``is_sound`` of a few bf16 values, aligned: as integers they are in the order of their magnitudes, NaN last.

    Seen with a sign, the largest is the largest of the positive ones; seen without, of the negative ones, if any.
    """
    return bool(bits.max() <= _BF16_LIMIT and bits.view(np.uint16).max() <= _BF16_LIMIT | 0x8000)


def _has_sound_extremes(values: Tensor) -> bool:
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)  # NaN wins both, and fails both comparisons
    return bool(low.item() >= -MAX_MAGNITUDE and high.item() <= MAX_MAGNITUDE)


def check_finite(values: Tensor) -> None:
    """Raise PeerError unless every value is finite and at most 2^100 in magnitude.

    Args:
        values: [n] f32 or bf16, typically a view of received bytes about to become an anchor.
    """
    if not is_sound(values):
        if bool(torch.isfinite(values).all()):
            raise PeerError("tensor bytes hold a value above 2^100 in magnitude")
        raise PeerError("tensor bytes hold a value that is not finite")
