"""A live run whose syncer and learners are killed at chosen moments, and what must hold all the while.

Two learner processes dial through a relay, so that the syncer may come back on any port. A scripted learner answers at
once, so that rounds go on whoever is away; it is the witness: every broadcast it sees is compared, on arrival, with the
checkpoint on the disk.
"""

from __future__ import annotations

import random
import signal
import threading
import time

import numpy as np

from tests.support.processes import Processes, Running, Syncer
from tests.support.real_learners import same_weights, start_script
from tests.support.relay import Proxy
from tests.support.saved_parameters import final_state, saved, saved_step
from tests.support.scripted_learner import Journal, ScriptedLearner
from tests.support.toy_model import toy
from tests.support.waiting import WAIT_S, until
from yeto_torch.fragments import build_layout
from yeto_torch.wire.messages import BcastFragment, PullReq
from yeto_torch.wire.model_layout import Layout, contract_hash

WIDTH, FRAGMENTS, RUN_ID = 160, 3, "storm"
MOMENTS = ("broadcast", "answer", "temporary", "start", "together")
FAR = 1_000_000  # outer steps that no test reaches


def layout() -> Layout:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in toy(0, WIDTH).named_parameters()]
    return build_layout(shapes, fragments=FRAGMENTS)


class Storm:
    """Args: ``every``: checkpoint.every. ``seed``: decides every moment that is left to chance."""

    def __init__(self, processes: Processes, seed: int, every: int) -> None:
        self.processes, self.every, self.chance = processes, every, random.Random(seed)
        self.layout = layout()
        self.journal = Journal(self._witness)
        self.newest = 0  # version that was shown to anybody
        self.kills = {"syncer": 0, "learner": 0}
        self.rollbacks = 0
        self.proxy = Proxy(None, record=False)
        self._countdown: tuple[str, int] | None = None
        self._struck = threading.Event()
        self.learners: dict[int, Running] = {}
        self._starts = 0
        self.syncer = self._start_syncer(FAR)
        for learner_id in (0, 1):
            self.start_learner(learner_id)
        self.peer = self._meet()

    # ------------------------------------------------------------------------------------------ what happens

    def strike(self, moment: str) -> None:
        """Kill the syncer at ``moment`` of its life, look at what it left, and start it again."""
        if moment == "together":
            self._await_learners()
        if moment == "start":
            self._fell()
            self._start_syncer(FAR, listening=False)
            self._pause(0.3)
        elif moment == "temporary":
            self.peer.pull()
            until(lambda: list(self.syncer.folder.glob(".checkpoint.*.tmp")) or self.syncer.code, "a write", pause_s=0)
        elif moment != "together":
            self._struck.clear()
            self._countdown = (moment, self.chance.randint(1, 12))
            assert self._struck.wait(WAIT_S), f"no {moment} came; {self.syncer.told()}"
            self._pause(0.004)
        self._fell()
        self.syncer = self._start_syncer(FAR)
        self.peer = self._meet()

    def strike_learner(self, learner_id: int) -> None:
        """Kill a learner process, at any moment after it has joined, and start it again."""
        self.learners[learner_id].wait_for("joined")
        self._pause(0.1)
        self.learners[learner_id].kill()
        self.kills["learner"] += 1
        self.start_learner(learner_id)

    def finish(self) -> None:
        """One last death; then the run may end, and everybody must hold what the checkpoint holds."""
        self._fell()
        total = saved_step(self.syncer.checkpoint) + 12
        self.syncer = self._start_syncer(total, start_grace_s=WAIT_S)  # nobody is left behind
        self.peer = self._meet()
        assert self.syncer.wait() == 0, self.syncer.told()
        assert [one.wait() for one in self.learners.values()] == [0, 0], [one.told() for one in self.learners.values()]
        self.peer.wait_closed()
        self.journal.check()
        results = [list(np.load(self._out(i)).values()) for i in (0, 1)]
        ours = self.peer.cut()[1]
        folder = self.syncer.folder
        assert same_weights(*results, ours, saved(self.syncer.checkpoint), final_state(folder / "model.safetensors"))
        assert saved_step(self.syncer.checkpoint) == total
        assert (folder / "checkpoint.final").read_text() == f"YETO_FINAL_V1\nglobal_step={total}\n"
        assert [line["step"] for line in self.syncer.merges()] == list(range(1, total + 1))
        assert not list(folder.glob(".*.tmp"))
        # a learner that follows a syncer that was set back never claims to stand on a version that is no more
        assert "future base" not in [line["reason"] for line in self.syncer.events("reject")]

    def close(self) -> None:
        self.peer.close()
        self.proxy.__exit__()

    # ------------------------------------------------------------------------------------------ its parts

    def _start_syncer(self, total_steps: int, *, start_grace_s: float = 0.1, listening: bool = True) -> Syncer:
        syncer = self.processes.syncer(
            "schedule.quorum=1",
            f"schedule.start_grace_s={start_grace_s}",
            "schedule.sync_interval_steps=0",
            "schedule.grace_ms=15",
            "checkpoint.resume=auto",
            "checkpoint.mark_final=true",
            f"checkpoint.every={self.every}",
            learners=3,
            total_steps=total_steps,
            listening=listening,
        )
        if listening:
            self.proxy.target = syncer.address
        self.syncer = syncer
        return syncer

    def _meet(self) -> ScriptedLearner:
        peer = ScriptedLearner(
            self.syncer.address,
            2,
            self.layout,
            contract=contract_hash(self.layout.fingerprint, RUN_ID),
            streams=1,
            journal=self.journal,
        )
        peer.serve(self._answer)
        return peer

    def start_learner(self, learner_id: int) -> None:
        self._starts += 1
        optimizer = {"run_id": RUN_ID, "fragments": FRAGMENTS, "wire_dtype": "f32", "streams": 1}
        self.learners[learner_id] = start_script(
            self.processes,
            self.proxy.address,
            learner_id,
            out=self._out(learner_id),
            seed=self._starts,
            width=WIDTH,
            optimizer={**optimizer, "connect_timeout_s": 120, "final_timeout_s": 120},
        )

    def _out(self, learner_id: int):
        return self.processes.folder / f"learner-{learner_id}.npz"

    def _await_learners(self) -> None:
        for learner_id in (0, 1):
            self.syncer.wait_for(rf"learner {learner_id} .* joined")
        self._pause(0.2)

    def _fell(self) -> None:
        """SIGKILL the syncer and judge what is left on the disk."""
        self.syncer.kill()
        assert self.syncer.code == -signal.SIGKILL, self.syncer.told()
        self.kills["syncer"] += 1
        self.peer.wait_closed()
        self.journal.check()
        step = saved_step(self.syncer.checkpoint)
        lost = self.newest - step
        assert lost < self.every, f"version {self.newest} was shown, the checkpoint holds step {step}"
        if lost > 0:
            self.rollbacks += 1
        if self.every > 1:
            self.journal.epoch += 1
        self.newest = max(step, 0)

    def _pause(self, most_s: float) -> None:
        """Where in the next moments the blow falls is left to chance; nothing waits for a result here."""
        time.sleep(self.chance.uniform(0, most_s))

    # ------------------------------------------------------------------------------------------ the witness

    def _answer(self, _peer: ScriptedLearner, pull: PullReq) -> np.ndarray:
        self._count("answer")
        numel = self.layout.fragments[pull.fragment].numel
        return np.full(numel, 0.001 * (pull.step % 7 - 3), np.float32)

    def _witness(self, message: BcastFragment) -> None:
        durable = saved_step(self.syncer.checkpoint)
        if self.every == 1 and message.version > durable:
            self.journal.faults.append(f"version {message.version} was visible while step {durable} was durable")
        self.newest = max(self.newest, message.version)
        self._count("broadcast")

    def _count(self, moment: str) -> None:
        if self._countdown is not None and self._countdown[0] == moment:
            left = self._countdown[1] - 1
            self._countdown = (moment, left)
            if left == 0:
                self._countdown = None
                self._struck.set()
