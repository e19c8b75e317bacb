"""How fast everybody is: step-time estimates, the adaptive grace window, the launch throttle.

    xi_step     per member: seconds per local step, from successive local_step reports
    xi_quorum   seconds from an attempt's launch to its K-th answer
    xi_sync     seconds to compute, commit and queue the broadcast of a round
    each is smoothed as 0.5 new + 0.5 old

    grace    = clamp(gamma (tau xi_step - xi_quorum - xi_sync), 0, grace_ms); all of grace_ms without an estimate
    interval = max(min_round_interval, H xi_step / F)

It must not know rounds, or members beyond their names.

Source: v4 §Quorum and grace (the adaptive grace window); rulings §6.3, §6.4.
"""

from __future__ import annotations

from collections.abc import Iterable

from syncer.config.policy import SchedulePolicy
from syncer.core.events import Member


class Pace:
    """Estimates in seconds; None where nothing has been measured."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy
        self._last: dict[Member, tuple[float, int]] = {}
        self._step_s: dict[Member, float] = {}
        self.quorum_s: float | None = None
        self.sync_s = 0.0
        self._synced = False

    def observe_step(self, member: Member, local_step: int, now: float) -> None:
        """A PUSH or HEARTBEAT said how many local steps the member has made."""
        last = self._last.get(member)
        if last is not None:
            then, steps = last
            if local_step <= steps:
                return
            self._step_s[member] = _smooth(self._step_s.get(member), max(now - then, 0.0) / (local_step - steps))
        self._last[member] = (now, local_step)

    def observe_quorum(self, seconds: float) -> None:
        self.quorum_s = _smooth(self.quorum_s, seconds)

    def observe_sync(self, seconds: float) -> None:
        self.sync_s = _smooth(self.sync_s if self._synced else None, seconds)
        self._synced = True

    def forget(self, member: Member) -> None:
        self._last.pop(member, None)
        self._step_s.pop(member, None)

    def step_s(self, members: Iterable[Member]) -> float | None:
        """The slowest member's estimate, or None when none has one."""
        return max((self._step_s[m] for m in members if m in self._step_s), default=None)

    def grace_s(self, members: Iterable[Member]) -> float:
        """The grace window of a round that has just reached its quorum."""
        return grace_window_s(self._policy, self.step_s(members), self.quorum_s or 0.0, self.sync_s)

    def launch_interval_s(self, members: Iterable[Member], fragments: int) -> float:
        """The least time between a launch with these members and the next launch."""
        step_s = self.step_s(members)
        floor_s = self._policy.min_round_interval_ms / 1000
        if step_s is None:
            return floor_s
        return max(floor_s, self._policy.sync_interval_steps * step_s / fragments)


def grace_window_s(policy: SchedulePolicy, step_s: float | None, quorum_s: float, sync_s: float) -> float:
    """The adaptive grace window in seconds."""
    cap_s = policy.grace_ms / 1000
    if step_s is None:
        return cap_s
    return min(max(policy.grace_gamma * (policy.grace_tau * step_s - quorum_s - sync_s), 0.0), cap_s)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else 0.5 * new + 0.5 * old
