"""The final parameters as a safetensors file, whole or not at all.

Decides: the names, shapes and order of tensors in that file. Written here and not by the safetensors package, because
that one neither streams nor survives a crash: the file is a u64 header length, a JSON header and the tensors.
Must not know: where parameters come from, merging, sessions.

Source: v4 §Final cut (the final-state file, f32, before terminal delivery); rulings §7.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from syncer.checkpoint.files import POSIX, Disk, write_atomically
from syncer.checkpoint.format import pieces
from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.errors import LocalError, StateError
from yeto_torch.wire.layout import WireLayout
from yeto_torch.wire.model_layout import Layout

if TYPE_CHECKING:
    import torch

Shapes: TypeAlias = list[tuple[str, tuple[int, ...]]]  # (name, shape) of the tensors of one fragment, in wire order


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One f32 tensor of the file: ``data`` is its 4 * numel little-endian bytes, row-major."""

    name: str
    shape: tuple[int, ...]
    data: memoryview


def write_final_state(
    path: str | Path,
    params: Sequence[torch.Tensor],
    wire_layout: WireLayout,
    step: int,
    fingerprint: bytes,
    names: Layout | None = None,
    disk: Disk = POSIX,
) -> None:
    """Write the authoritative parameters durably to ``path``.

    Args:
        params: per fragment, f32 on the CPU, all values of the fragment in wire order.
        wire_layout: the session's layout; without ``names`` tensors are called ``fragment.<f>.tensor.<i>`` and are
            flat, but for iso ones, whose rows and columns it knows.
        step, fingerprint: the final global step, and the session's 32 bytes, for the metadata.
        names: the semantic layout: parameter names and full shapes.

    Raises StateError when ``names`` describes another layout or the file cannot be written, LocalError when
    ``params`` does not fit ``wire_layout``.
    """
    if names is not None and names.fingerprint != fingerprint:
        raise StateError(
            f"the layout file has fingerprint {names.fingerprint.hex()}, the session {fingerprint.hex()}: "
            "it names the parameters of another model"
        )
    if len(params) != len(wire_layout):
        raise LocalError(f"{len(params)} fragments of parameters for a layout of {len(wire_layout)}")
    shapes = named_shapes(names) if names is not None else numbered_shapes(wire_layout)
    tensors: list[NamedTensor] = []
    for fragment, entries in zip(params, shapes, strict=True):
        values = fragment.detach().contiguous().numpy()
        if values.dtype != "<f4":
            raise LocalError(f"parameters of dtype {values.dtype} in a final state, which is f32")
        tensors.extend(split(values.data.cast("B"), entries))
    metadata = {"format": "pt", "step": str(step), "fingerprint": fingerprint.hex()}
    write_atomically(path, safetensors_parts(tensors, metadata), "final state", disk)


def numbered_shapes(layout: WireLayout) -> list[Shapes]:
    """Names and shapes per fragment when nobody knows the parameters' own."""
    found: list[Shapes] = []
    for f, fragment in enumerate(layout.fragments):
        shapes = fragment.dims if fragment.mode is MergeMode.ISO else ((numel,) for numel in fragment.numels)
        found.append([(f"fragment.{f}.tensor.{i}", shape) for i, shape in enumerate(shapes)])
    return found


def named_shapes(layout: Layout) -> list[Shapes]:
    """Names and shapes per fragment from the semantic layout. Raises StateError if two tensors share a name."""
    names = [tensor.name for tensor in layout.tensors]
    if len(set(names)) != len(names) or "__metadata__" in names:
        raise StateError("the layout file's tensor names are not distinct, or one of them is __metadata__")
    return [[(tensor.name, tensor.shape) for tensor in fragment.tensors] for fragment in layout.fragments]


def split(data: memoryview, shapes: Shapes) -> Iterator[NamedTensor]:
    """Cut the bytes of one fragment into its tensors, as views. Raises LocalError when they do not fit."""
    start = 0
    for name, shape in shapes:
        stop = start + 4 * math.prod(shape)
        yield NamedTensor(name, shape, data[start:stop])
        start = stop
    if start != data.nbytes:
        raise LocalError(f"tensors of {start} bytes in a fragment of {data.nbytes}")


def safetensors_parts(tensors: Sequence[NamedTensor], metadata: Mapping[str, str]) -> Iterator[Buffer]:
    """A safetensors file in parts of at most 8 MiB, tensor parts as views."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.data.nbytes
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the first tensor to 8 bytes
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors:
        yield from pieces(tensor.data)
