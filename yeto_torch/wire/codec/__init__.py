"""Tensor bytes: f32, bf16 and q4 to and from flat f32 tensors. The treaty's only room that knows torch and numpy.

Decides how a value is rounded, packed and judged fit to enter the arithmetic. Knows nothing of messages, fragments
or signs' meaning: who negates a push, and when, is the merge's business.

    bounds  what may be sent or computed with: finite, at most 2^100 in magnitude
    plain   f32 and bf16, little-endian arrays; bf16 rounds to nearest even and saturates instead of becoming infinite
    q4      blocks of 256 four-bit values and a scale

Whatever is decoded is bounded, or PeerError is raised.

Work runs in blocks that stay in the processor's cache, so that a check costs no second trip through memory, and on
the calling thread alone: a learner encodes beside a training thread that needs the other cores. Hosts are
little-endian, like every platform torch is built for.

Source: v4 §Messages (dtypes 1 f32, 2 bf16, 3 q4), v4 §Q4; rulings §3.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yeto_torch.wire.buffers import LENT_BYTES, Buffer, Spare
from yeto_torch.wire.codec import plain, q4
from yeto_torch.wire.codec.bounds import check_bounded, is_bounded
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import LocalError, PeerError

__all__ = ["TORCH_DTYPE", "as_tensor", "check_bounded", "copy", "decode", "empty", "encode", "is_bounded", "keep_spare"]

TORCH_DTYPE = {WireDType.F32: torch.float32, WireDType.BF16: torch.bfloat16}
"""Of those that travel as arrays; q4 has blocks of its own."""

_SPARE = Spare(keep=6)


def empty(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised CPU tensor [numel]; a large one is lent (``buffers.Spare``), on huge pages where there are some.

    Filling a fresh tensor of 64 MiB took six times as long as copying it when every 4 KiB of it was faulted in by
    itself, and twice as long on huge pages, which the kernel clears first.
    """
    nbytes = numel * dtype.itemsize
    if numel == 0:
        return torch.empty(0, dtype=dtype)  # torch views no bytes of length 0 as something longer
    memory = np.empty(nbytes, np.uint8) if nbytes < LENT_BYTES else np.frombuffer(_SPARE.allocate(nbytes), np.uint8)
    return torch.from_numpy(memory).view(dtype)


def keep_spare(count: int) -> None:
    """Let the memory of ``count`` large tensors wait to be used again, in this whole process; it is 6 at first."""
    _SPARE.keep = count


def encode(values: Tensor, dtype: WireDType) -> memoryview:
    """Bytes of ``values``, as they travel in ``dtype``.

    Args:
        values: [n] f32, on any device; finite. A value that is not makes bytes which every decoder refuses. Under
            bf16 also [n] bf16: values that have been rounded already.
        dtype: of the message; for INIT and BCAST the session dtype's ``bulk``.

    Returns:
        A flat memoryview of ``dtype.nbytes(n)`` bytes. **A contiguous CPU tensor that needs no rounding is not
        copied**: the view shares its storage, so the caller must not change it before the bytes have left. Every
        other result is a fresh buffer.

    Raises:
        LocalError: ``values`` is not a flat f32 tensor, or, under bf16, a flat bf16 one.
    """
    is_rounded = values.dtype is torch.bfloat16 and dtype is WireDType.BF16
    if not (values.dtype is torch.float32 or is_rounded) or values.dim() != 1:
        raise LocalError(f"encode takes a flat f32 tensor, not {values.dtype} of shape {tuple(values.shape)}")
    values = values.detach()
    if dtype is WireDType.Q4:
        return q4.encode(values.cpu().contiguous().numpy()).data
    if dtype is WireDType.BF16 and not is_rounded:
        on_cpu = values.device.type == "cpu"
        rounded = empty(values.numel(), torch.bfloat16) if on_cpu else torch.empty_like(values, dtype=torch.bfloat16)
        plain.round_to_bf16(values, rounded)
        values = rounded  # of a GPU's, half as much is downloaded
    return values.cpu().contiguous().view(torch.uint8).numpy().data


def copy(values: Tensor, out: Tensor) -> None:
    """``values`` [n] f32 into ``out`` [n], f32 or bf16 as ``encode`` rounds it; both on one device."""
    if out.dtype is torch.float32:
        out.copy_(values)
    else:
        plain.round_to_bf16(values, out)


def decode(data: Buffer, numel: int, dtype: WireDType, *, negate: bool = False, out: Tensor | None = None) -> Tensor:
    """The ``numel`` values that ``data`` holds, as a flat f32 CPU tensor. Reads and copies the bytes once.

    Args:
        data: exactly ``dtype.nbytes(numel)`` bytes, at any alignment; read only.
        negate: flip every sign on the way (zeros become -0.0, as IEEE negation has it).
        out: [numel] f32 CPU contiguous, filled and returned instead of a fresh tensor; undefined after an error. For
            bf16 bytes also bf16: nothing is widened then.

    Raises:
        PeerError: a wrong length, a value that is not finite or above 2^100, a q4 scale that is negative or neither.
        LocalError: ``out`` does not fit.
    """
    _check_length(data, numel, dtype)
    if out is None:
        out = empty(numel)
    elif not _holds(out, dtype) or out.shape != (numel,) or not out.is_contiguous() or out.device.type != "cpu":
        raise LocalError(f"decode into {out.dtype} {tuple(out.shape)} on {out.device}, expected {numel} f32 on the CPU")
    if dtype is WireDType.Q4:
        q4.decode(np.frombuffer(data, np.uint8), out.numpy(), negate)
    else:
        plain.decode(as_tensor(data, numel, dtype), out, negate)
    return out


def _holds(out: Tensor, dtype: WireDType) -> bool:
    return out.dtype is torch.float32 or (out.dtype is torch.bfloat16 and dtype is WireDType.BF16)


def as_tensor(data: Buffer, numel: int, dtype: WireDType) -> Tensor:
    """A view [numel] of f32 or bf16 ``data``: no copy, any alignment, unchecked (see ``check_bounded``).

    The tensor keeps the buffer alive and **must not be written to**, also where torch would allow it.

    Raises:
        PeerError: a wrong length.
        LocalError: q4 has no tensor view.
    """
    if dtype not in TORCH_DTYPE:
        raise LocalError(f"{dtype.name} bytes cannot be viewed as a tensor")
    _check_length(data, numel, dtype)
    if numel == 0:
        return torch.empty(0, dtype=TORCH_DTYPE[dtype])
    # Bytes first, then view: torch takes an unaligned pointer, numpy would refuse fast loops on an unaligned f32 array.
    lent = np.asarray(_Lent(np.frombuffer(data, np.uint8)))
    return torch.from_numpy(lent).view(TORCH_DTYPE[dtype])


class _Lent:
    """Offers the bytes of a read-only array as an array torch takes without a warning; nobody writes to it."""

    def __init__(self, owner: npt.NDArray[np.uint8]) -> None:
        self.owner = owner  # numpy keeps this object as the array's base, and so the buffer alive
        self.__array_interface__: dict[str, object] = {
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
