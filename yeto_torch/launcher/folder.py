"""The run folder: which file of a local run lies where.

The launcher and the demonstration write it, ``load_final`` and the reading commands look into it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from yeto_torch.wire.errors import RunError
from yeto_torch.wire.model_layout import Layout

_RUN_ID_LIMIT = 200  # characters


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run. Nothing is created before ``held``."""

    path: Path

    @property
    def is_one(self) -> bool:
        """Has a launcher worked here?"""
        return any(path.exists() for path in (self.path / "run_id", self.checkpoint, self.layout))

    @property
    def checkpoint(self) -> Path:
        """The syncer's state: periodic, and at the end final."""
        return self.path / "checkpoint.yeto"

    @property
    def marker(self) -> Path:
        """Exists once every learner acknowledged the final cut; written by the syncer beside the checkpoint."""
        return self.path / "checkpoint.yeto.final"

    @property
    def state(self) -> Path:
        """The final parameters as safetensors, f32."""
        return self.path / "model.safetensors"

    @property
    def layout(self) -> Path:
        """Names and shapes of the parameters, written by learner 0."""
        return self.path / "layout.json"

    @property
    def tape(self) -> Path:
        """The event tape, one JSON object a line."""
        return self.path / "tape.jsonl"

    @property
    def address(self) -> Path:
        """``host:port`` of the syncer while it runs."""
        return self.path / "syncer.address"

    @contextmanager
    def held(self) -> Iterator[str]:
        """Create the folder, keep other launchers out of it, and give its run id, a new one in a new folder.

        The run id decides whether a checkpoint may be continued, so starting again in the same folder resumes its run.
        Raises RunError when another launcher works in the folder or its run id is damaged, OSError when it cannot be
        written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "run_id").open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock goes with the process, however it ends
            except BlockingIOError:
                raise RunError(f"run folder {self.path} is in use by another launcher") from None
            file.seek(0)
            try:
                run_id = file.read(_RUN_ID_LIMIT + 2).strip()
            except UnicodeDecodeError:
                run_id = "\0"
            if len(run_id) > _RUN_ID_LIMIT or not run_id.isprintable():
                raise RunError(f"run folder {self.path}: run_id must be one line of at most {_RUN_ID_LIMIT} characters")
            if not run_id:
                run_id = secrets.token_hex(8)
                file.write(run_id + "\n")
                file.flush()
            yield run_id


def save_layout(layout: Layout, run_dir: Path) -> None:
    """Write ``layout.json`` into the run folder, whole or not at all. Raises ValueError when that cannot be."""
    target = RunFolder(run_dir).layout
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        layout.save(temporary)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(f"YETO_RUN_DIR={str(run_dir)!r}: cannot be written: {error.strerror or error}") from error


def new_run_dir(parent: Path) -> Path:
    """A folder in ``parent`` named after the time, that does not exist yet."""
    name = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    path = parent / name
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path
