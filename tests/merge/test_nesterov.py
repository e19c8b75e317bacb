"""The outer step: golden bits, torch's own SGD as oracle, and nothing touched when it must not be taken."""

import json
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncer.merge import blocks
from syncer.merge.nesterov import Bounds, nesterov_step
from tests.support import merge_oracle as oracle
from tests.support.sgd_oracle import compare_with_sgd
from yeto_torch.wire import codec
from yeto_torch.wire.errors import LocalError, RunError

pytestmark = pytest.mark.usefixtures("either_way")

TOP = float(torch.finfo(torch.float32).max)


@pytest.mark.parametrize("repeats", [1, 64])
def test_golden_bits(request, repeats):
    path = request.config.rootpath / "tests" / "vectors" / "numerics.json"
    want = json.loads(path.read_text(encoding="utf-8"))["nesterov_a"]["f32_bits"].split()
    params, momentum = torch.ones(repeats), torch.zeros(repeats)
    nesterov_step(params, momentum, torch.full((repeats,), 0.5), 0.7, 0.9)
    for got, bits in zip((params, momentum), want, strict=True):
        assert set(got.view(torch.int32).tolist()) == {int(bits, 16)}


def test_equals_sgd_bit_for_bit_where_products_are_exact():
    """With powers of two a fused multiply-add rounds like two operations, so SGD's kernel does not matter."""
    compare_with_sgd([(0.5, 0.5), (1.0, 0.0), (0.25, 0.5)])


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only here torch has kernels without FMA")
def test_equals_sgd_bit_for_bit_without_fused_multiply_add(root):
    code = (
        "from tests.support.sgd_oracle import compare_with_sgd; compare_with_sgd([(0.7, 0.9), (0.7, 0.5), (0.3, 0.99)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@given(st.integers(0, 2**32), st.integers(1, 300), st.floats(0, 2), st.floats(0, 1))
def test_equals_the_oracle_bit_for_bit(seed, numel, lr, mu):
    rng = np.random.default_rng(seed)
    p, m, d = (rng.standard_normal(numel).astype(np.float32) for _ in range(3))
    params, momentum, gradient = (torch.from_numpy(x.copy()) for x in (p, m, d))
    nesterov_step(params, momentum, gradient, lr, mu)
    want_p, want_m = oracle.outer(p, m, d, lr, mu)
    assert np.array_equal(params.numpy(), want_p)
    assert np.array_equal(momentum.numpy(), want_m)
    assert np.array_equal(gradient.numpy(), d)


def test_pieces_change_no_bit(monkeypatch):
    rng = torch.Generator().manual_seed(2)
    p, m, d = (torch.randn(1000, generator=rng) for _ in range(3))
    whole = (p.clone(), m.clone())
    nesterov_step(*whole, d, 0.7, 0.9)
    monkeypatch.setattr(blocks, "CPU_BLOCK", 37)
    nesterov_step(p, m, d, 0.7, 0.9)
    assert torch.equal(p, whole[0])
    assert torch.equal(m, whole[1])


@pytest.fixture
def state(monkeypatch):
    """Parameters and momentum of three pieces, and a check that both are what they were."""
    monkeypatch.setattr(blocks, "CPU_BLOCK", 4)
    params, momentum = torch.arange(10.0), torch.arange(10.0) / 8
    kept = params.clone(), momentum.clone()

    def unchanged():
        return torch.equal(params, kept[0]) and torch.equal(momentum, kept[1])

    return params, momentum, unchanged


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 9])
def test_a_gradient_that_is_not_finite_touches_nothing(state, bad, at):
    params, momentum, unchanged = state
    gradient = torch.ones(10)
    gradient[at] = bad
    with pytest.raises(RunError, match="merged outer gradient is not finite"):
        nesterov_step(params, momentum, gradient, 0.7, 0.9)
    assert unchanged()


