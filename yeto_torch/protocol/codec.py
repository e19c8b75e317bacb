"""Tensor bytes: f32, bf16 and q4 to and from flat f32 tensors. The treaty's only file that knows torch and numpy.

Decides how a value is rounded, packed and judged fit to enter the arithmetic. Knows nothing of messages, fragments
or signs' meaning: who negates a push, and when, is the merge's business.

* f32 and bf16 are little-endian arrays; bf16 rounds to nearest even and saturates instead of becoming infinite.
* q4 (E3M0): per 256 values one f32 scale, the block's largest magnitude, then 128 bytes of two nibbles each, the
  earlier value in the low nibble. Nibble = sign << 3 | level; level 0 is zero, level L is ``2^(L-7) * scale``.
* Whatever is decoded is finite and at most 2^100 in magnitude, or PeerError is raised.

Work runs in pieces that stay in the processor's cache, so that a check costs no second trip through memory, and on
the calling thread alone: a learner encodes beside a training thread that needs the other cores. Numpy does q4 (it
compares into bytes by vector instructions) and all decoding; torch rounds to bf16. Hosts are little-endian, like every
platform torch is built for.

Source: protocol v4, message tables and the section on Q4.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yeto_torch.protocol.constants import MAX_MAGNITUDE, Q4_BLOCK, Q4_BLOCK_BYTES, WireDType
from yeto_torch.protocol.errors import LocalError, PeerError

Buffer: TypeAlias = bytes | bytearray | memoryview
_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Floats: TypeAlias = npt.NDArray[np.float32]

_TORCH_PIECE = 1 << 15  # values per piece for torch: the most it works on without forking threads
_PIECE = 1 << 17  # values per piece of an f32 or bf16 decoding: 512 KiB of f32
_Q4_PIECE = 1 << 9  # blocks per piece of a q4 tensor: 512 KiB of f32
_BF16_MAX = float(torch.finfo(torch.bfloat16).max)
_TORCH_DTYPE = {WireDType.F32: torch.float32, WireDType.BF16: torch.bfloat16}

# Level L is reached from this ratio |x|/scale on, given as f32 bits: the smallest ratio whose f32 log2, rounded half
# to even, is at least L - 7. Near 2^(L-7.5) neighbouring ratios share one f32 logarithm, more of them the smaller
# the ratio, and a tie goes to the even side; hence the last digit is not the same for every L. Comparing with these
# seven numbers *is* the rule, without a logarithm whose last bit depends on the library. The tests derive them anew.
_LEVEL_BITS = (0x3C3504F2, 0x3CB504F6, 0x3D3504F2, 0x3DB504F5, 0x3E3504F3, 0x3EB504F4, 0x3F3504F3)
_LEVELS = tuple(np.array(_LEVEL_BITS, np.uint32).view(np.float32))

_NIBBLES = np.array([0.0] + [2.0 ** (level - 7) for level in range(1, 8)], np.float32)
_NIBBLES = np.concatenate([_NIBBLES, np.float32(-1) * _NIBBLES])
# byte -> its two values before scaling, kept as one 8-byte item so that a single look-up fetches both
_PAIRS = np.stack([np.tile(_NIBBLES, 16), np.repeat(_NIBBLES, 16)], axis=1).reshape(-1).view(np.uint64)


def empty(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised CPU tensor [numel], on huge pages where the system has them.

    Numpy asks for huge pages, torch does not unless told by an environment variable. Filling a fresh tensor of
    64 MiB took six times as long as copying it when every 4 KiB of it was faulted in by itself.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)  # torch views no bytes of length 0 as something longer
    return torch.from_numpy(np.empty(numel * dtype.itemsize, np.uint8)).view(dtype)


def encode(values: Tensor, dtype: WireDType) -> memoryview:
    """Bytes of ``values``, as they travel in ``dtype``.

    Args:
        values: [n] f32, on any device; finite. A value that is not makes bytes which every decoder refuses.
        dtype: of the message; for INIT and BCAST the session dtype's ``bulk``.

    Returns:
        A flat memoryview of ``dtype.nbytes(n)`` bytes. **Under f32 a contiguous CPU tensor is not copied**: the view
        shares its storage, so the caller must not change it before the bytes have left. Every other result is a
        fresh buffer.

    Raises:
        LocalError: ``values`` is not a flat f32 tensor.
    """
    if values.dtype is not torch.float32 or values.dim() != 1:
        raise LocalError(f"encode takes a flat f32 tensor, not {values.dtype} of shape {tuple(values.shape)}")
    values = values.detach()
    if dtype is WireDType.F32:
        return _bytes_of(values.cpu().contiguous())
    if dtype is WireDType.BF16:
        return _bytes_of(_to_bf16(values))
    return _q4_encode(values.cpu().contiguous().numpy()).data


def decode(data: Buffer, numel: int, dtype: WireDType, *, negate: bool = False, out: Tensor | None = None) -> Tensor:
    """The ``numel`` values that ``data`` holds, as a flat f32 CPU tensor. Reads and copies the bytes once.

    Args:
        data: exactly ``dtype.nbytes(numel)`` bytes, at any alignment; read only.
        negate: flip every sign on the way (zeros become -0.0, as IEEE negation has it).
        out: [numel] f32 CPU contiguous, filled and returned instead of a fresh tensor; undefined after an error.

    Raises:
        PeerError: a wrong length, a value that is not finite or above 2^100, a q4 scale that is negative or neither.
        LocalError: ``out`` does not fit.
    """
    _check_length(data, numel, dtype)
    if out is None:
        out = empty(numel)
    elif out.dtype is not torch.float32 or out.shape != (numel,) or not out.is_contiguous() or out.device.type != "cpu":
        raise LocalError(f"decode into {out.dtype} {tuple(out.shape)} on {out.device}, expected {numel} f32 on the CPU")
    source = np.frombuffer(data, np.uint8)
    if dtype is WireDType.Q4:
        _q4_decode(source, out.numpy(), negate)
    else:
        _plain_decode(source, out.numpy(), dtype, negate)
    return out


def as_tensor(data: Buffer, numel: int, dtype: WireDType) -> Tensor:
    """A view [numel] of f32 or bf16 ``data``: no copy, any alignment, unchecked (see ``check_finite``).

    The tensor keeps the buffer alive and **must not be written to**, also where torch would allow it.

    Raises:
        PeerError: a wrong length.
        LocalError: q4 has no tensor view.
    """
    if dtype not in _TORCH_DTYPE:
        raise LocalError(f"{dtype.name} bytes cannot be viewed as a tensor")
    _check_length(data, numel, dtype)
    if numel == 0:
        return torch.empty(0, dtype=_TORCH_DTYPE[dtype])
    # Bytes first, then view: torch takes an unaligned pointer, numpy would refuse fast loops on an unaligned f32 array.
    lent = np.asarray(_Lent(np.frombuffer(data, np.uint8)))
    return torch.from_numpy(lent).view(_TORCH_DTYPE[dtype])


def is_sound(values: Tensor) -> bool:
    """Whether every value is finite and at most 2^100 in magnitude: fit to be sent, or to be computed with."""
    size = _TORCH_PIECE if values.device.type == "cpu" else max(values.numel(), 1)
    for piece in torch.split(values, size):
        if piece.numel():
            low, high = torch.aminmax(piece)  # NaN wins both, and fails both comparisons
            if not (low.item() >= -MAX_MAGNITUDE and high.item() <= MAX_MAGNITUDE):
                return False
    return True


def check_finite(values: Tensor) -> None:
    """Raise PeerError unless every value is finite and at most 2^100 in magnitude.

    Args:
        values: [n] f32 or bf16, typically a view of received bytes about to become an anchor.
    """
    if not is_sound(values):
        if bool(torch.isfinite(values).all()):
            raise PeerError("tensor bytes hold a value above 2^100 in magnitude")
        raise PeerError("tensor bytes hold a value that is not finite")


class _Lent:
    """Offers the bytes of a read-only array as an array torch takes without a warning; nobody writes to it."""

    def __init__(self, owner: _Bytes) -> None:
        self.owner = owner  # numpy keeps this object as the array's base, and so the buffer alive
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": owner.shape,
            "data": (owner.__array_interface__["data"][0], False),
        }


def _check_length(data: Buffer, numel: int, dtype: WireDType) -> None:
    size = memoryview(data).nbytes
    if size != dtype.nbytes(numel):
        raise PeerError(
            f"{size} tensor bytes, expected {dtype.nbytes(numel)} for {numel} values in {dtype.name.lower()}"
        )


def _bytes_of(values: Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data


def _to_bf16(values: Tensor) -> Tensor:
    """[n] f32 -> [n] bf16 on the CPU: nearest even, saturating. On a GPU it is rounded before it is downloaded."""
    if values.device.type != "cpu":
        return values.clamp(-_BF16_MAX, _BF16_MAX).to(torch.bfloat16).cpu()
    out = empty(values.numel(), torch.bfloat16)
    for piece, target in zip(torch.split(values, _TORCH_PIECE), torch.split(out, _TORCH_PIECE), strict=True):
        if piece.numel():
            low, high = torch.aminmax(piece)
            inside = low.item() >= -_BF16_MAX and high.item() <= _BF16_MAX
            target.copy_(piece if inside else piece.clamp(-_BF16_MAX, _BF16_MAX))
    return out


def _plain_decode(source: _Bytes, out: _Floats, dtype: WireDType, negate: bool) -> None:
    """f32 or bf16 bytes -> ``out`` [n] f32, checked."""
    halves = source.view(np.uint16) if dtype is WireDType.BF16 else None
    for first in range(0, out.size, _PIECE):
        target = out[first : first + _PIECE]
        if halves is None:
            target.view(np.uint8)[:] = source[4 * first : 4 * first + target.nbytes]
        else:  # bf16 is the upper half of an f32
            bits = target.view(np.uint32)
            np.copyto(bits, halves[first : first + _PIECE])
            np.left_shift(bits, 16, out=bits)
        if negate:
            np.negative(target, out=target)
        if not (target.max() <= MAX_MAGNITUDE and target.min() >= -MAX_MAGNITUDE):  # NaN fails both
            check_finite(torch.from_numpy(target))


def _q4_encode(values: _Floats) -> _Bytes:
    """[n] f32 -> [132 * ceil(n / 256)] bytes."""
    whole, rest = divmod(values.size, Q4_BLOCK)
    out = np.empty((whole + (rest > 0), Q4_BLOCK_BYTES), np.uint8)
    blocks = values[: whole * Q4_BLOCK].reshape(whole, Q4_BLOCK)
    scratch = _Q4Scratch(min(_Q4_PIECE, len(out)))
    with np.errstate(invalid="ignore"):  # infinities give NaN ratios; their scale tells the decoder
        for first in range(0, whole, _Q4_PIECE):
            scratch.encode(blocks[first : first + _Q4_PIECE], out[first : min(first + _Q4_PIECE, whole)])
        if rest:
            tail = np.zeros((1, Q4_BLOCK), np.float32)
            tail[0, :rest] = values[-rest:]
            scratch.encode(tail, out[whole:])
    return out.reshape(-1)


class _Q4Scratch:
    """The buffers one piece of a q4 encoding works in."""

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
        scale = np.maximum.reduceat(ratio.reshape(-1), self.starts[:count]).reshape(count, 1)
        out[:, :4] = scale.view(np.uint8)

        # level: how many thresholds the ratio reaches. A block of zeros divides by 1 and reaches none.
        np.divide(ratio, np.where(scale == 0, np.float32(1), scale), out=ratio)
        np.greater_equal(ratio, _LEVELS[0], out=level.view(np.bool_))
        np.less(values, 0, out=mask)
        np.bitwise_and(mask.view(np.uint8), level, out=sign)  # no sign on a zero
        for threshold in _LEVELS[1:]:
            np.greater_equal(ratio, threshold, out=mask)
            np.add(level, mask.view(np.uint8), out=level)
        np.left_shift(sign, 3, out=sign)
        np.bitwise_or(level, sign, out=level)

        # pack: as little-endian u16 a pair is low | high << 8; its low byte after x | x >> 4 is low | high << 4
        pairs, shifted = level.view(np.uint16), sign.view(np.uint16)
        np.right_shift(pairs, 4, out=shifted)
        np.bitwise_or(pairs, shifted, out=pairs)
        np.copyto(out[:, 4:], pairs, casting="unsafe")


def _q4_decode(data: _Bytes, out: _Floats, negate: bool) -> None:
    """[132 * ceil(n / 256)] bytes -> ``out`` [n] f32. Padding nibbles are not looked at."""
    blocks = data.reshape(-1, Q4_BLOCK_BYTES)
    scales = blocks[:, :4].copy().view(np.float32)
    if not bool(np.all(scales >= 0)):  # NaN fails too
        raise PeerError("a q4 scale is negative or not a number")
    if not bool(np.all(scales <= MAX_MAGNITUDE)):
        raise PeerError("a q4 scale is infinite or above 2^100")
    if negate:
        np.negative(scales, out=scales)
    whole, rest = divmod(out.size, Q4_BLOCK)
    target = out[: whole * Q4_BLOCK].reshape(whole, Q4_BLOCK)
    for first in range(0, whole, _Q4_PIECE):
        piece = slice(first, min(first + _Q4_PIECE, whole))
        _q4_values(blocks[piece, 4:], scales[piece], target[piece])
    if rest:
        tail = np.empty((1, Q4_BLOCK), np.float32)
        _q4_values(blocks[whole:, 4:], scales[whole:], tail)
        out[-rest:] = tail[0, :rest]


def _q4_values(nibbles: _Bytes, scales: _Floats, out: _Floats) -> None:
    """[b, 128] bytes and [b, 1] scales -> [b, 256] values."""
    np.multiply(_PAIRS[nibbles].view(np.float32), scales, out=out)
