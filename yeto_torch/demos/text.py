"""The Python standard library's own source text. Nothing is downloaded."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from yeto_torch.demos.transformer import CONTEXT, Transformer, indices, windows

WIDTH, LAYERS = 96, 2  # of a transformer with 240,000 parameters
HELD_OUT_EVERY = 10  # of the modules
HELD_OUT_WINDOWS = 256


class Text:
    """The text task: predict the next character. The modules are dealt out to the learners in order of their names."""

    title = "characters of the Python standard library"
    batch = 16
    steps = 720
    fragments = 6
    lr = 2e-3

    def __init__(self, seed: int, learners: int) -> None:
        self._seed = seed
        modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        if not modules:
            raise RuntimeError("this Python keeps no source text of its standard library")
        training = [module for number, module in enumerate(modules) if number % HELD_OUT_EVERY]
        self._parts = [_characters(training[learner::learners]) for learner in range(learners)]
        held_out = _characters(modules[::HELD_OUT_EVERY])
        starts = torch.linspace(0, len(held_out) - CONTEXT - 1, HELD_OUT_WINDOWS).long()
        self._held_out = windows(held_out, starts)

    def model(self) -> nn.Module:
        torch.manual_seed(self._seed)
        return Transformer(WIDTH, LAYERS)

    def batches(self, learner: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        text = torch.cat(self._parts) if learner is None else self._parts[learner]
        stream = 0 if learner is None else 1 + learner
        generator = torch.Generator().manual_seed(1000 * self._seed + stream)
        while True:
            yield windows(text, torch.randint(len(text) - CONTEXT, (self.batch,), generator=generator))

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self._held_out


def _characters(modules: list[Path]) -> Tensor:
    """All modules' text, one after the other."""
    return indices("".join(module.read_text(encoding="utf-8", errors="ignore") for module in modules))
