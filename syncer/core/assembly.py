"""When may training start? Initialised fragments, connected learners, and what each was sent on joining.

Decides the start and which broadcasts it still owes. It must not know rounds or files.

    a fresh run    every fragment initialised (by learner 0; the first INIT wins) and every learner connected
    a resumed run  the same, or a quorum connected for ``start_grace_s``: one learner lost for good must not block a
                   restart. When only the final cut is left, one learner is enough.

Source: v4 §Generations (every initialised fragment at its current version to a new generation); rulings §6.1.
"""

from __future__ import annotations

from syncer.config.policy import SyncerPolicy
from syncer.core.events import Member


class Assembly:
    """The time before round 1. ``resumed``: every fragment is there already; ``complete``: it is at the last step."""

    def __init__(self, policy: SyncerPolicy, fragments: int, *, resumed: bool, complete: bool) -> None:
        self._policy, self._resumed = policy, resumed
        self._quorum = 1 if complete else policy.schedule.quorum
        self._quorum_since: float | None = None
        self._initialized = [resumed] * fragments
        self._greeted: dict[Member, frozenset[int]] = {}

    @property
    def initialized(self) -> tuple[int, ...]:
        """Fragments that have parameters."""
        return tuple(f for f, done in enumerate(self._initialized) if done)

    @property
    def all_initialized(self) -> bool:
        """Does every fragment have parameters?"""
        return all(self._initialized)

    def initialize(self, fragment: int) -> bool:
        """An INIT came; False when the fragment has parameters already."""
        if self._initialized[fragment]:
            return False
        self._initialized[fragment] = True
        return True

    def greet(self, member: Member) -> tuple[int, ...]:
        """The fragments to send a member that joins now; the rest is owed at the start."""
        self._greeted[member] = frozenset(self.initialized)
        return self.initialized

    def forget(self, member: Member) -> None:
        """A group is gone."""
        self._greeted.pop(member, None)

    def owed(self, fragment: int, members: tuple[Member, ...]) -> tuple[Member, ...]:
        """Members that have not been sent this fragment."""
        return tuple(m for m in members if fragment not in self._greeted.get(m, frozenset()))

    def may_start(self, connected: int, now: float) -> bool:
        """Asked after every change and whenever ``start_at`` passes."""
        if connected < self._quorum:
            self._quorum_since = None
        elif self._quorum_since is None:
            self._quorum_since = now
        start_at = self.start_at
        return self.all_initialized and (
            connected == self._policy.learners or (start_at is not None and now >= start_at)
        )

    @property
    def start_at(self) -> float | None:
        """When a resumed run starts with whoever is connected."""
        if not self._resumed or self._quorum_since is None:
            return None
        return self._quorum_since + self._policy.schedule.start_grace_s

    def waiting_for(self, connected: tuple[Member, ...]) -> str:
        """Who and what is missing."""
        here = {m.learner_id for m in connected}
        away = [i for i in range(self._policy.learners) if i not in here][:8]
        parts = []
        if away:
            noun, verb = ("learner", "is") if len(away) == 1 else ("learners", "are")
            parts.append(f"{noun} {', '.join(map(str, away))} {verb} not connected")
        if not self.all_initialized:
            cure = "" if away else "; if it sent them to an earlier process of the syncer, restart it"
            parts.append(f"learner 0 has not sent all starting values{cure}")
        return "assembling: " + " and ".join(parts)
