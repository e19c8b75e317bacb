"""Trouble, where it hurts: at the K-th answer, at a deadline, between the effects of a commit, in the final cut.

Every kind of trouble has its probability in the scenario, and a seed has only so much of it. After ``calm_at`` nothing
new goes wrong: what is broken heals, and the run must end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncer.core import effects as fx
from syncer.core import events as ev
from tests.sim.scenario import Scenario
from tests.sim.world import Thread, World

if TYPE_CHECKING:
    from tests.sim.learner import LearnerNode
    from tests.sim.syncer import Process, SyncerNode

TICK_S = 1e-6
_WRITES = (fx.SaveCheckpoint, fx.WriteFinal, fx.WriteMarker)
_DANGEROUS = (*_WRITES, fx.Commit, fx.Record, fx.Broadcast, fx.SendCut, fx.SendShutdown, fx.SendPull, fx.Initialize)


class CrashError(Exception):
    """The syncer's process is gone."""


class Faults:
    """Decides what goes wrong, and does it.

    Attributes:
        syncer: set by the syncer's node.
        learners: set by the learners' nodes, by id.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        self._world, self._scenario, self._chances = world, scenario, scenario.chances
        self.left = scenario.faults
        self._ending = False
        self.syncer: SyncerNode | None = None
        self.learners: dict[int, LearnerNode] = {}
        world.spawn(self._background())

    @property
    def calm(self) -> bool:
        return self.left <= 0 or self._world.now >= self._scenario.calm_at

    def _strikes(self, chance: float) -> bool:
        if chance <= 0.0 or self.calm or self._world.rng.random() >= chance:
            return False
        self.left -= 1
        return True

    def _background(self) -> Thread:
        """Trouble at any time."""
        while True:
            yield self._world.rng.uniform(0.5, 8.0)
            if self.calm:
                return
            self.trouble(self._world.rng.randrange(len(self._scenario.learners)))
            if self._scenario.never_back is not None and self._world.rng.random() < 0.5:
                self.learners[self._scenario.never_back].kill()
            process = self.syncer.process if self.syncer is not None else None
            if process is not None and self._strikes(self._chances.interrupt):
                process.tell("SIGTERM")
                process.post(ev.Interrupted())

    # ------------------------------------------------------------------ at the syncer

    def handled(self, event: ev.Event) -> None:
        """An event is about to be settled: the K-th answer and its neighbours are dangerous."""
        if isinstance(event, ev.AckArrived) and self._strikes(self._chances.final / 2):
            raise CrashError("at an acknowledgement")
        if isinstance(event, ev.PushArrived | ev.AckArrived | ev.GroupLost):
            if self._strikes(self._chances.crash):
                raise CrashError(f"at {type(event).__name__}")
            self.trouble(self._world.rng.randrange(len(self._scenario.learners)))

    def before(self, effect: fx.Effect, process: Process) -> None:
        """An effect is about to be done."""
        disk = self.syncer.disk if self.syncer is not None else None
        if isinstance(effect, _WRITES) and disk is not None:
            if self._strikes(self._chances.tear):
                disk.cut_power_in(self._world.rng.randint(0, 9))
            elif self._strikes(self._chances.disk_full):
                process.tell("the disk is full")
                disk.fail_in(self._world.rng.randint(0, 5))
        if isinstance(effect, _DANGEROUS) and self._strikes(self._chances.crash):
            raise CrashError(f"before {type(effect).__name__}")

    def behind(self, effect: fx.Effect) -> None:
        """An effect was done."""
        match effect:
            case fx.Drain():
                self._the_end_is_near()
            case fx.SendPull(member) | fx.SendCut(member) | fx.SendShutdown(member):
                self.trouble(member.learner_id)
            case fx.Broadcast():
                for member in effect.members:
                    self.trouble(member.learner_id)
        if isinstance(effect, _DANGEROUS) and self._strikes(self._chances.crash):
            raise CrashError(f"behind {type(effect).__name__}")

    def _the_end_is_near(self) -> None:
        """The final cut is short, and every moment of it is dangerous: there is some trouble left for it."""
        self._ending = True
        if self._chances.final and self._world.now < self._scenario.calm_at:
            self.left += self._world.rng.choice([1, 3])
        for learner_id in range(len(self._scenario.learners)):
            self.trouble(learner_id)

    # ------------------------------------------------------------------ at the learners

    def trouble(self, learner_id: int) -> None:
        """Perhaps something happens to this learner or its connection."""
        learner = self.learners.get(learner_id)
        if learner is None or learner.over:
            return
        rng, chances = self._world.rng, self._chances
        cut = max(chances.cut, chances.final) if self._ending else chances.cut
        if learner.connection is not None and self._strikes(cut):
            connection = learner.connection
            late = rng.choice([connection.learner, connection.syncer]) if rng.random() < chances.half_open else None
            learner.tell("CUT" + ("" if late is None else f", the {late.name} notices late"))
            connection.cut(late=late, late_s=rng.uniform(0.5, 12.0))
        elif learner.connection is not None and self._strikes(chances.stall):
            seconds = rng.choice([0.5, 3.0, 10.0])
            learner.tell(f"STALL for {seconds} s")
            learner.connection.stall(seconds)
        elif self._strikes(chances.freeze):
            learner.freeze(rng.choice([1.0, 8.0, 20.0]))
        elif self._strikes(chances.kill):
            learner.kill()

    def silly(self, often: float = 1.0) -> bool:
        """Does a learner say something now that must not count?"""
        return self._strikes(min(1.0, often * self._chances.silly))

    def arrival(self, deadline: float | None) -> float:
        """The earliest moment an answer may arrive: now and then its deadline, or a tick beside it."""
        if deadline is None or deadline <= self._world.now or not self._strikes(self._chances.deadline):
            return 0.0
        return deadline + self._world.rng.choice([-TICK_S, 0.0, TICK_S])
