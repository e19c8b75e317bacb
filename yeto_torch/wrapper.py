"""A torch optimizer around one or several others: torch's contract, and nothing of the fleet.

Decides how a wrapper stays indistinguishable from what it wraps. Param groups, state and defaults are the inner
optimizer's own objects and are looked up each time, since ``load_state_dict`` replaces them. Hooks registered here get
this object; torch's global hooks are run by the inner ``step``. Attributes beyond torch's contract are not handed
through: whoever needs one asks the inner optimizer. ``_step`` and ``_switch`` are for the subclass to extend.

Source: torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from torch.optim.optimizer import Args, Kwargs, StateDict

Closure: TypeAlias = Callable[[], Any]
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
ParamGroup: TypeAlias = dict[str, Any]  # also of defaults, which are a group without parameters
_State: TypeAlias = defaultdict[torch.Tensor, Any]


class _Inner:
    """An attribute that is the (first) inner optimizer's own, to read, set and delete."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: OptimizerWrapper | None, _: type) -> object:
        return self if wrapper is None else getattr(wrapper._inner[0], self._name)

    def __set__(self, wrapper: OptimizerWrapper, value: object) -> None:
        setattr(wrapper._inner[0], self._name, value)

    def __delete__(self, wrapper: OptimizerWrapper) -> None:
        delattr(wrapper._inner[0], self._name)


class OptimizerWrapper(torch.optim.Optimizer):
    """Behaves as ``inner``; several optimizers behave as one over all their groups.

    ``torch.optim.Optimizer.__init__`` is not called: it would make groups and a state of its own.
    """

    def __init__(self, inner: Optimizers) -> None:
        self._inner = _optimizers(inner)
        self._single = self._inner[0] if len(self._inner) == 1 else None
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._warned_capturable_if_run_uncaptured = True
        if self._single is not None and "grad_scaler" in inspect.signature(self._single.step).parameters:
            # GradScaler looks for this name in the signature
            self.step = MethodType(_step_with_scaler, self)  # type: ignore[method-assign]

    # ------------------------------------------------------------------------------------------ step

    def step(self, closure: Closure | None = None, **arguments: Any) -> Any:
        """One step, with the hooks of this object around it."""
        args: Args = (self,) if closure is None else (self, closure)
        kwargs: Kwargs = arguments
        for before in self._optimizer_step_pre_hooks.values():
            result = before(self, args, kwargs)
            if result is not None:
                args, kwargs = _new_arguments(result)
        out = self._step(*args[1:], **kwargs)
        for after in self._optimizer_step_post_hooks.values():
            after(self, args, kwargs)
        return out

    step.hooked = True  # type: ignore[attr-defined]  # or torch would wrap it again, and run every hook twice

    def _step(self, closure: Closure | None = None, **inner_arguments: Any) -> object:
        """The step of the inner optimizers; a closure is called once if they are several."""
        if self._single is not None:
            return self._single.step(*(() if closure is None else (closure,)), **inner_arguments)
        loss = value_of(closure)
        for optimizer in self._inner:
            optimizer.step(**inner_arguments)
        return loss

    def _was_skipped(self, inner_arguments: Kwargs) -> bool:
        """Did a GradScaler that leaves the decision to the inner optimizer find an overflow? Then no step was made."""
        if inner_arguments.get("grad_scaler") is not None:
            scaler = inner_arguments["grad_scaler"]
            found = [scaler._found_inf_per_device(optimizer).values() for optimizer in (self, self._inner[0])]
            return any(bool(value) for values in found for value in values)
        return bool(getattr(self._inner[0], "found_inf", False))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, as the inner optimizer does."""
        for optimizer in self._inner:
            optimizer.zero_grad(set_to_none=set_to_none)

    def train(self) -> None:
        """Put inner optimizers that have modes, as schedule-free ones do, into training mode."""
        self._switch("train")

    def eval(self) -> None:
        """Put inner optimizers that have modes into evaluation mode; for others this is nothing."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        for optimizer in self._inner:
            switch = getattr(optimizer, mode, None)
            if callable(switch):
                switch()

    # ------------------------------------------------------------------------------------------ groups and state

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The inner optimizer's own groups; of several, one list of all their groups."""
        if self._single is not None:
            return self._single.param_groups
        return [group for optimizer in self._inner for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self._only("param_groups").param_groups = groups

    @property
    def state(self) -> _State:
        """The inner optimizer's own state; of several, one mapping with all entries."""
        if self._single is not None:
            return self._single.state
        merged: _State = defaultdict(dict)
        for optimizer in self._inner:
            merged.update(optimizer.state)
        return merged

    @state.setter
    def state(self, state: _State) -> None:
        self._only("state").state = state

    @property
    def defaults(self) -> ParamGroup:
        """The (first) inner optimizer's defaults."""
        return self._inner[0].defaults

    @defaults.setter
    def defaults(self, defaults: ParamGroup) -> None:
        self._only("defaults").defaults = defaults

    def _only(self, name: str) -> torch.optim.Optimizer:
        if self._single is None:
            raise AttributeError(f"{name} of several inner optimizers cannot be replaced; set it on each of them")
        return self._single

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
        """Load what ``state_dict`` of this or of the plain inner optimizer gave."""
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

    # ------------------------------------------------------------------------------------------ GradScaler
    # An inner optimizer that unscales by itself keeps doing so, through the attributes that it reads.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self._single, "_step_supports_amp_scaling", False))

    grad_scale = _Inner()
    found_inf = _Inner()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._inner))})"


def value_of(closure: Closure | None) -> object:
    """What a closure returns where no optimizer calls it; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _new_arguments(result: object) -> tuple[Args, Kwargs]:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise RuntimeError(f"a step pre-hook must return None or (args, kwargs), got {result!r}")
    return result


def _step_with_scaler(
    self: OptimizerWrapper, closure: Closure | None = None, *, grad_scaler: object = None, **arguments: object
) -> object:
    """``step`` for an inner optimizer that takes the scaler itself."""
    if grad_scaler is not None:
        arguments["grad_scaler"] = grad_scaler
    return type(self).step(self, closure, **arguments)


def _optimizers(inner: object) -> tuple[torch.optim.Optimizer, ...]:
    optimizers = []
    for optimizer in inner if isinstance(inner, Iterable) else (inner,):
        if isinstance(optimizer, OptimizerWrapper) or not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"inner: {type(optimizer).__name__} is not a plain torch.optim.Optimizer")
        optimizers.append(optimizer)
    if not optimizers:
        raise ValueError("inner: an empty list of optimizers")
    return tuple(optimizers)


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
    """Give each optimizer its part of a joined state dict. Raises ValueError before any is loaded."""
    groups = list(state_dict["param_groups"])
    expected = [len(optimizer.param_groups) for optimizer in inner]
    if len(groups) != sum(expected):
        raise ValueError(f"loaded state dict has {len(groups)} parameter groups, the optimizers have {sum(expected)}")
    parts: list[StateDict] = []
    for count in expected:
        own, groups = groups[:count], groups[count:]
        numbers = {number for group in own for number in group["params"]}
        state = {key: value for key, value in state_dict["state"].items() if key in numbers}
        parts.append({"state": state, "param_groups": own})
    for optimizer, part in zip(inner, parts, strict=True):
        optimizer.load_state_dict(part)
