"""The exact-SVD pool's decisions: who may be admitted, who computes what, when it is too late, and what ends it.

* pure

Decides capacity, order, deadlines, drain and poison. It must not know matrices, processes, pipes, threads or clocks.

    state     what happens next
    STARTING  -- last worker ready --> SERVING       a ready worker takes work at once, whatever the others do
    STARTING, SERVING -- drain --> DRAINING          jobs without a permit are withdrawn, nothing new is taken
    DRAINING  -- last admitted job delivered --> DRAINED   the workers are no longer needed and are stopped
    any but DRAINED -- first failure or expired deadline, or close --> POISONED   for ever, with one sentence

A job's life: waiting (no permit) -> queued -> running -> delivered. Its permit is taken when it is queued and given
back when its result is delivered or discarded, so queued and running jobs together never exceed the capacity. Its
deadline runs from submission, through all three. Jobs are admitted and started in the order of their submission.

Source: v4 §SVD pool (bounded start-up, request and drain; a poison is for ever); rulings §8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class State(Enum):
    """Where the pool stands; POISONED and DRAINED are final."""

    STARTING = auto()
    SERVING = auto()
    DRAINING = auto()
    DRAINED = auto()
    POISONED = auto()


ENDED = frozenset({State.DRAINED, State.POISONED})


# ---------------------------------------------------------------------- what can happen


@dataclass(frozen=True, slots=True)
class Submitted:
    """Somebody wants job ``job`` computed; the number is not in use by another job."""

    job: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker answered its readiness probe."""

    worker: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A worker returned a result of the right shape, finite, for the job it was given."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker ended, or said something it must not; ``reason`` goes on after the worker's name."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take nothing more and finish what is admitted, within ``timeout_s``."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class CloseAsked:
    """Stop at once; nobody waits for results."""


Event = Submitted | WorkerReady | Answered | WorkerFailed | DrainAsked | CloseAsked


# ---------------------------------------------------------------------- what must be done


@dataclass(frozen=True, slots=True)
class Assign:
    """Give this job to this idle worker."""

    worker: int
    job: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand the job's result to whoever submitted it."""

    job: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The job had no permit when admissions closed: it will not be computed."""

    job: int


@dataclass(frozen=True, slots=True)
class RefuseJob:
    """The submission is not taken."""

    job: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Kill every worker and forget every matrix; the last instruction about either."""


@dataclass(frozen=True, slots=True)
class Poison:
    """Tell the owner, once, that the pool is lost."""

    reason: str


Effect = Assign | Deliver | Withdraw | RefuseJob | Stop | Poison


