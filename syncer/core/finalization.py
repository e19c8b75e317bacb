"""The end of a run: freeze, cut, acknowledgement by generation, shutdown, a bounded wait.

Decides whose acknowledgement is awaited and which one counts. It must not know parameters or files.

    per learner   PENDING  --cut queued to a generation-->  QUEUED(gen)  --its ACK-->  ACKED(gen), for good
                  QUEUED(gen) --that group lost--> PENDING
    together      OPEN --freeze--> DELIVERING --last ACK--> COMPLETE
                  DELIVERING --deadline--> FAILED, naming the missing

Source: v4 §Final cut (membership is generation-aware, an ACK is never erased, a bounded wait); rulings §6.10.
"""

from __future__ import annotations

from collections.abc import Iterable

from syncer.core.events import Member


class Finalization:
    """Awaits one accepted acknowledgement of the final ``step`` from every learner frozen at the cut.

    ``deadline`` is when the wait ends; None until it has begun.
    """

    def __init__(self, step: int, timeout_s: float) -> None:
        self._step, self._timeout_s = step, timeout_s
        self.deadline: float | None = None
        self._frozen = False
        self._expected: frozenset[int] = frozenset()
        self._queued: set[Member] = set()
        self._acked: dict[int, set[Member]] = {}

    def freeze(self, expected: Iterable[int]) -> None:
        """The run has ended: these learners, live now, are awaited, and nobody else may join."""
        self._frozen, self._expected = True, frozenset(expected)

    def refusal(self, learner_id: int) -> str | None:
        """Why a learner may not enter any more."""
        if not self._frozen or learner_id in self._expected:
            return None
        return f"the run is ending: learner {learner_id} was not connected when its final state was frozen"

    @property
    def missing(self) -> tuple[int, ...]:
        """Learners without an accepted acknowledgement, ascending."""
        return tuple(sorted(self._expected - self._acked.keys()))

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def acked_members(self) -> tuple[Member, ...]:
        """Generations whose acknowledgement was accepted, ascending; only they may be sent SHUTDOWN."""
        return tuple(sorted(m for members in self._acked.values() for m in members))

    def queued(self, member: Member) -> None:
        """The whole cut was queued to this generation."""
        self._queued.add(member)

    def lost(self, member: Member) -> None:
        """A group is gone. An accepted acknowledgement stays."""
        self._queued.discard(member)

    def overdue(self, now: float) -> bool:
        """Is the wait over? It begins when first asked about: the cut is written and queued by then, however large."""
        if self.deadline is None:
            self.deadline = now + self._timeout_s
        return now >= self.deadline

    def acknowledge(self, member: Member, step: int) -> str | None:
        """An ACK arrived; None when it is accepted (again), else the violation it is."""
        if not self._frozen:
            return "FINAL_ACK before the run has ended"
        if step != self._step:
            return f"FINAL_ACK of step {step}: the final step is {self._step}"
        if member not in self._queued:
            return "FINAL_ACK before the final cut was sent on this connection"
        self._acked.setdefault(member.learner_id, set()).add(member)
        return None
