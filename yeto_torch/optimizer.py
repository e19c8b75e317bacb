"""YetoOuterOptimizer: any torch optimizer, as one learner of a fleet.

``wrapper`` makes it a torch optimizer, ``learner`` does the fleet's work; this file joins them: what a user says at
construction, what happens at the end of ``step``, and how a run ends. It must not know the protocol.

Source: docs/training-loops/index.md, docs/optimizers.md.
"""

from __future__ import annotations

import inspect
import operator
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, SupportsIndex, TypeAlias, TypeVar

import torch

from yeto_torch.config import LearnerConfig, LearnerOptions, disabled, wrong_name
from yeto_torch.fragments import NamedParameters, bind, collect, kept, layout_of, raw_names
from yeto_torch.launcher.folder import save_layout
from yeto_torch.learner.learner import Learner
from yeto_torch.learner.shards import check_shards, check_wrapping, resharding
from yeto_torch.learner.stats import Stats
from yeto_torch.offline.local import LocalLearner
from yeto_torch.ranks.follower import Follower
from yeto_torch.ranks.group import RankGroup
from yeto_torch.ranks.leader import make_learner
from yeto_torch.ranks.rendezvous import Rendezvous
from yeto_torch.wire.errors import RunError
from yeto_torch.wire.model_layout import Layout
from yeto_torch.wrapper import Closure, Optimizers, OptimizerWrapper, ParamGroup, value_of

P = ParamSpec("P")
S = TypeVar("S")
_Init: TypeAlias = Callable[Concatenate[S, P], None]


@dataclass(frozen=True)
class _Wrapped:
    """The arguments about the model."""

    inner: Optimizers
    named_parameters: NamedParameters | None = None


@dataclass(frozen=True)
class _Arguments(LearnerOptions, _Wrapped):
    """Everything the constructor takes, in its order: a dataclass takes the fields of its last base first."""


def _takes(arguments: Callable[P, object]) -> Callable[[_Init[S, ...]], _Init[S, P]]:
    """For ``help`` and type checkers the decorated ``__init__`` has the parameters of ``arguments``."""

    def show(init: _Init[S, ...]) -> _Init[S, P]:
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        shown = inspect.signature(arguments)
        shown = shown.replace(parameters=[itself, *shown.parameters.values()])
        init.__signature__ = shown  # type: ignore[attr-defined]  # where ``inspect`` looks
        return init

    return show


