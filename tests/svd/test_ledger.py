"""The pool's decisions, simulated without children: against a twin, by example, and with planted defects."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.svd import ledger as lg
from tests.svd.world import REQUEST_S, STARTUP_S, World, play


@given(workers=st.integers(1, 3), capacity=st.integers(1, 5), rng=st.randoms(use_true_random=False))
def test_every_life_of_a_pool_is_the_twins(workers, capacity, rng):
    play(World(workers, capacity), rng, 60)


def serving(workers=1, capacity=2):
    world = World(workers, capacity)
    for worker in range(workers):
        world.step(lg.WorkerReady(worker))
    return world


def test_a_permit_is_held_until_delivery_not_until_dequeue():
    world = serving(workers=1, capacity=2)
    for job in (1, 2, 3):
        world.step(lg.Submitted(job))
    # 1 runs, 2 is queued; 3 has no permit although the queue has only one entry: the drain shows it
    assert world.step(lg.DrainAsked(60.0)) == [lg.Withdraw(3)]
    assert world.step(lg.Answered(0)) == [lg.Deliver(1), lg.Assign(0, 2)]
    assert world.step(lg.Answered(0)) == [lg.Deliver(2), lg.Stop()]
    assert world.ledger.state is lg.State.DRAINED


def test_work_is_taken_while_starting_and_waits():
    world = World(workers=2, capacity=4)
    assert world.step(lg.Submitted(1)) == []
    assert world.ledger._ready == set()
    assert world.step(lg.WorkerReady(1)) == [lg.Assign(1, 1)]
    assert world.ledger.state is lg.State.STARTING
    world.step(lg.WorkerReady(0))
    assert world.ledger.state is lg.State.SERVING


@pytest.mark.parametrize(
    ("place", "words"),
    [(1, "running on worker w0"), (2, "queued"), (3, "waiting for capacity")],
)
def test_the_request_deadline_runs_from_submission_wherever_the_job_is(place, words):
    """Jobs 1, 2 and 3 are running, queued and waiting; those before ``place`` are answered at the last moment."""
    world = serving(workers=1, capacity=2)
    for job in range(1, 4):
        world.step(lg.Submitted(job))
        world.now += 1.0
    world.now = 100.0 + REQUEST_S
    if place == 1:
        [_, poison] = world.step(None)
        assert poison.reason.endswith(f"{REQUEST_S:g} of its submission ({words})")
        return
    # The clock of the others is not their turn on the worker: nothing but their submission counts.
    world.now -= 0.5
    world.step(lg.Answered(0))
    world.now = 101.0 + REQUEST_S
    [_, poison] = world.step(lg.Answered(0))  # an answer at the very deadline is late
    assert poison.reason.endswith("(running on worker w0)")


def test_a_job_that_never_got_capacity_poisons_too():
    world = World(workers=1, capacity=1)  # never ready
    world.step(lg.Submitted(1))
    assert world.ledger.next_deadline() == 100.0 + REQUEST_S < 100.0 + STARTUP_S
    world.now += REQUEST_S
    [stop, poison] = world.step(None)
    assert stop == lg.Stop()
    assert poison.reason.endswith("(queued)")


def test_one_worker_of_two_that_is_never_ready_poisons():
    world = World(workers=2)
    world.step(lg.WorkerReady(0))
    world.now += STARTUP_S
    [_, poison] = world.step(None)
    assert "worker w1 was not ready within svd.startup_timeout_s = 30" in poison.reason


def test_the_first_message_stays_for_ever():
    world = serving(workers=2)
    world.step(lg.Submitted(1))
    [_, poison] = world.step(lg.WorkerFailed(0, "was killed by signal 9"))
    assert poison.reason == "the exact-SVD pool failed: worker w0 was killed by signal 9"
    for event in (lg.WorkerFailed(1, "ended with exit code 1"), lg.DrainAsked(1.0), lg.CloseAsked(), lg.WorkerReady(1)):
        assert world.step(event) == []
    world.now += 1000.0
    assert world.step(lg.Submitted(2)) == [lg.RefuseJob(2, poison.reason)]
    assert world.ledger.next_deadline() is None


def test_an_idle_pool_drains_at_once_even_while_starting():
    world = World()
    assert world.step(lg.DrainAsked(5.0)) == [lg.Stop()]
    assert world.ledger.state is lg.State.DRAINED
    [refused] = world.step(lg.Submitted(1))
    assert "drained" in refused.reason
    assert world.step(lg.WorkerFailed(0, "ended with exit code 1")) == []
    assert world.step(lg.CloseAsked()) == []
    assert world.ledger.reason is None


def test_close_drops_work_without_a_report():
    world = serving()
    world.step(lg.Submitted(1))
    assert world.step(lg.CloseAsked()) == [lg.Stop()]
    assert world.step(lg.Submitted(2)) == [lg.RefuseJob(2, "the exact-SVD pool was closed")]


# ---------------------------------------------------------------------- does the simulation bite?

DEFECTS = {
    "capacity released at dequeue": ("self.admitted < self._capacity", "len(self._queued) < self._capacity"),
    "running jobs not counted": ("return len(self._queued) + len(self._running)", "return len(self._queued)"),
    "capacity off by one": ("self.admitted < self._capacity", "self.admitted <= self._capacity"),
    "last in, first out": ("job = self._queued.popleft()", "job = self._queued.pop()"),
    "admission out of order": ("self._waiting.popleft()", "self._waiting.pop()"),
    "the deadline starts anew with the work": (
        "effects.append(Assign(worker, job))",
        "effects.append(Assign(worker, job)); self._due[job] += self._request_timeout_s",
    ),
    "a delivered job keeps its deadline": ("                del self._due[job]\n", ""),
    "a late answer counts": ("effects = self.on_time(now)", "effects = []"),
    "a deadline is met at its very end": ("and due <= now", "and due < now"),
    "poison does not absorb": ("case _ if self.state in ENDED:", "case _ if self.state is State.DRAINED:"),
    "poison without a kill": ("return [Stop(), Poison(sentence)]", "return [Poison(sentence)]"),
    "poison told before the kill": ("[Stop(), Poison(sentence)]", "[Poison(sentence), Stop()]"),
    "another message later": (
        "return [RefuseJob(job, self.reason)]",
        "return [RefuseJob(job, 'the pool is poisoned')]",
    ),
    "work is taken after poison": ("if self.reason is not None:", "if False:"),
    "work is taken while draining": ("(State.DRAINING, State.DRAINED)", "(State.DRAINED,)"),
    "the drain forgets who waits": ("[Withdraw(job) for job in self._waiting]", "[]"),
    "the drain keeps who waits": ("        self._waiting.clear()\n        return effects", "        return effects"),
    "drained while jobs are queued": ("and not self.admitted:", "and not self._running:"),
    "the drain has no deadline": ("= now + timeout_s, timeout_s", "= None, timeout_s"),
    "a second drain begins anew": ("if self.state is State.DRAINING:\n", "if False:\n"),
    "a late start undoes the drain": ("if self.state is State.STARTING:", "if True:"),
    "the first worker ends the start-up": ("if len(self._ready) == len(self._names):", "if self._ready:"),
    "work for workers that are not ready": ("sorted(self._ready -", "sorted(set(range(len(self._names))) -"),
    "two jobs for one worker": ("sorted(self._ready - self._running.keys())", "sorted(self._ready)"),
    "a close is told as a failure": (
        "                effects.append(Stop())",
        "                effects += [Stop(), Poison(self.reason or '')]",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught(defect, tmp_path):
    broken = planted(*DEFECTS[defect], tmp_path / "broken_ledger.py")
    for seed in range(400):
        rng = random.Random(seed)
        world = World(rng.randint(1, 3), rng.randint(1, 5), broken)
        try:
            play(world, rng, 60)
        except (AssertionError, KeyError):
            return
    pytest.fail(f"no life of a pool shows the defect: {defect}")


def planted(old, new, file):
    """The ledger's module with one piece of its source replaced."""
    source = Path(lg.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"the ledger has changed: mend the defect {old!r}"
    file.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[module.__name__]
    return module
