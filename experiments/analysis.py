"""Statistics of paired runs: intervals and one-sided tests over differences, nothing else.

Decides how a difference is measured and when a margin counts as met. It must not know what was run, nor any margin.

* An arm and its baseline are compared seed by seed; a seed that only one of them has is left out.
* Intervals are Student's t over the paired differences.
* Equivalence is two one-sided tests (TOST) at level alpha. That is the same as the (1 - 2 alpha) interval lying inside
  the margin, and that interval is what gets printed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit  # Student's distribution and its inverse, without all of scipy.stats

ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its two-sided interval at ``level``; of one value the interval is the whole line."""

    mean: float
    low: float
    high: float
    n: int
    level: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A tested claim.

    Attributes:
        is_met: the claim was shown; False also when there are too few pairs.
        p: of the test (of TOST the larger of both); 1 with fewer than two pairs.
        interval: the two-sided 1 - 2 alpha interval whose end(s) the test looks at.
        reason: why it is not met, empty if it is.
    """

    is_met: bool
    p: float
    interval: Interval
    reason: str = ""


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean and t interval of ``values``. Raises ValueError when there are none, or one is not finite."""
    _check(values)
    mean, error = statistics.fmean(values), _error(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf, len(values), level)
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * error
    return Interval(mean, mean - half, mean + half, len(values), level)


def relative_differences(arm: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """Percent by which ``arm`` is above ``baseline``, for every seed both have, in the order of the seeds."""
    return [100 * (arm[seed] - baseline[seed]) / baseline[seed] for seed in sorted(arm.keys() & baseline.keys())]


def equivalent(differences: Sequence[float], margin: float, least_n: int = 2, alpha: float = ALPHA) -> Outcome:
    """TOST: is the mean difference within +-``margin``?"""
    lower = _p_above(differences, -margin)
    upper = _p_above([-d for d in differences], -margin)
    return _outcome(differences, max(lower, upper), least_n, alpha)


def at_most(differences: Sequence[float], bound: float, least_n: int = 2, alpha: float = ALPHA) -> Outcome:
    """One one-sided test: is the mean difference below ``bound``?"""
    return _outcome(differences, _p_above([-d for d in differences], -bound), least_n, alpha)


def at_least(values: Sequence[float], bound: float, least_n: int = 2, alpha: float = ALPHA) -> Outcome:
    """One one-sided test: is the mean above ``bound``?"""
    return _outcome(values, _p_above(values, bound), least_n, alpha)


def _outcome(values: Sequence[float], p: float, least_n: int, alpha: float) -> Outcome:
    found = interval(values, 1 - 2 * alpha)
    if len(values) < least_n:
        return Outcome(False, p, found, f"{len(values)} pairs, {least_n} are needed")
    return Outcome(True, p, found) if p < alpha else Outcome(False, p, found, "the interval is not inside the margin")


def _p_above(values: Sequence[float], bound: float) -> float:
    """p of the test that rejects 'the mean is at most ``bound``'."""
    _check(values)
    if len(values) < 2:
        return 1.0
    gap, error = statistics.fmean(values) - bound, _error(values)
    if error == 0:
        return 0.0 if gap > 0 else 1.0
    return float(stdtr(len(values) - 1, -gap / error))


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _check(values: Sequence[float]) -> None:
    if not values:
        raise ValueError("no pairs: expected at least one seed that both arms have")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"a difference is not finite: {list(values)}")
