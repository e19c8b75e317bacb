"""YetoOuterOptimizer: any torch optimizer, as one learner of a fleet.

It is a ``torch.optim.Optimizer`` in every respect that training code relies on, and the inner optimizer in all that is
state: param groups, state and defaults are the inner one's own objects, ``state_dict`` is exactly its. What is added
happens at the end of ``step``. It must not know the protocol; ``learner`` does the work.

Source: README, "The learner"; torch.optim.Optimizer's contract.
"""

from __future__ import annotations

import inspect
import operator
import os
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import MethodType, TracebackType
from typing import Any

import torch

from yeto_torch.config import LearnerConfig, disabled
from yeto_torch.folder import RunFolder
from yeto_torch.fragments import NamedParameters, bind, build_layout, collect
from yeto_torch.learner import Learner, Stats
from yeto_torch.protocol.errors import RunError
from yeto_torch.protocol.layout import Layout

StateDict = dict[str, Any]
Closure = Callable[[], Any]


class YetoOuterOptimizer(torch.optim.Optimizer):
    """Wraps ``inner`` so that the model it trains is trained by a whole fleet.

    The constructor connects and, like DDP's, returns when the fleet's weights are installed. Each ``step`` is the
    inner optimizer's; in between, and without waiting for the network, fragments of the model are exchanged with the
    syncer.

    Args:
        inner: the optimizer, or a list of optimizers over one model.
        named_parameters: ``model.named_parameters()``, or the model; default: the names the inner optimizer knows.
        syncer, learner_id, run_id, budget_steps: default to the environment (YETO_SYNCER, YETO_LEARNER_ID,
            YETO_RUN_ID, YETO_BUDGET_STEPS), which the launcher sets.
        **: see ``LearnerConfig``.

    Raises:
        ValueError: a wrong argument; the sentence names it.
        ConnectionLostError: the fleet did not start within ``connect_timeout_s``.
        RefusedError: the syncer does not want this learner; carries its reason.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        named_parameters: NamedParameters | None = None,
        syncer: str | None = None,
        learner_id: int | None = None,
        run_id: str | None = None,
        fragments: int = 8,
        pattern: str = "binpack",
        matrix_merge: str = "rda",
        average: str | None = None,
        wire_dtype: str = "bf16",
        streams: int = 4,
        merge_alpha: float = 0.0,
        tokens_per_step: int = 1,
        profile: Any = None,
        contract: bytes | str | None = None,
        hmac_key: bytes | None = None,
        tls: Any = None,
        process_group: Any = None,
        budget_steps: int | None = None,
        wait_for_start: bool = True,
        on_nonfinite: str = "raise",
        max_reconnects: int | None = None,
        connect_timeout_s: float = 900,
        final_timeout_s: float = 900,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "inner", "named_parameters", "__class__")}
        self._inner = _optimizers(inner)
        self._prepare_hooks()
        self._learner: Learner | None = None
        self._layout: Layout | None = None
        self._warned = self._ended = False
        if disabled():
            self._names = (
                named_parameters if isinstance(named_parameters, torch.nn.Module) else _listed(named_parameters)
            )
            self._layout_arguments = {k: arguments[k] for k in ("fragments", "pattern", "matrix_merge", "average")}
            return
        config = LearnerConfig.resolve(**arguments)
        parameters = collect(self._inner, named_parameters)
        self._layout = build_layout(
            [(name, tuple(p.shape)) for name, p in parameters.items()],
            fragments=config.fragments,
            pattern=config.pattern,
            matrix_merge=config.matrix_merge,
            average=config.average,
        )
        self._known = {id(p) for p in parameters.values()}
        if config.run_dir is not None and config.identity == 0:
            _save_layout(self._layout, Path(config.run_dir))
        learner = Learner(config, self._layout, bind(self._layout, parameters), self._inner)
        try:
            learner.start()
        except BaseException:
            learner.close()
            raise
        self._learner = learner
        self._finalizer = weakref.finalize(self, learner.link.close)  # also at interpreter exit

    def _prepare_hooks(self) -> None:
        """What ``torch.optim.Optimizer.__init__`` sets beside the groups and the state, which are the inner one's."""
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._warned_capturable_if_run_uncaptured = True
        if self._single is not None and "grad_scaler" in inspect.signature(self._single.step).parameters:
            self.step = MethodType(_step_with_scaler, self)  # type: ignore[method-assign]  # GradScaler asks the signature

    # ------------------------------------------------------------------------------------------ one step

    def step(self, closure: Closure | None = None, *, tokens: int | None = None, **inner_arguments: Any) -> Any:
        """One step of the inner optimizer; then, if anything is due, the exchange with the fleet.

        Args:
            closure: as for any torch optimizer.
            tokens: what this step counts in the weight of the learner (w = tokens² / steps); default
                ``tokens_per_step``.
            **inner_arguments: handed on to the inner optimizer.

        Returns:
            What the inner optimizer returns. After ``finished``: nothing is done, and None returned.
        """
        args: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        kwargs = inner_arguments if tokens is None else {**inner_arguments, "tokens": tokens}
        for before in self._optimizer_step_pre_hooks.values():
            result = before(self, args, kwargs)
            if result is not None:
                if not (isinstance(result, tuple) and len(result) == 2):
                    raise RuntimeError(f"a step pre-hook must return None or (args, kwargs), got {result!r}")
                args, kwargs = result
        out = self._step(*args[1:], **kwargs)
        for after in self._optimizer_step_post_hooks.values():
            after(self, args, kwargs)
        return out

    step.hooked = True  # type: ignore[attr-defined]  # the inner step runs torch's global hooks; here they would run twice

    def _step(self, closure: Closure | None = None, *, tokens: int | None = None, **inner_arguments: Any) -> Any:
        learner = self._learner
        if learner is None:
            return self._inner_step(closure, inner_arguments)
        if learner.installed:
            self._warn_ended()
            return None
        if learner.frozen:
            raise RunError("step() after report_budget(): the parameters are frozen; call finish()")
        count = learner.config.tokens_per_step if tokens is None else operator.index(tokens)
        if count < 0:
            raise ValueError(f"step(tokens={count}): must not be negative")
        loss = self._inner_step(closure, inner_arguments)
        if not self._was_skipped(inner_arguments):
            learner.stepped(count)
        return loss

    def _inner_step(self, closure: Closure | None, inner_arguments: dict[str, Any]) -> Any:
        if self._single is not None:
            return self._single.step(*(() if closure is None else (closure,)), **inner_arguments)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._inner:
            optimizer.step(**inner_arguments)
        return loss

    def _was_skipped(self, inner_arguments: dict[str, Any]) -> bool:
        """Did a GradScaler that leaves the decision to the inner optimizer find an overflow? Then no step was made."""
        found = [getattr(self._inner[0], "found_inf", None)]
        scaler = inner_arguments.get("grad_scaler")
        if scaler is not None:
            for optimizer in (self, self._inner[0]):
                found += scaler._found_inf_per_device(optimizer).values()
        return any(bool(value) for value in found if value is not None)

    def _warn_ended(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn("step() after the run has finished: the final parameters stay as they are", stacklevel=4)

    # ------------------------------------------------------------------------------------------ the fleet

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
        """Leave the fleet, without the final cut if it has not come yet. ``step`` then is the inner optimizer's alone."""
        if self._learner is not None:
            self._learner.close()

    def __enter__(self) -> YetoOuterOptimizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def stats(self) -> Stats:
        """A snapshot of this learner's numbers."""
        if self._learner is None:
            return Stats(0, (), 0, 0, 0, 0, 0.0, 0, False)
        return self._learner.stats

    @property
    def layout(self) -> Layout:
        """The fragments, their tensors and the fingerprint."""
        if self._layout is None:  # YETO_DISABLE
            parameters = collect(self._inner, self._names)
            self._layout = build_layout([(n, tuple(p.shape)) for n, p in parameters.items()], **self._layout_arguments)
        return self._layout

    # ------------------------------------------------------------------------------------------ the inner optimizer's

    @property
    def _single(self) -> torch.optim.Optimizer | None:
        return self._inner[0] if len(self._inner) == 1 else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's own groups; of several, one list of all their groups."""
        if self._single is not None:
            return self._single.param_groups
        return [group for optimizer in self._inner for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._only("param_groups").param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's own state; of several, one mapping with all entries."""
        if self._single is not None:
            return self._single.state
        merged: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in self._inner:
            merged.update(optimizer.state)
        return merged

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self._only("state").state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The (first) inner optimizer's defaults."""
        return self._inner[0].defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._only("defaults").defaults = defaults

    def _only(self, name: str) -> torch.optim.Optimizer:
        if self._single is None:
            raise AttributeError(f"{name} of several inner optimizers cannot be replaced; set it on each of them")
        return self._single

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, as the inner optimizer does."""
        for optimizer in self._inner:
            optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the (first) inner optimizer, before the first step, of parameters that need no place in the layout.

        Raises ValueError for a trainable parameter that the layout does not hold: what is exchanged is fixed when the
        optimizer is wrapped.
        """
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if self._learner is not None:
            if self._learner.local_step:
                raise ValueError("add_param_group after the first step: the layout of the fleet is fixed by then")
            for item in params:
                tensor = item[1] if isinstance(item, tuple) else item
                if tensor.requires_grad and tensor.numel() and id(tensor) not in self._known:
                    raise ValueError(
                        f"add_param_group: a new trainable parameter of shape {tuple(tensor.shape)} is not in the "
                        "layout; add it to the inner optimizer before wrapping it"
                    )
        self._inner[0].add_param_group({**param_group, "params": params})

    def state_dict(self) -> StateDict:
        """Exactly the inner optimizer's; of several, as one optimizer over all their groups would give it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._single.state_dict() if self._single is not None else _join_states(self._inner)
        for after in self._optimizer_state_dict_post_hooks.values():
            result = after(self, state)
            state = state if result is None else result
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what ``state_dict`` of this or of the plain inner optimizer gave. Outer state is never in it."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            result = before(self, state_dict)
            state_dict = state_dict if result is None else result
        if self._single is not None:
            self._single.load_state_dict(state_dict)
        else:
            _split_state(self._inner, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # GradScaler: an inner optimizer that unscales by itself keeps doing so, through the attributes it reads.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self._single, "_step_supports_amp_scaling", False))

    @property
    def grad_scale(self) -> Any:
        return self._inner[0].grad_scale

    @grad_scale.setter
    def grad_scale(self, value: Any) -> None:
        self._inner[0].grad_scale = value

    @grad_scale.deleter
    def grad_scale(self) -> None:
        del self._inner[0].grad_scale

    @property
    def found_inf(self) -> Any:
        return self._inner[0].found_inf

    @found_inf.setter
    def found_inf(self, value: Any) -> None:
        self._inner[0].found_inf = value

    @found_inf.deleter
    def found_inf(self) -> None:
        del self._inner[0].found_inf

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "YetoOuterOptimizer holds a connection and cannot be copied or pickled; save optimizer.state_dict()"
        )

    def __repr__(self) -> str:
        return f"YetoOuterOptimizer({', '.join(map(repr, self._inner))})"


def _step_with_scaler(
    self: YetoOuterOptimizer,
    closure: Closure | None = None,
    *,
    tokens: int | None = None,
    grad_scaler: Any = None,
    **inner_arguments: Any,
) -> Any:
    """``step`` for an inner optimizer that takes the scaler itself: torch looks for this name in the signature."""
    if grad_scaler is not None:
        inner_arguments["grad_scaler"] = grad_scaler
    return type(self).step(self, closure, tokens=tokens, **inner_arguments)


def _optimizers(inner: Any) -> tuple[torch.optim.Optimizer, ...]:
    optimizers = tuple(inner) if isinstance(inner, Iterable) else (inner,)
    for optimizer in optimizers:
        if isinstance(optimizer, YetoOuterOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"inner: {type(optimizer).__name__} is not a plain torch.optim.Optimizer")
    if not optimizers:
        raise ValueError("inner: an empty list of optimizers")
    return optimizers


def _listed(named_parameters: Any) -> Any:
    return None if named_parameters is None else list(named_parameters)


def _join_states(inner: Sequence[torch.optim.Optimizer]) -> StateDict:
    """One state dict whose parameter numbers run on from optimizer to optimizer."""
    joined: StateDict = {"state": {}, "param_groups": []}
    offset = 0
    for optimizer in inner:
        part = optimizer.state_dict()
        joined["state"].update({key + offset if isinstance(key, int) else key: v for key, v in part["state"].items()})
        for group in part["param_groups"]:
            joined["param_groups"].append({**group, "params": [number + offset for number in group["params"]]})
        offset += sum(len(group["params"]) for group in part["param_groups"])
    return joined


def _split_state(inner: Sequence[torch.optim.Optimizer], state_dict: StateDict) -> None:
    """Give each optimizer its groups and their entries of a joined state dict. Raises ValueError, nothing loaded."""
    counts = [len(optimizer.param_groups) for optimizer in inner]
    groups = list(state_dict["param_groups"])
    if len(groups) != sum(counts):
        raise ValueError(f"loaded state dict has {len(groups)} parameter groups, the optimizers have {sum(counts)}")
    parts: list[StateDict] = []
    for count in counts:
        own, groups = groups[:count], groups[count:]
        numbers = {number for group in own for number in group["params"]}
        state = {key: value for key, value in state_dict["state"].items() if key in numbers}
        parts.append({"state": state, "param_groups": own})
    for optimizer, part in zip(inner, parts, strict=True):
        optimizer.load_state_dict(part)


def _save_layout(layout: Layout, run_dir: Path) -> None:
    """Write ``layout.json`` into the run folder, whole or not at all."""
    target = RunFolder(run_dir).layout
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    layout.save(temporary)
    temporary.replace(target)
