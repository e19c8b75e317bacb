"""Play one seed: build its world, let it happen, say what went wrong."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from unittest import mock

from tests.sim.faults import Faults
from tests.sim.judge import Judge
from tests.sim.learner import LearnerNode
from tests.sim.scenario import Scenario, draw
from tests.sim.syncer import SyncerNode
from tests.sim.world import LivenessError, World
from yeto_torch.wire import chunks

_PATIENCE_S = 900.0  # from the last fault to the end of the run, at most


@dataclass(frozen=True)
class Outcome:
    """How one seed went.

    Attributes:
        failure: one sentence, None when everything held.
        story: one line per happening.
        ended_at: simulated seconds.
        trace: where a failure was noticed.
    """

    seed: int
    failure: str | None
    story: list[str]
    ended_at: float
    committed: int
    trace: str = ""

    def report(self, lines: int = 60) -> str:
        """The failure, how to see it again, and the end of the story."""
        tail = "\n".join(self.story[-lines:])
        return f"seed {self.seed}: {self.failure}\nreplay: python -m tests.sim {self.seed}\n{tail}\n{self.trace}"


def play(seed: int) -> Outcome:
    """One seed from beginning to end."""
    scenario = draw(seed)
    world = World(seed)
    judge = Judge(world, scenario)
    failure, trace = None, ""
    with mock.patch.object(chunks, "SLICE_BYTES", scenario.slice_bytes):
        try:
            _let_happen(world, scenario, judge)
        except AssertionError as error:
            failure, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        except Exception as error:  # noqa: BLE001 - a machine that stumbles is a finding like any other
            failure, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
    return Outcome(seed, failure, world.story, world.now, judge.committed, trace)


def _let_happen(world: World, scenario: Scenario, judge: Judge) -> None:
    faults = Faults(world, scenario)
    syncer = SyncerNode(world, scenario, judge, faults)
    learners = [LearnerNode(world, scenario, judge, faults, syncer, i) for i in range(len(scenario.learners))]

    def restart_everybody() -> None:
        """A run without a checkpoint begins anew: so do its learners, or nobody would send INIT."""
        for learner in learners:
            learner.kill(may_end=False)

    syncer.restarted_fresh = restart_everybody
    world.after(0.0, syncer.start)

    def over() -> bool:
        """Everybody has gone home, or those that have not were too late: their place is taken."""
        if all(node.over for node in learners) and judge.durable == scenario.policy.total_steps:
            return True  # with nobody left a syncer that was restarted behind the marker waits in vain
        return syncer.over and all(n.over or n.process is None or n.ack_boot != n.boots for n in learners)

    if not world.run(scenario.calm_at + _PATIENCE_S, over):
        waiting = syncer.process.coordinator.waiting_for() if syncer.process is not None else "nobody: it is gone"
        raise LivenessError(f"{_PATIENCE_S:g} s after the last fault the run has not ended; it waits for {waiting}")
    judge.at_the_end(syncer.disk)
