"""The child's mathematics against f64, and what it must not load."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

from syncer.config.policy import IsoScale
from syncer.merge.iso import flatten_spectrum
from tests.svd.oracle import flat_f64, well_conditioned

flatten = partial(flatten_spectrum, dtype=torch.float32)
SHAPES = [(1, 1), (1, 9), (9, 1), (2, 2), (7, 5), (5, 7), (64, 64), (33, 130), (130, 33)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", IsoScale)
def test_equals_the_f64_oracle(shape, scale):
    matrix = well_conditioned(*shape, seed=3)
    flat = flatten(torch.from_numpy(matrix), keeps_norm=scale is IsoScale.NORM).numpy()
    want = flat_f64(matrix, scale)
    assert flat.dtype == np.float32
    assert np.abs(flat - want).max() <= 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("scale", IsoScale)
def test_the_spectrum_is_flat_and_is_what_the_scale_says(scale):
    matrix = well_conditioned(20, 12, seed=1)
    before = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    after = np.linalg.svd(
        flatten(torch.from_numpy(matrix), keeps_norm=scale is IsoScale.NORM).numpy().astype(np.float64),
        compute_uv=False,
    )
    level = before.mean() if scale is IsoScale.MEAN else np.sqrt((before**2).mean())
    np.testing.assert_allclose(after, level, rtol=1e-5)
    if scale is IsoScale.NORM:
        assert np.linalg.norm(after) == pytest.approx(np.linalg.norm(before), rel=1e-5)


@pytest.mark.parametrize("scale", IsoScale)
def test_zeros_stay_zeros(scale):
    matrix = torch.zeros(3, 4)
    matrix[1, 2] = -0.0
    assert flatten(matrix, keeps_norm=scale is IsoScale.NORM).numpy().tobytes() == matrix.numpy().tobytes()


def test_a_zero_singular_value_stays_zero_and_still_counts_in_the_mean():
    matrix = torch.diag(torch.tensor([3.0, 1.0, 0.0]))
    torch.testing.assert_close(flatten(matrix), torch.diag(torch.tensor([4 / 3, 4 / 3, 0.0])))
    torch.testing.assert_close(flatten(matrix, keeps_norm=True), torch.diag(torch.tensor([5**0.5, 5**0.5, 0.0])))


@pytest.mark.parametrize("exponent", [-60, 60, 100])
def test_the_scale_of_the_values_does_not_matter(exponent):
    """The sum of squares of such values overflows or vanishes in f32."""
    matrix = torch.from_numpy(well_conditioned(6, 8, seed=2))
    factor = 2.0**exponent
    for scale in IsoScale:
        flat = flatten(matrix * factor, keeps_norm=scale is IsoScale.NORM) / factor
        torch.testing.assert_close(flat, flatten(matrix, keeps_norm=scale is IsoScale.NORM), rtol=1e-5, atol=1e-5)


def test_a_child_loads_no_hydra_and_no_torch_before_it_must():
    code = (
        "import sys, syncer.svd.worker as worker\n"
        "assert not {'torch', 'numpy', 'hydra', 'omegaconf', 'syncer.svd.pool'} & set(sys.modules)\n"
        "import syncer.merge.iso\n"
        "assert not {'hydra', 'omegaconf'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