class YetoOuterOptimizer(OptimizerWrapper):
    """Wraps ``inner`` so that the model it trains is trained by a whole fleet.

    The constructor connects and, like DDP's, returns when the fleet's weights are installed. Each ``step`` is the
    inner optimizer's; in between, and without waiting for the network, fragments of the model are exchanged with the
    syncer. ``state_dict`` is exactly the inner optimizer's: outer state comes from the syncer on joining.

    Args:
        inner: the optimizer, or a list of optimizers over one model.
        named_parameters: ``model.named_parameters()``, or the model; default: the names the inner optimizer knows.
        *args: the options, in the order of ``yeto_torch.config.LearnerOptions``, which says what each one means.
        **options: the same, by name, as ``syncer="host:port"``.

    Raises:
        ValueError: a wrong argument; the sentence names it.
        ConnectionLostError: the fleet did not start within ``connect_timeout_s``.
        RefusedError: the syncer does not want this learner; carries its reason.
        NonFiniteError: learner 0's starting values are not finite.
    """

    @_takes(_Arguments)
    def __init__(
        self, inner: Optimizers, named_parameters: NamedParameters | None = None, *args: Any, **options: Any
    ) -> None:
        wrong = wrong_name(options, LearnerOptions)
        if wrong is not None:
            raise TypeError(f"YetoOuterOptimizer got an unexpected keyword argument {wrong}")
        self._options = told = LearnerOptions(*args, **options)
        super().__init__(inner)
        self._learner: Learner | Follower | LocalLearner | None = None
        self._counted: int | None = None  # tokens of the step to come
        self._warned = self._ended = False
        self._named = named = kept(named_parameters)
        ranks = None if told.process_group is None else RankGroup(told.process_group)
        with Rendezvous(ranks) as rendezvous:
            if disabled():
                return
            config = LearnerConfig.resolve(**vars(told))
            reshard = resharding(named)
            reshard()
            check_wrapping(named, raw_names(self._inner, named), told.process_group)
            parameters = collect(self._inner, named)
            check_shards(parameters, None if ranks is None else ranks.members)
            rendezvous.layout = self._layout = layout_of(parameters, config)
            if config.run_dir is not None and config.identity == 0 and (ranks is None or ranks.rank == 0):
                save_layout(self._layout, Path(config.run_dir))
        self._in_layout = {id(p) for p in parameters.values()}
        learner = make_learner(config, self._layout, bind(self._layout, parameters), self._inner, ranks, reshard)
        try:
            learner.start()
        except BaseException:
            learner.close()
            raise
        self._learner = learner
        weakref.finalize(self, learner.abandon).atexit = False  # at exit the link leaves by itself

    # ------------------------------------------------------------------------------------------ training

    def step(self, closure: Closure | None = None, *, tokens: int | None = None, **inner_arguments: object) -> Any:
        """One step of the inner optimizer; then, if anything is due, the exchange with the fleet.

        Args:
            closure: as for any torch optimizer.
            tokens: what this step counts in the weight of the learner (w = tokens² / steps), on top of what
                ``count_tokens`` was told; default ``tokens_per_step``.
            **inner_arguments: handed on to the inner optimizer.

        Returns:
            What the inner optimizer returns. After the final cut was installed no parameter changes any more, and it
            is what the closure returns.

        Raises:
            PeerError, RefusedError, ConnectionLostError: what ended the session.
            NonFiniteError: a parameter is not finite when its progress is asked for.
        """
        if tokens is not None:
            inner_arguments["tokens"] = tokens  # hooks see it, and may change it
        return super().step(closure, **inner_arguments)

    step.hooked = True  # type: ignore[attr-defined]  # as the wrapper's own

    def _step(self, closure: Closure | None = None, *, tokens: int | None = None, **inner_arguments: object) -> object:
        learner = self._learner
        if learner is None:
            return super()._step(closure, **inner_arguments)
        if learner.installed:
            if not self._warned:
                self._warned = True
                warnings.warn("step() after the run has finished: the final parameters stay as they are", stacklevel=4)
            value = value_of(closure)
            learner.stepped(None)
            return value
        if learner.frozen:
            raise RunError("step() after report_budget(): the parameters are frozen; call finish()")
        count = self._counted if tokens is None else _add("step", self._counted, tokens)
        loss = super()._step(closure, **inner_arguments)
        if self._was_skipped(inner_arguments):
            learner.stepped(None)
        else:
            self._counted = None
            learner.stepped(learner.config.tokens_per_step if count is None else count)
        return loss

    def count_tokens(self, tokens: int) -> None:
        """Count ``tokens`` for the next step that is made: for loops that call ``step()`` for you, and for the
        micro-batches of one step. Calls add up. Raises ValueError when negative.
        """
        self._counted = _add("count_tokens", self._counted, tokens)

    def resync(self) -> None:
        """Put the parameters back on the last broadcasts; progress made since is dropped.

        For after a training checkpoint was loaded into the model: what it holds is older than the fleet, and would
        travel as if it had been learnt just now. Raises RunError after the final cut was installed.
        """
        if self._learner is not None:
            self._learner.resync()

    def _switch(self, mode: str) -> None:
        """A mode moves the parameters, so that none may change behind the final cut."""
        if self._learner is None or not self._learner.installed:
            super()._switch(mode)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group to the (first) inner optimizer, before the first step.

        Its parameters are in the layout already or do not require grad: what is exchanged is fixed when the optimizer
        is wrapped. Raises ValueError for others, and after the first step.
        """
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if self._learner is not None:
            if self._learner.local_step:
                raise ValueError("add_param_group after the first step: the layout of the fleet is fixed by then")
            for item in params:
                tensor = item[1] if isinstance(item, tuple) else item
                if tensor.requires_grad and tensor.numel() and id(tensor) not in self._in_layout:
                    raise ValueError(
                        f"add_param_group: a new trainable parameter of shape {tuple(tensor.shape)} is not in the "
                        "layout; add it to the inner optimizer before wrapping it"
                    )
        self._inner[0].add_param_group({**param_group, "params": params})

    # ------------------------------------------------------------------------------------------ the end of a run

    @property
    def finished(self) -> bool:
        """True once the authoritative final parameters are installed and their acknowledgement was sent."""
        return self._ended if self._learner is None else self._learner.finished

    def finish(self, timeout: float | None = None) -> None:
        """Serve the fleet until the final cut, install it, return. Idempotent.

        Args:
            timeout: seconds; default ``final_timeout_s``.

        Raises:
            RunError: the cut did not come in time.
        """
        if self._learner is None:
            self._ended = True
        else:
            self._learner.finish(timeout)

    def report_budget(self, steps: int) -> None:
        """Learner-budget benchmark: report that exactly ``steps`` steps were made, and freeze the parameters.

        Returns once the report has left; ``finish()`` then serves the consolidation and the final cut. Raises
        ValueError, with nothing sent, unless ``steps`` is ``budget_steps`` (if given) and the number of steps made.
        """
        if self._learner is not None:
            self._learner.report_budget(steps)

    def close(self) -> None:
        """Leave, without the final cut if it has not come yet; ``step`` is then the inner optimizer's alone."""
        if self._learner is not None:
            self._learner.close()

    def __enter__(self) -> YetoOuterOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ what can be looked at

    @property
    def stats(self) -> Stats:
        """A snapshot of this learner's numbers."""
        return Stats() if self._learner is None else self._learner.stats

    @property
    def layout(self) -> Layout:
        """The fragments, their tensors and the fingerprint."""
        if self._learner is None:
            return layout_of(collect(self._inner, self._named), self._options)
        return self._layout

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "YetoOuterOptimizer holds a connection and cannot be copied or pickled; save optimizer.state_dict()"
        )


def _add(call: str, counted: int | None, tokens: int) -> int:
    """``tokens`` more than were counted; bad ones are the fault of ``call``."""
    count = operator.index(tokens)
    if count < 0:
        raise ValueError(f"{call}(tokens={count}): must not be negative")
    return (counted or 0) + count
