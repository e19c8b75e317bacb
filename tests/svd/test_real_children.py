"""The pool with its real children: exactness, signals, deaths, and the price of the way to a child and back."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from syncer.config.policy import IsoScale
from syncer.merge.iso import flatten_spectrum
from syncer.svd.pool import Delivered, Poisoned
from tests.svd.oracle import flat_f64, well_conditioned
from tests.svd.watch import PATIENCE_S, ends, gone, pool_of

TOLERANCE = 2e-5
LARGE = 2500  # its decomposition takes many seconds: whatever is sent meanwhile comes in the middle of it


@pytest.fixture(scope="module")
def served():
    with pool_of(devices=("cpu", "cpu"), queue_capacity=3) as pool:
        pool.until_serving()
        yield pool


def far(got, want):
    return np.abs(got.numpy() - want).max() / np.abs(want).max()


def test_every_job_comes_back_exact(served):
    shapes = [(1, 1), (5, 1), (1, 6), (48, 48), (100, 30), (30, 100), (257, 129)] * 4
    jobs = {job: well_conditioned(*shape, seed=job) for job, shape in enumerate(shapes)}
    for job, matrix in jobs.items():
        served.submit(job, torch.from_numpy(matrix), IsoScale(job % 2))
    for _ in shapes:
        event = served.event()
        matrix = jobs.pop(event.job_id)
        assert far(event.matrix, flat_f64(matrix, IsoScale(event.job_id % 2))) <= TOLERANCE
        if event.job_id % 2 == IsoScale.MEAN:
            assert far(event.matrix, flatten_spectrum(torch.from_numpy(matrix)).numpy()) <= TOLERANCE
    assert not jobs


def test_a_large_matrix_is_exact_too(served):
    matrix = well_conditioned(640, 512, seed=7)
    served.submit(1, torch.from_numpy(matrix))
    assert far(served.event().matrix, flat_f64(matrix)) <= TOLERANCE


def test_zeros_come_back_as_they_are(served):
    served.submit(1, torch.zeros(4, 3))
    assert torch.equal(served.event().matrix, torch.zeros(4, 3))


def test_a_signal_to_the_whole_service_is_not_the_childs_to_answer(served):
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        for pid in served.pids:
            os.kill(pid, signum)
    for job in range(4):
        served.submit(job, torch.eye(3))
    assert {served.event().job_id for _ in range(4)} == {0, 1, 2, 3}


def test_the_way_to_a_child_and_back_costs_less_than_a_tenth_of_the_svd(served, record_property):
    matrix = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))

    def fastest(pool, times):
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            pool.submit(1, matrix)
            assert isinstance(pool.event(), Delivered)
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    whole = fastest(served, 2)
    with pool_of("echo") as echoing:  # the same way, without the work
        echoing.until_serving()
        way = fastest(echoing, 10)
    record_property("way_ms", 1000 * way)
    record_property("svd_ms", 1000 * (whole - way))
    assert way < 0.1 * (whole - way)


@pytest.mark.parametrize(
    ("signum", "timeout_s", "words"),
    [
        (signal.SIGKILL, 3540.0, "worker 0 (cpu) was killed by signal 9"),
        (signal.SIGSTOP, 1.0, "svd.request_timeout_s = 1 of its submission (running on worker 0 (cpu))"),
    ],
)
def test_a_signal_in_the_middle_of_a_request_poisons(signum, timeout_s, words):
    with pool_of(request_timeout_s=timeout_s) as pool:
        [pid] = pool.until_serving()
        pool.submit(1, torch.randn(LARGE, LARGE))
        os.kill(pid, signum)
        pool.submit(2, torch.eye(3))
        event = pool.event()
        assert isinstance(event, Poisoned)
        assert words in event.reason
        pool.until_reaped()
        assert gone(pid)


def test_a_device_that_is_not_there_poisons_with_the_reason():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pool_of(devices=("cuda:0",)) as pool:
        event = pool.event()
        assert isinstance(event, Poisoned)
        assert "worker 0 (cuda:0) failed: " in event.reason
        assert "\n" not in event.reason


PARENT = """
import sys, torch
from syncer.svd import framing
from tests.svd.watch import pool_of
send = framing.send
def send_and_tell(*args):
    send(*args)
    print(list(pids), flush=True)
with pool_of(devices=("cpu", "cpu")) as pool:
    pids = pool.until_serving()
    framing.send = send_and_tell
    pool.submit(1, torch.randn(4000, 4000))  # half a minute, if nobody interferes
    sys.stdin.read()
"""


def test_no_child_outlives_a_killed_parent(root):
    """Neither the one that is idle nor the one in the middle of an SVD."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pids = json.loads(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=PATIENCE_S)
    started = time.monotonic()
    assert len(pids) == 2
    assert all(ends(pid) for pid in pids)
    assert time.monotonic() - started < 5.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpus_matrix_returns_to_its_gpu():
    matrix = well_conditioned(300, 200, seed=5)
    with pool_of(devices=("auto",)) as pool:
        pool.submit(1, torch.from_numpy(matrix).cuda())
        event = pool.event()
    assert event.matrix.device.type == "cuda"
    assert far(event.matrix.cpu(), flat_f64(matrix)) <= TOLERANCE
