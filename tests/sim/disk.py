"""The syncer's disk: the real write sequence on memory, a power cut, and what is left after it."""

from __future__ import annotations

import random
from pathlib import Path

from syncer.checkpoint.files import marker_path
from tests.support.checkpoint_bytes import parse_bytes
from tests.support.fake_disk import FakeDisk, Inode

CHECKPOINT = Path("/disk/state.ckpt")
MARKER = marker_path(CHECKPOINT)


class SimDisk(FakeDisk):
    """One directory over the whole life of a run, power cuts included."""

    def __init__(self, files: dict[Path, bytes] | None = None) -> None:
        super().__init__(files or {})

    def cut_power_in(self, operations: int) -> None:
        """The machine dies before the n-th operation from now."""
        self._cut_at = len(self.operations) + operations

    def fail_in(self, operations: int) -> None:
        """The n-th operation from now finds the disk full."""
        self._fail_at = len(self.operations) + operations

    def heal(self) -> None:
        self._cut_at = self._fail_at = None

    def after_power_cut(self, rng: random.Random) -> SimDisk:
        """One of the worlds a power cut now may leave."""
        names: dict[Path, Inode | None] = dict(self._durable_names)
        for change in self._changes:
            if rng.random() < 0.5:
                names.update(change)
        return SimDisk({path: self._left_of(inode, rng) for path, inode in names.items() if inode is not None})

    def after_kill(self) -> SimDisk:
        """A killed process leaves its files to the kernel, which forgets nothing."""
        return SimDisk(self.files)

    @staticmethod
    def _left_of(inode: Inode, rng: random.Random) -> bytes:
        tail = b"".join(inode.unsynced)
        return inode.durable + tail[: rng.randint(0, len(tail))]

    def oldest_step(self) -> int | None:
        """The lowest step that a power cut now may leave in the checkpoint; None if it may leave none.

        Raises StateError when it may leave something that is no checkpoint.
        """
        survivors = self.survivors(CHECKPOINT)
        if None in survivors:
            return None
        return min(parse_bytes(data).step for data in survivors if data is not None)
