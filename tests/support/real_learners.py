"""Real learners for tests: in threads of this process, or as processes that run ``learner_script.py`` beside this file.

A learner in a thread is a real ``YetoOuterOptimizer`` on real sockets; its constructor waits for the whole fleet, which
is why it lives on a thread. After every step it notes what changed, so that a test can compare learners merge by merge.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.processes import Processes, Running
from tests.support.toy_model import digest, flat, loss_of, toy
from tests.support.waiting import WAIT_S
from yeto_torch import YetoOuterOptimizer

SCRIPT = str(Path(__file__).with_name("learner_script.py"))


class Learner(threading.Thread):
    """A learner that trains until the run is finished.

    Args:
        address: of the syncer.
        learner_id: also the seed of its weights and data, so that learners start apart.
        model: default ``toy``.
        gradients: called with (model, learner id, step number from 1) before every step; default: of ``loss_of``.
        steps: how many to make before ``finish()``; None = until finished.
        tokens: of each step, by its number; default: one.
        pace_s: what a step takes.
        lr: of the plain SGD inside.
        **config: further arguments of YetoOuterOptimizer.

    Attributes:
        free: while it is cleared, no step is made.
        started: the fragments' parameters when the constructor returned.
        history: per step from 1 the adopted versions behind it, and a copy of the fragments' parameters.
        merged: by (fragment, version) the digest of the fragment's parameters right after it was adopted.
    """

    def __init__(
        self,
        address: str,
        learner_id: int,
        *,
        model: nn.Module | None = None,
        gradients: Callable[[nn.Module, int, int], None] | None = None,
        tokens: Callable[[int], int] = lambda _: 1,
        steps: int | None = None,
        pace_s: float = 0.002,
        lr: float = 0.05,
        **config: Any,
    ) -> None:
        super().__init__(name=f"test learner {learner_id}", daemon=True)
        self.learner_id = learner_id
        self.model = toy(learner_id) if model is None else model
        self._address, self._gradients, self._tokens = address, gradients, tokens
        self._steps, self._pace_s, self._lr = steps, pace_s, lr
        self._config = {"streams": 1, "connect_timeout_s": WAIT_S, "final_timeout_s": WAIT_S, **config}
        self._changed = threading.Condition()
        self.stopping, self.free = threading.Event(), threading.Event()
        self.free.set()
        self.optimizer: YetoOuterOptimizer | None = None
        self.step_number = 0
        self.started: list[np.ndarray] = []
        self.history: list[tuple[tuple[int, ...], list[np.ndarray]]] = []
        self.merged: dict[tuple[int, int], str] = {}
        self.error: BaseException | None = None
        self.over = False
        self.start()

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001  # handed on to the test's thread
            self.error = error
        finally:
            with self._changed:
                self.over = True
                self._changed.notify_all()

    def _train(self) -> None:
        inner = torch.optim.SGD(self.model.parameters(), lr=self._lr)
        optimizer = YetoOuterOptimizer(
            inner, self.model, syncer=self._address, learner_id=self.learner_id, **self._config
        )
        with optimizer:
            self.started = flat(self.model, optimizer.layout)
            versions = optimizer.stats.versions
            with self._changed:
                self.optimizer = optimizer
                self._changed.notify_all()
            while not optimizer.finished and not self.stopping.is_set() and self.step_number != self._steps:
                self.free.wait(WAIT_S)
                self._one_step(optimizer)
                versions = self._note(optimizer, versions)
                self.stopping.wait(self._pace_s)
            if self.step_number == self._steps:
                optimizer.finish()

    def _one_step(self, optimizer: YetoOuterOptimizer) -> None:
        number = self.step_number + 1
        optimizer.zero_grad()
        if self._gradients is None:
            loss_of(self.model, self.learner_id, number).backward()
        else:
            self._gradients(self.model, self.learner_id, number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a step between the cut and its acknowledgement changes nothing
            optimizer.step(tokens=self._tokens(number))
        self.step_number = number

    def _note(self, optimizer: YetoOuterOptimizer, before: tuple[int, ...]) -> tuple[int, ...]:
        now = optimizer.stats.versions
        values = flat(self.model, optimizer.layout)
        with self._changed:
            self.history.append((now, values))
            self.merged |= {(f, now[f]): digest(values[f]) for f in range(len(now)) if now[f] != before[f]}
            self._changed.notify_all()
        return now

    def joined(self, timeout_s: float = WAIT_S) -> YetoOuterOptimizer:
        """The optimizer, once its constructor has returned."""
        self.wait(lambda: self.optimizer is not None, "the constructor", timeout_s)
        assert self.optimizer is not None
        return self.optimizer

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Until something this learner notes makes ``condition`` true."""
        with self._changed:
            met = self._changed.wait_for(lambda: condition() or self.over, timeout_s)
        if self.error is not None:
            raise self.error
        met = met and condition()
        assert met, f"learner {self.learner_id}, not within {timeout_s:g} s: {what}"

    def result(self, timeout_s: float = WAIT_S) -> list[np.ndarray]:
        """Wait for the end; the parameters of every fragment. Raises what ended the training loop."""
        self.wait(lambda: self.over, "the end of the run", timeout_s)
        assert self.optimizer is not None
        return flat(self.model, self.optimizer.layout)

    def leave(self) -> None:
        """Stop training without the final cut."""
        self.stopping.set()
        self.join(WAIT_S)


@contextmanager
def training(*learners: Learner) -> Iterator[tuple[Learner, ...]]:
    """Whatever happens inside, no learner trains on behind it."""
    try:
        yield learners
    finally:
        for learner in learners:
            learner.stopping.set()
        for learner in learners:
            if learner.optimizer is not None:
                learner.optimizer.close()
            learner.join(WAIT_S)


def start_script(
    processes: Processes, address: str, learner_id: int, *, out: Path | None = None, cold: bool = False, **options: Any
) -> Running:
    """``learner_script.py`` as a process; ``options`` are its own and those of the optimizer (``optimizer=``)."""
    settings = {"out": None if out is None else str(out), **options}
    env = {"YETO_SYNCER": address, "YETO_LEARNER_ID": str(learner_id)}
    return processes.start(f"learner {learner_id}", [SCRIPT, json.dumps(settings)], env, cold=cold)


def same_weights(*results: list[np.ndarray]) -> bool:
    """Are all these bit for bit equal?"""
    first = [value.tobytes() for value in results[0]]
    return all([value.tobytes() for value in other] == first for other in results[1:])


def wait_all(learners: list[Learner], timeout_s: float = WAIT_S) -> list[list[np.ndarray]]:
    deadline = time.monotonic() + timeout_s
    return [learner.result(max(0.0, deadline - time.monotonic())) for learner in learners]
