"""What a planned run comes to: two snapshots of the fleet, and everything per second or per step in between.

    merged share   local steps inside merged answers / local steps made: the rest is learnt between an answer and the
                   broadcast it leads to, or by a learner that was missed or failed, and is overwritten
    goodput        merged steps per second / what the fleet makes when nobody fails or stalls
    interval       local steps from one merge of a fragment to its next: H, or more where the network is the limit

Failures that are rare are made denser, and what they cost is scaled back to their rate: a day of virtual time per
failure would tell no more. It must not know which figures are good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from syncer.plan.simulated_fleet import SimulatedFleet, Tally
from syncer.plan.situation import Settings, Situation, layout_of

_WARM_UP_CYCLES, _CYCLES = 3, 12  # merges of every fragment, before and while it is measured
_FAILURES = 40  # to be seen, so that their share is not chance
_MOST_ROUNDS = 3_000
_APART = 10.0  # mean times between failures, in repairs, at which hardly two of them meet
_PATIENCE = 30.0  # times the expected length, for a network that cannot keep up
_F32 = 4
_SCALED = ("rounds_per_s", "interval_steps", "round_s", "merged_share", "goodput", "participation", "staleness")


@dataclass(frozen=True, slots=True)
class Forecast:
    """Per-second and per-step figures of one run; bytes are those of the sockets, framing included.

    Attributes:
        rounds: that were watched.
        rounds_per_s: merges of one fragment, per second.
        interval_steps: of the fastest learner, between two merges of one fragment.
        round_s: mean time from launch to commit.
        merged_share, goodput: see the top of this file; 0 to 1.
        participation: answers / members captured.
        staleness: mean versions behind at the launch, in outer steps.
        sent_per_step, received_per_step: bytes one learner receives and sends per local step.
        link_use, syncer_link_use: the busier direction of a learner's and of the syncer's line, 0 to 1.
        syncer_use: share of the time in which the syncer computes.
        stall: share of the learners' time in step boundaries.
        relaunches, failures: in the time watched.
        against_gradients: bytes of an f32 gradient all-reduce every step / bytes sent here.
    """

    rounds: int
    rounds_per_s: float
    interval_steps: float
    round_s: float
    merged_share: float
    goodput: float
    participation: float
    staleness: float
    received_per_step: float
    sent_per_step: float
    link_use: float
    syncer_link_use: float
    syncer_use: float
    stall: float
    relaunches: int
    failures: int
    against_gradients: float


def forecast(situation: Situation, settings: Settings, seed: int = 0) -> Forecast:
    """Watch a run of this fleet in virtual time."""
    mtbf_s = situation.mtbf_s
    if mtbf_s is None:
        return _observed(situation, settings, seed)
    watched_s = _MOST_ROUNDS * _cycle_s(situation, settings) / settings.fragments
    dense_s = max(situation.learners * watched_s / _FAILURES, _APART * situation.repair_s)
    if mtbf_s <= dense_s:
        return _observed(situation, settings, seed)
    calm = _observed(replace(situation, mtbf_s=None), settings, seed)
    dense = _observed(replace(situation, mtbf_s=dense_s), settings, seed)
    share = (dense_s + situation.repair_s) / (mtbf_s + situation.repair_s)
    scaled = {name: getattr(calm, name) + share * (getattr(dense, name) - getattr(calm, name)) for name in _SCALED}
    return replace(calm, failures=dense.failures, relaunches=dense.relaunches, **scaled)


def _cycle_s(situation: Situation, settings: Settings) -> float:
    """From one merge of a fragment to its next, if nothing but the slowest learner holds it up."""
    return max(settings.interval, 1.0) * situation.step_s / min(situation.speeds, default=1.0)


def _observed(situation: Situation, settings: Settings, seed: int) -> Forecast:
    fleet = SimulatedFleet(situation, settings, seed)
    fragments, cycle_s = len(fleet.layout), _cycle_s(situation, settings)
    _watch(fleet, _WARM_UP_CYCLES * fragments, _WARM_UP_CYCLES * cycle_s)
    before, started = fleet.tally(), fleet.agenda.now
    least_s = 0.0 if situation.mtbf_s is None else _FAILURES * situation.mtbf_s / situation.learners
    rounds = max(_CYCLES * fragments, min(_MOST_ROUNDS, int(least_s / cycle_s * fragments)))
    _watch(fleet, before.rounds + rounds, rounds / fragments * cycle_s)
    return _figures(situation, settings, before, fleet.tally(), fleet.agenda.now - started)


def _watch(fleet: SimulatedFleet, rounds: int, expected_s: float) -> None:
    """Let time pass until so many rounds are merged; a fleet that never gets there is watched long enough."""
    pause_s, end = expected_s / 50, fleet.agenda.now + _PATIENCE * expected_s
    while fleet.tally().rounds < rounds and fleet.agenda.now < end:
        fleet.agenda.run(fleet.agenda.now + pause_s)


def _figures(situation: Situation, settings: Settings, before: Tally, after: Tally, seconds: float) -> Forecast:
    def grown(name: str) -> float:
        return float(getattr(after, name) - getattr(before, name))

    learners, fragments = situation.learners, len(layout_of(situation, settings))
    rounds, answers = max(grown("rounds"), 1e-9), max(grown("answers"), 1e-9)
    made, merged = grown("made_steps"), grown("merged_steps") / fragments
    ideal = seconds * sum(situation.speed(i) for i in range(learners)) / situation.step_s
    sent, received = grown("sent"), grown("received")
    steps_per_learner = max(made / learners, 1e-9)
    gradient = 2 * (learners - 1) / learners * _F32 * situation.parameters
    uploaded, downloaded = (nbytes / learners / steps_per_learner for nbytes in (received, sent))
    return Forecast(
        rounds=int(grown("rounds")),
        rounds_per_s=rounds / seconds,
        interval_steps=fragments * seconds / rounds / situation.step_s,
        round_s=grown("round_s") / rounds,
        merged_share=min(1.0, merged / max(made, 1e-9)),
        goodput=merged / ideal,
        participation=grown("answers") / max(grown("expected"), 1e-9),
        staleness=grown("staleness") / answers,
        received_per_step=downloaded,
        sent_per_step=uploaded,
        link_use=max(sent, received) / learners / seconds / situation.link,
        syncer_link_use=max(sent, received) / seconds / situation.syncer_link,
        syncer_use=grown("busy_s") / seconds,
        stall=grown("stalled_s") / seconds / learners,
        relaunches=int(grown("retries")),
        failures=int(grown("failures")),
        against_gradients=2 * gradient / max(uploaded + downloaded, 1e-9) if learners > 1 else 0.0,
    )