class SvdLedger:
    """The pure state of a pool; every change of it goes through ``handle`` and ``on_time``.

    Args:
        workers: what to call each worker in a sentence, usually its device.
        capacity: permits, at least 1.
        startup_timeout_s: all workers must be ready so long after ``now``.
        request_timeout_s: a job must be answered so long after its submission.
        now: the present, in seconds; later calls never pass an earlier time.
    """

    def __init__(
        self, workers: Sequence[str], *, capacity: int, startup_timeout_s: float, request_timeout_s: float, now: float
    ) -> None:
        self.state = State.STARTING
        self.reason: str | None = None  # set when POISONED
        self._names = tuple(workers)
        self._capacity = capacity
        self._startup_timeout_s, self._request_timeout_s = startup_timeout_s, request_timeout_s
        self._ready: set[int] = set()
        self._waiting: deque[int] = deque()  # submitted, without a permit
        self._queued: deque[int] = deque()  # with a permit, without a worker
        self._running: dict[int, int] = {}  # worker -> job
        self._due: dict[int, float] = {}  # job -> deadline; ascending, since the clock is and the timeout is constant
        self._startup_due: float | None = now + startup_timeout_s
        self._drain_due: float | None = None
        self._drain_timeout_s = 0.0

    # ------------------------------------------------------------------ questions

    @property
    def admitted(self) -> int:
        """Permits in use: queued plus running jobs."""
        return len(self._queued) + len(self._running)

    def next_deadline(self) -> float | None:
        """When ``on_time`` has something to decide, if nothing happens before."""
        return min((due for due, _ in self._deadlines()), default=None)

    # ------------------------------------------------------------------ what happens

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event that happened at ``now``; what must be done, in order.

        A deadline that has passed by ``now`` counts before the event: an answer at its deadline is late.
        """
        effects = self.on_time(now)
        match event:
            case Submitted(job):
                effects += self._submit(job, now)
            case _ if self.state in ENDED:
                pass
            case WorkerReady(worker):
                self._ready.add(worker)
                if len(self._ready) == len(self._names):
                    self._startup_due = None
                    if self.state is State.STARTING:
                        self.state = State.SERVING
                effects += self._advance()
            case Answered(worker):
                job = self._running.pop(worker)
                del self._due[job]
                effects += [Deliver(job), *self._advance()]
            case WorkerFailed(worker, reason):
                effects += self._poison(f"worker {self._names[worker]} {reason}")
            case DrainAsked(timeout_s):
                effects += self._drain(timeout_s, now)
            case CloseAsked():
                self._end(State.POISONED, "the exact-SVD pool was closed")
                effects.append(Stop())
        return effects

    def on_time(self, now: float) -> list[Effect]:
        """Let the earliest deadline that has passed by ``now`` poison the pool."""
        due, reason = min(self._deadlines(), default=(now, None))
        return self._poison(reason) if reason is not None and due <= now else []

    # ------------------------------------------------------------------ one case each

    def _submit(self, job: int, now: float) -> list[Effect]:
        if self.reason is not None:
            return [RefuseJob(job, self.reason)]
        if self.state in (State.DRAINING, State.DRAINED):
            return [RefuseJob(job, "the exact-SVD pool takes no more work: it is drained")]
        self._waiting.append(job)
        self._due[job] = now + self._request_timeout_s
        return self._advance()

    def _drain(self, timeout_s: float, now: float) -> list[Effect]:
        if self.state is State.DRAINING:
            return []
        self.state = State.DRAINING
        self._drain_due, self._drain_timeout_s = now + timeout_s, timeout_s
        effects: list[Effect] = [Withdraw(job) for job in self._waiting]
        for job in self._waiting:
            del self._due[job]
        self._waiting.clear()
        return effects + self._advance()

    def _advance(self) -> list[Effect]:
        """Permits to those who wait, work to those who idle, and the end of a drain."""
        effects: list[Effect] = []
        while self._waiting and self.admitted < self._capacity:
            self._queued.append(self._waiting.popleft())
        for worker in sorted(self._ready - self._running.keys()):
            if not self._queued:
                break
            self._running[worker] = job = self._queued.popleft()
            effects.append(Assign(worker, job))
        if self.state is State.DRAINING and not self.admitted:
            self._end(State.DRAINED, None)
            effects.append(Stop())
        return effects

    def _deadlines(self) -> list[tuple[float, str]]:
        """Every deadline that could be the next, with the sentence for the day it passes."""
        if self.state in ENDED:
            return []
        deadlines = []
        if self._startup_due is not None:
            missing = ", ".join(name for worker, name in enumerate(self._names) if worker not in self._ready)
            limit = f"svd.startup_timeout_s = {self._startup_timeout_s:g}"
            deadlines.append((self._startup_due, f"worker {missing} was not ready within {limit}"))
        for job, due in self._due.items():
            limit = f"svd.request_timeout_s = {self._request_timeout_s:g} of its submission"
            deadlines.append((due, f"a matrix was not done within {limit} ({self._place(job)})"))
            break  # the first is the earliest
        if self._drain_due is not None:
            limit = f"{self._drain_timeout_s:g} s ({self.admitted} matrices left)"
            deadlines.append((self._drain_due, f"admitted work was not done within the drain's {limit}"))
        return deadlines

    def _place(self, job: int) -> str:
        for worker, running in self._running.items():
            if running == job:
                return f"running on worker {self._names[worker]}"
        return "queued" if job in self._queued else "waiting for capacity"

    def _poison(self, reason: str) -> list[Effect]:
        sentence = f"the exact-SVD pool failed: {reason}"
        self._end(State.POISONED, sentence)
        return [Stop(), Poison(sentence)]

    def _end(self, state: State, reason: str | None) -> None:
        self.state, self.reason = state, reason
        self._waiting.clear()
        self._queued.clear()
        self._running.clear()
        self._due.clear()
