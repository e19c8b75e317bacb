"""What the rivals' workers share: the questions, and tensors of the same shapes as ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from benchmarks.model import Matrices
from benchmarks.worker import Parent


class Rival(Protocol):
    """One rank of another system."""

    def address(self) -> str | None:
        """Where the others find this one, if they must know."""

    def meet(self, at: str | None) -> None: ...

    def prepare(self) -> None: ...

    def sync(self) -> None: ...


def matrices(numel: int, rank: int) -> Matrices:
    """The model of one rank; ranks differ, so that an average is one."""
    model = Matrices(numel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3 * rank)
    return model


def serve(kind: Callable[..., Rival]) -> None:
    """Be a rival of this kind, on one thread, until the measuring process is done."""
    parent = Parent()
    torch.set_num_threads(1)
    rival = kind(**parent.settings)
    parent.say(rival.address())
    for question in parent.questions():
        match question["ask"]:
            case "meet":
                rival.meet(question["at"])
                parent.say()
            case "prepare":
                rival.prepare()
                parent.say()
            case "sync":
                begin = time.monotonic()
                rival.sync()
                parent.say([begin, time.monotonic()])
