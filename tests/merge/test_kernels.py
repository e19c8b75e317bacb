"""The merge's compiled loops: f32 results to the bit, f64 sums to their last digits, answers in bf16 as in f32."""

import math

import numpy as np
import pytest
import torch

from syncer.merge import blocks, kernels
from syncer.merge.correction import Corrected
from syncer.merge.gain import sampled
from syncer.merge.merge import merge_fragment
from syncer.merge.nesterov import nesterov_step
from tests.support.kernel_switch import both_ways, same, working
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.layout import WireFragment

compiled = kernels.compiled
pytestmark = pytest.mark.skipif(compiled is None, reason="the kernels were not built here")

STRETCH, LARGE = 1024, 1 << 18
SIZES = [1, 2, 3, 4, 5, STRETCH - 1, STRETCH, STRETCH + 1, 3 * STRETCH + 2, LARGE + 7]
F32, BF16 = torch.float32, torch.bfloat16


def random(numel, seed, dtype=F32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()).to(dtype)


@pytest.mark.parametrize("dtypes", [(F32,), (BF16,), (F32, F32), (BF16, BF16), (F32, BF16), (F32,) * 3, (BF16,) * 6])
@pytest.mark.parametrize("referred", [False, True])
@pytest.mark.parametrize("numel", SIZES)
def test_products(numel, referred, dtypes):
    vectors = [random(numel, seed, dtype) for seed, dtype in enumerate(dtypes)]
    reference = random(numel, 99) if referred else None
    found = blocks.products(vectors, reference)
    wide = [vector.double() for vector in vectors]
    close = {"rel": 1e-12, "abs": 1e-12 * numel}
    assert found.norms == pytest.approx([math.sqrt(float(v @ v)) for v in wide], **close)
    assert (found.cross is None) == (len(dtypes) != 2)
    if found.cross is not None:
        assert found.cross == pytest.approx(float(wide[0] @ wide[1]), **close)
    if reference is not None:
        r = reference.double()
        assert found.inner == pytest.approx([float(v @ r) for v in wide], **close)
        assert found.reference_norm == pytest.approx(math.sqrt(float(r @ r)), **close)
    else:
        assert (found.inner, found.reference_norm) == ([], 0.0)


def test_squares_beyond_f32_are_summed():
    values = torch.tensor([2.0**100, 1e-30, -(2.0**100), 1e-44])
    assert blocks.norm(values) == math.sqrt(2.0 * 2.0**200 + 1e-60)
    assert blocks.norm(values[1::2].contiguous()) == pytest.approx(float(values[1]), rel=1e-15)


