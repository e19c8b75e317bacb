"""The files of an experiment: where they lie, and what they tell as evidence.

The names are those of any run folder, so that what reads one reads this one too. Decides nothing about what it reads:
a file that cannot be used becomes the sentence why.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from syncer.benchmark.verdict import Saved, Stretch, stretches
from syncer.checkpoint.files import read_checkpoint, read_marker, write_atomically
from syncer.export import check_layout, metadata, tensors_of
from syncer.final_state import safetensors_parts
from syncer.tape import read_tape
from yeto_torch.wire.errors import StateError
from yeto_torch.wire.layout import Layout


@dataclass(frozen=True, slots=True)
class Folder:
    """The paths of one experiment."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        """The cut-off checkpoint, then the final one."""
        return self.path / "checkpoint.yeto"

    @property
    def tape(self) -> Path:
        return self.path / "tape.jsonl"

    @property
    def address(self) -> Path:
        """``host:port`` of the syncer that runs."""
        return self.path / "syncer.address"

    @property
    def layout(self) -> Path:
        """Names and shapes of the parameters, written by learner 0."""
        return self.path / "layout.json"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict.json"

    @property
    def arms(self) -> Path:
        """What the synchronous arm came to."""
        return self.path / "arms.json"

    def log(self, name: str) -> Path:
        return self.path / f"{name.replace(' ', '-')}.log"

    def read_saved(self) -> Saved | str:
        """The checkpoint and its marker."""
        try:
            snapshot = read_checkpoint(self.checkpoint)
            marker = read_marker(self.checkpoint)
        except StateError as error:
            return str(error)
        return Saved(
            snapshot.step,
            tuple(record.version for record in snapshot.fragments),
            (snapshot.backend, snapshot.fingerprint, snapshot.contract),
            {entry.learner: (entry.merges, entry.steps, entry.tokens) for entry in snapshot.ledger},
            marker,
        )

    def read_tape(self) -> tuple[Stretch, ...] | str:
        try:
            return stretches(read_tape(self.tape))
        except StateError as error:
            return str(error)

    def end_reason(self) -> str:
        """What the last process says of its end; empty when it could not say anything."""
        try:
            ends = [line.get("reason", "") for line in read_tape(self.tape) if line.get("event") in ("start", "end")]
        except StateError:
            return ""
        return str(ends[-1]) if ends else ""

    def is_finalizing(self) -> bool:
        """Has the last process committed its last round and frozen the membership?"""
        try:
            events = [line["event"] for line in read_tape(self.tape) if line.get("event") in ("start", "final")]
        except StateError:
            return False
        return events[-1:] == ["final"]

    def export(self) -> str:
        """The final checkpoint as ``model.safetensors``; how its tensors are called. Raises StateError."""
        snapshot = read_checkpoint(self.checkpoint)
        layout = Layout.load(self.layout) if self.layout.exists() else None
        if layout is not None:
            check_layout(snapshot, layout, str(self.checkpoint), str(self.layout))
        parts = safetensors_parts(tensors_of(snapshot, layout), metadata(snapshot, layout))
        write_atomically(self.model, parts, "model")
        return "named by the layout" if layout is not None else "one flat tensor per fragment"
