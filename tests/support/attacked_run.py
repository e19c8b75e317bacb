"""A living syncer with two honest learners that answer when they are told to, for tests that attack it meanwhile."""

from __future__ import annotations

import numpy as np

from tests.support.attacker import descriptors, status
from tests.support.processes import Processes, Syncer, overriding
from tests.support.scripted_learner import ScriptedLearner
from tests.wire.hostile import CONTRACT, FINGERPRINT, LAYOUT, LEARNERS
from yeto_torch.wire.codec import as_tensor, check_bounded
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.messages import BcastFragment
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

NAMED = Layout(
    (
        Fragment(MergeMode.AVG, (Tensor("a", (3,)),)),
        Fragment(MergeMode.RDA, (Tensor("b", (39_000,)), Tensor("c", (1_000,)))),
    )
)
assert NAMED.wire == LAYOUT


class Run:
    """Learners 0 and 1 are honest; 2 was here once, and leaves its place to strangers.

    Attributes:
        step: rounds committed.
        peers: the honest learners.
    """

    def __init__(
        self, processes: Processes, dtype: WireDType = WireDType.F32, *overrides: str, layout: Layout = NAMED
    ) -> None:
        self.dtype, self.layout = dtype, layout
        defaults = {
            "schedule.quorum": "2",
            "schedule.pipeline": "1",
            "schedule.sync_interval_steps": "0",
            "schedule.grace_ms": "0",
            "schedule.quorum_timeout_s": "3600",
            "checkpoint.every": "50",
        }
        keys = overriding(defaults, overrides)
        self.syncer: Syncer = processes.syncer(*keys, learners=LEARNERS, total_steps=10**6)
        self.peers = [self.peer(learner) for learner in range(LEARNERS)]
        self.peers[0].init([np.zeros(fragment.numel, np.float32) for fragment in layout.fragments])
        self.step = 0
        self.next_round()
        self.peers.pop().close()

    def peer(self, learner: int) -> ScriptedLearner:
        """An honest learner, connected; its session is the table's."""
        layout = Layout(self.layout.fragments)
        layout.__dict__["fingerprint"] = FINGERPRINT
        return ScriptedLearner(self.syncer.address, learner, layout, dtype=self.dtype.name, contract=CONTRACT)

    def next_round(self) -> None:
        """The honest learners answer; the round is merged and broadcast."""
        self.step += 1
        for peer in self.peers[:2]:
            pull = peer.pull(step=self.step)
            peer.answer(pull, np.zeros(self.layout.fragments[pull.fragment].numel, np.float32))
        for peer in self.peers[:2]:
            message = peer.next(BcastFragment, version=self.step)
            numel, bulk = self.layout.fragments[message.fragment].numel, self.dtype.bulk
            check_bounded(as_tensor(message.data, numel, bulk))  # as every learner does before it adopts
            del peer.seen[:-8]
            peer._taken.clear()

    def vitals(self) -> tuple[int, int]:
        """(threads, descriptors) of the syncer."""
        return status(self.syncer.pid, "Threads"), descriptors(self.syncer.pid)

    def memory(self, field: str = "VmRSS") -> int:
        """Bytes: ``VmRSS`` now, ``VmHWM`` the most so far."""
        return status(self.syncer.pid, field)

    def rejected(self, reason: str) -> int:
        """Answers not counted for this reason so far, or because the honest learners were faster."""
        counts = [line["rejected"] for line in self.syncer.merges()]
        return sum(count.get(why, 0) for count in counts for why in {reason, "out_of_round"})

    def check_clean(self) -> None:
        """It is alive and nothing in its log is a surprise to it."""
        assert self.syncer.code is None
        assert not [line for line in self.syncer.lines if "Traceback" in line or "internal error" in line]
