"""Which parameter lies in which fragment: a model and its optimizer become a ``Layout``.

Decides the names, which parameters take part, and the order and grouping that every learner of a run must arrive at
on its own. It must not know the network or any tensor's values.

Rules, in the order they are applied:

* A parameter takes part when it is named, held by the inner optimizer, requires grad and has an element; a tied one
  takes part once.
* Averaged tensors (embeddings, heads, what ``average`` matches, under iso all that is not a matrix) form fragment 0.
* The rest, sorted by (-numel, name), is spread over the remaining fragments by size, or by layer under ``strided``.

Source: docs/model.md; v4 §Layout and fingerprint (which parameter lies where); rulings §2.5.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from yeto_torch.config import LearnerOptions, MatrixMerge, Pattern
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

NamedParameters = nn.Module | Iterable[tuple[str, nn.Parameter]]

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_AVERAGED = ("embed", "wte", "wpe", "lm_head", "shared.weight")
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_SHOW = "pass the names: YetoOuterOptimizer(optimizer, named_parameters=model.named_parameters())"


def clean_name(name: str) -> str:
    """The name without the segments that DDP, FSDP, ``torch.compile`` and activation checkpointing add."""
    *path, leaf = name.split(".")
    return ".".join([part for part in path if part not in _WRAPPERS] + [leaf])


def collect(
    inner: Sequence[torch.optim.Optimizer], named_parameters: NamedParameters | None
) -> dict[str, torch.Tensor]:
    """The parameters that take part, by their clean names, in naming order.

    Args:
        inner: the optimizers over one model.
        named_parameters: a module, ``(name, parameter)`` pairs, or None for the names the optimizers know.

    Raises:
        ValueError: a trainable parameter has no name, two have the same, one cannot be synchronised, or none is left.
    """
    held = {id(p): p for optimizer in inner for group in optimizer.param_groups for p in group["params"]}
    named = list(_names(inner, named_parameters))
    names: dict[int, str] = {}
    taken: dict[str, torch.Tensor] = {}
    unheld: list[str] = []
    for raw, parameter in named:
        if id(parameter) in names:
            continue  # tied: it travels once, under its first name
        name = names[id(parameter)] = clean_name(raw)
        if not parameter.requires_grad or parameter.numel() == 0:
            continue
        if id(parameter) not in held:
            unheld.append(name)
            continue
        if name in taken:
            raise ValueError(f"two parameters are named {name!r} (wrapper prefixes aside): names must be unique")
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name!r} is {parameter.dtype}: only real floating-point ones are synchronised")
        taken[name] = parameter
    nameless = [p for p in held.values() if p.requires_grad and p.numel() and id(p) not in names]
    if nameless:
        shapes = ", ".join(str(tuple(p.shape)) for p in nameless[:3])
        raise ValueError(
            f"the optimizer trains {len(nameless)} parameter(s) that named_parameters does not name "
            f"(shape {shapes}{', ...' if len(nameless) > 3 else ''}); {_SHOW}"
        )
    if not taken:
        raise ValueError(f"no trainable parameter is both named and held by the optimizer; {_SHOW}")
    if unheld:
        warnings.warn(
            f"{len(unheld)} trainable parameter(s) of the model are not held by the optimizer and will not be "
            f"synchronised: {', '.join(unheld[:3])}{', ...' if len(unheld) > 3 else ''}",
            stacklevel=3,
        )
    statistics = _running_statistics(named_parameters)
    if statistics:
        warnings.warn(
            f"{len(statistics)} layer(s) keep running statistics ({', '.join(statistics[:3])}"
            f"{', ...' if len(statistics) > 3 else ''}); only parameters are merged, so each learner keeps its own: "
            "recompute them after the run, or use norms without them",
            stacklevel=3,
        )
    return taken


def _running_statistics(model: object) -> list[str]:
    """The layers of a module whose running mean and variance training changes: batch norms and their kin."""
    if not isinstance(model, nn.Module):
        return []
    return [
        clean_name(name)
        for name, layer in model.named_modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None and layer.momentum != 0.0
    ]


def kept(named_parameters: NamedParameters | None) -> NamedParameters | None:
    """The same, to be read any number of times."""
    if named_parameters is None or isinstance(named_parameters, nn.Module):
        return named_parameters
    return list(named_parameters)


def raw_names(inner: Sequence[torch.optim.Optimizer], named_parameters: NamedParameters | None) -> list[str]:
    """The names as they are given, with the wrappers' segments. Raises ValueError as ``collect`` does."""
    return [name for name, _ in _names(inner, named_parameters)]


