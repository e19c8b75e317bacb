"""The two tasks: text that ships with Python, and scikit-learn's digits. Nothing is downloaded.

Decides models, data and the train / held-out split. A task gives one endless stream of samples; whoever makes a step
takes the next few, so that a fleet and its baseline see the same samples in the same order. It must not know fleets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yeto_torch.demos.transformer import CONTEXT, Transformer, indices, windows

BLOCK = 4096  # characters; every HELD_OUT_EVERY-th block is held out
HELD_OUT_EVERY = 10

Batch = tuple[Tensor, Tensor]


class Task(Protocol):
    """Everything follows from the seed.

    Attributes:
        batch: samples of one global step.
        tokens: that one sample counts.
        average: further tensors that are merged by plain averaging (a regex), or None.
    """

    batch: int
    tokens: int
    average: str | None

    def model(self) -> nn.Module: ...
    def stream(self) -> Stream: ...
    def held_out(self) -> Batch: ...
    def digest(self) -> str: ...


class Stream:
    """Samples in one fixed order, drawn a global batch at a time.

    Args:
        draw: gives the next global batch: (inputs, targets), ``batch`` samples each.
    """

    def __init__(self, draw: Callable[[], Batch]) -> None:
        self._draw = draw
        self._inputs, self._targets = draw()
        self._at = 0

    def take(self, count: int) -> Batch:
        """The next ``count`` samples; ``count`` divides the global batch."""
        if self._at == len(self._inputs):
            self._inputs, self._targets = self._draw()
            self._at = 0
        first, self._at = self._at, self._at + count
        return self._inputs[first : self._at], self._targets[first : self._at]


def make_task(name: str, seed: int) -> Task:
    """A task of ``CHARACTERS``, or ``digits``. Raises ValueError for another name."""
    if name in CHARACTERS:
        return Characters(seed, CHARACTERS[name])
    if name == "digits":
        return HandwrittenDigits(seed)
    raise ValueError(f"task={name!r}: expected one of {', '.join(CHARACTERS)}, digits")


@dataclass(frozen=True, slots=True)
class Size:
    """Of a character model and of its global batch."""

    width: int
    layers: int
    batch: int = 16


CHARACTERS = {
    "char": Size(64, 2),  # 110,000 parameters
    "char-30k": Size(32, 2),
    "char-30k-b64": Size(32, 2, batch=64),
    "char-1m": Size(128, 5),
}


class Characters:
    """Predict the next character of Python's own language reference (``pydoc_data.topics``)."""

    tokens = CONTEXT
    average: str | None = None

    def __init__(self, seed: int, size: Size) -> None:
        self._seed, self._size, self.batch = seed, size, size.batch
        self._text = _reference()
        blocks = torch.split(self._text, BLOCK)
        self._train = torch.cat([block for i, block in enumerate(blocks) if i % HELD_OUT_EVERY])
        self._held_out = torch.cat(blocks[::HELD_OUT_EVERY])

    def model(self) -> nn.Module:
        torch.manual_seed(self._seed)
        return Transformer(self._size.width, self._size.layers)

    def stream(self) -> Stream:
        generator = torch.Generator().manual_seed(self._seed)

        def draw() -> Batch:
            return windows(self._train, torch.randint(len(self._train) - CONTEXT, (self.batch,), generator=generator))

        return Stream(draw)

    def held_out(self) -> Batch:
        """All of it, window by window."""
        return windows(self._held_out, torch.arange(0, len(self._held_out) - CONTEXT, CONTEXT))

    def digest(self) -> str:
        """Python's text differs between versions, and so do losses on it."""
        return hashlib.sha256(self._text.numpy().tobytes()).hexdigest()[:12]


class HandwrittenDigits:
    """The demonstration's digits, model and split."""

    batch, tokens = 32, 1
    average: str | None = None

    def __init__(self, seed: int) -> None:
        from yeto_torch.demos.digits import Digits  # needs the demo extra

        self._task = Digits(seed)

    def model(self) -> nn.Module:
        return self._task.model()

    def stream(self) -> Stream:
        return Stream(self._task.batches(None).__next__)

    def held_out(self) -> Batch:
        return self._task.held_out()

    def digest(self) -> str:
        return hashlib.sha256(self.held_out()[0].numpy().tobytes()).hexdigest()[:12]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy, in nats."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, task: Task) -> float:
    """Mean cross entropy on everything held out, in nats."""
    inputs, targets = task.held_out()
    total = 0.0
    for x, y in zip(torch.split(inputs, 128), torch.split(targets, 128), strict=True):
        total += F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum").item()
    return total / targets.numel()


def _reference() -> Tensor:
    from pydoc_data.topics import topics

    return indices("\n".join(topics[name] for name in sorted(topics)))
