"""One training run from its configuration to its result: the synchronous baseline, or a fleet.

Decides the inner optimizer, its schedule and what is measured. Every arm makes the same synchronous steps first, and
goes on from there with the same parameters and optimizer state; what is evaluated is always the global parameters.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from experiments.codecs import bulk_of
from experiments.configs import Alone, Fleet, Training
from experiments.merging import layout_for
from experiments.tasks import Stream, Task, evaluate, loss_of, make_task
from experiments.world import Learner, World
from yeto_torch import YetoOuterOptimizer
from yeto_torch.fragments import bind, collect
from yeto_torch.learner.exchange import Exchange

WARM_UP = 0.05  # of the run, linear
FLOOR = 0.1  # of the peak, where the cosine ends
CHECKPOINTS = 3  # evaluations behind the common steps, the last one at the end


def lr_at(progress: float, peak: float) -> float:
    """The inner learning rate; ``progress`` is the share of the run's samples already taken, 0 to 1."""
    if progress < WARM_UP:
        return peak * (progress + WARM_UP / 10) / (1.1 * WARM_UP)
    along = (progress - WARM_UP) / (1 - WARM_UP)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0))))


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), weight_decay=0.01, fused=True)


def inner_optimizers(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """``adamw``, or ``muon``: Muon for the matrices between embedding and output, AdamW for all else, at one rate.

    Raises ValueError for another name.
    """
    if name == "adamw":
        return [inner_optimizer(model)]
    if name != "muon":
        raise ValueError(f"inner={name!r}: must be adamw or muon")
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blocks.")]
    ids = {id(p) for p in hidden}
    muon = torch.optim.Muon(hidden, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    others = [p for p in model.parameters() if id(p) not in ids]
    return [muon, torch.optim.AdamW(others, weight_decay=0.01, fused=True)]


def run(config: Training | Alone) -> dict[str, Any]:
    """The result of one run: losses in nats, tokens and bytes of all learners together."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    started, began = time.monotonic(), time.process_time()
    training = _Run(config.baseline if isinstance(config, Alone) else config)
    training.warm_up()
    if isinstance(config, Alone):
        extra = training.finish_alone(config)
    else:
        extra = training.finish_synchronously() if config.fleet is None else training.finish_as_fleet(config.fleet)
    return {
        "loss": training.losses[-1][1],
        "losses": training.losses,
        "tokens": training.samples * training.task.tokens,
        "data": training.task.digest(),
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(time.process_time() - began, 2),
        **extra,
    }


_WARM: dict[Training, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
"""The last warm start: parameters and optimizer state behind the common steps, by the baseline's configuration."""


class _Run:
    """What the phases of one run share."""

    def __init__(self, config: Training) -> None:
        self._config = config
        self.task: Task = make_task(config.task, config.seed)
        self._stream: Stream = self.task.stream()
        self._model = self.task.model()
        self._inner = inner_optimizers(self._model, config.inner)
        self.samples = 0
        self.losses: list[tuple[int, float]] = []  # (tokens, held-out loss)
        self._end = config.steps * self.task.batch

    def warm_up(self) -> None:
        """The common steps. Made once by a process for all arms of a seed that follow each other."""
        name = replace(self._config, fleet=None)
        if name not in _WARM:
            while self.samples < self._config.warm_steps * self.task.batch:
                self.synchronous_step()
            _WARM.clear()
            _WARM[name] = copy.deepcopy((self._model.state_dict(), [inner.state_dict() for inner in self._inner]))
            return
        weights, optimizer_states = copy.deepcopy(_WARM[name])
        self._model.load_state_dict(weights)
        for inner, state in zip(self._inner, optimizer_states, strict=True):
            inner.load_state_dict(state)
        for _ in range(self._config.warm_steps):
            self._stream.take(self.task.batch)
            self.samples += self.task.batch

    def synchronous_step(self) -> None:
        self._set_lr()
        self._descend(self._model, self._inner, self.task.batch)

    def finish_synchronously(self) -> dict[str, Any]:
        while self.samples < self._end:
            self.synchronous_step()
            if self._is_due():
                self._evaluate(self._model)
        return {}

    def finish_alone(self, config: Alone) -> dict[str, Any]:
        """The optimizer wrapped, as a user does it; what ``finish`` leaves, the global parameters, is evaluated."""
        rules = {"sync_interval_steps": config.interval, "lr": config.lr, "momentum": config.momentum}
        if config.merge == "iso":
            rules["iso_scale"] = "norm"
        if config.iso_lr is not None and config.iso_momentum is not None:
            rules |= {"iso_lr": config.iso_lr, "iso_momentum": config.iso_momentum}
        wrapped = YetoOuterOptimizer(
            self._inner, self._model, syncer="local", fragments=config.fragments, matrix_merge=config.merge,
            average=self.task.average, local=rules,
        )  # fmt: skip
        while self.samples < self._end:
            self._set_lr()
            self._descend(self._model, [wrapped], self.task.batch)
        wrapped.finish()
        self._evaluate(self._model)
        return {"rounds": wrapped.stats.global_step, "stall_seconds": round(wrapped.stats.stall_seconds, 3)}

    def finish_as_fleet(self, fleet: Fleet) -> dict[str, Any]:
        layout = layout_for(fleet, [(n, tuple(p.shape)) for n, p in self._model.named_parameters()], self.task.average)
        exchange = Exchange(layout, bind(layout, collect(self._inner, self._model)), bulk_of(fleet.wire), 0.0)
        start = [exchange.values(fragment) for fragment in range(len(layout))]
        weights = {name: value.clone() for name, value in self._model.state_dict().items()}
        optimizer_states = [inner.state_dict() for inner in self._inner]
        returned: set[int] = set()

        def make(learner: int) -> Learner:
            model = self.task.model()
            inners = inner_optimizers(model, self._config.inner)
            if learner not in returned:  # who comes back is a new process, without the old one's moments
                model.load_state_dict(weights)
                for inner, state in zip(inners, optimizer_states, strict=True):
                    inner.load_state_dict(copy.deepcopy(state))  # torch keeps what it is given, copying nothing
                returned.add(learner)
            return Learner(model, inners, layout, fleet.wire, self._local_step)

        world = World(fleet, layout, start, make)
        self._share = self.task.batch // fleet.learners
        while self.samples < self._end:
            self._lr = lr_at(self.samples / self._end, self._config.peak_lr)
            world.tick()
            if self._is_due():
                for fragment, values in enumerate(world.final()):
                    exchange.write(fragment, values, 0.0)
                self._evaluate(self._model)
        gains = [sum(gain) / max(len(gain), 1) for gain in world.gains]
        return {"bytes": world.nbytes, "rounds": world.state.step, "gain": gains}

    def _local_step(self, model: nn.Module, inners: Sequence[torch.optim.Optimizer]) -> int:
        _set_lr(inners, self._lr)
        self._descend(model, inners, self._share)
        return self._share * self.task.tokens

    def _set_lr(self) -> None:
        _set_lr(self._inner, lr_at(self.samples / self._end, self._config.peak_lr))

    def _descend(self, model: nn.Module, inners: Sequence[torch.optim.Optimizer], samples: int) -> None:
        loss = loss_of(model, self._stream.take(samples))
        for inner in inners:
            inner.zero_grad()
        loss.backward()
        for inner in inners:
            inner.step()
        self.samples += samples

    def _is_due(self) -> bool:
        begin = self._config.warm_steps * self.task.batch
        return self.samples >= begin + (self._end - begin) * (len(self.losses) + 1) / CHECKPOINTS

    def _evaluate(self, model: nn.Module) -> None:
        self.losses.append((self.samples * self.task.tokens, evaluate(model, self.task)))


def _set_lr(inners: Sequence[torch.optim.Optimizer], lr: float) -> None:
    for inner in inners:
        for group in inner.param_groups:
            group["lr"] = lr
