"""The planned fleet: the real coordinator, served by an actor whose work takes time, and its learners.

What decides is the product's own ``core``; what takes time is counted here. It must not know what a good plan is.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.coordinator import Coordinator
from syncer.plan.agenda import Agenda
from syncer.plan.network import Pipe, Transfer, framed_bytes
from syncer.plan.simulated_learner import SimulatedLearner
from syncer.plan.situation import MERGE_ANSWERS, OUTER_ANSWERS, Settings, Situation, layout_of, policy_of
from yeto_torch.wire.constants import HASH_BYTES
from yeto_torch.wire.messages import Hello

_BCAST_HEAD = 12
_SLICED_MESSAGES = 2  # to one learner at once
_NOTICED_S = 0.05  # until a closed socket is seen
_HASH = bytes(HASH_BYTES)
_F32 = 4


@dataclass(slots=True)
class Tally:
    """What a run has come to, so far."""

    rounds: int = 0
    answers: int = 0
    expected: int = 0
    merged_steps: int = 0  # local steps in the answers that were merged, per fragment summed
    made_steps: int = 0  # by learners that are gone
    round_s: float = 0.0  # attempt's launch to commit, summed
    staleness: int = 0
    retries: int = 0
    failures: int = 0
    busy_s: float = 0.0  # of the syncer's actor
    sent: int = 0
    received: int = 0
    stalled_s: float = 0.0


class SimulatedFleet:
    """One syncer and its learners in virtual time."""

    def __init__(self, situation: Situation, settings: Settings, seed: int = 0) -> None:
        self.agenda = Agenda()
        self._situation, self._settings = situation, settings
        self._rng = random.Random(seed)
        self.layout = layout_of(situation, settings)
        self._coordinator = Coordinator(policy_of(situation, settings), _HASH)
        self._inbox: deque[tuple[ev.Event, float]] = deque()
        self._own: deque[ev.Event] = deque()
        self._free_at = 0.0  # when the actor has done what it was given
        self._woken_for: float | None = None
        self._up = Pipe(self.agenda, situation.syncer_link)
        self._down = Pipe(self.agenda, situation.syncer_link)
        self._lines = [
            (Pipe(self.agenda, situation.link), Pipe(self.agenda, situation.link)) for _ in range(situation.learners)
        ]
        self._learners: dict[ev.Member, SimulatedLearner] = {}
        self._waiting: dict[ev.Member, dict[int, int]] = {}  # broadcasts not begun: fragment -> version
        self._under_way: dict[ev.Member, int] = {}
        self._initialized = False
        self._spent: dict[int, float] = {}  # seconds on rounds that are not broadcast yet, by step
        self._tally = Tally()
        self._tickets = 0
        for learner in range(situation.learners):
            self._join(learner)

    def tally(self) -> Tally:
        """Everything so far, the living included."""
        tally = replace(self._tally, sent=self._up.nbytes, received=self._down.nbytes)
        tally.made_steps += sum(learner.steps for learner in self._learners.values())
        tally.stalled_s += sum(learner.stalled_s for learner in self._learners.values())
        return tally

    # ------------------------------------------------------------------ learners come and go

    def _join(self, learner: int) -> None:
        self._tickets += 1
        hello = Hello(learner, self._tickets, self._settings.wire_dtype, self.layout, _HASH, _HASH, None, 4)
        member = ev.Member(learner, self._tickets)
        up = (self._lines[learner][0], self._down)
        self._learners[member] = SimulatedLearner(
            self.agenda, self._situation, self._settings, self.layout, member, up, self._rng.random(), self._post
        )
        self._waiting[member], self._under_way[member] = {}, 0
        self.agenda.after(self._situation.latency_s, self._post, ev.HelloArrived(self._tickets, hello))
        if learner == 0 and not self._initialized:
            self._initialized = True
            for fragment in range(len(self.layout)):
                self.agenda.after(2 * self._situation.latency_s, self._post, ev.InitArrived(member, fragment, None))
        if self._situation.mtbf_s is not None:
            self.agenda.after(self._rng.expovariate(1 / self._situation.mtbf_s), self._fail, member)

    def _fail(self, member: ev.Member) -> None:
        learner = self._learners.pop(member)
        del self._waiting[member], self._under_way[member]
        learner.is_dead = True
        self._tally.made_steps += learner.steps
        self._tally.stalled_s += learner.stalled_s
        self._tally.failures += 1
        self.agenda.after(_NOTICED_S, self._post, ev.GroupLost(member, "failed"))
        self.agenda.after(self._situation.repair_s, self._join, member.learner_id)

    # ------------------------------------------------------------------ the actor

    def _post(self, event: ev.Event) -> None:
        self._inbox.append((event, self.agenda.now))
        self._wake(self.agenda.now)

    def _wake(self, when: float) -> None:
        """Have a turn at ``when``, or as soon as the actor is free."""
        when = max(when, self._free_at)
        if self._woken_for is None or when < self._woken_for:
            self._woken_for = when
            self.agenda.at(when, self._turn, when)

    def _turn(self, woken_for: float) -> None:
        if woken_for != self._woken_for:
            return
        self._woken_for = None
        while self._inbox:
            event, arrived = self._inbox.popleft()
            if isinstance(event, ev.PushArrived):
                self._work(self._situation.message_s)
            self._perform(self._coordinator.handle(event, arrived))
        self._perform(self._coordinator.on_time(self.agenda.now))
        deadline = self._coordinator.next_deadline()
        if deadline is not None:
            self._wake(max(deadline, self.agenda.now + 1e-6))

    def _perform(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self._do(effect)
        while self._own:
            self._perform(self._coordinator.handle(self._own.popleft(), self.agenda.now))

    def _do(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPull(member, fragment, step, attempt):
                if member in self._learners:
                    self._work(self._situation.message_s)
                    arrives = self._later(self._situation.latency_s)
                    self.agenda.at(arrives, self._learners[member].pulled, fragment, step, attempt)
            case fx.Merge(step, fragment, responses):
                self._spent[step] = self._compute(len(responses) + MERGE_ANSWERS, fragment)
                self._own.append(ev.MergeDone(step))
            case fx.Commit(step, fragment):
                self._spent[step] += self._compute(OUTER_ANSWERS, fragment)
            case fx.Record():
                self._record(effect)
            case fx.Note("retry"):
                self._tally.retries += 1
            case fx.Broadcast():
                self._broadcast(effect)

    def _later(self, seconds: float) -> float:
        return max(self.agenda.now, self._free_at) + seconds

    def _compute(self, answers: float, fragment: int) -> float:
        """The actor does what merging so many answers of a fragment takes; returns the seconds."""
        seconds = answers * _F32 * self.layout.numels[fragment] / self._situation.merge_rate
        self._work(seconds)
        return seconds

    def _work(self, seconds: float) -> None:
        """The actor is busy."""
        self._free_at = self._later(seconds)
        self._tally.busy_s += seconds

    def _record(self, record: fx.Record) -> None:
        line, tally = record.line, self._tally
        tally.rounds += 1
        tally.answers += len(line["responders"])
        tally.expected += len(line["expected"])
        tally.merged_steps += sum(r["c_steps"] for r in line["responders"])
        tally.staleness += sum(r["staleness"] for r in line["responders"])
        tally.round_s += self._later(0.0) - record.launched_at

    def _broadcast(self, effect: fx.Broadcast) -> None:
        started = self._later(0.0)
        spent = self._spent.pop(effect.version, None)
        self._work(len(effect.members) * self._situation.message_s)
        self.agenda.at(self._free_at, self._send_all, effect)
        if spent is not None:
            self._own.append(ev.RoundSynced(effect.version, spent + self._free_at - started))

    def _send_all(self, effect: fx.Broadcast) -> None:
        for member in effect.members:
            if member in self._waiting:
                self._waiting[member][effect.fragment] = effect.version
                self._send_next(member)

    def _send_next(self, member: ev.Member) -> None:
        """As the real outbox: a newer broadcast of a fragment replaces one that still waits."""
        waiting = self._waiting.get(member)
        if not waiting or self._under_way[member] == _SLICED_MESSAGES:
            return
        fragment = next(iter(waiting))
        version = waiting.pop(fragment)
        self._under_way[member] += 1
        values = self._settings.wire_dtype.bulk.nbytes(self.layout.numels[fragment])
        pipes = (self._up, self._lines[member.learner_id][1])
        arrived = partial(self._sent, member, fragment, version)
        Transfer(self.agenda, framed_bytes(_BCAST_HEAD + values), pipes, self._situation.latency_s, arrived)

    def _sent(self, member: ev.Member, fragment: int, version: int) -> None:
        if member in self._learners:
            self._under_way[member] -= 1
            self._learners[member].received(fragment, version)
            self._send_next(member)
