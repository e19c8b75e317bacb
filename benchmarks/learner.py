"""A worker that is one real learner: many matrices, the default layout, and nothing computed between the syncs.

A learner that only syncs shows what a sync costs. After every sync a few values of each tensor move, so that answers
are not zero; no codec and no merge takes longer for the rest. Between two steps it pauses for two milliseconds: a step
takes longer, and a loop that spins would take the interpreter from its own connection, and a core from the others.

    cycles N   -> {version: monotonic time it was taken over} of N + 1 versions, each F rounds after the last
    memory     -> bytes that this learner takes beyond its model: at most while starting, at most since
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks import proc
from benchmarks.model import Matrices
from benchmarks.worker import Parent
from yeto_torch import YetoOuterOptimizer
from yeto_torch.learner.syncs import Sync

PAUSE_S = 0.002
MOVED = 1024  # values per tensor


class Loop:
    """The training loop of this worker."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._model = Matrices(settings.pop("numel"))
        self._times: dict[int, float] = {}
        inner = torch.optim.SGD(self._model.parameters(), lr=1.0)  # no gradients: it changes nothing
        inner.step()  # torch imports some 150 MiB of itself here
        measured = proc.AVAILABLE
        self._before = proc.resident() if measured else 0
        if measured:
            proc.forget_peak()
        self._optimizer = YetoOuterOptimizer(inner, self._model, run_id="bench", on_sync=self._synced, **settings)
        self.starting = proc.peak() - self._before if measured else 0
        if measured:
            proc.forget_peak()
        parameters = dict(self._model.named_parameters())
        layout = self._optimizer.layout
        self._fragments = [[parameters[t.name] for t in fragment.tensors] for fragment in layout.fragments]
        for fragment in range(len(self._fragments)):
            self._move(fragment)

    def cycles(self, count: int) -> dict[int, float]:
        """Sync every fragment ``count`` times, after as many rounds as it takes to be in the middle of it."""
        every = len(self._fragments)
        first = (self._optimizer.stats.global_step // every + 1) * every
        self._times.clear()
        while self._optimizer.stats.global_step < first + count * every:
            self._optimizer.step()
            time.sleep(PAUSE_S)
        return {version: self._times[version] for version in range(first, first + count * every + 1, every)}

    def training(self) -> int:
        """The peak since the start, beyond the model."""
        return proc.peak() - self._before

    def close(self) -> None:
        self._optimizer.close()

    def _synced(self, sync: Sync) -> None:
        self._times[sync.version] = time.monotonic()
        if sync.fragment is not None:  # the final cut, which never comes here
            self._move(sync.fragment)

    @torch.no_grad()
    def _move(self, fragment: int) -> None:
        for parameter in self._fragments[fragment]:
            parameter.view(-1)[:MOVED].add_(1e-3)


def main() -> None:
    parent = Parent()
    torch.set_num_threads(1)
    loop = Loop(parent.settings)
    parent.say()
    for question in parent.questions():
        if question["ask"] == "cycles":
            parent.say(loop.cycles(question["count"]))
        else:
            parent.say({"starting": loop.starting, "training": loop.training()})
    loop.close()


if __name__ == "__main__":
    main()
