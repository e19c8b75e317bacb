"""Working through long tensors piece by piece: f64 reductions, and products that never fuse.

Decides how large a piece is, and how a sum is accumulated. Knows nothing of learners or fragments.

* A reduction converts one piece at a time to f64. No f64 copy of a whole tensor ever exists.
* A product and the sum it enters are two operations. ``add(..., alpha=)`` fuses them on processors with FMA and on
  GPUs, rounding once instead of twice: other bits than the law's formulas in f32 give, and other bits per machine.
  Within a piece the extra pass runs in cache and costs little.

Source: protocol v4, coordinator merge; the rule that sums of squares accumulate in f64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from yeto_torch.protocol import codec

CPU_PIECE = 1 << 18  # 1 MiB of f32: with its scratch it stays in cache, yet a call's overhead is small against it
GPU_PIECE = 1 << 26  # a GPU has no such cache: launches should be few, scratch moderate (256 MiB)
_F32_SHIFT = 2.0**64
_F32_MAX = float(torch.finfo(torch.float32).max)


def piece_numel(tensor: Tensor) -> int:
    """Values per piece for work on ``tensor``'s device."""
    return CPU_PIECE if tensor.device.type == "cpu" else GPU_PIECE


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching pieces (views) of flat tensors of one length."""
    size = piece_numel(tensors[0])
    if all(tensor.numel() <= size for tensor in tensors):  # most tensors of most models: nothing to split
        return iter([tensors])
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def scratch(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised room for one piece of ``like``, on its device."""
    return torch.empty(min(like.numel(), piece_numel(like)), dtype=dtype, device=like.device)


def empty_like(tensor: Tensor) -> Tensor:
    """An uninitialised f32 tensor [n] on the device of ``tensor`` [n]."""
    if tensor.device.type == "cpu":
        return codec.empty(tensor.numel())
    return torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)


def alignment(vectors: Sequence[Tensor], reference: Tensor) -> tuple[list[tuple[float, float]], float]:
    """Per vector (its norm, its inner product with ``reference``), and the norm of ``reference``; all in f64.

    Flat f32 tensors of one length; each is read once. Sums run through aligned scratch: a library may add in another
    order where the same values lie at another alignment.
    """
    ref64, vec64 = scratch(reference, torch.float64), scratch(reference, torch.float64)
    sums = torch.zeros(len(vectors) + 1, 2, dtype=torch.float64, device=reference.device)
    for ref, *parts in pieces(reference, *vectors):
        r = ref64[: ref.numel()].copy_(ref)
        sums[-1, 0] += torch.dot(r, r)
        for row, part in enumerate(parts):
            v = vec64[: part.numel()].copy_(part)
            sums[row, 0] += torch.dot(v, v)
            sums[row, 1] += torch.dot(v, r)
    *rows, (square, _) = sums.tolist()
    return [(math.sqrt(own), inner) for own, inner in rows], math.sqrt(square)


def norm(values: Tensor) -> float:
    """The l2 norm of a flat f32 tensor, in f64; NaN or infinite where a value is."""
    return alignment((), values)[1]


def largest(values: Tensor) -> float:
    """The largest magnitude in a flat tensor; NaN where a value is NaN."""
    extremes = [torch.stack(torch.aminmax(piece)) for (piece,) in pieces(values)]
    return float(torch.stack(extremes).abs().amax())


def total(terms: Sequence[float]) -> float:
    """A plain left-to-right f64 sum. The built-in one compensates since Python 3.12: other bits per interpreter."""
    result = 0.0
    for term in terms:
        result += term
    return result


def product(values: Tensor, factor: float, out: Tensor) -> Tensor:
    """``out = f32(factor) * values`` for one piece, elementwise; ``out`` may be ``values``.

    A factor beyond f32 multiplies in two steps, the first by a power of two: then the values are so small that the
    product is ordinary, and infinity in its place would end the run for an input that is merely odd.
    """
    if abs(factor) > _F32_MAX and math.isfinite(factor):
        return torch.mul(values, _F32_SHIFT, out=out).mul_(factor / _F32_SHIFT)
    return torch.mul(values, factor, out=out)


def weighted_sum(out: Tensor, values: Sequence[Tensor], factors: Sequence[float]) -> None:
    """``out = sum of f32(factor) * values`` over flat tensors of one length, every product and sum rounded to f32.

    A list is worked through piece by piece, all of its tensors at once, so that the sum stays in cache. Any other
    sequence may hand out the same memory with each fetch: its tensors are taken one after the other, whole.
    """
    if isinstance(values, list):
        _sum_at_once(out, values, factors)
        return
    for index, factor in enumerate(factors):
        if index == 0:
            _sum_at_once(out, [values[index]], [factor])
        else:
            add(out, values[index], factor)


def _sum_at_once(out: Tensor, values: Sequence[Tensor], factors: Sequence[float]) -> None:
    if not values:
        return
    whole = scratch(out)
    for target, *parts in pieces(out, *values):
        room = whole if len(parts[0]) == len(whole) else whole[: len(parts[0])]
        product(parts[0], factors[0], target)
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            target += product(part, factor, room)


def add(out: Tensor, values: Tensor, factor: float) -> None:
    """``out += f32(factor) * values`` over whole flat tensors, product and sum each rounded to f32."""
    room = scratch(out)
    for target, piece in pieces(out, values):
        target += product(piece, factor, room[: piece.numel()])


def scale(values: Tensor, factor: float) -> None:
    """``values *= f32(factor)`` over a whole flat tensor."""
    for (piece,) in pieces(values):
        product(piece, factor, piece)
