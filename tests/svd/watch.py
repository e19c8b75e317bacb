"""Looking at a pool from outside: its events with a deadline, and whether its processes are gone."""

import contextlib
import os
import queue
import select
import sys
from pathlib import Path

from syncer.svd.ledger import State
from syncer.svd.pool import SvdPool
from tests.support.coordinator_desk import svd_policy

SCRIPTED = Path(__file__).with_name("scripted_worker.py")
PATIENCE_S = 60.0  # of the tests; nothing waits so long but on a machine in trouble


class Watched(SvdPool):
    """A pool that remembers who its children were and keeps its events."""

    def __init__(self, policy, **options):
        self.events = queue.SimpleQueue()
        super().__init__(policy, self.events.put, **options)

    def event(self):
        return self.events.get(timeout=PATIENCE_S)

    def until_serving(self):
        """The pids, once every child is ready."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._ledger.state is not State.STARTING, PATIENCE_S)
            assert self._ledger.state is State.SERVING, self._ledger.reason
            return self.pids

    @property
    def pids(self):
        """Process ids of the living children."""
        with self._changed:
            return tuple(worker.child.pid for worker in self._workers if worker.child is not None)

    @property
    def load(self):
        """How many jobs are (running, queued, waiting for capacity)."""
        with self._changed:
            ledger = self._ledger
            return len(ledger._running), len(ledger._queued), len(ledger._waiting)

    def until_reaped(self):
        """Every thread of a pool that has ended, without closing it."""
        for worker in self._workers:
            worker.thread.join(PATIENCE_S)
            assert not worker.thread.is_alive()


@contextlib.contextmanager
def pool_of(*script, devices=("cpu",), **limits):
    """A started pool; of scripted children when a script is given, else of real ones."""
    command = {"command": (sys.executable, str(SCRIPTED), *map(str, script))} if script else {}
    pool = Watched(svd_policy(devices=devices, **{"startup_timeout_s": PATIENCE_S, **limits}), **command)
    try:
        yield pool
    finally:
        pool.close()
        assert pool.pids == ()


def gone(pid):
    """Whether the process has ended and been reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ends(pid):
    """Wait for the end of a process that need not be our child; a zombie has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(PATIENCE_S * 1000))
    finally:
        os.close(fd)
