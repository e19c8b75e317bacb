"""Whom the probe asks: a plain optimizer, ours in a living fleet, and the wrappers of torch and Accelerate.

Ours is joined to a real syncer, one for every model the probe uses. The fleet's second learner joins and never answers:
pulls come and are answered, but no round is merged, so that the parameters stay comparable bit for bit.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from tests.support.processes import Processes
from tests.support.scripted_learner import ScriptedLearner
from tests.support.waiting import WAIT_S
from yeto_torch import YetoOuterOptimizer
from yeto_torch.config import LearnerOptions
from yeto_torch.fragments import collect, layout_of
from yeto_torch.wire.model_layout import contract_hash

Inner = torch.optim.Optimizer | list[torch.optim.Optimizer]
RUN_ID = "contract"
AGAIN = str(Path(__file__).with_name("again.py"))


class Subject:
    """The plain optimizer; a wrapper of it overrides ``wrap``.

    Args:
        name: heads the column.
        processes: starts the new process that a saved state is loaded in.
    """

    name = "plain"

    def __init__(self, processes: Processes | None = None) -> None:
        self._processes = processes

    def wrap(self, model: nn.Module, inner: Inner) -> Any:
        """The optimizer that a loop would hold."""
        del model
        return inner

    def environment(self, model: nn.Module) -> dict[str, str]:
        """What a new process must know to be the same subject."""
        del model
        return {}

    def load_and_step(self, model: nn.Module, saved: Path) -> Path:
        """In a new process: build the model, load ``saved``, make one step. Returns where the parameters lie."""
        assert self._processes is not None, "started without processes"
        result = saved.with_suffix(".out")
        child = self._processes.start("again", [AGAIN, self.name, str(saved), str(result)], self.environment(model))
        assert child.wait(WAIT_S) == 0, child.text
        return result

    def close(self) -> None:
        """Leave nothing behind."""


class Yeto(Subject):
    """Learner 0 of a fleet of two; a new one takes the place of the one before."""

    name = "YetoOuterOptimizer"

    def __init__(self, processes: Processes | None = None) -> None:
        super().__init__(processes)
        self._addresses: dict[bytes, str] = {}
        self._silent: list[ScriptedLearner] = []
        self._optimizer: YetoOuterOptimizer | None = None

    def wrap(self, model: nn.Module, inner: Inner) -> YetoOuterOptimizer:
        self._leave()
        arguments: dict[str, Any] = {"wire_dtype": "f32", "streams": 0, "connect_timeout_s": WAIT_S}
        if self._processes is not None:  # else the environment knows
            arguments |= {"syncer": self._address(model, inner), "learner_id": 0, "run_id": RUN_ID}
        self._optimizer = YetoOuterOptimizer(inner, model, **arguments)
        return self._optimizer

    def environment(self, model: nn.Module) -> dict[str, str]:
        self._leave()
        address = self._address(model, torch.optim.SGD(model.parameters()))
        return {"YETO_SYNCER": address, "YETO_LEARNER_ID": "0", "YETO_RUN_ID": RUN_ID}

    def _address(self, model: nn.Module, inner: Inner) -> str:
        """Of the syncer for models like this one; it is started for the first of them."""
        assert self._processes is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says of the model it says again to the user
            layout = layout_of(collect(inner if isinstance(inner, list) else [inner], model), LearnerOptions())
        key = layout.fingerprint
        if key not in self._addresses:
            folder = self._processes.folder / f"fleet {len(self._addresses)}"
            folder.mkdir()
            syncer = self._processes.syncer(
                "schedule.quorum=2", "schedule.sync_interval_steps=0", "session.idle_timeout_s=900",
                learners=2, total_steps=1000, folder=folder,
            )  # fmt: skip
            self._addresses[key] = syncer.address
            self._silent.append(ScriptedLearner(syncer.address, 1, layout, contract=contract_hash(key, RUN_ID)))
        return self._addresses[key]

    def _leave(self) -> None:
        if self._optimizer is not None:
            self._optimizer.close()
            self._optimizer = None

    def close(self) -> None:
        self._leave()
        for peer in self._silent:
            peer.group.close()
        for peer in self._silent:
            peer.group.join(WAIT_S)


class PostLocalSGD(Subject):
    """torch's own local-SGD wrapper, in a group of one."""

    name = "PostLocalSGDOptimizer"

    def __init__(self, processes: Processes | None = None) -> None:
        super().__init__(processes)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def wrap(self, model: nn.Module, inner: Inner) -> Any:
        del model
        return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=1000))

    def close(self) -> None:
        dist.destroy_process_group()


class Accelerated(Subject):
    """What ``Accelerator.prepare`` returns for an optimizer."""

    name = "AcceleratedOptimizer"

    def __init__(self, processes: Processes | None = None) -> None:
        super().__init__(processes)
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=True)

    def wrap(self, model: nn.Module, inner: Inner) -> Any:
        del model
        return self._accelerator.prepare_optimizer(inner)

    def close(self) -> None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


SUBJECTS: dict[str, Callable[[Processes | None], Subject]] = {
    kind.name: kind for kind in (Subject, Yeto, PostLocalSGD, Accelerated)
}


def available() -> Sequence[str]:
    """The names of the subjects whose packages are installed."""
    has_accelerate = importlib.util.find_spec("accelerate") is not None
    return [name for name in SUBJECTS if has_accelerate or name != Accelerated.name]


def versions() -> str:
    """Of the packages that the foreign columns depend on, as the caption of docs/optimizers.md says them."""
    found = [f"torch {torch.__version__.partition('+')[0]}"]
    if Accelerated.name in available():
        found.append(f"accelerate {importlib.metadata.version('accelerate')}")
    return ", ".join(found)
