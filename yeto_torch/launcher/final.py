"""The authoritative final parameters of a run folder, into a model.

They are the syncer's: f32, the same for every learner, written when the run was complete. What a learner holds in
memory before that is not it, so a folder without the completion marker is refused.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from yeto_torch.fragments import clean_name
from yeto_torch.launcher.folder import RunFolder
from yeto_torch.wire import marker
from yeto_torch.wire.errors import StateError
from yeto_torch.wire.model_layout import Layout, Tensor


def load_final(model: torch.nn.Module, run_dir: str | os.PathLike[str], *, strict: bool = True) -> int:
    """Overwrite ``model``'s parameters with the final ones of the run in ``run_dir``.

    Each parameter keeps its device and dtype (a lower precision rounds the f32 values); a tied one is written once.
    Buffers, and parameters that the run did not hold, stay as they are. Nothing is written unless everything fits.

    Args:
        model: a model with the names and shapes of the run, with or without DDP, FSDP or ``torch.compile`` around it.
        run_dir: the folder that ``yeto_torch.run`` or the demonstration printed.
        strict: refuse a model with trainable parameters that the run did not hold.

    Returns:
        The number of outer steps of the run.

    Raises:
        StateError: the run is not complete, or a file of the folder is missing, damaged or of another run.
        ValueError: the model's names or shapes are not the run's.
    """
    folder = RunFolder(Path(run_dir))
    step = _marker_step(folder)
    layout = Layout.load(folder.layout)
    values = _read_state(folder, step, layout)
    targets = _targets(model, layout, strict=strict)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])
    return step


def _marker_step(folder: RunFolder) -> int:
    try:
        _check_regular(folder.marker)
        with folder.marker.open("rb") as file:
            content = file.read(marker.LIMIT_BYTES)
    except FileNotFoundError:
        if not folder.is_one:
            raise StateError(f"{folder.path}: not a run folder of yeto_torch.run") from None
        raise StateError(
            f"{folder.path}: the run is not complete ({folder.marker.name} is missing); run the same command with the "
            "same run folder again to resume it"
        ) from None
    except OSError as error:
        raise StateError(f"{folder.marker}: {error.strerror or error}") from error
    step = marker.decode(content)
    if step is None:
        raise StateError(f"{folder.marker}: not a completion marker")
    return step


def _read_state(folder: RunFolder, step: int, layout: Layout) -> dict[str, torch.Tensor]:
    """Parameter name -> f32 tensor of its shape, of exactly this step and layout."""
    try:
        _check_regular(folder.state)
        with safe_open(folder.state, framework="pt") as file:
            metadata = file.metadata() or {}
            values = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - the file object is no dict
    except (OSError, SafetensorError) as error:
        raise StateError(f"{folder.state}: {getattr(error, 'strerror', None) or error}") from error
    for key, expected in (("step", str(step)), ("fingerprint", layout.fingerprint.hex())):
        if metadata.get(key) != expected:
            raise StateError(
                f"{folder.state}: its {key} is {metadata.get(key)!r}, but the run folder says {expected!r}; "
                "the files are not of one run"
            )
    named = {
        tensor.name: (f"fragment.{f}.tensor.{i}", tensor)
        for f, fragment in enumerate(layout.fragments)
        for i, tensor in enumerate(fragment.tensors)
    }
    return {name: _value(folder, values, name, alias, tensor) for name, (alias, tensor) in named.items()}


def _value(folder: RunFolder, values: dict[str, torch.Tensor], name: str, alias: str, tensor: Tensor) -> torch.Tensor:
    """What the file holds for one parameter: under its name in its shape, or numbered and perhaps flat."""
    value, shapes = values.get(name), [tensor.shape]
    if value is None:
        value, shapes = values.get(alias), [tensor.shape, (tensor.numel,)]
    if value is None or value.dtype is not torch.float32 or tuple(value.shape) not in shapes:
        raise StateError(f"{folder.state}: no f32 tensor of {tensor.numel} values for {name!r}, shape {tensor.shape}")
    if not bool(torch.isfinite(value).all()):
        raise StateError(f"{folder.state}: {name!r} holds a value that is not finite")
    return value.reshape(tensor.shape)


def _check_regular(path: Path) -> None:
    """Opening a pipe would wait for its other end. Raises StateError; a file that is not there is the caller's."""
    if path.exists() and not path.is_file():
        raise StateError(f"{path}: not a regular file")


def _targets(model: torch.nn.Module, layout: Layout, *, strict: bool) -> dict[str, torch.nn.Parameter]:
    """Layout name -> the model's parameter; raises ValueError unless names and shapes agree."""
    aliases = {clean_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    targets = {}
    for tensor in layout.tensors:
        parameter = aliases.get(tensor.name)
        if parameter is None:
            raise ValueError(f"the model has no parameter {tensor.name!r}, which the run trained")
        if tuple(parameter.shape) != tensor.shape:
            raise ValueError(
                f"parameter {tensor.name!r} is {tuple(parameter.shape)} in the model, but {tensor.shape} in the run"
            )
        targets[tensor.name] = parameter
    held = {id(parameter) for parameter in targets.values()}
    extra = [name for name, p in aliases.items() if p.requires_grad and p.numel() and id(p) not in held]
    if strict and extra:
        raise ValueError(
            f"the run did not train {extra[0]!r} ({len(extra)} such in the model); strict=False leaves them as they are"
        )
    return targets
