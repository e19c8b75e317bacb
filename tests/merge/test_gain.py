"""The gain of an outer step, what the answers say of each other, and the momentum that keeps the gain at its limit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.merging import aligned_gain
from syncer.config.policy import DRIVE_LIMIT
from syncer.merge.gain import STRETCHES, Alignment, MeanAnswer, mean_answer, sampled
from syncer.merge.merge import merge_fragment
from syncer.merge.nesterov import nesterov_step
from syncer.merger import outer_momentum
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.layout import WireFragment

pytestmark = pytest.mark.usefixtures("either_way")

E0, E1 = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])


def rounds(gradients, lr, mu, guard="off"):
    """Gains and momenta of one learner's rounds under plain averaging, by the product's functions."""
    params, momentum = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    told = []
    for gradient in gradients:
        answers = mean_answer([gradient], [2.0], momentum)
        found = answers.against(gradient)
        used = outer_momentum(guard, found, lr, mu)
        nesterov_step(params, momentum, gradient, lr, used)
        told.append((found.gain(lr, used), used, found.lag))
    return told


@pytest.mark.parametrize(("lr", "mu"), [(1.0, 0.0), (0.7, 0.5), (0.7, 0.9), (0.1, 0.99)])
def test_closed_forms_of_the_gain(lr, mu):
    many = math.ceil(math.log(1e-9) / math.log(mu)) if mu else 2  # until the momentum is what it will be
    steady = rounds([E0] * many, lr, mu)
    assert steady[0][0] == pytest.approx(lr * (1 + mu))
    assert steady[-1][0] == pytest.approx(lr / (1 - mu), rel=1e-5)
    assert steady[0][2] is None
    assert steady[-1][2] == pytest.approx(1.0)
    alternating = rounds([E0, -E0] * many, lr, mu)
    assert alternating[-1][0] == pytest.approx(lr * (1 + 2 * mu) / (1 + mu), rel=1e-5)
    assert alternating[-1][2] == pytest.approx(-1.0)
    orthogonal = rounds(list(torch.eye(many)), lr, mu)
    assert [gain for gain, _, _ in orthogonal] == pytest.approx([lr * (1 + mu)] * many)
    assert orthogonal[-1][2] == 0.0


vectors = st.integers(0, 2**32)
rates, momenta = st.floats(0.01, 2.0), st.floats(0.0, 0.999)


def a_round(seed, members, mode=MergeMode.RDA, numel=60):
    """(fragment, gradients, weights, momentum), with directions in common."""
    rng = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=rng)
    gradients = [torch.randn(numel, generator=rng) + common for _ in range(members)]
    momentum = torch.randn(numel, generator=rng) + torch.randn(1, generator=rng) * common
    weights = (torch.rand(members, generator=rng) + 0.1).tolist()
    return WireFragment(mode, (numel // 3, numel - numel // 3)), gradients, weights, momentum


@given(vectors, st.integers(1, 5), st.sampled_from([MergeMode.AVG, MergeMode.RDA]), rates, momenta)
def test_the_gain_is_that_of_the_step_the_state_makes(seed, members, mode, lr, mu):
    """Reckoned from the parameters themselves, as the experiments have it."""
    fragment, gradients, weights, momentum = a_round(seed, members, mode)
    merged = merge_fragment(fragment, gradients, weights, momentum, correction=True)[0]
    gain = mean_answer(gradients, weights, momentum).against(merged).gain(lr, mu)
    params = torch.zeros_like(momentum)
    nesterov_step(params, momentum, merged, lr, mu)
    assert gain == pytest.approx(aligned_gain(params, gradients, weights), rel=1e-4, abs=1e-5)


@given(vectors, st.integers(1, 6))
def test_looking_changes_nothing(seed, members):
    _, gradients, weights, momentum = a_round(seed, members)
    kept = [part.clone() for part in (*gradients, momentum)]
    answers = mean_answer(gradients, weights, momentum)
    answers.against(gradients[0])
    assert all(torch.equal(a, b) for a, b in zip((*gradients, momentum), kept, strict=True))
    assert 0 <= answers.agreement <= 1 + 1e-12
    assert abs(answers.lag) <= 1 + 1e-12


def test_agreement_of_equal_orthogonal_and_opposed_answers():
    zero = torch.zeros(3)
    assert mean_answer([E0, 3 * E0], [1.0, 5.0], zero).agreement == pytest.approx(1.0)
    assert mean_answer([E0, E1], [1.0, 1.0], zero).agreement == pytest.approx(1 / math.sqrt(2))
    assert mean_answer([2 * E0, -E0], [1.0, 1.0], zero).agreement == pytest.approx(1 / 3)
    assert mean_answer([E0, E1], [1.0, 0.0], zero).agreement == pytest.approx(1.0), "no weight, no say"


@pytest.mark.parametrize(
    ("gradients", "weights"), [([E0, -E0], [1.0, 1.0]), ([torch.zeros(3)], [1.0]), ([E0], [0.0]), ([], [])], ids=str
)
def test_a_round_without_a_direction_has_no_gain(gradients, weights):
    assert mean_answer(gradients, weights, E0) is None
    assert outer_momentum("cap", None, 0.7, 0.9) == 0.9


@given(st.floats(1e-3, 50), st.floats(-50, 50), st.floats(1e-3, 10.0), momenta, st.floats(0.05, 5.0))
def test_the_cap_is_the_largest_momentum_within_the_limit(along, carried, lr, mu, limit):
    found = Alignment(along, carried, 1.0, 0.0)
    capped = found.capped(lr, mu, limit)
    assert 0 <= capped <= mu
    if found.drive(lr, mu) <= limit:
        assert capped == mu
        return
    if lr > limit:
        assert capped == 0.0
        return
    slack = 1e-9 * lr * (1 + abs(carried) / along)
    assert found.drive(lr, capped) <= limit + slack
    for share in range(1, 20):  # nothing between it (and its rounding) and mu would have done
        other = capped + 1 / 4096 + (mu - capped - 1 / 4096) * share / 20
        if other > capped + 1 / 4096:
            assert found.drive(lr, other) > limit - slack


@given(st.floats(0.01, 100.0), st.floats(-5, 5), rates, momenta)
def test_how_long_a_merge_mode_makes_the_mean_is_not_the_outer_step_s_doing(length, lag, lr, mu):
    plain, longer = Alignment(1.0, lag, 1.0, lag), Alignment(length, lag * length, 1.0, lag)
    assert longer.gain(lr, mu) == pytest.approx(length * plain.gain(lr, mu), abs=1e-12)
    assert longer.drive(lr, mu) == pytest.approx(plain.drive(lr, mu), abs=1e-12)
    assert longer.capped(lr, mu, DRIVE_LIMIT) == pytest.approx(plain.capped(lr, mu, DRIVE_LIMIT), abs=1 / 4096)


@pytest.mark.parametrize("along", [0.0, -1.0, 1e-9, math.nan])
def test_a_merge_that_does_not_go_along_the_mean_is_not_judged(along):
    found = Alignment(along, 5.0, 1.0, 0.5)
    assert found.drive(0.7, 0.9) is None
    assert found.capped(0.7, 0.9, DRIVE_LIMIT) == 0.9


def test_a_steady_direction_ends_at_the_momentum_whose_gain_is_the_limit():
    """mu' = 1 - lr / limit, whatever mu was asked for; in a regime without overdrive it stays what it is."""
    for mu in (0.6, 0.9, 0.99):
        gain, used, _ = rounds([E0] * 200, 0.7, mu, "cap")[-1]
        assert used == pytest.approx(1 - 0.7 / DRIVE_LIMIT, abs=2e-3)
        assert DRIVE_LIMIT - 0.01 < gain <= DRIVE_LIMIT + 1e-6
    assert {used for _, used, _ in rounds([E0, -E0] * 20, 0.6, 0.9, "cap")} == {0.9}
    assert {used for _, used, _ in rounds(list(torch.eye(20)), 0.6, 0.9, "cap")} == {0.9}


