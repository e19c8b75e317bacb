"""What a run has come to, read from its folder while it is written: the tape and the learners' metrics."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from yeto_torch.launcher.folder import RunFolder

Entry = dict[str, Any]


class JsonLines:
    """A growing file of one JSON object a line. ``new()`` gives the objects of the lines that were completed since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[Entry]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


@dataclass
class LearnerView:
    """One learner as its metrics tell."""

    step: int = 0
    loss: float | None = None
    steps_per_s: float = 0.0
    bytes_moved: int = 0  # sent and received, framing included; known at the end
    held_out: list[tuple[float, float, float]] = field(default_factory=list)  # time, accuracy, loss
    _steps: list[tuple[float, int]] = field(default_factory=list)  # time, steps made

    def take(self, entry: Entry) -> None:
        step = self.step = entry["step"]
        self._steps.append((entry["time"], step))
        elapsed = entry["time"] - self._steps[0][0]
        if elapsed > 0:
            self.steps_per_s = (step - self._steps[0][1]) / elapsed
        if "loss" in entry:
            self.loss = entry["loss"]
        if "held_out_accuracy" in entry:
            self.held_out.append((entry["time"], entry["held_out_accuracy"], entry["held_out_loss"]))
        if "done" in entry:
            self.bytes_moved = entry["bytes_sent"] + entry["bytes_received"]

    def steps_at(self, time: float) -> float:
        """Steps made by then, between two lines as if at one pace."""
        times, steps = zip(*self._steps, strict=True)
        return float(np.interp(time, times, steps, left=0))


class RunView:
    """A run of a fleet as its folder tells."""

    def __init__(self, folder: RunFolder, learners: int) -> None:
        self.learners = [LearnerView() for _ in range(learners)]
        self.round = 0
        self.quorum = 0
        self.responded = 0
        self.tensor_bytes = 0  # pushes and broadcasts so far
        self._metrics = [JsonLines(folder.path / f"learner-{i}.jsonl") for i in range(learners)]
        self._tape = JsonLines(folder.tape)

    def update(self) -> None:
        """Read what was written since the last call."""
        for view, lines in zip(self.learners, self._metrics, strict=True):
            for entry in lines.new():
                view.take(entry)
        for entry in self._tape.new():
            if "event" not in entry:
                self._commit(entry)

    def held_out(self) -> list[tuple[int, float, float]]:
        """(steps of all learners together, accuracy, loss) of the model of learner 0, whenever it was evaluated."""
        return [
            (round(sum(learner.steps_at(time) for learner in self.learners)), accuracy, loss)
            for time, accuracy, loss in self.learners[0].held_out
        ]

    def _commit(self, merge: Entry) -> None:
        self.round = merge["step"]
        self.quorum = merge["quorum"]
        self.responded = len(merge["responders"])
        pushed = [responder["bytes"] for responder in merge["responders"]]
        self.tensor_bytes += sum(pushed) + max(pushed) * len(self.learners)  # bf16 broadcasts are as large as pushes
