"""The parameters a syncer has written, flat per fragment, so that they compare with a learner's."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from syncer.checkpoint.files import read_checkpoint


def final_state(path: Path) -> list[np.ndarray]:
    """[numel] f32 of every fragment of a model.safetensors without a layout file."""
    tensors = load_file(path)
    found: list[np.ndarray] = []
    while f"fragment.{len(found)}.tensor.0" in tensors:
        prefix, parts = f"fragment.{len(found)}.tensor.", []
        while f"{prefix}{len(parts)}" in tensors:
            parts.append(tensors[f"{prefix}{len(parts)}"].ravel())
        found.append(np.concatenate(parts))
    return found


def saved(path: Path) -> list[np.ndarray]:
    """[numel] f32 of every fragment of a checkpoint."""
    return [np.frombuffer(record.params, "<f4") for record in read_checkpoint(path).fragments]


def saved_step(path: Path) -> int:
    """The step of a V3 checkpoint, -1 when there is none: one small read, cheap enough for every broadcast."""
    try:
        with path.open("rb") as file:
            head = file.read(45)
    except FileNotFoundError:
        return -1
    magic, _, _, step = struct.unpack("<IB32sQ", head)
    assert magic == 0xD1705A80
    return int(step)
