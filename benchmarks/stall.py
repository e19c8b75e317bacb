"""What syncing costs a training loop at H = 24, against the same loop without the wrapper.

A learner trains a chain of layers for real; the syncer asks for one of F fragments every H/F steps, on the clock of the
plain loop. Wrapped and plain stretches of H steps take turns in one process. Two figures: the time ``step()`` itself
spent in exchanges (``stats.stall_seconds``), and all that the loop became longer by, which includes what the threads
that encode and send, and on a small machine the syncer, take from the training thread.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.harness import Figure, Size, Target, clock
from benchmarks.model import chain, millions
from benchmarks.stage import Launch, Stage, launch
from yeto_torch import YetoOuterOptimizer

H = 24
TARGET = Target(3, 1)


class Loop:
    """A training loop whose optimizer can be exchanged."""

    def __init__(self, numel: int, batch: int) -> None:
        self.model = chain(numel)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-5, foreach=True)
        width = next(self.model.parameters()).shape[1]
        self.inputs = torch.randn(batch, width, generator=torch.Generator().manual_seed(4))
        self.numel = sum(parameter.numel() for parameter in self.model.parameters())

    def run(self, optimizer: torch.optim.Optimizer, steps: int) -> float:
        """Seconds of ``steps`` steps."""
        started = clock()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(self.model(self.inputs), self.inputs).backward()
            optimizer.step()
        return clock() - started


def measure(size: Size, start: Launch = launch) -> Iterator[Figure]:
    loop = Loop(size.of(30_000_000, 4_000_000, 20_000), size.of(64, 64, 4))
    loop.run(loop.inner, 2)  # its state exists before the clock is set
    step_s = loop.run(loop.inner, size.of(6, 12, 6)) / size.of(6, 12, 6)
    fragments = 8
    interval_ms = max(1, round(1000 * step_s * H / fragments))
    stalls, losses, merged = [], [], 0
    with Stage(start) as stage:
        syncer = stage.syncer(1, schedule__min_round_interval_ms=interval_ms)
        with YetoOuterOptimizer(
            loop.inner, loop.model, syncer=syncer.address, learner_id=0, run_id="bench", fragments=fragments
        ) as optimizer:
            loop.run(optimizer, H)
            for _ in range(size.of(5, 3, 2)):
                plain_s = loop.run(loop.inner, H)
                before = optimizer.stats
                wrapped_s = loop.run(optimizer, H)
                after = optimizer.stats
                merged += after.merges - before.merges
                stalls.append(100 * (after.stall_seconds - before.stall_seconds) / wrapped_s)
                losses.append(100 * (wrapped_s / plain_s - 1))
    syncs = merged / fragments / len(stalls)
    note = f"a step takes {1e3 * step_s:.3g} ms; every fragment synced {syncs:.2g} times per {H} steps"
    name = f"H = {H}, {millions(loop.numel)}"
    yield Figure(f"training time spent in step boundaries, {name}", "train seconds", "%", TARGET, tuple(stalls), note)
    yield Figure(
        f"training time lost to syncs in all, {name}", "a loop without the wrapper", "%", TARGET, tuple(losses), note
    )
