"""A fleet under failures in virtual time, and two ways to train synchronously on the same machines.

Decides the traces and what counts as goodput: local steps whose progress is in the model at the end, against those of
the same fleet when none of its machines fails. So goodput is what failures cost, and nothing else. That a fleet merges
H - 1 of H steps even where nobody fails is a cost of another kind (parity pays it) and told beside it, as
``of_ideal``: the same steps against all that the machines could make. The decoupled fleet is ``syncer.plan``'s: the
real coordinator over learners made of numbers, at the product's defaults. It must not know margins.

Synchronous training makes a step only when all (stalled) or all who are left (elastic) take part, and loses nothing
but the step under way:

    stalled   all wait for the repair of whoever failed. A failure every up / M steps, each costing ``repair``:
              goodput = up / (up + M repair)
    elastic   the rest stops for ``RESTART`` steps at every change of membership, and goes on without who failed. Of
              a = up / (up + repair) of the machines each cycle stops (M - 1) a of them, and 1 + (M - 1) a on return:
              goodput = a - RESTART (1 + 2 (M - 1) a) / (up + repair), a little more where two stops overlap
    decoupled at most a; of the ideal at most a (H - 1) / H: of H steps one is made between an answer and the broadcast
              it leads to
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

from experiments.specs import Trace
from syncer.plan.simulated_fleet import SimulatedFleet
from syncer.plan.situation import Settings, Situation

RESTART = 5.0  # steps: to notice, to form the group anew, to load the last state
STEP_S = 1.0  # virtual seconds; only ratios count
WARM_UP = 200.0  # steps before counting begins


def run_trace(trace: Trace) -> dict[str, Any]:
    """Goodput, 0 to 1, of the decoupled fleet and of both baselines, on traces of one seed."""
    return {
        **decoupled(trace),
        "stalled": stalled(trace),
        "elastic": elastic(trace),
        **closed_forms(trace),
    }


def decoupled(trace: Trace) -> dict[str, float]:
    """Merged local steps / the same fleet's without failures; those, and all made, / what the machines can make."""
    ideal = trace.learners * trace.steps
    merged, made = _steps(trace, trace.up)
    unharmed, _ = _steps(replace(trace, seed=0), None)
    return {"decoupled": merged / unharmed, "of_ideal": merged / ideal, "made": made / ideal}


def fleet_of(trace: Trace, up: float | None) -> SimulatedFleet:
    """The planned fleet, before its first step; a machine works ``up`` steps on average, None = for ever."""
    mtbf_s = None if up is None else up * STEP_S
    situation = Situation(1_000_000, trace.learners, STEP_S, 1e9, 1e9, mtbf_s=mtbf_s, repair_s=trace.repair * STEP_S)
    return SimulatedFleet(situation, Settings(interval=float(trace.interval)), trace.seed)


@cache  # every trace is held against the same fleet without failures
def _steps(trace: Trace, up: float | None) -> tuple[float, float]:
    """Local steps merged and made, of all learners, while a machine works ``up`` steps on average; None = for ever."""
    fleet = fleet_of(trace, up)
    fleet.agenda.run(WARM_UP * STEP_S)
    before = fleet.tally()
    fleet.agenda.run((WARM_UP + trace.steps) * STEP_S)
    after = fleet.tally()
    return (after.merged_steps - before.merged_steps) / len(fleet.layout), after.made_steps - before.made_steps


def stalled(trace: Trace) -> float:
    """The machines stand still while one is repaired, and fail only at work."""
    rng = random.Random(trace.seed)
    now = made = 0.0
    while now < trace.steps:
        until_failure = rng.expovariate(trace.learners / trace.up)
        work = min(until_failure, trace.steps - now)
        made += int(work)
        now += work + (trace.repair if work == until_failure else 0.0)
    return made / trace.steps


def elastic(trace: Trace) -> float:
    """Who is up makes the steps; each change of who that is costs the rest ``RESTART`` steps."""
    rng = random.Random(trace.seed)
    changes = sorted(change for _ in range(trace.learners) for change in _life(trace, rng))
    made, now, up, stopped_until = 0.0, 0.0, trace.learners, 0.0
    for when, change in [*changes, (float(trace.steps), 0)]:
        made += up * max(0.0, when - max(now, stopped_until))
        now, up, stopped_until = when, up + change, when + RESTART
    return made / (trace.learners * trace.steps)


def _life(trace: Trace, rng: random.Random) -> list[tuple[float, int]]:
    """When one machine fails (-1) and is back (+1)."""
    out, now = [], rng.expovariate(1 / trace.up)
    while now < trace.steps:
        out.append((now, -1))
        if now + trace.repair < trace.steps:
            out.append((now + trace.repair, 1))
        now += trace.repair + rng.expovariate(1 / trace.up)
    return out


def closed_forms(trace: Trace) -> dict[str, float]:
    """What the figures above should be near; of the decoupled fleet a bound."""
    cycle = trace.up + trace.repair
    available = trace.up / cycle
    return {
        "stalled_formula": trace.up / (trace.up + trace.learners * trace.repair),
        "elastic_formula": available - RESTART * (1 + 2 * (trace.learners - 1) * available) / cycle,
        "decoupled_bound": available,
        "of_ideal_bound": available * (trace.interval - 1) / trace.interval,
    }
