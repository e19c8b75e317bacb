"""``python -m syncer.export``: look into a checkpoint, or turn it into a safetensors file.

Decides: how much of a file's identity is proven. A V3 file names its layout, so another layout's names are refused;
V1 and V2 do not, so their sizes are compared and the output says that nothing more is known.
Must not know: sessions, torch.

Source: v4 §Checkpoints (V1 and V2 can be read and exported); rulings §7.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from syncer.checkpoint.files import read_checkpoint, read_marker, write_atomically
from syncer.checkpoint.format import Snapshot
from syncer.config.plain_command import key_values, run_command
from syncer.config.policy import IsoBackend
from syncer.final_state import NamedTensor, Shapes, named_shapes, safetensors_parts, split
from yeto_torch.wire.errors import StateError
from yeto_torch.wire.model_layout import Layout

USAGE = "python -m syncer.export checkpoint=PATH [layout=PATH] [output=PATH.safetensors]"


def export(argv: Sequence[str]) -> None:
    """The command. Raises ValueError for wrong arguments, StateError for wrong files."""
    values = key_values(argv, ("checkpoint",), ("layout", "output"))
    source, target = values["checkpoint"], values.get("output")
    for key in ("checkpoint", "layout"):
        if target is not None and key in values and os.path.realpath(target) == os.path.realpath(values[key]):
            raise ValueError(f"output: {target} would overwrite the {key}, name another file")
    snapshot, layout = read_with_layout(source, values.get("layout"))
    if target is None:
        print("\n".join(describe(snapshot, source, layout)))
        return
    how = write_model(target, snapshot, layout, "output")
    print(f"{target}: step {snapshot.step}, {how}")
    if snapshot.fingerprint is None:
        print(unproven(snapshot))


def read_with_layout(source: str | Path, layout_path: str | Path | None) -> tuple[Snapshot, Layout | None]:
    """A checkpoint and, if one is named, the layout it fits as far as the file can tell. Raises StateError."""
    snapshot = read_checkpoint(source)
    if layout_path is None:
        return snapshot, None
    layout = Layout.load(layout_path)
    if snapshot.fingerprint is not None and snapshot.fingerprint != layout.fingerprint:
        raise StateError(
            f"checkpoint {source}: its layout is {snapshot.fingerprint.hex()}, but that of {layout_path} is "
            f"{layout.fingerprint.hex()}"
        )
    ours, theirs = snapshot.facts.numels, layout.wire.numels
    if ours != theirs:
        raise StateError(
            f"checkpoint {source}: its fragments have {_brief(ours)} values, those of {layout_path} {_brief(theirs)}"
        )
    return snapshot, layout


def write_model(target: str | Path, snapshot: Snapshot, layout: Layout | None, what: str) -> str:
    """Write the parameters as safetensors to ``target``; returns how its tensors are called. Raises StateError."""
    write_atomically(target, safetensors_parts(tensors_of(snapshot, layout), metadata(snapshot, layout)), what)
    return "named by the layout" if layout is not None else "one flat tensor per fragment"


def tensors_of(snapshot: Snapshot, layout: Layout | None) -> list[NamedTensor]:
    """The parameters as views: by name, or flat as ``fragment.<f>.tensor.0``, as a checkpoint knows no borders."""
    shapes: list[Shapes]
    if layout is not None:
        shapes = named_shapes(layout)
    else:
        shapes = [[(f"fragment.{f}.tensor.0", (numel,))] for f, numel in enumerate(snapshot.facts.numels)]
    return [
        tensor
        for record, entries in zip(snapshot.fragments, shapes, strict=True)
        for tensor in split(memoryview(record.params), entries)
    ]


def metadata(snapshot: Snapshot, layout: Layout | None) -> Mapping[str, str]:
    """What the output says of itself; only a V3 file's fingerprint is given as one."""
    proven = snapshot.fingerprint.hex() if snapshot.fingerprint is not None else "unverified"
    entries = {"format": "pt", "step": str(snapshot.step), "fingerprint": proven}
    if snapshot.fingerprint is None and layout is not None:
        entries["assumed_layout_fingerprint"] = layout.fingerprint.hex()
    return entries


def describe(snapshot: Snapshot, source: str, layout: Layout | None) -> Iterator[str]:
    """The inspection, line by line."""
    backend = "not recorded" if snapshot.backend is None else IsoBackend(snapshot.backend).key
    marked = read_marker(source)
    yield f"checkpoint    {source} (format V{snapshot.version}, {Path(source).stat().st_size} bytes)"
    yield f"step          {snapshot.step}"
    yield f"final marker  {'none' if marked is None else f'step {marked}'}"
    yield f"iso backend   {backend}"
    yield f"fingerprint   {_hex(snapshot.fingerprint)}"
    yield f"contract      {_hex(snapshot.contract)}"
    for index, record in enumerate(snapshot.fragments):
        yield f"fragment {index:<4} version {record.version}, {record.numel} values"
        for name, shape in named_shapes(layout)[index] if layout is not None else ():
            yield f"              {name} {list(shape)}"
    for entry in snapshot.ledger:
        yield f"learner {entry.learner:<5} {entry.merges} merges, {entry.steps} steps, {entry.tokens} tokens"
    if snapshot.fingerprint is None:
        yield unproven(snapshot)


def unproven(snapshot: Snapshot) -> str:
    """What a legacy file leaves open, in one sentence."""
    open_points = "which layout it belongs to" if snapshot.version == 2 else "its iso backend and its layout"
    return f"note: a V{snapshot.version} file cannot prove {open_points}; only sizes can be compared"


def _hex(digest: bytes | None) -> str:
    return "not recorded" if digest is None else digest.hex()


def _brief(numels: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numels[:8]))
    return shown if len(numels) <= 8 else f"{shown}, … ({len(numels)} fragments)"


if __name__ == "__main__":
    sys.exit(run_command(export, USAGE, sys.argv[1:]))
