"""The pool's shell with scripted children: every way a child can fail, and that none of them outlives it."""

import os
import queue
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch

from syncer.svd.pool import Delivered, Poisoned, SvdPool, Withdrawn, resolve_devices
from tests.support.coordinator_desk import svd_policy
from tests.svd.watch import ends, gone, pool_of
from yeto_torch.wire.errors import LocalError, StateError

ENDS_BY_DEADLINE = 0.5  # seconds; for children that never would


def matrix(rows=3, cols=5, seed=0):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def assert_poisoned_for_ever(pool, words):
    """One event, the last; every later call fails with the same sentence; the children are reaped without a close."""
    event = pool.event()
    assert isinstance(event, Poisoned)
    assert words in event.reason
    pool.until_reaped()
    for call in (lambda: pool.submit(99, matrix()), pool.drain, lambda: pool.submit(1, matrix())):
        with pytest.raises(StateError) as caught:
            call()
        assert str(caught.value) == event.reason == pool.poison
    pool.close()
    assert pool.poison == event.reason
    with pytest.raises(queue.Empty):
        pool.events.get_nowait()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("garbage", "sent a malformed frame"),
        ("wrong-magic", "sent a malformed frame"),
        ("wrong-status", "sent a malformed frame"),
        ("wrong-id", "answered request 2 instead of 1"),
        ("wrong-shape", "answered a 3 x 5 matrix with shape 5 x 3"),
        ("wrong-length", "announced 56 bytes for a 3 x 5 matrix"),
        ("endless-text", "announced 4611686018427387904 bytes of text"),
        ("nan", "answered a 3 x 5 matrix with values that are not finite"),
        ("infinity", "answered a 3 x 5 matrix with values that are not finite"),
        ("refuse", "failed: it did not converge"),
        ("half", "ended with exit code 4"),
        ("exit", "ended with exit code 3"),
        ("close", "closed its pipe"),
    ],
)
def test_a_bad_answer_poisons(mode, words):
    with pool_of(mode) as pool:
        [pid] = pool.until_serving()
        for job in range(4):
            with suppress(StateError):  # the first answer may be quicker than the last submission
                pool.submit(job, matrix(seed=job))
        assert_poisoned_for_ever(pool, f"worker 0 (cpu) {words}")
        assert gone(pid)


@pytest.mark.parametrize("mode", ["silence", "half-then-silence", "deaf", "grandchild"])
def test_a_request_that_is_never_answered_poisons_at_its_deadline(mode):
    with pool_of(mode, request_timeout_s=ENDS_BY_DEADLINE) as pool:
        [pid] = pool.until_serving()
        started = time.monotonic()
        pool.submit(1, matrix(1024, 1024))  # more than the pipe holds: a deaf child blocks the writer
        assert_poisoned_for_ever(pool, "a matrix was not done within svd.request_timeout_s = 0.5 of its submission")
        assert time.monotonic() - started >= ENDS_BY_DEADLINE
        assert gone(pid)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("exit-at-once", "worker 0 (cpu) ended with exit code 7"),
        ("wrong-probe", "answered the readiness probe 2.0 with -2.0"),
        ("babble", "a frame that nobody asked for"),
        ("die-idle", "ended with exit code 5"),
    ],
)
def test_a_child_that_is_never_fit_poisons_by_itself(mode, words):
    with pool_of(mode) as pool:
        assert_poisoned_for_ever(pool, words)


@pytest.mark.parametrize("mode", ["never-ready", "stubborn"])
def test_a_child_that_is_never_ready_poisons_at_the_deadline(mode):
    with pool_of(mode, startup_timeout_s=ENDS_BY_DEADLINE) as pool:
        pool.submit(1, matrix())
        assert_poisoned_for_ever(pool, "worker 0 (cpu) was not ready within svd.startup_timeout_s = 0.5")


def test_a_command_that_cannot_be_started_poisons():
    events = queue.SimpleQueue()
    pool = SvdPool(svd_policy(devices=("cpu",)), events.put, command=("/nonexistent/python",))
    assert "could not be started" in events.get(timeout=10).reason
    pool.close()


def test_an_extra_answer_is_found_even_if_nothing_follows():
    with pool_of("twice") as pool:
        pool.submit(1, matrix())
        assert pool.event().job_id == 1
        assert_poisoned_for_ever(pool, "worker 0 (cpu) sent")


def test_one_bad_child_takes_the_others_along():
    with pool_of("silence", devices=("cpu", "cpu", "cpu")) as pool:
        pids = pool.until_serving()
        for job in range(8):
            pool.submit(job, matrix())
        os.kill(pids[1], 9)
        assert_poisoned_for_ever(pool, "worker 1 (cpu) was killed by signal 9")
        assert len(pids) == 3
        assert all(gone(pid) for pid in pids)


def test_what_a_child_started_ends_with_it():
    with pool_of("grandchild", request_timeout_s=ENDS_BY_DEADLINE) as pool:
        [pid] = pool.until_serving()
        pool.submit(1, matrix())
        with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123 - not a file of a path's kind
            grandchildren = [int(word) for word in file.read().split()]
        assert_poisoned_for_ever(pool, "not done within")
        assert all(ends(child) for child in grandchildren)


