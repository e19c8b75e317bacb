"""Checkpoints and markers on disk: a reader sees the old file or the new one, whole, whatever happens.

Decides nothing about content. A write goes to a new temporary beside the target, is fsynced, renamed over the
target, and the directory is fsynced; only then is it reported done. Whatever fails before the rename leaves the old
file as it was and removes the temporary.

Temporaries are named ``.<target>.<16 random hex digits>.tmp``. A killed process leaves its own behind. The rule for
removing one: whoever writes it holds an exclusive ``flock`` on it from creation to rename, and the kernel drops that
lock when the process dies, on whatever host or in whatever container it ran. A temporary that can be locked therefore
belongs to nobody. A writer whose file was swept between its creation and its lock finds it without a name, and takes
another; where the file system knows no locks, nothing is swept.

Source: v4 §Checkpoints (an atomic write; the marker only after the terminal one); rulings §7.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from syncer.checkpoint.format import Snapshot, parse, write_parts
from yeto_torch.wire import marker
from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.errors import StateError

_EARLY_BYTES = 1024 * 1024  # what is written out at once; less waits for the sync
_BEHIND_BYTES = 64 * 1024 * 1024  # how far behind the newest byte memory is given back


class Disk(Protocol):
    """The operations that make a file durable; every one may raise OSError."""

    def create(self, path: Path) -> int:
        """A new, empty, locked file. Raises FileExistsError when the name is, or turns out to be, taken."""
        ...

    def write(self, fd: int, data: memoryview) -> int: ...

    def sync(self, fd: int) -> None: ...

    def close(self, fd: int) -> None: ...

    def replace(self, source: Path, target: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def sync_directory(self, path: Path) -> None: ...


class PosixDisk:
    """The real disk."""

    def create(self, path: Path) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # less the umask
        try:
            if not _lock(fd) or os.fstat(fd).st_nlink == 0:
                raise FileExistsError(path)  # somebody sweeps it, or has just done so
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        count = os.write(fd, data)
        if count >= _EARLY_BYTES:
            at = os.lseek(fd, 0, os.SEEK_CUR) - count
            _release_cache(fd, at, count)  # on its way to the disk while the next part is copied
            if at >= _BEHIND_BYTES:
                _release_cache(fd, at - _BEHIND_BYTES, count)  # there by now, most likely: its memory serves the next
        return count

    def sync(self, fd: int) -> None:
        os.fsync(fd)
        _release_cache(fd, 0, 0)

    def close(self, fd: int) -> None:
        os.close(fd)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


POSIX = PosixDisk()


def _release_cache(fd: int, offset: int, nbytes: int) -> None:
    """Tell the kernel that nobody reads this part of a file soon (0 bytes: to its end). It promises nothing durable.

    What is not on the disk yet is begun to be written out, what is there leaves memory. Otherwise a checkpoint lies in
    memory until the next one has been written beside it, and each is copied to pages that were not in use before:
    twice the time of copying on pages just freed. A failing write-out is what ``sync`` reports, now as before.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice; not every file system takes it
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _lock(fd: int) -> bool:
    """False when another process holds the lock; True when we do, or the file system has none to give."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


# Checkpoints


def write_checkpoint(path: str | Path, snapshot: Snapshot, disk: Disk = POSIX) -> None:
    """Publish ``snapshot`` as V3 at ``path``, durably and at once.

    Raises StateError naming the file when it could not be written, LocalError when the snapshot is not writable.
    """
    write_atomically(path, write_parts(snapshot), "checkpoint", disk)


def read_checkpoint(path: str | Path) -> Snapshot:
    """Read and check a checkpoint of any version; its tensors are new memory, writable.

    Raises StateError with one sentence that names the file and what is wrong with it.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # opening a pipe would wait for its other end
            raise StateError("not a regular file")
        with Path(path).open("rb", buffering=0) as file:
            reader = parse(os.fstat(file.fileno()).st_size)
            try:
                while True:
                    view = next(reader)
                    while view.nbytes:
                        got = file.readinto(view)
                        if not got:
                            raise StateError("it became shorter while it was read")
                        view = view[got:]
            except StopIteration as done:
                snapshot: Snapshot = done.value
                return snapshot
    except OSError as error:
        raise StateError(f"checkpoint {path}: {error.strerror or error}") from error
    except StateError as error:
        raise StateError(f"checkpoint {path}: {error}") from None


# The final marker


def marker_path(path: str | Path) -> Path:
    """``<checkpoint>.final`` of the checkpoint at ``path``."""
    return Path(f"{path}.final")


def write_marker(path: str | Path, step: int, disk: Disk = POSIX) -> None:
    """Mark the checkpoint at ``path`` as the final one of global step ``step``, durably. Raises StateError."""
    write_atomically(marker_path(path), [marker.encode(step)], "final marker", disk)


def remove_marker(path: str | Path, disk: Disk = POSIX) -> None:
    """Remove the marker of the checkpoint at ``path``, durably; none there is fine. Raises StateError."""
    file = marker_path(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            disk.remove(file)
            disk.sync_directory(file.parent)
    except OSError as error:
        raise StateError(f"final marker {file}: cannot be removed: {error.strerror or error}") from error


def read_marker(path: str | Path) -> int | None:
    """The step that the marker of the checkpoint at ``path`` names, or None without one. Raises StateError."""
    target = marker_path(path)
    try:
        with target.open("rb") as file:
            content = file.read(marker.LIMIT_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"final marker {target}: {error.strerror or error}") from error
    step = marker.decode(content)
    if step is None:
        raise StateError(f"final marker {target}: not a marker: {content[:40]!r}")
    return step


# Atomic writes


def write_atomically(path: str | Path, parts: Iterable[Buffer], what: str, disk: Disk = POSIX) -> None:
    """Replace the file at ``path`` by ``parts``, durably, or leave it alone and raise StateError.

    Args:
        path: the target; its directory must exist. Its mode follows the umask.
        parts: the content in order; an exception of theirs passes through once the temporary is gone.
        what: what the file is called in an error.
    """
    target = Path(path)
    try:
        temporary, fd = _create_beside(target, disk)
        try:
            try:
                for part in parts:
                    _write_all(disk, fd, part)
                disk.sync(fd)
            finally:
                disk.close(fd)
            disk.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.remove(temporary)
            raise
        disk.sync_directory(target.parent)
    except OSError as error:
        raise StateError(f"{what} {path}: cannot be written: {error.strerror or error}") from error


def _create_beside(target: Path, disk: Disk) -> tuple[Path, int]:
    while True:
        temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
        with contextlib.suppress(FileExistsError):
            return temporary, disk.create(temporary)


def _write_all(disk: Disk, fd: int, part: Buffer) -> None:
    view = memoryview(part).cast("B")
    while view.nbytes:
        view = view[disk.write(fd, view) :]


def remove_stale_temporaries(path: str | Path) -> list[Path]:
    """Sweep what killed writers of the file at ``path``, or of its marker, left behind; returns what was removed.

    Called once at start. A temporary that a living process writes stays (the rule is at the head of this file), and
    so does whatever cannot be opened or removed: an untidy folder is no reason not to run.
    """
    target = Path(path)
    ours = re.compile(rf"\.{re.escape(target.name)}(\.final)?\.[0-9a-f]{{16}}\.tmp")
    try:
        found = [entry for entry in sorted(target.parent.iterdir()) if ours.fullmatch(entry.name)]
    except OSError:
        return []
    return [entry for entry in found if _sweep(entry)]


def _sweep(temporary: Path) -> bool:
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails on a living writer's file, and where there are no locks
        temporary.unlink()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