def test_a_rate_that_is_too_large_by_itself_is_left_without_momentum():
    found = rounds([E0] * 5, 2.0, 0.9, "cap")
    assert [used for _, used, _ in found] == [0.0] * 5
    assert [gain for gain, _, _ in found] == pytest.approx([2.0] * 5)


def test_off_is_the_momentum_that_was_asked_for_to_the_bit():
    found = Alignment(1.0, 10.0, 1.0, 1.0)
    assert outer_momentum("off", found, 0.7, 1 / 3) == 1 / 3
    assert 0 < outer_momentum("cap", found, 0.7, 1 / 3) < 1 / 3


def test_giants_and_the_faint_have_a_finite_gain():
    faint, giant = torch.full((3,), 1e-45), torch.full((3,), 2.0**100)
    found = mean_answer([faint], [1.0], giant).against(giant)
    assert math.isfinite(found.gain(0.7, 0.9))
    assert found.drive(0.7, 0.9) == pytest.approx(0.7 * (1.9 + 0.81))
    assert found.capped(0.7, 0.9, DRIVE_LIMIT) < 0.9
    assert mean_answer([giant], [1.0], faint).against(giant).gain(0.7, 0.9) == pytest.approx(0.7 * 1.9)


# ---------------------------------------------------------------- what is looked at


