"""Working through long tensors piece by piece: f64 reductions, and products that never fuse.

Decides how large a piece is, who works on it, and how a sum is accumulated. Knows nothing of learners or fragments.

* A piece and its scratch stay in a core's cache, so that a second look at it costs no second trip to memory: whoever
  writes a tensor measures its norm on the way. On the CPU a piece is a numpy array, whose operations start in a third
  of the time that torch's take and round alike; on a GPU it is a tensor. ``operations`` finds those of both.
* A reduction converts one piece at a time to f64. No f64 copy of a whole tensor ever exists.
* A product and the sum it enters are two operations. ``add(..., alpha=)`` fuses them on processors with FMA and on
  GPUs, rounding once instead of twice: other bits than the law's formulas in f32 give, and other bits per machine.

Source: v4 §Merging; rulings §4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from syncer.merge import kernels
from yeto_torch.wire import codec

CPU_PIECE = 1 << 16  # 256 KiB of f32, 512 KiB in f64: half the size costs a tenth more calls, double leaves the cache
GPU_PIECE = 1 << 26  # a GPU has no such cache: launches should be few, scratch moderate (256 MiB)
_F32_SHIFT = 2.0**64
F32_MAX = float(torch.finfo(torch.float32).max)

Piece = Any
"""A numpy array or, on a GPU, a tensor, as ``operations`` takes them. Flat f32, memory of the tensor it is part of."""


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def unheeded(work: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Around work on pieces: what is not finite is found where the law says so, not warned of by numpy."""

    @wraps(work)
    def quiet(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        with np.errstate(over="ignore", invalid="ignore"):
            return work(*arguments, **keywords)

    return quiet


def piece_numel(tensor: Tensor) -> int:
    """Values per piece for work on ``tensor``'s device."""
    return CPU_PIECE if tensor.device.type == "cpu" else GPU_PIECE


def pieces(*tensors: Tensor) -> Iterator[tuple[Piece, ...]]:
    """Matching pieces of flat f32 tensors of one length."""
    size, numel = piece_numel(tensors[0]), tensors[0].numel()
    wholes = [as_piece(tensor) for tensor in tensors]
    if numel <= size:  # most tensors of most models: nothing to split
        yield tuple(wholes)
        return
    for first in range(0, numel, size):
        yield tuple([whole[first : first + size] for whole in wholes])


def as_piece(tensor: Tensor) -> Piece:
    """A whole tensor as one piece."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


Values = Tensor | npt.NDArray[Any]
"""Flat f32 or bf16: a tensor, or what ``as_array`` made of one."""


def as_array(values: Values) -> npt.NDArray[Any]:
    """A flat CPU tensor as kernels take it: bf16 by its bits, since numpy has no name for it."""
    if isinstance(values, np.ndarray):
        return values
    return (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).numpy()


def sliceable(tensors: Sequence[Tensor]) -> Sequence[Values]:
    """Where kernels work on them, arrays: a slice of one costs a tenth of a tensor's, and many learners have many."""
    if kernels.compiled is None or any(tensor.device.type != "cpu" for tensor in tensors):
        return tensors
    return [as_array(tensor) for tensor in tensors]


def as_f32(values: Values) -> Tensor:
    """Back to a tensor; a bf16 one is widened."""
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values if values.dtype == np.float32 else values.view(np.int16))
        values = values if values.dtype is torch.float32 else values.view(torch.bfloat16)
    return values.float()


def _is_for_kernels(values: Values) -> bool:
    return kernels.compiled is not None and (isinstance(values, np.ndarray) or values.device.type == "cpu")


def operations(piece: Piece) -> Any:
    """Where ``add``, ``subtract`` and ``multiply``, each with ``out=``, are found for pieces of this kind."""
    return np if isinstance(piece, np.ndarray) else torch


def scratch(like: Tensor, dtype: torch.dtype = torch.float32) -> Piece:
    """Uninitialised room for one piece of ``like`` in f32 or f64, on its device."""
    numel = min(like.numel(), piece_numel(like))
    if like.device.type == "cpu":
        return np.empty(numel, np.float32 if dtype is torch.float32 else np.float64)
    return torch.empty(numel, dtype=dtype, device=like.device)


