"""The exact-SVD pool: one child process per device, one thread that talks to each, one that watches the clock.

    pool = SvdPool(policy.svd, on_event)   # starts the children
    pool.submit(7, matrix)        # later, from another thread: on_event(Delivered(7, flat))
    pool.drain()                  # takes no more, returns when everything admitted is delivered
    pool.close()                  # kills and reaps the children, whatever they do

It decides nothing: ``ledger`` says who computes what and when it is too late; this shell moves bytes, reports what
happens and kills. Children are killed, never asked: one that hangs cannot be asked.

Source: v4 §SVD pool (any expired deadline kills the directly owned child); rulings §8.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from syncer.config.policy import IsoScale, SvdPolicy
from syncer.svd import framing
from syncer.svd import ledger as lg
from syncer.svd.child import WORKER, Child
from yeto_torch.wire.errors import LocalError, StateError

log = logging.getLogger("syncer")

_REAP_S = 10.0  # a killed child is gone in milliseconds, unless a driver holds it


@dataclass(frozen=True, slots=True)
class Delivered:
    """``matrix`` is the flattened [rows, cols] f32 of the job, on the device of the submitted one."""

    job_id: int
    matrix: Tensor


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The drain began before the job was admitted: it will not be computed."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Poisoned:
    """The pool is lost for ever; the last event there is. ``reason`` is what every later call raises."""

    reason: str


PoolEvent: TypeAlias = Delivered | Withdrawn | Poisoned


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    matrix: Tensor
    scale: IsoScale


@dataclass(eq=False, slots=True)
class _Worker:
    """One device's child and its thread; shared under the pool's lock."""

    index: int
    device: str
    wake: tuple[int, int] = field(default_factory=os.pipe)  # a byte: there is a job, or it is time to go
    is_watched: bool = True  # and so the pipe is open
    child: Child | None = None
    thread: threading.Thread | None = None
    job: _Job | None = None


class SvdPool:
    """Makes the spectra of matrices flat, in children that can be killed.

    The children are started at once; what goes wrong with them is reported as ``Poisoned``.

    ``on_event`` is called from the pool's threads, one call at a time and never after ``Poisoned``; it must only pass
    the event on. All methods may be called from any thread, and none but ``drain`` and ``close`` waits.

    Args:
        policy: devices, capacity and deadlines; ``auto`` is every CUDA device, or the CPU if there is none.
        command: what starts a child; ``--device`` and ``--threads`` are appended.
    """

    def __init__(
        self, policy: SvdPolicy, on_event: Callable[[PoolEvent], None], *, command: Sequence[str] = WORKER
    ) -> None:
        self._policy, self._on_event = policy, on_event
        self._changed = threading.Condition(threading.RLock())
        self._jobs: dict[int, _Job] = {}
        self._results: dict[int, Tensor] = {}
        devices = resolve_devices(policy.devices)
        self._ledger = lg.SvdLedger(
            [f"{index} ({device})" for index, device in enumerate(devices)],
            capacity=policy.queue_capacity,
            startup_timeout_s=policy.startup_timeout_s,
            request_timeout_s=policy.request_timeout_s,
            now=time.monotonic(),
        )
        self._workers = [_Worker(index, device) for index, device in enumerate(devices)]
        threads = str(_threads_per_child(devices))
        with self._changed:
            for worker in self._workers:
                arguments = (*command, "--device", worker.device, "--threads", threads)
                worker.thread = _thread(f"svd worker {worker.index}", self._watch, worker, arguments)
                worker.thread.start()
            _thread("svd deadlines", self._keep_time).start()

    # ------------------------------------------------------------------ for the owner

    def submit(self, job_id: int, matrix: Tensor, scale: IsoScale = IsoScale.MEAN) -> None:
        """Have ``matrix`` flattened; ``Delivered(job_id, ...)`` follows, within ``request_timeout_s`` from now.

        Args:
            job_id: not in use by another job that is under way.
            matrix: [rows, cols] f32, finite, on any device; must not be modified before the job's event.
            scale: what the flat spectrum is set to.

        Raises:
            StateError: the pool is poisoned, with its one message, or is drained.
            LocalError: not a matrix of f32, or the id is in use.
        """
        if matrix.ndim != 2 or matrix.dtype != torch.float32 or not 1 <= matrix.numel() <= framing.MAX_NUMEL:
            raise LocalError(f"the exact-SVD pool takes f32 matrices, not {list(matrix.shape)} {matrix.dtype}")
        with self._changed:
            if job_id in self._jobs:
                raise LocalError(f"job {job_id} is already in the exact-SVD pool")
            self._jobs[job_id] = _Job(job_id, matrix, scale)
            refused = self._handle(lg.Submitted(job_id))
        if refused is not None:
            raise StateError(refused)

    def drain(self) -> None:
        """Take no more work and return once everything admitted is delivered; the children are stopped then.

        Jobs that still wait for capacity are withdrawn. Idempotent.

        Raises:
            StateError: the pool is or becomes poisoned; so it does after the policy's ``drain_timeout_s``.
        """
        with self._changed:
            self._handle(lg.DrainAsked(self._policy.drain_timeout_s))
            self._changed.wait_for(self._ended)
            if self._ledger.reason is not None:
                raise StateError(self._ledger.reason)

    def close(self) -> None:
        """Kill and reap the children at once and drop all work; idempotent."""
        self._handle(lg.CloseAsked())
        until = time.monotonic() + _REAP_S
        for worker in self._workers:
            if worker.thread is not None and worker.thread is not threading.current_thread():
                worker.thread.join(max(0.0, until - time.monotonic()))
                if worker.thread.is_alive():
                    log.warning("exact-SVD worker %d (%s) was killed and has not ended", worker.index, worker.device)

    @property
    def poison(self) -> str | None:
        """The one message, once the pool is poisoned or was closed before it was drained."""
        with self._changed:
            return self._ledger.reason

    # ------------------------------------------------------------------ effects, under the lock

    def _handle(self, event: lg.Event) -> str | None:
        """Report an event to the ledger and do what it says; the reason if a submission was refused."""
        with self._changed:
            return self._perform(self._ledger.handle(event, time.monotonic()))

    def _perform(self, effects: list[lg.Effect]) -> str | None:
        refused = None
        for effect in effects:
            match effect:
                case lg.Assign(index, job):
                    self._workers[index].job = self._jobs[job]
                    self._wake(self._workers[index])
                case lg.Deliver(job):
                    del self._jobs[job]
                    self._on_event(Delivered(job, self._results.pop(job)))
                case lg.Withdraw(job):
                    del self._jobs[job]
                    self._on_event(Withdrawn(job))
                case lg.RefuseJob(job, reason):
                    self._jobs.pop(job, None)
                    refused = reason
                case lg.Stop():
                    self._stop()
                case lg.Poison(reason):
                    self._on_event(Poisoned(reason))
        self._changed.notify_all()
        return refused

    def _stop(self) -> None:
        self._jobs.clear()
        self._results.clear()
        for worker in self._workers:
            worker.job = None
            if worker.child is not None:
                worker.child.kill()
            self._wake(worker)

    def _wake(self, worker: _Worker) -> None:
        if worker.is_watched:
            os.write(worker.wake[1], b"!")

    def _ended(self) -> bool:
        with self._changed:
            return self._ledger.state in lg.ENDED

    # ------------------------------------------------------------------ threads

    def _keep_time(self) -> None:
        with self._changed:
            while not self._ended():
                due = self._ledger.next_deadline()
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
                self._perform(self._ledger.on_time(time.monotonic()))

    def _watch(self, worker: _Worker, command: Sequence[str]) -> None:
        """One child's life, on its own thread."""
        try:
            self._serve(worker, Child(command))
        except (StateError, OSError, RuntimeError) as error:  # RuntimeError: torch, a device out of memory
            self._handle(lg.WorkerFailed(worker.index, " ".join(str(error).split())))
        finally:
            with self._changed:
                self._handle(lg.WorkerFailed(worker.index, "is not watched any more"))  # news only after a bug of ours
                worker.is_watched = False
                for fd in worker.wake:
                    os.close(fd)

    def _serve(self, worker: _Worker, child: Child) -> None:
        try:
            with self._changed:
                worker.child = child
                if self._ended():  # while it was being started
                    return
            child.probe()
            self._handle(lg.WorkerReady(worker.index))
            while (job := self._next_job(worker, child)) is not None:
                result = child.exchange(job.matrix, job.scale).to(job.matrix.device)
                with self._changed:
                    if not self._ended():
                        self._results[job.number] = result
                        self._handle(lg.Answered(worker.index))
                del job, result  # nothing is held while waiting for the next
        finally:
            child.reap()
            with self._changed:
                worker.child = None

    def _next_job(self, worker: _Worker, child: Child) -> _Job | None:
        """Wait for an assignment; None when it is time to go."""
        child.idle_until(worker.wake[0])
        with self._changed:
            os.read(worker.wake[0], 1)
            job, worker.job = worker.job, None
            return job


# ---------------------------------------------------------------------- devices and processes


def resolve_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """``auto`` becomes every CUDA device, or ``cpu`` where there is none; other names stay."""
    found: list[str] = []
    for device in devices:
        if device == "auto":
            found += [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
        else:
            found.append(device)
    return tuple(found)


def _threads_per_child(devices: Sequence[str]) -> int:
    """An equal share of the cores for each CPU child; 0, torch's own choice, if the user has chosen."""
    if "OMP_NUM_THREADS" in os.environ:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, sum(device == "cpu" for device in devices)))


def _thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    return threading.Thread(target=target, args=args, name=name, daemon=True)
