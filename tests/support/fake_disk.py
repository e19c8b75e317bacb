"""A disk that forgets what was not synced, and can fail or lose power at every operation.

``FakeDisk`` offers the operations of ``syncer.checkpoint.files.Disk`` on memory and keeps two views: what a running
program sees, and everything a power cut may leave. Of the bytes written since a file's last sync any prefix may
survive, and any of the single writes may be missing, leaving zeros where later ones survived. Of the names changed
since a directory's last sync any subset of the changes may survive; one rename is never half done.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path


@dataclass
class Inode:
    """A file's content: what is safe, and the writes since."""

    durable: bytes = b""
    unsynced: list[bytes] = field(default_factory=list)

    @property
    def seen(self) -> bytes:
        return self.durable + b"".join(self.unsynced)

    def survivors(self) -> set[bytes]:
        """Every content that a power cut may leave."""
        tail = b"".join(self.unsynced)
        found = {self.durable + tail[:length] for length in range(len(tail) + 1)}
        for kept in product((True, False), repeat=len(self.unsynced)):
            pairs = zip(kept, self.unsynced, strict=True)
            found.add(self.durable + b"".join(data if keep else bytes(len(data)) for keep, data in pairs))
        return found


class PowerCutError(BaseException):
    """The machine is gone; not an Exception, so that no handler of the code under test believes it may clean up."""


class FakeDisk:
    """One directory. ``fail_at`` and ``cut_at`` number the operations from 0.

    Args:
        files: what is durably there.
        fail_at: this operation raises ``OSError(ENOSPC)``.
        cut_at: from this operation on every one raises ``PowerCutError``.
        longest_write: a write takes no more bytes than this.
    """

    def __init__(
        self,
        files: dict[Path, bytes],
        *,
        fail_at: int | None = None,
        cut_at: int | None = None,
        longest_write: int | None = None,
    ) -> None:
        self._durable_names = {path: Inode(data) for path, data in files.items()}
        self._names = dict(self._durable_names)
        self._changes: list[list[tuple[Path, Inode | None]]] = []  # each inner list happens as one
        self._open: dict[int, Inode] = {}
        self._fail_at, self._cut_at, self._longest_write = fail_at, cut_at, longest_write
        self.operations: list[str] = []

    # What the code under test calls

    def create(self, path: Path) -> int:
        self._operation("create")
        if path in self._names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        inode = Inode()
        self._change((path, inode))
        fd = 1000 + len(self.operations)
        self._open[fd] = inode
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        self._operation("write")
        taken = bytes(data[: self._longest_write])
        self._open[fd].unsynced.append(taken)
        return len(taken)

    def sync(self, fd: int) -> None:
        self._operation("sync")
        inode = self._open[fd]
        inode.durable, inode.unsynced = inode.seen, []

    def close(self, fd: int) -> None:
        self._operation("close", always=lambda: self._open.pop(fd))

    def replace(self, source: Path, target: Path) -> None:
        self._operation("replace")
        self._change((target, self._existing(source)), (source, None))

    def remove(self, path: Path) -> None:
        self._operation("remove")
        self._existing(path)
        self._change((path, None))

    def sync_directory(self, path: Path) -> None:
        self._operation("sync_directory")
        assert all(name.parent == path for name in self._names)
        self._durable_names, self._changes = dict(self._names), []

    # What a test asks

    @property
    def files(self) -> dict[Path, bytes]:
        """What a running program sees."""
        return {path: inode.seen for path, inode in self._names.items()}

    @property
    def open_files(self) -> int:
        return len(self._open)

    def survivors(self, path: Path) -> set[bytes | None]:
        """Every content of ``path`` that a power cut now may leave; None is no such file."""
        found: set[bytes | None] = set()
        for inode in self._surviving_inodes(path):
            found |= {None} if inode is None else inode.survivors()
        return found

    def _surviving_inodes(self, path: Path) -> Iterator[Inode | None]:
        for kept in product((True, False), repeat=len(self._changes)):
            names: dict[Path, Inode | None] = dict(self._durable_names)
            for keep, change in zip(kept, self._changes, strict=True):
                if keep:
                    names.update(change)
            yield names.get(path)

    # Inside

    def _operation(self, name: str, always=lambda: None) -> None:
        number = len(self.operations)
        if self._cut_at is not None and number >= self._cut_at:
            raise PowerCutError(f"before operation {number}, {name}")
        self.operations.append(name)
        always()
        if number == self._fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _change(self, *entries: tuple[Path, Inode | None]) -> None:
        self._changes.append(list(entries))
        for path, inode in entries:
            if inode is None:
                self._names.pop(path, None)
            else:
                self._names[path] = inode

    def _existing(self, path: Path) -> Inode:
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return self._names[path]
