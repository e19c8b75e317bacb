"""Which round comes next, and when: t to fragment, the pipeline window, strictly ascending commits, the throttle.

Decides only order and earliest time. It must not know who answers.

Source: v4 §Scheduler (pipelined rounds target distinct fragments), v4 §Checkpoints (strictly in ascending step order);
rulings §6.2, §6.3.
"""

from __future__ import annotations

from collections.abc import Iterator

from syncer.config.policy import SchedulePolicy
from syncer.core.events import Member
from syncer.core.pace import Pace
from syncer.core.rounds import Round, RoundState
from yeto_torch.wire.layout import version_at


class Schedule:
    """Rounds in flight, keyed by step; never more than min(pipeline, F), never skipping ahead of ``committed``."""

    def __init__(self, policy: SchedulePolicy, fragments: int, total_steps: int, committed: int, pace: Pace) -> None:
        self._policy, self._fragments, self._total, self._pace = policy, fragments, total_steps, pace
        self._window = min(policy.pipeline, fragments)
        self._last_launch: tuple[float, tuple[Member, ...]] | None = None
        self.committed = committed
        self.rounds: dict[int, Round] = {}

    def __iter__(self) -> Iterator[Round]:
        return iter(list(self.rounds.values()))

    @property
    def complete(self) -> bool:
        return self.committed >= self._total

    @property
    def versions(self) -> tuple[int, ...]:
        """The committed version of every fragment."""
        return tuple(version_at(f, self.committed, self._fragments) for f in range(self._fragments))

    @property
    def _next_step(self) -> int:
        return self.committed + len(self.rounds) + 1

    def earliest_launch(self) -> float | None:
        """When the window and the throttle allow the next new round; None while they cannot, whatever the time."""
        if len(self.rounds) >= self._window or self._next_step > self._total:
            return None
        if self._last_launch is None:
            return float("-inf")
        launched_at, members = self._last_launch
        return launched_at + self._pace.launch_interval_s(members, self._fragments)

    def open_next(self, members: tuple[Member, ...], now: float) -> Round:
        """The next round, to be launched with these members now."""
        step = self._next_step
        fragment = (step - 1) % self._fragments
        base = version_at(fragment, self.committed, self._fragments)
        self.rounds[step] = Round(step, fragment, base, self._policy.quorum_timeout_s)
        self._last_launch = (now, members)
        return self.rounds[step]

    def cancel(self) -> tuple[int, ...]:
        """Drop every round in flight, whole; returns their steps."""
        steps = tuple(self.rounds)
        self.rounds.clear()
        return steps

    def pop_ready(self) -> Round | None:
        """The next round in order, if it is ready: it is committed now."""
        head = self.rounds.get(self.committed + 1)
        if head is None or head.state is not RoundState.READY:
            return None
        del self.rounds[head.step]
        self.committed = head.step
        head.state = RoundState.COMMITTED
        return head
