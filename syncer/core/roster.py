"""Who is here: live groups, the current generation of each learner, and who has been away for how long.

A new generation of a learner supersedes the old one for everything to come; the old one stays live, may answer the
attempts that captured it, and its end never removes its replacement. Only ``_LIVE_OLD`` superseded groups of one
learner are kept, so that redialling cannot pile up sockets; the oldest go first.

Source: v4 §Generations (a new generation supersedes the old one, whose end cannot remove it); rulings §6.5, §6.14.
"""

from __future__ import annotations

from syncer.core.events import Member

_LIVE_OLD = 4


class Roster:
    """Live groups by member, current member by learner id."""

    def __init__(self) -> None:
        self._live: dict[int, list[Member]] = {}  # per learner, oldest first; the current one, if any, is last
        self._current: dict[int, Member] = {}
        self._absent_since: dict[int, float] = {}  # learners once connected, now away

    @property
    def current(self) -> tuple[Member, ...]:
        """The current live generation of every connected learner, ascending."""
        return tuple(sorted(self._current.values()))

    def is_live(self, member: Member) -> bool:
        return member in self._live.get(member.learner_id, ())

    def current_of(self, learner_id: int) -> Member | None:
        """The current live generation of one learner."""
        return self._current.get(learner_id)

    def join(self, member: Member) -> list[Member]:
        """A new generation is here; returns superseded groups that are now too many and must go."""
        groups = self._live.setdefault(member.learner_id, [])
        groups.append(member)
        self._current[member.learner_id] = member
        self._absent_since.pop(member.learner_id, None)
        return groups[: max(0, len(groups) - 1 - _LIVE_OLD)]

    def leave(self, member: Member, now: float) -> None:
        """A group is gone. A superseded group's end changes nothing but its own membership."""
        groups = self._live.get(member.learner_id, [])
        if member in groups:
            groups.remove(member)
        if self.current_of(member.learner_id) == member:
            del self._current[member.learner_id]
            self._absent_since[member.learner_id] = now

    def longest_absent(self) -> tuple[int, float] | None:
        """(learner id, since) of the learner that has been away longest, among those once connected."""
        if not self._absent_since:
            return None
        learner_id = min(self._absent_since, key=lambda i: (self._absent_since[i], i))
        return learner_id, self._absent_since[learner_id]