# ---------------------------------------------------------------------- work


def test_results_of_several_children_keep_their_jobs():
    with pool_of("negate", devices=("cpu", "cpu", "cpu"), queue_capacity=2) as pool:
        jobs = {job: matrix(1 + job % 7, 1 + job % 11, seed=job) for job in range(200)}
        for job, value in jobs.items():
            pool.submit(job, value)
        results = [pool.event() for _ in jobs]
        assert sorted(event.job_id for event in results) == sorted(jobs)
        for event in results:
            assert torch.equal(event.matrix, -jobs[event.job_id])
        pool.submit(0, jobs[0].t())  # the number is free again; any strides will do
        assert torch.equal(pool.event().matrix, -jobs[0].t())


@pytest.fixture
def gate(tmp_path):
    """A pipe with a name; each byte written lets one request of a ``gate`` child through."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)  # both ends: neither side waits for the other to open
    yield path, fd
    os.close(fd)


def test_drain_finishes_what_is_admitted_and_withdraws_the_rest(gate):
    path, fd = gate
    with pool_of("gate", path, queue_capacity=3) as pool:
        [pid] = pool.until_serving()
        for job in range(5):
            pool.submit(job, matrix(seed=job))
        assert pool.load == (1, 2, 2)
        draining = threading.Thread(target=pool.drain)
        draining.start()
        assert [pool.event() for _ in range(2)] == [Withdrawn(3), Withdrawn(4)]
        with pytest.raises(StateError, match="takes no more work"):
            pool.submit(9, matrix())
        assert draining.is_alive()
        os.write(fd, b"!!!")
        assert [pool.event().job_id for _ in range(3)] == [0, 1, 2]
        draining.join(10)
        assert not draining.is_alive()
        pool.drain()  # again: at once
        pool.until_reaped()
        assert gone(pid)
        assert pool.poison is None
        with pytest.raises(StateError, match="drained"):
            pool.submit(9, matrix())
    pool.drain()  # a close does not spoil it


def test_a_drain_that_takes_too_long_poisons():
    with pool_of("silence", drain_timeout_s=ENDS_BY_DEADLINE) as pool:
        [pid] = pool.until_serving()
        pool.submit(1, matrix())
        pool.submit(2, matrix())
        with pytest.raises(StateError, match=r"drain's 0\.5 s \(2 matrices left\)"):
            pool.drain()
        assert_poisoned_for_ever(pool, "drain's 0.5 s")
        assert gone(pid)


def test_a_drain_fails_when_a_child_does():
    with pool_of("silence") as pool:
        [pid] = pool.until_serving()
        pool.submit(1, matrix())
        killer = threading.Timer(0.05, os.kill, (pid, 9))
        killer.start()
        with pytest.raises(StateError, match="killed by signal 9"):
            pool.drain()
        killer.join()


def test_close_while_busy_kills_at_once_and_reports_nothing(gate):
    path, _ = gate
    with pool_of("gate", path, devices=("cpu", "cpu")) as pool:
        pids = pool.until_serving()
        for job in range(6):
            pool.submit(job, matrix())
        assert pool.load == (2, 4, 0)
        pool.close()
        assert all(gone(pid) for pid in pids)
        pool.close()
        for call in (lambda: pool.submit(7, matrix()), pool.drain):
            with pytest.raises(StateError, match="was closed"):
                call()
        assert pool.events.empty()


def test_a_stopped_child_is_closed_all_the_same():
    with pool_of("echo") as pool:
        [pid] = pool.until_serving()
        os.kill(pid, signal.SIGSTOP)
        pool.submit(1, matrix())
        pool.close()
        assert gone(pid)
        assert pool.events.empty()


def test_close_while_starting():
    with pool_of("stubborn") as pool:
        pool.submit(1, matrix())
        pool.close()
        assert pool.pids == ()
        assert pool.events.empty()


def test_nothing_is_left_open():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - not files

    with pool_of("echo"):
        pass
    before = descriptors()
    for mode in ("echo", "exit-at-once", "nan"):
        with pool_of(mode, devices=("cpu", "cpu")) as pool:
            if mode != "exit-at-once":
                pool.submit(1, matrix())
            if mode != "echo":
                pool.until_reaped()
    assert descriptors() == before


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3), torch.zeros(2, 2, 2), torch.zeros(0, 3), torch.zeros(2, 2, dtype=torch.float64)],
    ids=["vector", "cube", "empty", "f64"],
)
def test_what_is_not_a_matrix_is_refused_and_harms_nobody(wrong):
    with pool_of("echo") as pool:
        with pytest.raises(LocalError, match="takes f32 matrices"):
            pool.submit(1, wrong)
        pool.submit(1, matrix())
        assert isinstance(pool.event(), Delivered)


def test_a_number_in_use_is_refused(gate):
    path, _ = gate
    with pool_of("gate", path) as pool:
        pool.submit(1, matrix())
        with pytest.raises(LocalError, match="job 1 is already"):
            pool.submit(1, matrix())


def test_auto_is_every_gpu_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_devices(("auto", "cpu")) == ("cpu", "cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_devices(("auto",)) == ("cuda:0", "cuda:1")
