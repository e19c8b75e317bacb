"""What is claimed, and the margin of each claim: chosen and committed before anything was run.

Decides which comparisons carry a verdict; every other figure of the report is described and not judged. It must not
know results. To change a margin after a run is to start anew: with new seeds, and saying so.

Differences of losses are percent of the synchronous loss of the same seed, negative = better than synchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.analysis import Outcome, at_least, at_most, equivalent

Test = Literal["within", "at most", "at least"]
_TESTS: dict[Test, Callable[[Sequence[float], float, int], Outcome]] = {
    "within": equivalent,
    "at most": at_most,
    "at least": at_least,
}


@dataclass(frozen=True, slots=True)
class Margin:
    """One claim.

    Attributes:
        claim: in words.
        test: ``within`` is TOST on +-``bound``; the other two are one-sided.
        bound: in ``unit``.
        least_n: pairs without which nothing is claimed.
    """

    claim: str
    test: Test
    bound: float
    unit: str
    least_n: int

    def judge(self, values: Sequence[float]) -> Outcome:
        return _TESTS[self.test](values, self.bound, self.least_n)


MARGINS = {
    "parity": Margin("char, M = 2, H = 24, rda: as good as tuned synchronous training", "within", 1.0, "%", 6),
    # Margin zero: met only if iso is shown to be better, for "equal" can never be shown without a margin.
    "iso": Margin("char, M = 2, H = 24, iso, norm scale: at least as good as synchronous", "at most", 0.0, "%", 6),
    "q4": Margin("char, M = 2, H = 24: q4 answers are as good as f32", "within", 0.25, "%", 8),
    "bytes": Margin("bytes at the sockets of real processes against the formula", "within", 2.0, "%", 3),
    # Local steps inside merged answers / the same of a fleet without failures, and / all that the machines can make.
    "goodput": Margin(
        "virtual time, M = 4, up 300 / repair 30 steps: goodput, of the fleet without failures",
        "at least",
        0.87,
        "",
        200,
    ),
    "of_ideal": Margin("the same, of all steps that the machines can make", "at least", 0.87, "", 200),
    "kills": Margin("real SIGKILLs, M = 4: goodput / that of restarted synchronous training", "at least", 1.5, "x", 3),
}

# The second set (``lasting.py``), all in its setting MAIN: 30,000 parameters, 1,600 steps of which 400 are common,
# global batch 16. Percent of tuned synchronous AdamW of the same seed, but for the last: percent of one machine with
# the same outer step.
LASTING = {
    "rda, M = 2": Margin(
        "rda, M = 2, H = 24: no worse than synchronous by more than half a percent", "at most", 0.5, "%", 8
    ),
    "rda, M = 4": Margin(
        "rda, M = 4, H = 24: no worse than synchronous by more than one percent", "at most", 1.0, "%", 8
    ),
    "iso, M = 2": Margin(
        "iso, norm scale, own outer step, M = 2, H = 24: two percent below synchronous", "at most", -2.0, "%", 8
    ),
    "iso, M = 4": Margin("the same, M = 4: no worse than synchronous by more than one percent", "at most", 1.0, "%", 8),
    "iso, price": Margin(
        "the same, M = 2, against one machine with the same outer step: what the fleet costs", "within", 1.5, "%", 8
    ),
}
