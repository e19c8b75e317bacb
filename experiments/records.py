"""What was run, as JSON lines: one whole line per finished run, appended, never changed.

Decides how a line gets into the file whole and which lines of a file count. A last line without its end is what a
killed writer leaves: it is not read, and cut off before the next one is written. It must not know what was run.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """The finished runs of one file, by key; without a path they are kept in memory alone.

    Raises ValueError when a line that is not the last one does not hold a record.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.by_key: dict[str, Record] = {record["key"]: record for record in (_read(path) if path else ())}

    def append(self, record: Record) -> None:
        """Durable when this returns. Of one key the first record counts: nothing is run again for a better one."""
        if record["key"] in self.by_key:
            return
        line = json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n"
        if self._path is not None:
            _append(self._path, line)
        self.by_key[record["key"]] = record

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.by_key.values() if record["kind"] == kind]

    def missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self.by_key]


def _append(path: Path, line: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(_whole(file.read()))
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _whole(data: bytes) -> int:
    """Bytes up to the end of the last whole line."""
    return data.rfind(b"\n") + 1


def _read(path: Path) -> list[Record]:
    if not path.exists():
        return []
    data = path.read_bytes()
    records: dict[str, Record] = {}
    for number, line in enumerate(data[: _whole(data)].splitlines(), 1):
        try:
            record = json.loads(line)
            records.setdefault(record["key"], record)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: no record: {error}") from error
    return list(records.values())
