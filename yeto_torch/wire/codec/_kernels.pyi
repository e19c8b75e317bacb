"""Types of what _kernels.c offers. Arrays are contiguous and of one length n, and taken as the bytes they are.

Raises ValueError for lengths that do not match; ValueError or BufferError, as the array has it, where it is not
contiguous or not to be written to.
"""

from typing import Any

def is_sound(values: Any, is_bf16: bool, /) -> bool:
    """``sound.is_sound`` of [n] f32 or bf16, at any address."""

def decode(data: Any, out: Any, is_bf16: bool, negate: bool, /) -> bool:
    """[n] f32 or bf16 at any address -> ``out`` [n] f32, or what has items of two bytes: bf16; whether all is sound."""

def round_to_bf16(values: Any, out: Any, /) -> None:
    """[n] f32 -> ``out`` [n] bf16: nearest even, saturating."""

def subtract(local: Any, base: Any, is_base_bf16: bool, out: Any, is_out_bf16: bool, /) -> bool:
    """``local`` [n] f32, less ``base`` [n] unless it is None, into ``out`` [n]; whether that was sound unrounded."""

def encode_q4(values: Any, out: Any, levels: Any, /) -> None:
    """[n] f32 -> ``out`` [132 * ceil(n / 256)] bytes; ``levels``: where each of seven begins, f32."""

def decode_q4(data: Any, out: Any, negate: bool, /) -> None:
    """[132 * ceil(n / 256)] bytes -> ``out`` [n] f32. The scales are not judged."""
