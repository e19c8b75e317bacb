"""Types of what _kernels.c offers. Arrays are contiguous f32 of one length n.

Raises ValueError for lengths that do not match; ValueError or BufferError, as the array has it, where it is not
contiguous or not to be written to.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Array: TypeAlias = npt.NDArray[np.generic]

def products(vectors: list[_Array], reference: _Array | None, /) -> list[float]:
    """Sums in f64, as ``blocks.products`` has them: squares, inner products with the reference, the pair's, its square.

    Zero for what is not asked for: without a reference (None), or other than two vectors. At least one vector.
    """

def weighted_sum(out: _Array, vectors: list[_Array], factors: _Array, scale: float, is_measured: bool, /) -> float:
    """``out = f32(scale) * sum of factors * vectors``, each operation rounded to f32; the sum of its squares, or 0.

    ``factors``: one f32 per vector, at least one. The first vector may be ``out``.
    """

def blend(out: _Array, x: _Array, y: _Array, along: float, towards: float, /) -> float:
    """``out = along * x + towards * y`` in f64, each operation rounded by itself; the sum of its squares in f64."""

def nesterov_step(
    params: _Array, momentum: _Array, gradient: _Array, lr: float, mu: float, copy: _Array | None, /
) -> None:
    """The outer step in f32, each operation rounded by itself; the first two are overwritten.

    ``copy``: None, or [n] f32 or bf16, which becomes what ``params`` are then, rounded to nearest even.
    """
