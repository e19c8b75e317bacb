"""A durable checkpoint against writing and syncing as many bytes to the same folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import Figure, Size, Target, alternate, both, ratios, seconds
from benchmarks.model import millions
from benchmarks.stage import Launch, Stage, launch
from syncer.checkpoint.files import write_checkpoint
from syncer.checkpoint.format import FragmentRecord, LedgerEntry, Snapshot
from yeto_torch.wire.layout import version_at

FRAGMENTS = 8
PIECE_BYTES = 8 * 1024 * 1024
STEP = 800


def measure(size: Size, start: Launch = launch) -> Iterator[Figure]:
    """Every tensor of the snapshot is the same memory, for both sides: what is measured is the disk."""
    numel = size.of(300_000_000, 30_000_000, 80_000) // FRAGMENTS
    part = np.random.default_rng(3).standard_normal(numel, dtype=np.float32)
    data = memoryview(part).cast("B")
    records = [FragmentRecord(version_at(index, STEP, FRAGMENTS), data, data) for index in range(FRAGMENTS)]
    ledger = [LedgerEntry(learner, STEP, 10 * STEP, 10 * STEP) for learner in range(2)]
    snapshot = Snapshot(3, 1, bytes(32), bytes(32), STEP, records, ledger)
    with Stage(start) as stage:
        ours_at, theirs_at = stage.folder / "run.ckpt", stage.folder / "plain"
        ours, theirs = alternate(
            size.of(5, 3, 2),
            seconds(lambda: write_checkpoint(ours_at, snapshot)),
            seconds(lambda: _plain(theirs_at, data, 2 * FRAGMENTS)),
        )
    yield Figure(
        f"checkpoint write, {millions(FRAGMENTS * numel)}",
        "write + fsync of the bytes",
        "x",
        Target(0.7, 0.9, more_is_better=True),
        ratios(theirs, ours),
        both(ours, theirs),
    )


def _plain(path: Path, data: memoryview, times: int) -> None:
    """A new file each time, as a checkpoint is."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for _ in range(times):
            for first in range(0, len(data), PIECE_BYTES):
                piece = data[first : first + PIECE_BYTES]
                while piece:
                    piece = piece[os.write(fd, piece) :]
        os.fsync(fd)
    finally:
        os.close(fd)
