"""The end of a run: freeze, cut, acknowledgement by generation, shutdown, a bounded wait.

Decides whose acknowledgement is awaited and which one counts. It must not know parameters or files.

    per learner   PENDING  --cut queued to a generation-->  QUEUED(gen)  --its ACK-->  ACKED(gen), for good
                  QUEUED(gen) --that group lost--> PENDING
    whole         DELIVERING --last ACK--> COMPLETE;  --deadline--> FAILED, naming the missing

Source: protocol v4, final membership; rulings on finalization.
"""

from __future__ import annotations

from collections.abc import Iterable

from syncer.core.events import Member


class Finalization:
    """Awaits one accepted acknowledgement from every learner frozen at the cut.

    Args:
        expected: logical ids live at the freeze.
        step: the final global step.
        timeout_s: how long the wait lasts.

    Attributes:
        deadline: when the wait ends; None until it has begun.
    """

    def __init__(self, expected: Iterable[int], step: int, timeout_s: float) -> None:
        self.expected = frozenset(expected)
        self.step, self._timeout_s = step, timeout_s
        self.deadline: float | None = None
        self._queued: set[Member] = set()
        self._acked: dict[int, set[Member]] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        """Learners without an accepted acknowledgement, ascending."""
        return tuple(sorted(self.expected - self._acked.keys()))

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
        if step != self.step:
            return f"FINAL_ACK of step {step}: the final step is {self.step}"
        if member not in self._queued:
            return "FINAL_ACK before the final cut was sent on this connection"
        self._acked.setdefault(member.learner_id, set()).add(member)
        return None
