"""One thread, one seed, one heap of (time, action): the clock and the threads of the simulated world.

A thread of a real process is a generator here. It yields seconds to spend them (computing, writing a file), or a
``Wait`` to sleep until somebody wakes it or a deadline passes. Whatever happens at one moment happens in the order in
which it was asked for, so that a seed always tells the same story.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

_MAX_ACTIONS = 400_000  # far beyond any honest run: somebody spins


class SafetyError(AssertionError):
    """Something happened that must never happen."""


class LivenessError(AssertionError):
    """The faults have stopped and the run does not end."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep until woken, at most until ``deadline``."""

    deadline: float | None = None


Thread = Generator["float | Wait", None, None]


class World:
    """The heap, the seed's random numbers, and the story so far.

    Attributes:
        now: seconds since the beginning of the world.
        rng: the only source of chance.
        story: one readable line per happening.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.story: list[str] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        """Do ``action`` at ``time``, or at once if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(time, self.now), self._count, action, args))

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, action, *args)

    def spawn(self, thread: Thread) -> Task:
        """Start a thread."""
        return Task(self, thread)

    def run(self, until: float, over: Callable[[], bool]) -> bool:
        """Let things happen until ``over()`` or ``until``; True when it was over."""
        for _ in range(_MAX_ACTIONS):
            if over():
                return True
            if not self._heap or self._heap[0][0] > until:
                return False
            self.now, _, action, args = heapq.heappop(self._heap)
            action(*args)
        raise LivenessError(f"{_MAX_ACTIONS} actions and no end: something spins")

    def tell(self, who: str, what: str) -> None:
        """One line of the story."""
        self.story.append(f"{self.now:9.3f}  {who:<9}  {what}")


class Task:
    """A running thread. It can be woken, frozen (SIGSTOP) and killed."""

    def __init__(self, world: World, thread: Thread) -> None:
        self._world, self._thread = world, thread
        self._turn = 0  # invalidates wake-ups that were overtaken
        self._waiting = False
        self._frozen_until = 0.0
        self.over = False
        world.after(0.0, self._resume, 0)

    def wake(self) -> None:
        """End its ``Wait``, if it waits."""
        if self._waiting:
            self._waiting = False
            self._turn += 1
            self._world.after(0.0, self._resume, self._turn)

    def freeze(self, until: float) -> None:
        self._frozen_until = max(self._frozen_until, until)

    def kill(self) -> None:
        """It does nothing any more."""
        self.over = True
        if not self._thread.gi_running:
            self._thread.close()

    def _resume(self, turn: int) -> None:
        if turn != self._turn or self.over:
            return
        if self._world.now < self._frozen_until:
            self._world.at(self._frozen_until, self._resume, turn)
            return
        self._waiting = False
        try:
            what = next(self._thread)
        except StopIteration:
            self.over = True
            return
        self._turn += 1
        if isinstance(what, Wait):
            self._waiting = True
            if what.deadline is not None:
                self._world.at(what.deadline, self._resume, self._turn)
        else:
            self._world.after(what, self._resume, self._turn)
