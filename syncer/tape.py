"""The event tape: one JSON object per line and commit, appended, for people and programs that come later.

Decides: what counts as a line, and which merge lines of a resumed run still hold. A line is whole once its newline is
there; what follows the last newline is the trace of a killed process: readers drop it, the next writer cuts it off.
Must not know: what the fields mean, beyond ``event`` and ``step``.

A run resumes from a checkpoint that may be older than its last commits, and then commits those steps again. The
``event: start`` line therefore carries the ``step`` it starts from, and merge lines before it of a higher step
are void.

Source: v4 §Event tape (every merge appends a line); rulings §7.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from syncer.core.record import Line
from yeto_torch.wire.errors import LocalError, StateError

_LINE_LIMIT_BYTES = 64 * 1024 * 1024  # a longer "line" is another kind of file


class Tape:
    """The writing end. With ``path`` None every call is accepted and nothing is kept.

    Raises StateError when the file cannot be opened, or holds whole lines that no tape would: it is then untouched.
    """

    def __init__(self, path: str | Path | None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._path = path
        self._fd: int | None = None
        if path is not None:
            self._fd = _open(path)

    def write(self, fields: Mapping[str, object]) -> None:
        """Append one line, whole or not at all; ``time`` (unix seconds) is added where ``fields`` has none.

        Raises StateError when the disk does not take it, LocalError for values that are not JSON.
        """
        if self._fd is None:
            return
        try:
            text = json.dumps({"time": self._clock(), **fields}, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise LocalError(f"this does not go on a tape: {error}") from error
        line = text.encode() + b"\n"
        try:
            written = os.write(self._fd, line)
            if written < len(line):
                os.ftruncate(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR) - written)
        except OSError as error:
            raise StateError(f"tape {self._path}: cannot be written: {error.strerror or error}") from error
        if written < len(line):
            raise StateError(f"tape {self._path}: cannot be written: the disk took {written} of {len(line)} bytes")

    def event(self, name: str, **fields: object) -> None:
        """Append a line that is not a merge: ``start``, ``join``, ``retry``, … Raises as ``write``."""
        self.write({"event": name, **fields})

    def close(self) -> None:
        """Idempotent; later writes go nowhere."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_tape(path: str | Path) -> Iterator[Line]:
    """The objects of all whole lines, in order; a tape that is being written to may be read.

    Raises StateError naming the file and, where a whole line is not a JSON object, the line.
    """
    try:
        with Path(path).open("rb") as file:
            for entry, _ in _whole_lines(file, path):
                yield entry
    except OSError as error:
        raise StateError(f"tape {path}: {error.strerror or error}") from error


def merges(path: str | Path) -> list[Line]:
    """The merge lines that hold: those no later start has superseded. Raises StateError as ``read_tape``."""
    kept: list[Line] = []
    for entry in read_tape(path):
        if "event" not in entry:
            kept.append(entry)
        elif entry["event"] == "start" and isinstance(entry.get("step"), int):
            kept = [merge for merge in kept if merge.get("step", 0) <= entry["step"]]
    return kept


def _whole_lines(file: BinaryIO, path: str | Path) -> Iterator[tuple[Line, int]]:
    """Each whole line's object and the offset behind its newline."""
    number = end = 0
    while (line := file.readline(_LINE_LIMIT_BYTES)).endswith(b"\n"):
        number += 1
        end += len(line)
        entry = _object(line)
        if entry is None:
            raise StateError(f"tape {path}: not a tape: line {number} is not a JSON object")
        yield entry, end
    if len(line) == _LINE_LIMIT_BYTES:
        raise StateError(f"tape {path}: not a tape: line {number + 1} has no end within {_LINE_LIMIT_BYTES} bytes")


def _object(line: bytes) -> Line | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _open(path: str | Path) -> int:
    try:
        if Path(path).exists() and not Path(path).is_file():  # opening a pipe would wait for its other end
            raise StateError(f"tape {path}: not a regular file")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            _cut_torn_line(fd, path)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise StateError(f"tape {path}: cannot be opened: {error.strerror or error}") from error
    return fd


def _cut_torn_line(fd: int, path: str | Path) -> None:
    """Leave only whole lines. Refuses, before touching it, a file that no tape's writer can have left behind."""
    end = 0
    with open(fd, "rb", closefd=False) as file:
        for _, offset in _whole_lines(file, path):
            end = offset
        file.seek(end)
        torn = file.read(_LINE_LIMIT_BYTES)
    if not torn:
        return
    entry = _object(torn)
    foreign = not torn.startswith(b"{") or (entry is not None and "time" not in entry)
    if end == 0 and foreign and torn.strip(b"\0"):
        raise StateError(f"tape {path}: not a tape: it holds one line without an end that no tape begins with")
    os.ftruncate(fd, end)
