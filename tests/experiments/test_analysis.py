"""The statistics against values computed elsewhere, and against each other."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from experiments.analysis import at_least, at_most, equivalent, interval, relative_differences
from experiments.margins import MARGINS

# Sleep of ten patients, difference of two drugs (Student 1908): t = -4.0621, 95 % interval -2.459886 to -0.700114.
STUDENT = [-1.2, -2.4, -1.3, -1.3, 0.0, -1.0, -1.8, -0.8, -4.6, -1.4]


def test_the_interval_is_the_one_of_students_paper():
    found = interval(STUDENT)
    assert (found.mean, found.n) == (pytest.approx(-1.58), 10)
    assert (found.low, found.high) == (pytest.approx(-2.459886, abs=1e-6), pytest.approx(-0.700114, abs=1e-6))


def test_one_sided_p_values_are_those_of_a_t_test():
    expected = stats.ttest_1samp(STUDENT, -1.0, alternative="less").pvalue
    assert at_most(STUDENT, -1.0).p == pytest.approx(expected)
    assert at_least(STUDENT, -1.0).p == pytest.approx(1 - expected)


@pytest.mark.parametrize("margin", [1.0, 2.0, 2.3, 2.4, 5.0])
def test_tost_is_both_one_sided_tests_and_the_ninety_percent_interval(margin):
    found = equivalent(STUDENT, margin)
    below = stats.ttest_1samp(STUDENT, margin, alternative="less").pvalue
    above = stats.ttest_1samp(STUDENT, -margin, alternative="greater").pvalue
    assert found.p == pytest.approx(max(below, above))
    assert found.is_met == (-margin < found.interval.low and found.interval.high < margin)
    assert found.interval.level == pytest.approx(0.9)


def test_equivalence_is_claimed_falsely_no_oftener_than_alpha():
    rng = random.Random(0)
    claimed = sum(equivalent([rng.gauss(1.0, 0.5) for _ in range(8)], 1.0).is_met for _ in range(600))
    assert 0.025 < claimed / 600 < 0.08  # the mean lies on the margin: 5 % by construction


def test_too_few_pairs_claim_nothing():
    found = equivalent([0.0, 0.001, -0.001], 1.0, least_n=6)
    assert not found.is_met
    assert found.reason == "3 pairs, 6 are needed"
    assert math.isinf(interval([1.0]).high)
    assert not at_least([9.0], 1.0, least_n=1).is_met


def test_equal_differences_are_decided_by_their_value():
    assert equivalent([0.5] * 4, 1.0).is_met
    assert not equivalent([1.0] * 4, 1.0).is_met


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf]])
def test_what_is_no_number_is_no_result(bad):
    with pytest.raises(ValueError, match=r"no pairs|not finite"):
        interval(bad)


def test_only_seeds_of_both_arms_are_compared():
    assert relative_differences({3: 2.2, 1: 1.1, 7: 5.0}, {1: 1.0, 3: 2.0, 9: 1.0}) == pytest.approx([10.0, 10.0])


def test_every_claim_can_be_met_and_can_fail():
    for margin in MARGINS.values():
        inside = {"within": 0.0, "at most": margin.bound - 1, "at least": margin.bound + 1}[margin.test]
        near = [inside + 0.01 * (i % 2) for i in range(margin.least_n)]
        outside = margin.bound + (-1 if margin.test == "at least" else 1)
        assert margin.judge(near).is_met
        assert not margin.judge(near[1:]).is_met
        assert not margin.judge([outside] * margin.least_n).is_met
