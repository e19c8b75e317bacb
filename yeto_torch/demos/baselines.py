"""What the fleet is compared with: one learner alone, and synchronous training. Plain PyTorch, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from yeto_torch.demos.task import Task, evaluate, inner_optimizer, loss_of, set_lr

EVALUATIONS = 24  # of the held-out data, over a run
LOSS_EVERY = 4  # steps


@dataclass
class Curve:
    """What one training went through: (step, value) pairs, and where it ended."""

    loss: list[tuple[int, float]] = field(default_factory=list)
    held_out_accuracy: list[tuple[int, float]] = field(default_factory=list)
    accuracy: float = 0.0  # percent, held-out, at the end
    final_loss: float = 0.0  # nats, held-out, at the end
    seconds: float = 0.0  # of training; preparing the data is not in it


def train_alone(task: Task, learner: int, steps: int) -> Curve:
    """One learner on its own part of the data."""
    return _train(task, [task.batches(learner)], steps)


def train_synchronously(task: Task, learners: int, steps: int, evaluations: int = EVALUATIONS) -> Curve:
    """All learners' batches in one gradient, every step: what per-step gradient exchange computes."""
    return _train(task, [task.batches(learner) for learner in range(learners)], steps, evaluations)


def _train(
    task: Task, streams: Sequence[Iterator[tuple[Tensor, Tensor]]], steps: int, evaluations: int = EVALUATIONS
) -> Curve:
    model = task.model()
    optimizer = inner_optimizer(task, model)
    curve = Curve()
    began = time.perf_counter()
    for step in range(steps):
        set_lr(optimizer, task, step / steps)
        parts = [next(stream) for stream in streams]
        loss = loss_of(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % LOSS_EVERY == 0:
            curve.loss.append((step, loss.item()))
        if evaluations and step % max(1, steps // evaluations) == 0:
            curve.held_out_accuracy.append((step, evaluate(model, task)[0]))
    curve.seconds = time.perf_counter() - began
    curve.accuracy, curve.final_loss = evaluate(model, task)
    curve.held_out_accuracy.append((steps, curve.accuracy))
    return curve
