"""avg, rda, iso and the correction: golden values, and the formulas in exact sums as an oracle."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from syncer.merge import blocks
from syncer.merge.average import average
from syncer.merge.correction import Corrected
from syncer.merge.intake import learner_weight
from syncer.merge.iso import flatten_spectrum, isotropic_average
from syncer.merge.members import Uncorrected
from syncer.merge.merge import merge_fragment
from syncer.merge.rda import radial_directional_average
from syncer.merge_words import correction_of
from tests.support import merge_oracle as oracle
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.errors import LocalError, RunError
from yeto_torch.wire.layout import WireFragment

pytestmark = pytest.mark.usefixtures("either_way")

D0, D1 = [0.1, -0.2, 0.3], [-0.05, 0.4, 0.25]
WEIGHTS = [learner_weight(4096, 24), learner_weight(2048, 12)]


def flat(values):
    return torch.tensor(values, dtype=torch.float32)


def hex_bits(values):
    return " ".join(f"{bits & 0xFFFFFFFF:08x}" for bits in values.view(torch.int32).flatten().tolist())


def made(merge, gradients, *arguments):
    """What ``merge`` writes into its last argument; it returns the norm of that, before the last rounding to f32."""
    length = merge(Uncorrected(gradients), *arguments)
    assert length == pytest.approx(blocks.norm(arguments[-1]), rel=2.0**-22)
    return arguments[-1]


def correct(gradient, momentum, share=1.0):
    return Corrected([gradient], momentum, torch.empty_like(gradient), share).fetch(0)[0]


def from_bits(text):
    return np.array([int(word, 16) for word in text.split()], np.uint32).view(np.float32)


@pytest.fixture(scope="module")
def golden(request):
    path = request.config.rootpath / "tests" / "vectors" / "numerics.json"
    return json.loads(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- golden values


def test_golden_weights(golden):
    assert [learner_weight(*pair) for pair in ((4096, 24), (2048, 12), (100, 10))] == golden["weights"]["f64"]


@pytest.mark.parametrize("repeats", [1, 40])  # three values take a scalar loop, 120 the vector unit
def test_golden_avg_to_the_bit(golden, repeats):
    out = made(average, [flat(D0).repeat(repeats), flat(D1).repeat(repeats)], WEIGHTS, torch.empty(3 * repeats))
    assert hex_bits(out) == " ".join([golden["avg"]["f32_bits"]] * repeats)


def test_golden_rda(golden):
    out = made(radial_directional_average, [flat(D0), flat(D1)], WEIGHTS, torch.empty(3))
    assert oracle.close(out, from_bits(golden["rda"]["f32_bits"]))


def test_golden_correction_to_the_bit(golden):
    out = correct(flat([-2.0, 0.5]), flat([1.0, 0.0]))
    assert hex_bits(out) == golden["heloco_against"]["f32_bits"]


def test_correction_rounds_product_and_sum_one_by_one():
    """The same vectors, long enough for the vector unit: f32(k) * m + d with two roundings, not one."""
    rng = torch.Generator().manual_seed(4)
    momentum = torch.randn(1003, generator=rng)
    gradient = torch.randn(1003, generator=rng) - momentum
    a, b = (oracle.length(x) for x in (gradient, momentum))
    c = float(gradient.double() @ momentum.double()) / (a * b)
    k = np.float32((-min(0.5 * -c * a / (a + 3 * b + 1e-8), 0.5) * c) * a / b)
    assert np.array_equal(correct(gradient, momentum).numpy(), gradient.numpy() + k * momentum.numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_iso(golden, dtype):
    out = flatten_spectrum(flat([[3.0, 0.0], [0.0, 1.0]]), dtype)
    assert out.dtype is torch.float32
    assert oracle.close(out.flatten(), from_bits(golden["iso_diag"]["f32_bits"]))


# ---------------------------------------------------------------- against the oracle


@st.composite
def rounds(draw, mode):
    """(fragment, gradients, weights, momentum): several tensors, members of very different sizes, some zero."""
    dims = ()
    if mode is MergeMode.ISO:
        dims = tuple(draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3)))
        numels = tuple(rows * cols for rows, cols in dims)
    else:
        numels = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    members = draw(st.integers(1, 5))
    momentum = rng.standard_normal(sum(numels)) * draw(st.sampled_from([0.0, 1e-10, 0.1, 1.0, 100.0]))
    gradients, weights = [], []
    for _ in range(members):
        size = draw(st.sampled_from([0.0, 1e-20, 1e-3, 1.0, 1e6]))
        lean = draw(st.sampled_from([-2.0, 0.0, 0.1, 2.0]))
        gradients.append(rng.standard_normal(sum(numels)) * size + lean * momentum)
        weights.append(learner_weight(draw(st.integers(0, 10**6)), draw(st.integers(1, 1000))))
    as_f32 = [torch.from_numpy(np.asarray(x, np.float32)) for x in (momentum, *gradients)]
    return WireFragment(mode, numels, dims), as_f32[1:], weights, as_f32[0]


def check_against_oracle(case, correction):
    fragment, gradients, weights, momentum = case
    if fragment.mode is MergeMode.RDA and sum(weights) > 0:
        assume(directions_do_not_cancel(case, correction))
    kept = [x.clone() for x in (momentum, *gradients)]
    got = merge_fragment(fragment, gradients, weights, momentum, correction=correction)[0]
    again = merge_fragment(fragment, gradients, weights, momentum, correction=correction)[0]
    arrays = [g.numpy() for g in gradients]
    want = oracle.merge(
        fragment.mode.name.lower(),
        fragment.numels,
        fragment.dims,
        arrays,
        weights,
        momentum.numpy(),
        correction=correction,
    )
    # measured against what was summed: where terms cancel, the result keeps their absolute error
    largest = max([float(np.abs(a).max()) for a in arrays] + [1e-30])
    assert np.abs(got.numpy() - want).max() <= 2e-6 * largest
    assert torch.equal(got, again)
    assert all(torch.equal(a, b) for a, b in zip(kept, (momentum, *gradients), strict=True)), "an input was changed"


def directions_do_not_cancel(case, correction):
    """Where unit vectors cancel almost, rda multiplies their rounding error without bound: no tolerance would fit."""
    fragment, gradients, weights, momentum = case
    end = 0
    for numel in fragment.numels:
        here = slice(end, end := end + numel)
        total = np.zeros(numel)
        for gradient, w in zip(gradients, weights, strict=True):
            d = gradient[here].numpy()
            d = oracle.heloco(d, momentum[here].numpy()) if correction else d
            if oracle.length(d):
                total += w / sum(weights) / oracle.length(d) * d
        if 0 < oracle.length(total) < 0.1:
            return False
    return True


@given(rounds(MergeMode.AVG), st.booleans())
def test_avg_equals_the_oracle(case, correction):
    check_against_oracle(case, correction)


@given(rounds(MergeMode.RDA), st.booleans())
def test_rda_equals_the_oracle(case, correction):
    check_against_oracle(case, correction)


@given(rounds(MergeMode.ISO), st.booleans())
def test_iso_equals_the_oracle(case, correction):
    fragment, gradients, weights, momentum = case
    mean = oracle.merge("avg", fragment.numels, (), gradients, weights, momentum, correction=correction)
    end = 0
    for rows, cols in fragment.dims:
        values = np.linalg.svd(mean[end : end + rows * cols].reshape(rows, cols), compute_uv=False)
        assume(values[-1] > 1e-2 * values[0] or values[0] == 0)  # f32 input: a small value is mostly its rounding error
        end += rows * cols
    got = merge_fragment(fragment, gradients, weights, momentum, correction=correction)[0]
    want = oracle.merge("iso", fragment.numels, fragment.dims, gradients, weights, momentum, correction=correction)
    assert oracle.close(got, want, 5e-4)  # the polar factor moves by up to error / smallest singular value


@pytest.mark.parametrize("mode", [MergeMode.AVG, MergeMode.RDA])
@pytest.mark.parametrize("lean", [-1.0, 0.05, 1.0])
def test_pieces_change_no_more_than_the_last_digit_of_a_norm(mode, lean, monkeypatch):
    rng = torch.Generator().manual_seed(5)
    momentum = torch.randn(1000, generator=rng)
    gradients = [torch.randn(1000, generator=rng) + lean * momentum for _ in range(3)]
    fragment = WireFragment(mode, (1, 600, 399))
    whole = merge_fragment(fragment, gradients, [1.0, 2.0, 3.0], momentum, correction=True)[0]
    monkeypatch.setattr(blocks, "CPU_BLOCK", 97)
    assert oracle.close(merge_fragment(fragment, gradients, [1.0, 2.0, 3.0], momentum, correction=True)[0], whole)


# ---------------------------------------------------------------- weights


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**32 - 1))
def test_weight_is_exact_to_f64(tokens, steps):
    assert learner_weight(tokens, steps) == pytest.approx(oracle.weight(tokens, steps), rel=1e-15)


@pytest.mark.parametrize("mode", MergeMode)
@pytest.mark.parametrize("correction", [True, False])
def test_no_weight_at_all_merges_to_zero(mode, correction):
    fragment = WireFragment(mode, (6,), ((2, 3),) if mode is MergeMode.ISO else ())
    merged = merge_fragment(fragment, [torch.ones(6)] * 2, [0.0, 0.0], torch.ones(6), correction=correction)[0]
    assert torch.equal(merged, torch.zeros(6))


@pytest.mark.parametrize("mode", MergeMode)
def test_a_learner_without_tokens_changes_nothing(mode):
    fragment = WireFragment(mode, (6,), ((2, 3),) if mode is MergeMode.ISO else ())
    trainer, idle = torch.tensor([1.0, -2.0, 3.0, 0.5, 0.25, -1.0]), torch.full((6,), 7.0)
    momentum = torch.zeros(6)
    alone = merge_fragment(fragment, [trainer], [5.0], momentum, correction=False)[0]
    both = merge_fragment(fragment, [trainer, idle], [5.0, learner_weight(0, 1)], momentum, correction=False)[0]
    assert torch.equal(alone, both)


def test_weights_of_any_size_only_matter_by_their_ratio():
    gradients = [flat(D0), flat(D1)]
    small = made(radial_directional_average, gradients, [2.0, 1.0], torch.empty(3))
    huge = made(radial_directional_average, gradients, [2.0**200, 2.0**199], torch.empty(3))
    assert torch.equal(small, huge)


@given(rounds(MergeMode.RDA), st.randoms())
def test_the_order_of_members_matters_only_to_rounding(case, random):
    assume(sum(case[2]) == 0 or directions_do_not_cancel(case, False))
    fragment, gradients, weights, momentum = case
    order = list(range(len(gradients)))
    random.shuffle(order)
    for mode in (MergeMode.AVG, MergeMode.RDA):
        part = WireFragment(mode, fragment.numels)
        straight = merge_fragment(part, gradients, weights, momentum, correction=False)[0]
        shuffled = merge_fragment(
            part, [gradients[i] for i in order], [weights[i] for i in order], momentum, correction=False
        )[0]
        largest = max(float(g.abs().max()) for g in gradients)
        assert float((straight - shuffled).abs().max()) <= 2e-6 * largest


def test_a_single_member_is_taken_as_it_is():
    gradient = torch.randn(500, generator=torch.Generator().manual_seed(1))
    assert torch.equal(made(average, [gradient], [3.0], torch.empty(500)), gradient)
    assert oracle.close(made(radial_directional_average, [gradient], [3.0], torch.empty(500)), gradient)


@pytest.mark.parametrize(
    ("gradients", "weights", "momentum"),
    [
        ([torch.ones(4)], [1.0, 2.0], torch.ones(4)),
        ([torch.ones(3)], [1.0], torch.ones(4)),
        ([torch.ones(4)], [1.0], torch.ones(3)),
    ],
)
def test_sizes_that_do_not_match_are_our_own_mistake(gradients, weights, momentum):
    with pytest.raises(LocalError, match="merge:"):
        merge_fragment(WireFragment(MergeMode.AVG, (4,)), gradients, weights, momentum, correction=True)[0]


# ---------------------------------------------------------------- rda


def test_rda_keeps_the_length_that_a_mean_loses():
    east, north = flat([3.0, 0.0]), flat([0.0, 1.0])
    out = made(radial_directional_average, [east, north], [1.0, 1.0], torch.empty(2))
    assert oracle.close(out, [math.sqrt(2), math.sqrt(2)])  # length 2, the mean of 3 and 1, in the middle direction
    assert blocks.norm(out) == pytest.approx(2.0, rel=1e-6)


def test_a_member_of_length_zero_counts_in_the_radius():
    out = made(radial_directional_average, [flat([4.0, 0.0]), flat([0.0, 0.0])], [1.0, 3.0], torch.empty(2))
    assert oracle.close(out, [1.0, 0.0])


@pytest.mark.parametrize("weights", [[1.0, 1.0], [5.0, 5.0]])
def test_directions_that_cancel_fall_back_to_the_mean(weights):
    out = made(radial_directional_average, [flat([4.0, 0.0]), flat([-2.0, 0.0])], weights, torch.empty(2))
    assert out.tolist() == [1.0, 0.0]


def test_members_that_are_all_zero():
    assert made(radial_directional_average, [torch.zeros(3)] * 2, [1.0, 2.0], torch.full((3,), 9.0)).tolist() == [
        0,
        0,
        0,
    ]


# What no honest learner sends, yet may not end the run: coefficients that f32 cannot hold.


def test_a_tiny_gradient_has_a_direction_too():
    tiny = flat([3e-41, 0.0])
    assert 1 / float(tiny[0]) > torch.finfo(torch.float32).max
    out = made(radial_directional_average, [tiny, flat([0.0, 1.0])], [1.0, 1.0], torch.empty(2))
    assert oracle.close(out, oracle.rda([tiny.numpy(), np.array([0.0, 1.0])], [1.0, 1.0]), 1e-5)


def test_giants_that_nearly_cancel_stay_finite():
    giant = 2.0**100
    left, right = flat([giant, giant * 1e-6]), flat([-giant, 0.0])
    for weights in ([1.0, 1.0], [1.0, 1.0 + 1e-9]):
        out = made(radial_directional_average, [left, right], weights, torch.empty(2))
        assert bool(torch.isfinite(out).all())
        assert blocks.norm(out) == pytest.approx(giant, rel=1e-5)


def test_a_factor_beyond_f32_is_applied_in_two_exact_steps():
    values, out = flat([1e-38, -2e-38]), torch.empty(2)
    blocks.product(values, 1e39, out)
    assert oracle.close(out, values.double().numpy() * 1e39)


# ---------------------------------------------------------------- iso


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5), (1, 6), (6, 1), (1, 1)])
def test_iso_makes_every_singular_value_their_mean(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    before = torch.linalg.svdvals(matrix.double())
    after = torch.linalg.svdvals(flatten_spectrum(matrix).double())
    assert oracle.close(after, before.mean().expand_as(before), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_all_zero_matrix_stays(dtype):
    matrix = torch.zeros(3, 4)
    assert torch.equal(flatten_spectrum(matrix, dtype), torch.zeros(3, 4))


@pytest.mark.parametrize("rank", [1, 2])
def test_iso_keeps_the_rank_and_averages_over_all_singular_values(rank):
    columns = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    matrix = columns if rank == 2 else columns * torch.tensor([[1.0], [0.0], [0.0]])
    values = torch.linalg.svdvals(matrix.double())
    after = torch.linalg.svdvals(flatten_spectrum(matrix).double())
    mean = values.sum() / 3  # the zeros count in the mean
    assert oracle.close(after, [mean] * rank + [0.0] * (3 - rank), 1e-6)


def test_iso_is_row_major_and_takes_any_backend():
    seen = []

    def backend(matrix):
        seen.append((tuple(matrix.shape), matrix.dtype, matrix.flatten().tolist()))
        return -matrix

    fragment = WireFragment(MergeMode.ISO, (6, 2), ((2, 3), (2, 1)))
    gradient = torch.arange(8, dtype=torch.float32)
    merged = merge_fragment(fragment, [gradient], [1.0], torch.zeros(8), correction=False, spectrum=backend)[0]
    assert seen == [
        ((2, 3), torch.float32, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        ((2, 1), torch.float32, [6.0, 7.0]),
    ]
    assert torch.equal(merged, -gradient)


def test_iso_bears_the_largest_legal_values():
    giant = torch.full((3, 3), 2.0**100) * torch.eye(3)
    assert oracle.close(flatten_spectrum(giant), giant, 1e-6)


def test_iso_of_a_mean():
    a, b = torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    out = made(isotropic_average, [a.flatten(), b.flatten()], [1.0, 1.0], (2, 2), torch.empty(4))
    assert oracle.close(out, [2.0, 0.0, 0.0, 2.0])


def test_a_decomposition_that_fails_ends_the_run_with_a_sentence():
    with pytest.raises(RunError, match="SVD of a 2 x 2 gradient did not converge"):
        flatten_spectrum(torch.full((2, 2), float("nan")))


# ---------------------------------------------------------------- directional correction


def test_a_gradient_along_the_momentum_is_returned_itself():
    gradient = flat([1.0, 2.0, 2.0, 4.0])  # length 5, so that the cosine with the first axis is 0.2 in f64
    assert correct(gradient, flat([3.0, 0.0, 0.0, 0.0])) is gradient


def test_just_below_the_threshold_it_is_turned_at_unchanged_length():
    gradient, momentum = flat([0.99999, 2.0, 2.0, 4.0]), flat([3.0, 0.0, 0.0, 0.0])
    out = correct(gradient, momentum)
    assert oracle.close(out, oracle.heloco(gradient, momentum))
    assert blocks.norm(out) == pytest.approx(blocks.norm(gradient), rel=1e-6)
    assert out[0] > 1.3 * gradient[0]


def test_a_cosine_of_zero_counts_as_aligned_enough_to_be_turned():
    gradient, momentum = flat([0.0, 4.0]), flat([2.0, 0.0])
    out = correct(gradient, momentum)
    share = 4.0 / (4.0 + 3 * 2.0 + 1e-8)
    turned = np.array([share, 1 - share])
    assert oracle.close(out, 4.0 * turned / np.linalg.norm(turned))


def test_just_below_zero_hardly_anything_is_taken():
    gradient, momentum = flat([-1e-4, 4.0]), flat([2.0, 0.0])
    assert oracle.close(correct(gradient, momentum), gradient, 1e-6)


def test_an_opposing_gradient_loses_part_of_its_opposition_and_nothing_else():
    gradient, momentum = flat([-2.0, 0.5]), flat([1.0, 0.0])
    out = correct(gradient, momentum)
    assert -2.0 < out[0] < -1.0
    assert out[1] == gradient[1]


@pytest.mark.parametrize("small", ["gradient", "momentum", "both"])
def test_without_a_direction_nothing_is_corrected(small):
    gradient, momentum = flat([-1.0, 0.0]), flat([1.0, 0.0])
    if small != "momentum":
        gradient *= 5e-9
    if small != "gradient":
        momentum *= 5e-9
    assert correct(gradient, momentum) is gradient


@given(st.integers(0, 2**32), st.floats(-1, 0.3), st.floats(-6, 6), st.sampled_from([1.0, 0.5, 0.1]))
def test_correction_equals_the_oracle(seed, cosine, log_size, share):
    rng = np.random.default_rng(seed)
    m = rng.standard_normal(50)
    across = rng.standard_normal(50)
    across -= across @ m / (m @ m) * m
    d = cosine * m / np.linalg.norm(m) + math.sqrt(1 - cosine**2) * across / np.linalg.norm(across)
    gradient, momentum = flat(d * 10**log_size), flat(m)
    exact = float(gradient.double() @ momentum.double() / gradient.double().norm() / momentum.double().norm())
    assume(min(abs(exact), abs(exact - 0.2)) > 1e-9)  # on a threshold the last digit of a sum decides the case
    kept = gradient.clone()
    out = correct(gradient, momentum, share)
    assert oracle.close(out, oracle.heloco(gradient, momentum, share))
    assert torch.equal(gradient, kept)


@pytest.mark.parametrize("lean", [-1.0, 0.05])
@pytest.mark.parametrize("block", [3, blocks.CPU_BLOCK])
def test_correction_in_pieces(lean, block, monkeypatch):
    monkeypatch.setattr(blocks, "CPU_BLOCK", block)
    rng = torch.Generator().manual_seed(3)
    momentum = torch.randn(50, generator=rng)
    gradient = torch.randn(50, generator=rng)
    gradient += (lean - float(gradient @ momentum) / float(momentum @ momentum)) * momentum
    assert oracle.close(correct(gradient, momentum), oracle.heloco(gradient, momentum))


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_normalised_it_trusts_a_gradient_alike_at_every_momentum(mu):
    """A steady direction's momentum is 1 / (1 - mu) gradients long; a gradient that turns against it then loses as much
    whatever mu: beta = 0.5 * 1/4, applied to a component of 1."""
    momentum, gradient = flat([1 / (1 - mu), 0.0]), flat([-1.0, 0.0])
    assert float(correct(gradient, momentum, correction_of("heloco-normalized", mu))[0]) == pytest.approx(-1 + 0.5 / 4)
    plain = -1 + 0.5 / (1 + 3 / (1 - mu))
    assert float(correct(gradient, momentum, correction_of("heloco", mu))[0]) == pytest.approx(plain)


def test_what_the_words_mean_to_a_merge():
    assert [correction_of(word, 0.75) for word in ("none", "heloco", "heloco-normalized")] == [0.0, 1.0, 0.25]
    with pytest.raises(ValueError, match="delta_correction='some': must be one of none, heloco, heloco-normalized"):
        correction_of("some", 0.5)


@pytest.mark.parametrize("mode", list(MergeMode))
def test_the_word_heloco_is_true_to_the_bit_and_none_is_false(mode):
    rng = torch.Generator().manual_seed(5)
    fragment = WireFragment(mode, (12,), ((3, 4),) if mode is MergeMode.ISO else ())
    momentum = torch.randn(12, generator=rng)
    gradients = [torch.randn(12, generator=rng) - momentum, torch.randn(12, generator=rng)]

    def merged(correction):
        return merge_fragment(fragment, gradients, [1.0, 2.0], momentum, correction=correction)[0]

    assert torch.equal(merged(True), merged(correction_of("heloco", 0.9)))
    assert torch.equal(merged(False), merged(correction_of("none", 0.9)))
    assert torch.equal(merged(True), merged(correction_of("heloco-normalized", 0.0)))
    assert not torch.equal(merged(True), merged(correction_of("heloco-normalized", 0.9)))


def test_a_giant_against_a_faint_momentum_stays_finite():
    out = correct(flat([-(2.0**100), 0.0]), flat([3e-8, 0.0]))
    assert oracle.close(out, oracle.heloco(flat([-(2.0**100), 0.0]), flat([3e-8, 0.0])))


def test_only_one_corrected_copy_exists():
    momentum, scratch = flat([1.0, 0.0]), torch.empty(2)
    members = [flat([-2.0, 0.5]), flat([1.0, 0.0]), flat([-1.0, 3.0])]
    corrected = Corrected(members, momentum, scratch)
    assert [corrected.fetch(i)[0] is scratch for i in range(3)] == [True, False, True]
    assert corrected.fetch(1)[0] is members[1]


# ---------------------------------------------------------------- norms


@given(st.integers(0, 2**32), st.integers(1, 2000), st.sampled_from([1e-30, 1.0, 2.0**99]))
def test_norms_are_those_of_f64(seed, numel, size):
    values = np.asarray(np.random.default_rng(seed).standard_normal(numel) * size, np.float32)
    assert blocks.norm(torch.from_numpy(values)) == pytest.approx(oracle.length(values), rel=1e-14)


def test_a_long_sum_loses_nothing():
    """Ten million equal terms: an f32 sum would stop growing at 2^24."""
    values = torch.full((3 * blocks.CPU_BLOCK + 5,), 0.1)
    exact = math.sqrt(values.numel()) * float(values[0])
    assert blocks.norm(values) == pytest.approx(exact, rel=1e-13)


def test_totals_are_plain_sums():
    assert blocks.ordered_sum([1e16, 1.0, -1e16]) == 0.0  # a compensated sum would give 1
