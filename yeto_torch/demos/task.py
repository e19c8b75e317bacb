"""What every demonstration task offers, and the training step and evaluation that all its trainings share.

The learners of the fleet, the lone learner and synchronous training differ in where batches come from and in what
the optimizer is; everything else is here, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from yeto_torch.demos.digits import Split

WARMUP = 0.05  # of the run
DECAY_FROM = 0.6  # of the run; from here the learning rate falls to zero
LEARNERS = 2


class Task(Protocol):
    """Data and model of one demonstration; everything follows from the seed."""

    title: str
    batch: int  # samples of one learner's step
    steps: int  # planned steps of each learner
    fragments: int
    lr: float

    def model(self) -> nn.Module:
        """A freshly initialised model; the same for every call."""

    def batches(self, learner: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (inputs, targets) of ``batch`` samples of ``learner``'s part of the data; of all data for None."""

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets that no training sees."""


def make_task(name: str, *, split: Split, seed: int, learners: int = LEARNERS) -> Task:
    """The task called ``digits`` or ``text``, its data in as many parts as there are learners.

    Raises ImportError when the packages of the demo extra are missing.
    """
    if name == "text":
        from yeto_torch.demos.text import Text

        return Text(seed, learners)
    from yeto_torch.demos.digits import Digits

    return Digits(seed, split, learners)


def inner_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every training: what a user would have had before."""
    return torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.01)


def set_lr(optimizer: torch.optim.Optimizer, task: Task, progress: float) -> None:
    """Warm up, hold, decay linearly to zero; ``progress`` is the finished part of the run, 0 to 1."""
    scale = min(1.0, progress / WARMUP + 0.1, max(0.0, 1 - progress) / (1 - DECAY_FROM))
    for group in optimizer.param_groups:
        group["lr"] = task.lr * scale


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all targets, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def evaluate(model: nn.Module, task: Task) -> tuple[float, float]:
    """(accuracy in percent, mean loss in nats) on the held-out data."""
    inputs, targets = task.held_out()
    correct, loss = 0.0, 0.0
    with torch.no_grad():
        for x, y in zip(torch.split(inputs, 64), torch.split(targets, 64), strict=True):
            logits = model(x).flatten(0, -2)
            correct += (logits.argmax(-1) == y.flatten()).sum().item()
            loss += F.cross_entropy(logits, y.flatten(), reduction="sum").item()
    return 100 * correct / targets.numel(), loss / targets.numel()