@pytest.mark.parametrize("numel", [1, 5, 4096, 4159])
def test_a_small_fragment_is_looked_at_whole(numel):
    values = torch.arange(numel, dtype=torch.float32)
    assert sampled([values, 2 * values]).tolist() == [values.tolist(), (2 * values).tolist()]


@pytest.mark.parametrize("numel", [4160, 100_003, 1_500_000, 1 << 22, (1 << 22) + 1, 8_388_607, 20_000_003])
def test_of_a_large_one_fixed_blocks_spread_evenly(numel):
    found = sampled([torch.arange(numel, dtype=torch.float32)])[0]
    assert 4096 <= len(found) <= 1 << 14
    assert len(found) == 4096 or len(found) * 256 <= numel
    if numel < 1 << 24:  # f32 still counts by one
        stretches = found.reshape(STRETCHES, -1)
        assert (stretches - stretches[:, :1] == np.arange(stretches.shape[1])).all()
        assert (stretches[:, 0] == numel // STRETCHES * np.arange(STRETCHES)).all()


def test_the_sample_tells_what_the_whole_would():
    """Tensors of unlike size and scale, as a model has them."""
    rng = torch.Generator().manual_seed(3)
    numel = 3_000_000
    scale = torch.cat([torch.full((size,), 10.0**-k) for k, size in enumerate((500_000, 1_500_000, 1_000_000))])
    common = torch.randn(numel, generator=rng) * scale
    gradients = [common + torch.randn(numel, generator=rng) * scale for _ in range(3)]
    momentum = 2 * common + torch.randn(numel, generator=rng) * scale
    fragment = WireFragment(MergeMode.RDA, (500_000, 1_500_000, 1_000_000))
    merged = merge_fragment(fragment, gradients, [1.0, 2.0, 3.0], momentum, correction=False)[0]
    found = mean_answer(gradients, [1.0, 2.0, 3.0], momentum).against(merged)
    params, before = torch.zeros(numel), momentum.clone()
    nesterov_step(params, momentum, merged, 0.7, 0.9)
    assert found.gain(0.7, 0.9) == pytest.approx(aligned_gain(params, gradients, [1.0, 2.0, 3.0]), rel=0.03)
    mean = sum(w / 6 * g.double() for w, g in zip((1.0, 2.0, 3.0), gradients, strict=True))
    assert found.lag == pytest.approx(float(mean @ before.double() / mean.norm() / before.double().norm()), abs=0.03)


def test_equal_rounds_have_equal_bits_wherever_they_lie():
    """A resumed run holds the same values at other places in memory."""
    fragment, gradients, weights, momentum = a_round(7, 3, numel=40_000)
    merged = merge_fragment(fragment, gradients, weights, momentum, correction=True)[0]
    first = mean_answer(gradients, weights, momentum).against(merged)
    for offset in (1, 3):

        def moved(values, offset=offset):
            return torch.cat([torch.zeros(offset), values])[offset:]

        again = mean_answer([moved(g) for g in gradients], weights, moved(momentum))
        assert isinstance(again, MeanAnswer)
        assert again.against(moved(merged)) == first
