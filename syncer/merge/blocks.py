"""Working through long tensors block by block: f64 reductions, and products that never fuse.

Decides how large a block is and how a sum is accumulated. Knows nothing of learners or fragments.

* On the CPU compiled kernels do it where there are some. Else, and on a GPU, torch does, to the same f32 bits.
* A block and what is made of it stay in a core's cache, so that a second look costs no second trip to memory: whoever
  writes a tensor measures its norm on the way.
* A reduction converts one block at a time to f64. No f64 copy of a whole tensor ever exists.
* A product and the sum it enters are two operations. ``add(..., alpha=)`` fuses them on processors with FMA and on
  GPUs, rounding once instead of twice: other bits than the law's formulas in f32 give, and other bits per machine.

Source: v4 §Merging (the order of sums fixes the bits); rulings §4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from syncer.merge import kernels
from yeto_torch.wire import codec

CPU_BLOCK = 1 << 17  # 512 KiB of f32, 1 MiB in f64: half the size costs a tenth more in calls
GPU_BLOCK = 1 << 26  # a GPU has no such cache: launches should be few, what is made of a block moderate (512 MiB)
F32_MAX = float(torch.finfo(torch.float32).max)
_F32_SHIFT = 2.0**64

Array: TypeAlias = npt.NDArray[np.generic]
Values: TypeAlias = Tensor | Array
"""Flat f32 or bf16: a tensor, or what ``as_array`` made of one."""


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching blocks of flat tensors of one length, on one device."""
    size = CPU_BLOCK if tensors[0].device.type == "cpu" else GPU_BLOCK
    if tensors[0].numel() <= size:  # most tensors of most models: nothing to split
        yield tensors
        return
    yield from zip(*[torch.split(tensor, size) for tensor in tensors], strict=True)


def as_array(values: Values) -> Array:
    """A flat CPU tensor as kernels take it: bf16 by its bits, since numpy has no name for it."""
    if isinstance(values, np.ndarray):
        return values
    array: Array = (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).numpy()
    return array


def as_tensor(values: Values) -> Tensor:
    """What ``as_array`` was given."""
    if not isinstance(values, np.ndarray):
        return values
    tensor = torch.from_numpy(values)
    return tensor if tensor.dtype is torch.float32 else tensor.view(torch.bfloat16)


def sliceable(tensors: Sequence[Tensor]) -> Sequence[Values]:
    """Where kernels work on them, arrays: a slice of one costs a tenth of a tensor's, and many learners have many."""
    return [as_array(tensor) for tensor in tensors] if all(map(_is_for_kernels, tensors)) else tensors


def _is_for_kernels(values: Values) -> bool:
    return kernels.compiled is not None and (isinstance(values, np.ndarray) or values.device.type == "cpu")


def empty_like(tensor: Tensor) -> Tensor:
    """An uninitialised f32 tensor [n] on the device of ``tensor`` [n]."""
    if tensor.device.type == "cpu":
        return codec.empty(tensor.numel())
    return torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)


# Reductions


@dataclass(frozen=True, slots=True)
class Products:
    """Norms and inner products of tensors of one length, in f64.

    Attributes:
        norms: of the vectors.
        cross: the inner product of two vectors where there are just two, else None.
        inner: of each vector with the reference; empty where there is none.
        reference_norm: 0 where there is none.
    """

    norms: list[float]
    cross: float | None
    inner: list[float]
    reference_norm: float


def products(vectors: Sequence[Values], reference: Tensor | None = None) -> Products:
    """What a merge asks of at least one vector, all flat f32 or bf16 of one length; each is read and widened once.

    Two vectors are also multiplied with each other: that costs a third of what measuring their sum would. More of them
    have too many pairs.
    """
    count = len(vectors)
    if kernels.compiled is not None and _is_for_kernels(vectors[0]):
        arrays = [as_array(vector) for vector in vectors]
        sums = kernels.compiled.products(arrays, None if reference is None else reference.numpy())
    else:
        sums = _products([as_tensor(vector) for vector in vectors], reference)
    *found, cross, square = sums
    return Products(
        [math.sqrt(own) for own in found[:count]],
        cross if count == 2 else None,
        [] if reference is None else found[count:],
        math.sqrt(square),
    )


