"""Merge mode iso: the averaged matrix gradient with its singular spectrum made flat.

``A = U S V'`` becomes ``s U V'``, with s the mean of S, or what keeps the norm of A: every direction the members agree
on moves equally far. The decomposition is a callable, so that another backend (a pool of child processes, in f32) can
stand in for the one here.

Source: v4 §Merging (the mean matrix with a flat spectrum), v4 §SVD pool (the same in a child); rulings §4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # torch documents it, its type information does not

from syncer.merge.average import average
from syncer.merge.blocks import norm
from syncer.merge.members import Members
from yeto_torch.wire.errors import RunError

Spectrum: TypeAlias = Callable[[Tensor], Tensor]
"""[rows, cols] f32 -> [rows, cols] f32 with a flat spectrum, on any device."""

RANK_TOLERANCE = 1e-10  # a singular value this small against the largest is a zero


def flatten_spectrum(matrix: Tensor, dtype: torch.dtype = torch.float64, *, keeps_norm: bool = False) -> Tensor:
    """``U S V' -> s U V'`` by a thin SVD in ``dtype``; in f64 it is the scalar backend as it stands.

    ``s`` is the mean over all min(rows, cols) singular values, or, with ``keeps_norm``, what keeps the Frobenius norm.
    Values that are zero stay zero: a matrix of low rank keeps its rank. A matrix of zeros is returned unchanged.

    Args:
        matrix: [rows, cols] f32, finite; not modified.

    Returns:
        [rows, cols] f32 on the same device.

    Raises:
        RunError: the decomposition did not converge.
    """
    if not bool(matrix.any()):
        return matrix
    try:
        left, values, right = torch.linalg.svd(matrix.to(dtype), full_matrices=False)
    except LinAlgError as error:
        raise RunError(f"the SVD of a {matrix.shape[0]} x {matrix.shape[1]} gradient did not converge") from error
    kept = values > RANK_TOLERANCE * values[0]
    exact = values.double()
    level = exact.square().sum().div(kept.sum()).sqrt() if keeps_norm else exact.mean()
    result: Tensor = (left * torch.where(kept, level, 0.0).to(dtype)) @ right
    return result.to(torch.float32)


def isotropic_average(
    members: Members,
    weights: Sequence[float],
    dims: tuple[int, int],
    out: Tensor,
    spectrum: Spectrum = flatten_spectrum,
) -> float:
    """``out = spectrum(average)`` of a matrix tensor.

    Args:
        members: what they sent, [rows * cols] each, row-major.
        weights: one f64 per member, their sum positive.
        dims: (rows, cols).
        out: [rows * cols] f32 on the same device, overwritten.

    Returns:
        The norm of ``out``, in f64.
    """
    average(members, weights, out)
    out.copy_(spectrum(out.view(dims)).reshape(-1))
    return norm(out)
