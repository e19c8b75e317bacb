"""Types of what _kernels.c offers. Arrays are contiguous and of one length n, and taken as the bytes they are.

Raises ValueError for lengths that do not match; ValueError or BufferError, as the array has it, where it is not
contiguous or not to be written to.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from yeto_torch.wire.buffers import Buffer

_Array: TypeAlias = npt.NDArray[np.generic]

def is_bounded(values: _Array, is_bf16: bool, /) -> bool:
    """``bounds.is_bounded`` of [n] f32 or bf16, at any address."""

def decode(data: _Array | Buffer, out: _Array, is_bf16: bool, negate: bool, /) -> bool:
    """[n] f32 or bf16 at any address -> ``out`` [n] f32, or bf16, of two bytes an item; is all of it bounded?"""

def round_to_bf16(values: _Array, out: _Array, /) -> None:
    """[n] f32 -> ``out`` [n] bf16: nearest even, saturating."""

def subtract(local: _Array, base: _Array | None, is_base_bf16: bool, out: _Array, is_out_bf16: bool, /) -> bool:
    """``local`` [n] f32, less ``base`` [n] unless it is None, into ``out`` [n]; whether that was bounded unrounded."""

def encode_q4(values: _Array, out: _Array, levels: _Array, /) -> None:
    """[n] f32 -> ``out`` [132 * ceil(n / 256)] bytes; ``levels``: where each of seven begins, f32."""

def decode_q4(data: _Array | Buffer, out: _Array, negate: bool, /) -> None:
    """[132 * ceil(n / 256)] bytes -> ``out`` [n] f32. The scales are not judged."""