def _names(
    inner: Sequence[torch.optim.Optimizer], named_parameters: NamedParameters | None
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(named_parameters, nn.Module):
        yield from named_parameters.named_parameters(remove_duplicate=False)
        return
    if named_parameters is None:
        for group in (group for optimizer in inner for group in optimizer.param_groups):
            yield from zip(group.get("param_names", ()), group["params"], strict=False)
        return
    for item in named_parameters:
        if not _is_pair(item):
            raise ValueError(f"named_parameters holds {type(item).__name__}, expected (name, parameter) pairs; {_SHOW}")
        yield item


def _is_pair(item: object) -> TypeGuard[tuple[str, torch.Tensor]]:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], torch.Tensor)


def layout_of(parameters: Mapping[str, torch.Tensor], options: LearnerOptions) -> Layout:
    """The layout of what ``collect`` returned, by the options that name a layout."""
    return build_layout(
        [(name, tuple(p.shape)) for name, p in parameters.items()],
        fragments=options.fragments,
        pattern=options.pattern,
        matrix_merge=options.matrix_merge,
        average=options.average,
    )


def build_layout(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    *,
    fragments: int = LearnerOptions.fragments,
    pattern: Pattern = LearnerOptions.pattern,
    matrix_merge: MatrixMerge = LearnerOptions.matrix_merge,
    average: str | None = LearnerOptions.average,
) -> Layout:
    """The layout of named shapes; every learner with the same names, shapes and arguments gets the same one.

    What the arguments mean is written once, at ``LearnerOptions``.
    """
    mode = MergeMode[matrix_merge.upper()]
    tensors = sorted((Tensor(name, tuple(shape)) for name, shape in shapes), key=lambda t: (-t.numel, t.name))
    averaged = [t for t in tensors if _is_averaged(t, mode, average)]
    rest = [t for t in tensors if not _is_averaged(t, mode, average)]
    out = [Fragment(MergeMode.AVG, tuple(averaged))] if averaged else []
    if rest:
        bins: list[list[Tensor]] = [[] for _ in range(max(1, min(fragments - bool(averaged), len(rest))))]
        loose = _place_layers(rest, bins) if pattern == "strided" else rest
        _pack(loose, bins)
        out += [Fragment(mode, tuple(content)) for content in bins if content]
    return Layout(tuple(out))


def _is_averaged(tensor: Tensor, mode: MergeMode, average: str | None) -> bool:
    name = tensor.name.lower()
    return (
        any(word in name for word in _AVERAGED)
        or (average is not None and re.search(average, tensor.name) is not None)
        or (mode is MergeMode.ISO and len(tensor.shape) != 2)
    )


def _place_layers(tensors: Sequence[Tensor], bins: list[list[Tensor]]) -> list[Tensor]:
    """Put the tensors of numbered layers into ``bins`` by the layer's rank; returns the tensors of no layer."""
    found = [(_LAYER.search(tensor.name), tensor) for tensor in tensors]
    layered = [(int(match[1]), tensor) for match, tensor in found if match]
    rank = {layer: index for index, layer in enumerate(sorted({layer for layer, _ in layered}))}
    for layer, tensor in sorted(layered, key=lambda item: (item[0], item[1].name)):
        bins[rank[layer] % len(bins)].append(tensor)
    return [tensor for match, tensor in found if not match]


def _pack(tensors: Sequence[Tensor], bins: list[list[Tensor]]) -> None:
    """Each tensor, largest first, to the smallest bin; ties go to the lowest index."""
    sizes = [sum(t.numel for t in content) for content in bins]
    for tensor in tensors:
        index = sizes.index(min(sizes))
        bins[index].append(tensor)
        sizes[index] += tensor.numel


def bind(layout: Layout, parameters: dict[str, torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The parameters of each fragment, in wire order."""
    return tuple(tuple(parameters[t.name] for t in fragment.tensors) for fragment in layout.fragments)
