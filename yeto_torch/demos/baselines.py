"""What the fleet is compared with: one learner alone, and synchronous training. Plain PyTorch, in this process."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from yeto_torch.demos.task import Task, evaluate, inner_optimizer, loss_of, set_lr

EVALUATE_AT = range(0, 1_000_000, 25)  # steps
Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass
class Curve:
    """What one training went through, and where it ended."""

    held_out: list[tuple[int, float, float]] = field(default_factory=list)  # steps, accuracy, loss
    accuracy: float = 0.0  # percent, held-out, at the end
    final_loss: float = 0.0  # nats, held-out, at the end
    seconds: float = 0.0  # of training; preparing the data is not in it


def train_alone(task: Task, learner: int, steps: int, evaluate_at: Container[int] = EVALUATE_AT) -> Curve:
    """One learner on its own part of the data; evaluated after so many steps, and at the end."""
    return _train(task, [task.batches(learner)], steps, evaluate_at)


def train_synchronously(task: Task, learners: int, steps: int, evaluate_at: Container[int] = EVALUATE_AT) -> Curve:
    """All learners' batches in one gradient, every step: what per-step gradient exchange computes."""
    return _train(task, [task.batches(learner) for learner in range(learners)], steps, evaluate_at)


def _train(task: Task, streams: Sequence[Batches], steps: int, evaluate_at: Container[int]) -> Curve:
    model = task.model()
    optimizer = inner_optimizer(task, model)
    curve = Curve()
    began = time.perf_counter()
    for step in range(steps):
        if step in evaluate_at:
            curve.held_out.append((step, *evaluate(model, task)))
        set_lr(optimizer, task, step / steps)
        parts = [next(stream) for stream in streams]
        loss = loss_of(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    curve.seconds = time.perf_counter() - began
    curve.accuracy, curve.final_loss = evaluate(model, task)
    curve.held_out.append((steps, curve.accuracy, curve.final_loss))
    return curve