@pytest.mark.parametrize("momentum_overflows", [True, False])
def test_a_step_out_of_range_touches_nothing(state, momentum_overflows):
    params, momentum, _ = state
    gradient = torch.zeros(10)
    gradient[9] = TOP / 2
    if momentum_overflows:
        momentum[9] = TOP * 0.9
    else:
        params[9] = -TOP * 0.9
    kept = params.clone(), momentum.clone()
    with pytest.raises(RunError, match="would make parameters or momentum non-finite"):
        nesterov_step(params, momentum, gradient, 0.7, 0.9)
    assert torch.equal(params, kept[0])
    assert torch.equal(momentum, kept[1])


def test_state_that_is_broken_already_is_not_stepped(state):
    params, momentum, _ = state
    params[3] = float("nan")
    with pytest.raises(RunError, match="non-finite"):
        nesterov_step(params, momentum, torch.ones(10), 0.7, 0.9)
    assert momentum[0] == 0


def test_a_large_step_that_stays_finite_is_taken(state):
    params, momentum, _ = state
    params[9] = TOP * 0.9
    gradient = torch.zeros(10)
    gradient[9] = TOP / 4  # lr 0.7, mu 0: the parameter falls
    nesterov_step(params, momentum, gradient, 0.7, 0.0)
    assert 0 < float(params[9]) < TOP
    assert momentum[9] == gradient[9]


@pytest.mark.parametrize("shapes", [((4,), (4,), (3,)), ((2, 2), (2, 2), (2, 2))])
def test_tensors_that_do_not_match(shapes):
    with pytest.raises(LocalError, match="flat tensors of one length"):
        nesterov_step(*(torch.ones(shape) for shape in shapes), 0.7, 0.9)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_lawful_giants_never_make_a_state_that_may_not_be_broadcast(sign):
    params, momentum = torch.zeros(5), torch.zeros(5)
    for _ in range(50):
        nesterov_step(params, momentum, torch.full((5,), sign * 2.0**100), 0.7, 0.9)
        codec.check_bounded(params)
        assert bool(torch.isfinite(momentum).all())
    assert params.tolist() == [-sign * 2.0**100] * 5
    nesterov_step(params, momentum, torch.full((5,), -sign * 2.0**99), 0.7, 0.0)
    assert bool((params.abs() < 2.0**100).all()), "it comes back"


def test_bounds_that_are_kept_never_fall_short_and_change_no_bit():
    generator = torch.Generator().manual_seed(3)
    params, momentum = torch.randn(40, generator=generator), torch.zeros(40)
    twin_params, twin_momentum = params.clone(), momentum.clone()
    bounds = Bounds()
    for step in range(300):
        gradient = torch.randn(40, generator=generator) * 10.0 ** (step % 9 - 4)
        nesterov_step(params, momentum, gradient, 0.7, 0.9, bounds, blocks.norm(gradient))
        nesterov_step(twin_params, twin_momentum, gradient, 0.7, 0.9)
        assert float(params.abs().max()) <= bounds.params
        assert float(momentum.abs().max()) <= bounds.momentum
    assert torch.equal(params, twin_params)
    assert torch.equal(momentum, twin_momentum)
    assert bounds.momentum < 100 * float(momentum.abs().max()) + 1e7


def test_bounds_that_say_too_little_are_measured_again(state):
    params, momentum, _ = state
    bounds = Bounds(2.0**101, 2.0**101)
    nesterov_step(params, momentum, torch.ones(10), 0.7, 0.9, bounds)
    assert bounds.params < 20
    assert bounds.momentum < 20


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_says_as_much_as_the_values(state, bad):
    params, momentum, unchanged = state
    gradient = torch.ones(10)
    gradient[3] = bad
    with pytest.raises(RunError, match="gradient is not finite"):
        nesterov_step(params, momentum, gradient, 0.7, 0.9, Bounds(), blocks.norm(gradient))
    assert unchanged()