def empty_like(tensor: Tensor) -> Tensor:
    """An uninitialised f32 tensor [n] on the device of ``tensor`` [n]."""
    if tensor.device.type == "cpu":
        return codec.empty(tensor.numel())
    return torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)


class Wide:
    """Room for one piece of ``like`` in f64, on its device."""

    def __init__(self, like: Tensor) -> None:
        self._room = scratch(like, torch.float64)

    def load(self, piece: Piece) -> Piece:
        """``piece`` in f64, until the next call."""
        values = self._room[: len(piece)]
        values[:] = piece
        return values


def dot(left: Piece, right: Piece) -> Any:
    """The inner product of two pieces in f64: a float, on a GPU a tensor of one value, for which nobody has waited."""
    return float(np.dot(left, right)) if isinstance(left, np.ndarray) else torch.dot(left, right)


def floats(sums: Sequence[Any]) -> list[float]:
    """Sums of what ``dot`` returned, the first of at least one term; on a GPU they are fetched at once."""
    if not isinstance(sums[0], Tensor):
        return list(sums)
    return torch.stack([sums[0].new_tensor(term) if isinstance(term, float) else term for term in sums]).tolist()


class Norm:
    """The l2 norm of a tensor like ``like``, gathered piece by piece in f64."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._wide: Wide | None = None
        self._square: Any = 0.0

    def take(self, piece: Piece) -> None:
        if self._wide is None:
            self._wide = Wide(self._like)
        values = self._wide.load(piece)
        self._square = self._square + dot(values, values)

    def add(self, square: float) -> None:
        """The sum of the squares of some values is known."""
        self._square = self._square + square

    def value(self) -> float:
        return math.sqrt(float(self._square))


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
    """What a merge asks of at least one vector, all flat f32 of one length; each is read and widened once.

    Two vectors are also multiplied with each other: that costs a third of what measuring their sum would. More of them
    have too many pairs.
    """
    count, is_pair = len(vectors), len(vectors) == 2
    if kernels.compiled is not None and _is_for_kernels(vectors[0]):
        arrays = [as_array(vector) for vector in vectors]
        sums: list[Any] = kernels.compiled.products(arrays, None if reference is None else reference.numpy())
    else:
        sums = _multiplied([as_f32(vector) for vector in vectors], reference)
    *found, cross, square = floats(sums)
    return Products(
        [math.sqrt(own) for own in found[:count]],
        cross if is_pair else None,
        [] if reference is None else found[count:],
        math.sqrt(square),
    )


def _multiplied(vectors: Sequence[Tensor], reference: Tensor | None) -> list[Any]:
    """Squares, inner products with the reference, the product of a pair, the square of the reference."""
    count, is_pair = len(vectors), len(vectors) == 2
    rooms = [Wide(vectors[0]) for _ in range(2 if is_pair else 1)]
    wide_reference = None if reference is None else Wide(reference)
    sums: list[Any] = [0.0] * (2 * count + 2)
    for parts in pieces(*vectors, *([] if reference is None else [reference])):
        wides: list[Piece] = []
        r = None if wide_reference is None else wide_reference.load(parts[-1])
        if r is not None:
            sums[-1] += dot(r, r)
        for index, part in enumerate(parts[:count]):
            wides.append(rooms[index if is_pair else 0].load(part))
            sums[index] += dot(wides[-1], wides[-1])
            if r is not None:
                sums[count + index] += dot(wides[-1], r)
        if is_pair:
            sums[-2] += dot(*wides)
    return sums


def norm(values: Values) -> float:
    """The l2 norm of a flat f32 tensor, in f64; NaN or infinite where a value is."""
    return products([values]).norms[0]


def largest(values: Tensor) -> float:
    """The largest magnitude in a flat tensor; NaN where a value is NaN."""
    return float(torch.stack(torch.aminmax(values)).abs().amax())


def total(terms: Sequence[float]) -> float:
    """A plain left-to-right f64 sum. The built-in one compensates since Python 3.12: other bits per interpreter."""
    result = 0.0
    for term in terms:
        result += term
    return result


def product(values: Piece, factor: float, out: Piece) -> Piece:
    """``out = f32(factor) * values``, elementwise; ``out`` may be ``values``.

    A factor beyond f32 multiplies in two steps, the first by a power of two: then the values are so small that the
    product is ordinary, and infinity in its place would end the run for an input that is merely odd.
    """
    multiply = operations(out).multiply
    if abs(factor) > F32_MAX and math.isfinite(factor):
        values, factor = multiply(values, _rounded(_F32_SHIFT, out), out=out), factor / _F32_SHIFT
    return multiply(values, _rounded(factor, out), out=out)


def _rounded(factor: float, piece: Piece) -> Any:
    """To f32: torch does so by itself, numpy would make the product one in f64."""
    return np.float32(factor) if isinstance(piece, np.ndarray) else factor


@unheeded
def weighted_sum(
    out: Tensor, values: Sequence[Values], factors: Sequence[float], factor: float = 1.0, length: Norm | None = None
) -> None:
    """``out = f32(factor) * sum of f32(factors) * values``, every product and sum rounded to f32.

    A list is worked through piece by piece, all of its tensors at once, so that the sum stays in cache. Any other
    sequence may hand out the same memory with each fetch: its tensors are taken one after the other, whole.

    Args:
        out: a flat f32 tensor.
        values: f32 or bf16, of its length.
        length: takes the norm of ``out``.
    """
    if isinstance(values, list):
        _sum_at_once(out, values, factors, factor, length)
        return
    last = len(factors) - 1
    for index, own in enumerate(factors):
        scaled, measure = (factor, length) if index == last else (1.0, None)
        if index == 0:
            _sum_at_once(out, [values[0]], [own], scaled, measure)
        else:
            add(out, values[index], own, scaled, measure)


def _sum_at_once(
    out: Tensor, values: Sequence[Values], factors: Sequence[float], factor: float, length: Norm | None
) -> None:
    if _summed(out, values, factors, factor, length):
        return
    room = scratch(out) if len(values) > 1 else None
    for target, *parts in pieces(out, *[as_f32(part) for part in values]):
        product(parts[0], factors[0], target)
        for part, own in zip(parts[1:], factors[1:], strict=True):
            assert room is not None
            operations(target).add(target, product(part, own, room[: len(part)]), out=target)
        _finish(target, factor, length)


def _summed(
    out: Tensor, values: Sequence[Values], factors: Sequence[float], factor: float, length: Norm | None
) -> bool:
    """Has it been done by a kernel? A factor beyond f32 is ``product``'s to take apart."""
    if kernels.compiled is None or out.device.type != "cpu" or not max(map(abs, [factor, *factors])) <= F32_MAX:
        return False
    arrays = [as_array(part) for part in values]
    square = kernels.compiled.weighted_sum(
        out.numpy(), arrays, np.array(factors, np.float32), factor, length is not None
    )
    if length is not None:
        length.add(square)
    return True


@unheeded
def add(out: Tensor, values: Values, own: float, factor: float = 1.0, length: Norm | None = None) -> None:
    """``out = f32(factor) * (out + f32(own) * values)``; else as ``weighted_sum``."""
    if _summed(out, [out, values], [1.0, own], factor, length):
        return
    room = scratch(out)
    for target, piece in pieces(out, as_f32(values)):
        operations(target).add(target, product(piece, own, room[: len(piece)]), out=target)
        _finish(target, factor, length)


@unheeded
def scale(values: Tensor, factor: float, length: Norm | None = None) -> None:
    """``values *= f32(factor)``; else as ``weighted_sum``."""
    if _summed(values, [values], [1.0], factor, length):
        return
    for (piece,) in pieces(values):
        _finish(piece, factor, length)


def _finish(target: Piece, factor: float, length: Norm | None) -> None:
    """What a piece that is in cache gets on top."""
    if factor != 1.0:
        product(target, factor, target)
    if length is not None:
        length.take(target)
