"""The files of an experiment: where they lie, and what they tell as evidence.

The names are those of any run folder, so that what reads one reads this one too. Decides nothing about what it reads:
a file that cannot be used becomes the sentence why.
"""

from __future__ import annotations

from pathlib import Path

from syncer.benchmark.verdict import Saved, Stretch, stretches
from syncer.checkpoint.files import read_checkpoint, read_marker
from syncer.export import read_with_layout, write_model
from syncer.tape import read_tape
from yeto_torch.wire.errors import StateError


class Folder:
    """The paths of one experiment.

    Attributes:
        checkpoint: the cut-off checkpoint, then the final one.
        address: ``host:port`` of the syncer that runs.
        layout: names and shapes of the parameters, written by learner 0.
        arms: what the synchronous arm came to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.yeto"
        self.tape = path / "tape.jsonl"
        self.address = path / "syncer.address"
        self.layout = path / "layout.json"
        self.model = path / "model.safetensors"
        self.verdict = path / "verdict.json"
        self.arms = path / "arms.json"

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
        snapshot, layout = read_with_layout(self.checkpoint, self.layout if self.layout.exists() else None)
        return write_model(self.model, snapshot, layout, "model")
