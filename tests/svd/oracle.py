"""Flat spectra in f64 with numpy, and matrices on which two decompositions must agree."""

import numpy as np

from syncer.config.policy import IsoScale


def flat_f64(matrix, scale=IsoScale.MEAN):
    """[rows, cols] f32 -> [rows, cols] f64."""
    left, values, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    kept = values > 1e-10 * values[0]
    level = values.mean() if scale is IsoScale.MEAN else np.sqrt(np.sum(values**2) / kept.sum())
    return (left * np.where(kept, level, 0.0)) @ right


def well_conditioned(rows, cols, seed):
    """A random [rows, cols] f32 matrix with singular values between 1 and 3."""
    rng = np.random.default_rng(seed)
    left, _, right = np.linalg.svd(rng.standard_normal((rows, cols)), full_matrices=False)
    return ((left * rng.uniform(1.0, 3.0, min(rows, cols))) @ right).astype(np.float32)
