"""``step()`` between two syncs, against the inner optimizer's: same process, same tensors, one step each in turn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.harness import Figure, Size, Target, alternate, clock
from benchmarks.model import Matrices, millions
from benchmarks.stage import Launch, Stage, launch
from yeto_torch import YetoOuterOptimizer

QUIET_MS = 1_000_000_000  # no second round during the measurement


def measure(size: Size, start: Launch = launch) -> Iterator[Figure]:
    small = size.of(1_000_000, 1_000_000, 20_000)
    large = size.of(30_000_000, 10_000_000, 40_000)
    found = _steps(size, start, small, size.of(200, 100, 3))
    ours, theirs = found
    yield Figure(
        f"step() between syncs, AdamW foreach, {millions(small)}: longer by",
        "the inner step",
        "us",
        Target(30, 10),
        tuple(1e6 * (a - b) for a, b in zip(ours, theirs, strict=True)),
        f"{1e6 * statistics.median(ours):.0f} us against {1e6 * statistics.median(theirs):.0f} us",
    )
    ours, theirs = _steps(size, start, large, size.of(10, 5, 2))
    yield Figure(
        f"step() between syncs, AdamW foreach, {millions(large)}",
        "the inner step",
        "x",
        Target(1.02, 1.0),
        tuple(a / b for a, b in zip(ours, theirs, strict=True)),
        f"{1e3 * statistics.median(ours):.3g} ms against {1e3 * statistics.median(theirs):.3g} ms",
    )


def _steps(size: Size, start: Launch, numel: int, steps: int) -> tuple[list[float], list[float]]:
    """Per turn the median seconds of ``steps`` wrapped and of ``steps`` plain steps, which take turns one by one."""
    model = Matrices(numel)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    with Stage(start) as stage:
        syncer = stage.syncer(1, schedule__min_round_interval_ms=QUIET_MS, schedule__pipeline=1)
        with YetoOuterOptimizer(
            inner, model, syncer=syncer.address, learner_id=0, run_id="bench", streams=1
        ) as optimizer:
            while optimizer.stats.global_step == 0:  # the one round that begins at once
                optimizer.step()
            ours, theirs = [], []
            for _ in range(size.runs):
                wrapped, plain = alternate(steps, lambda: _timed(optimizer), lambda: _timed(inner))
                ours.append(statistics.median(wrapped))
                theirs.append(statistics.median(plain))
    return ours, theirs


def _timed(optimizer: torch.optim.Optimizer) -> float:
    started = clock()
    optimizer.step()
    return clock() - started
