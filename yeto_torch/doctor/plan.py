"""How a fleet should be set up for a model, a line and a step time: the interval H, the wire dtype, the time of a sync.

Every learner sends its part of the model once per H steps and gets the merged one back, and all of
them share the syncer's line, so with P parameters, L learners, u and b bytes a value up and down, r the bytes a second
of the line in each direction and s the seconds of a step

    one sync of the whole model       T = L P u / r_up + L P b / r_down
    the line is busy for a share of   T / (H s)
    least H for a share of 1/2        H = T / (s / 2)
    for H, the line must carry        r = L P (u + b) / (H s / 2), in both directions

The rates are those one learner measured, so the sum over learners takes the syncer's line for the narrow place. If the
learners' lines are narrower, T is too long by up to L times: the advice errs on the side of more steps.

    u: f32 4, bf16 2, q4 132/256     b: f32 4, bf16 2, q4 2 (broadcasts of a q4 session are bf16)

* pure
"""

from __future__ import annotations

import math
from dataclasses import dataclass

USUAL_H = 24  # the syncer's default, schedule.sync_interval_steps
MOST_H = 500  # beyond it merging loses more than the line saves
_BF16_UP_TO_H = 100  # above it q4 pays for its coarser answers
_SHARE = 0.5
_BYTES = {"f32": (4.0, 4.0), "bf16": (2.0, 2.0), "q4": (132 / 256, 2.0)}


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be trained: P, s in seconds, L."""

    parameters: float
    step_time_s: float
    learners: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second, as one learner sees the line: ``up`` to the syncer, ``down`` from it."""

    up: float
    down: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The advice. ``busy`` is the share of the time in which the syncer's line carries something."""

    wire_dtype: str
    interval_steps: int
    least_steps: dict[str, int]
    sync_s: float
    busy: float

    @property
    def feasible(self) -> bool:
        return self.interval_steps <= MOST_H


def sync_seconds(workload: Workload, rates: Rates, wire_dtype: str) -> float:
    """T: the whole model of every learner once up and once down."""
    up, down = _BYTES[wire_dtype]
    values = workload.learners * workload.parameters
    return values * up / rates.up + values * down / rates.down


def least_interval(workload: Workload, rates: Rates, wire_dtype: str) -> int:
    """The least H, at least 1."""
    return max(1, math.ceil(sync_seconds(workload, rates, wire_dtype) / (_SHARE * workload.step_time_s)))


def needed_rate(workload: Workload, wire_dtype: str, interval_steps: int = USUAL_H) -> float:
    """Bytes a second that the syncer's line must carry in each direction for that H."""
    up, down = _BYTES[wire_dtype]
    return workload.learners * workload.parameters * (up + down) / (_SHARE * interval_steps * workload.step_time_s)


def plan(workload: Workload, rates: Rates) -> Plan:
    """bf16 at the usual H where the line allows it; q4 where bf16 would need more than 100 steps and q4 fewer."""
    least = {dtype: least_interval(workload, rates, dtype) for dtype in _BYTES}
    chosen = "q4" if least["bf16"] > _BF16_UP_TO_H and least["q4"] < least["bf16"] else "bf16"
    interval = max(USUAL_H, least[chosen])
    seconds = sync_seconds(workload, rates, chosen)
    return Plan(chosen, interval, least, seconds, seconds / (interval * workload.step_time_s))
