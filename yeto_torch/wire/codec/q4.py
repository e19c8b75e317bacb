"""q4 (E3M0): four bits a value, one scale per 256 values.

A block is one f32 scale, its largest magnitude, then 128 bytes of two nibbles each, the earlier value in the low
nibble. Nibble = sign << 3 | level; level 0 is zero, level L is ``2^(L-7) * scale``. A last block is filled up with
zeros.

Numpy does all of it: it compares into bytes by vector instructions. What it does not do so is avoided here: it shifts
words by vectors but bytes one by one, finds the largest integer in half the time of the largest float (of magnitudes
both are the same, NaN included), and looks up twice as fast by ``take`` as by an index.

Source: v4 §Q4 (blocks of 256: a scale and 128 bytes of nibbles); rulings §3.1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from yeto_torch.wire.codec import kernels
from yeto_torch.wire.constants import MAX_MAGNITUDE, Q4_BLOCK, Q4_BLOCK_BYTES
from yeto_torch.wire.errors import PeerError

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

AT_ONCE = 1 << 9  # blocks: 512 KiB of f32; smaller ones pay more for numpy's calls than the cache gives back

# Level L is reached from this ratio |x|/scale on, given as f32 bits: the smallest ratio whose f32 log2, rounded half
# to even, is at least L - 7. Near 2^(L-7.5) neighbouring ratios share one f32 logarithm, more of them the smaller
# the ratio, and a tie goes to the even side; hence the last digit is not the same for every L. Comparing with these
# seven numbers *is* the rule, without a logarithm whose last bit depends on the library. The tests derive them anew.
LEVEL_BITS = (0x3C3504F2, 0x3CB504F6, 0x3D3504F2, 0x3DB504F5, 0x3E3504F3, 0x3EB504F4, 0x3F3504F3)
_LEVELS = np.array(LEVEL_BITS, np.uint32).view(np.float32)

_NIBBLES = np.array([0.0] + [2.0 ** (level - 7) for level in range(1, 8)], np.float32)
_NIBBLES = np.concatenate([_NIBBLES, np.float32(-1) * _NIBBLES])
# byte -> its two values before scaling, kept as one 8-byte item so that a single look-up fetches both
_PAIRS = np.stack([np.tile(_NIBBLES, 16), np.repeat(_NIBBLES, 16)], axis=1).reshape(-1).view(np.uint64)


def encode(values: _Floats) -> _Bytes:
    """[n] f32 -> [132 * ceil(n / 256)] bytes."""
    whole, rest = divmod(values.size, Q4_BLOCK)
    out = np.empty((whole + (rest > 0), Q4_BLOCK_BYTES), np.uint8)
    if kernels.compiled is not None:
        kernels.compiled.encode_q4(values, out, _LEVELS)
        return out.reshape(-1)
    blocks = values[: whole * Q4_BLOCK].reshape(whole, Q4_BLOCK)
    scratch = _Scratch(min(AT_ONCE, len(out)))
    with np.errstate(invalid="ignore"):  # infinities give NaN ratios; their scale tells the decoder
        for first in range(0, whole, AT_ONCE):
            scratch.encode(blocks[first : first + AT_ONCE], out[first : min(first + AT_ONCE, whole)])
        if rest:
            tail = np.zeros((1, Q4_BLOCK), np.float32)
            tail[0, :rest] = values[-rest:]
            scratch.encode(tail, out[whole:])
    return out.reshape(-1)


class _Scratch:
    """The buffers one part of an encoding works in."""

    def __init__(self, blocks: int) -> None:
        self.starts = np.arange(0, blocks * Q4_BLOCK, Q4_BLOCK)
        self.ratio = np.empty((blocks, Q4_BLOCK), np.float32)
        self.mask = np.empty((blocks, Q4_BLOCK), np.bool_)
        self.level = np.empty((blocks, Q4_BLOCK), np.uint8)
        self.sign = np.empty((blocks, Q4_BLOCK), np.uint8)

    def encode(self, values: _Floats, out: _Bytes) -> None:
        """[b, 256] f32 -> [b, 132] bytes, for at most the blocks this scratch was made for."""
        count = len(values)
        ratio, mask = self.ratio[:count], self.mask[:count]
        level, sign = self.level[:count], self.sign[:count]

        # scale: the block's largest magnitude
        np.abs(values, out=ratio)
        scale_bits = np.maximum.reduceat(ratio.view(np.uint32).reshape(-1), self.starts[:count]).reshape(count, 1)
        scale = scale_bits.view(np.float32)
        out[:, :4] = scale.view(np.uint8)

        # level: how many thresholds the ratio reaches. A block of zeros divides by 1 and reaches none.
        np.divide(ratio, np.where(scale == 0, np.float32(1), scale), out=ratio)
        np.greater_equal(ratio, _LEVELS[0], out=level.view(np.bool_))
        np.less(values, 0, out=mask)
        np.bitwise_and(mask.view(np.uint8), level, out=sign)  # no sign on a zero
        for threshold in _LEVELS[1:]:
            np.greater_equal(ratio, threshold, out=mask)
            np.add(level, mask.view(np.uint8), out=level)

        # pack: as little-endian u16 a pair is low | high << 8; its low byte after x | x >> 4 is low | high << 4
        pairs, shifted = level.view(np.uint16), sign.view(np.uint16)
        np.left_shift(shifted, 3, out=shifted)  # of both bytes at once: each is 0 or 1
        np.bitwise_or(pairs, shifted, out=pairs)
        np.right_shift(pairs, 4, out=shifted)
        np.bitwise_or(pairs, shifted, out=pairs)
        np.copyto(out[:, 4:], pairs, casting="unsafe")


def decode(data: _Bytes, out: _Floats, negate: bool) -> None:
    """[132 * ceil(n / 256)] bytes -> ``out`` [n] f32. Padding nibbles are not looked at. Raises PeerError."""
    blocks = data.reshape(-1, Q4_BLOCK_BYTES)
    scales = blocks[:, :4].copy().view(np.float32)
    if not bool(np.all(scales >= 0)):  # NaN fails too
        raise PeerError("a q4 scale is negative or not a number")
    if not bool(np.all(scales <= MAX_MAGNITUDE)):
        raise PeerError("a q4 scale is infinite or above 2^100")
    if kernels.compiled is not None:
        kernels.compiled.decode_q4(data, out, negate)
        return
    if negate:
        np.negative(scales, out=scales)
    whole, rest = divmod(out.size, Q4_BLOCK)
    target = out[: whole * Q4_BLOCK].reshape(whole, Q4_BLOCK)
    for first in range(0, whole, AT_ONCE):
        part = slice(first, min(first + AT_ONCE, whole))
        _values(blocks[part, 4:], scales[part], target[part])
    if rest:
        tail = np.empty((1, Q4_BLOCK), np.float32)
        _values(blocks[whole:, 4:], scales[whole:], tail)
        out[-rest:] = tail[0, :rest]


def _values(nibbles: _Bytes, scales: _Floats, out: _Floats) -> None:
    """[b, 128] bytes and [b, 1] scales -> [b, 256] values."""
    _PAIRS.take(nibbles, out=out.view(np.uint64), mode="clip")  # every byte is an index; "raise" would copy first
    np.multiply(out, scales, out=out)