def _products(vectors: Sequence[Tensor], reference: Tensor | None) -> list[float]:
    """Squares, inner products with the reference, the product of a pair, the square of the reference."""
    count = len(vectors)
    sums = [torch.zeros((), dtype=torch.float64, device=vectors[0].device)] * (2 * count + 2)
    for parts in blocks(*vectors, *([] if reference is None else [reference])):
        wide_reference, first = None, None
        if reference is not None:
            wide_reference = parts[-1].double()
            sums[-1] = sums[-1] + torch.dot(wide_reference, wide_reference)
        for index, part in enumerate(parts[:count]):
            wide = part.double()
            sums[index] = sums[index] + torch.dot(wide, wide)
            if wide_reference is not None:
                sums[count + index] = sums[count + index] + torch.dot(wide, wide_reference)
            if first is not None:
                sums[-2] = sums[-2] + torch.dot(first, wide)
            elif count == 2:
                first = wide
    found: list[float] = torch.stack(sums).tolist()  # a GPU is waited for once
    return found


def norm(values: Values) -> float:
    """The l2 norm of a flat f32 or bf16 tensor, in f64; NaN or infinite where a value is."""
    return products([values]).norms[0]


def largest(values: Tensor) -> float:
    """The largest magnitude in a flat tensor; NaN where a value is NaN."""
    return float(torch.stack(torch.aminmax(values)).abs().amax())


def ordered_sum(terms: Sequence[float]) -> float:
    """A plain left-to-right f64 sum. The built-in one compensates since Python 3.12: other bits per interpreter."""
    result = 0.0
    for term in terms:
        result += term
    return result


# Sums


def product(values: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """``f32(factor) * values``, elementwise, into ``out``, which may be ``values``, or a new tensor.

    A factor beyond f32 multiplies in two steps, the first by a power of two: then the values are so small that the
    product is ordinary, and infinity in its place would end the run for an input that is merely odd.
    """
    if abs(factor) > F32_MAX and math.isfinite(factor):
        values, factor = torch.mul(values, _F32_SHIFT, out=out), factor / _F32_SHIFT
    if factor == 1.0 and out is not None:
        return out.copy_(values)
    return torch.mul(values, factor, out=out)


def weighted_sum(
    out: Tensor, values: Sequence[Values], factors: Sequence[float], scale: float = 1.0, *, measured: bool = False
) -> float:
    """``out = f32(scale) * sum of f32(factors) * values``, every product and sum rounded to f32; in one trip.

    Args:
        out: a flat f32 tensor.
        values: at least one, f32 or bf16, of its length; the first may be ``out``.

    Returns:
        The norm of ``out`` in f64 if it is to be ``measured``, else 0.
    """
    # a factor beyond f32 is ``product``'s to take apart
    if kernels.compiled is not None and out.device.type == "cpu" and max(map(abs, [scale, *factors])) <= F32_MAX:
        arrays = [as_array(part) for part in values]
        square = kernels.compiled.weighted_sum(out.numpy(), arrays, np.array(factors, np.float32), scale, measured)
        return math.sqrt(square)
    return math.sqrt(_weighted_sum(out, [as_tensor(part) for part in values], factors, scale, measured=measured))


def _weighted_sum(
    out: Tensor, values: Sequence[Tensor], factors: Sequence[float], scale: float, *, measured: bool
) -> float:
    square = torch.zeros((), dtype=torch.float64, device=out.device)
    for target, *parts in blocks(out, *values):
        product(parts[0].float(), factors[0], target)
        for part, own in zip(parts[1:], factors[1:], strict=True):
            target.add_(product(part.float(), own))
        if scale != 1.0:
            product(target, scale, target)
        if measured:
            wide = target.double()
            square = square + torch.dot(wide, wide)
    return float(square) if measured else 0.0