def test_sums_of_many_even_terms_keep_their_digits():
    """One after another, 16,384 stretches of the same sum would be off by 4e-13."""
    values = torch.full((1 << 24,), 0.1)
    square = float(values[0].double() ** 2)
    found = blocks.products([values, values], values)
    assert found.cross == pytest.approx(square * (1 << 24), rel=5e-14)
    assert blocks.weighted_sum(torch.empty_like(values), [values], [1.0], measured=True) == pytest.approx(
        math.sqrt(square * (1 << 24)), rel=5e-14
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_not_asked_for_is_zero(count):
    for value in (1.0, float("inf")):
        sums = compiled.products([np.full(7, value, np.float32)] * count, None)
        assert sums[count : 2 * count] == [0.0] * count
        assert (sums[2 * count] != 0) == (count == 2)
        assert sums[-1] == 0.0
    assert compiled.products([np.empty(0, np.float32)], None) == [0.0] * 4


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("numel", SIZES)
def test_weighted_sums_have_the_same_bits(numel, count, dtype):
    values = [random(numel, seed, dtype) for seed in range(count)]
    factors = [0.1 + 0.37 * index for index in range(count)]

    def work():
        out = torch.full((numel,), float("nan"))
        return out, blocks.weighted_sum(out, values, factors, 1.1, measured=True)

    (one, long), (other, length) = both_ways(work)
    assert same(one, other)
    assert long == pytest.approx(length, rel=1e-12)


@pytest.mark.parametrize("numel", SIZES)
def test_adding_and_scaling_in_place(numel):
    def work():
        out = random(numel, 1)
        blocks.weighted_sum(out, [out, random(numel, 2)], [1.0, 0.3], 1.7)
        blocks.weighted_sum(out, [out], [0.77])
        return out

    assert same(*both_ways(work))


def test_a_factor_beyond_f32_is_taken_apart():
    values = [torch.tensor([1e-44, -3e-42, 0.0]), torch.tensor([2e-44, 1e-44, 0.0])]

    def work():
        out = torch.empty(3)
        blocks.weighted_sum(out, values, [1e41, -2e41])
        return out

    one, other = both_ways(work)
    assert same(one, other)
    assert bool(one.isfinite().all())


@pytest.mark.parametrize("copy", [None, F32, BF16])
@pytest.mark.parametrize("numel", SIZES)
def test_the_outer_step_and_its_copy(numel, copy):
    def work():
        params, momentum = random(numel, 1), random(numel, 2)
        target = None if copy is None else torch.full((numel,), float("nan"), dtype=copy)
        nesterov_step(params, momentum, random(numel, 3), 0.7, 0.9, copy=target)
        return params, momentum, target

    one, other = both_ways(work)
    assert same(one[0], other[0])
    assert same(one[1], other[1])
    if copy is not None:
        assert same(one[2], other[2])
        assert same(one[2], one[0].to(copy))


def test_a_learning_rate_beyond_f32_is_taken_apart():
    def work():
        params, momentum = torch.zeros(4), torch.tensor([0.0, 1e-44, -3e-43, 0.0])
        nesterov_step(params, momentum, torch.tensor([0.0, 0.0, 1e-44, 3e-44]), 1e39, 0.5)
        return params

    one, other = both_ways(work)
    assert same(one, other)
    assert bool(one.isfinite().all())


def test_a_step_that_ends_at_the_largest_magnitude_copies_what_it_ends_at():
    for way in ("compiled", "plain"):
        with working(way):
            params, momentum, target = torch.full((5,), 2.0**100), torch.zeros(5), torch.zeros(5, dtype=BF16)
            nesterov_step(params, momentum, torch.full((5,), -(2.0**100)), 0.7, 0.9, copy=target)
            assert params.tolist() == target.float().tolist() == [2.0**100] * 5


def opposed(numel, dtype):
    """Two answers and a momentum that both corrections are made for: one answer against it, one across it."""
    momentum = random(numel, 7)
    return [(-momentum + 0.3 * random(numel, 8)).to(dtype), random(numel, 9).to(dtype)], momentum


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("numel", [STRETCH + 1, 70_001])
def test_corrections(numel, dtype):
    gradients, momentum = opposed(numel, dtype)

    def work():
        corrected = Corrected([g.float() for g in gradients], momentum, torch.empty(numel))
        return [(corrected.fetch(index)[0].clone(), corrected.fetch(index)[1]) for index in range(2)]

    one, other = both_ways(work)
    for (mine, long), (theirs, length), gradient in zip(one, other, gradients, strict=True):
        assert not torch.equal(mine, gradient.float())  # it was corrected
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        assert long == pytest.approx(length, rel=1e-6)
        assert long == pytest.approx(blocks.norm(mine), rel=1e-12)


@pytest.mark.parametrize("correction", [0.0, 1.0])
@pytest.mark.parametrize("mode", list(MergeMode))
@pytest.mark.parametrize("count", [1, 2, 5])
def test_answers_in_bf16_are_merged_as_the_same_in_f32(count, mode, correction):
    sizes = (64 * 40, 1, 77, STRETCH * 2)
    fragment = WireFragment(mode, sizes, tuple((64, 40) if n == 64 * 40 else (1, n) for n in sizes))
    opposing, momentum = opposed(sum(sizes), BF16)
    halves = [*opposing, *(random(sum(sizes), seed, BF16) for seed in range(3))][:count]
    weights = [1.0 + 0.25 * index for index in range(count)]
    one = merge_fragment(fragment, halves, weights, momentum, correction=correction)
    other = merge_fragment(fragment, [h.float() for h in halves], weights, momentum, correction=correction)
    assert same(one[0], other[0])
    assert one[1] == other[1]
    with working("plain"):
        reference = merge_fragment(fragment, [h.float() for h in halves], weights, momentum, correction=correction)[0]
    torch.testing.assert_close(one[0], reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numel", [1, 100, 64 * 64, 5_000_000])
def test_a_sample_of_bf16_is_that_of_the_same_in_f32(numel):
    half = random(numel, 1, BF16)
    assert np.array_equal(sampled([half])[0], sampled([half.float()])[0])


F, SHORT = np.zeros(8, np.float32), np.zeros(7, np.float32)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("products", ([F, SHORT], None)),
        ("products", ([F], SHORT)),
        ("products", ([F, SHORT.view(np.int16)], F)),
        ("weighted_sum", (F, [F, SHORT], F[:2], 1.0, False)),
        ("weighted_sum", (F, [F, F], F[:1], 1.0, False)),
        ("blend", (F, F, SHORT, 1.0, 1.0)),
        ("blend", (F, SHORT, F, 1.0, 1.0)),
        ("nesterov_step", (F, SHORT, F, 0.7, 0.9, None)),
        ("nesterov_step", (F, F, SHORT, 0.7, 0.9, None)),
        ("nesterov_step", (F, F, F, 0.7, 0.9, SHORT)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name, arguments):
    with pytest.raises(ValueError, match="bytes"):
        getattr(compiled, name)(*arguments)


@pytest.mark.parametrize("vectors", [[], (F,), [None], [F[::2]], ["text"]])
def test_what_is_no_list_of_arrays_is_refused(vectors):
    with pytest.raises((ValueError, BufferError, TypeError)):
        compiled.products(vectors, None)
    with pytest.raises((ValueError, BufferError, TypeError)):
        compiled.weighted_sum(F, vectors, F[: len(vectors)], 1.0, False)
