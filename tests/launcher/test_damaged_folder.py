"""A damaged run folder: each file cut, flipped, inflated or replaced is refused; the model stays as it was."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from syncer.final_state import write_final_state
from yeto_torch.launcher.final import load_final
from yeto_torch.launcher.folder import RunFolder
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.errors import RunError, StateError
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

LAYOUT = Layout(
    (
        Fragment(MergeMode.RDA, (Tensor("weight", (2, 3)),)),
        Fragment(MergeMode.AVG, (Tensor("bias", (2,)),)),
    )
)
STEP = 7
MARKER = b"YETO_FINAL_V1\nglobal_step=7\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder of a run that ended well."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    LAYOUT.save(folder.layout)
    folder.marker.write_bytes(MARKER)
    values = [torch.arange(6.0), torch.arange(2.0)]
    write_final_state(folder.state, values, LAYOUT.wire, STEP, LAYOUT.fingerprint, LAYOUT)
    return folder


def refused(folder: RunFolder) -> str:
    """Why it is not loaded; the model is what it was, and no more memory was taken than the files have bytes."""
    model = nn.Linear(3, 2)
    before = [parameter.clone() for parameter in model.parameters()]
    files = sum(file.stat().st_size for file in folder.path.iterdir() if file.is_file())
    tracemalloc.start()
    try:
        with pytest.raises(StateError) as caught:
            load_final(model, folder.path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * files + (1 << 20)
    assert all(torch.equal(then, now) for then, now in zip(before, model.parameters(), strict=True))
    said = str(caught.value)
    assert str(folder.path) in said
    assert len(said) < 500 + 2 * len(str(folder.path))
    return said


def header_of(raw: bytes) -> tuple[dict[str, object], bytes]:
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def safetensors(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_the_whole_folder_is_loaded(folder):
    model = nn.Linear(3, 2)
    assert load_final(model, folder.path) == STEP
    assert model.weight.flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["state", "layout", "marker"])
def test_every_cut_is_refused(folder, name):
    path = getattr(folder, name)
    raw = path.read_bytes()
    whole = {len(raw)} | ({len(raw) - 1} if name == "layout" else set())  # JSON may end without its newline
    step = 1 if name == "marker" else 7
    for length in [*range(0, len(raw), step), len(raw) - 2]:
        if length not in whole:
            path.write_bytes(raw[:length])
            refused(folder)


@pytest.mark.parametrize("name", ["state", "marker"])
def test_a_byte_more_is_refused(folder, name):
    path = getattr(folder, name)
    path.write_bytes(path.read_bytes() + b"\n")
    refused(folder)


def test_every_flipped_bit_of_marker_and_layout_is_refused_or_changes_nothing(folder):
    for path in (folder.marker, folder.layout):
        raw = path.read_bytes()
        for bit in range(0, 8 * len(raw), 5):
            flipped = bytearray(raw)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bytes(flipped))
            model = nn.Linear(3, 2)
            try:
                assert load_final(model, folder.path) == STEP
            except (StateError, ValueError):
                continue
            assert model.weight.flatten().tolist() == [0, 1, 2, 3, 4, 5]
            assert Layout.load(folder.layout).fingerprint == LAYOUT.fingerprint
        path.write_bytes(raw)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        MARKER[:-1],
        MARKER + b"x",
        b"YETO_FINAL_V1\nglobal_step=07\n",
        b"YETO_FINAL_V1\nglobal_step=18446744073709551616\n",
        b"YETO_FINAL_V1\nglobal_step=-7\n",
        b"YETO_FINAL_V2\nglobal_step=7\n",
        b"YETO_FINAL_V1\r\nglobal_step=7\r\n",
        "YETO_FINAL_V1\nglobal_step=\u0667\n".encode(),
        b"\xff" * 64,
        b"x" * (16 << 20),
    ],
    ids=range(11),
)
def test_what_is_no_marker_is_refused(folder, content):
    folder.marker.write_bytes(content)
    assert "marker" in refused(folder)


@pytest.mark.parametrize("step", [0, 6, 2**64 - 1])
def test_a_marker_of_another_step_is_refused(folder, step):
    folder.marker.write_bytes(f"YETO_FINAL_V1\nglobal_step={step}\n".encode())
    assert "not of one run" in refused(folder)


Change = Callable[[dict[str, dict[str, object]]], None]


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["weight"].update(dtype="I32"),
        lambda header: header["weight"].update(dtype="F64"),
        lambda header: header["weight"].update(dtype="F32", shape=[3, 2]),
        lambda header: header["weight"].update(shape=[6]),
        lambda header: header["weight"].update(shape=[2**40, 2**40]),
        lambda header: header["weight"].update(shape=[2**63, 2]),
        lambda header: header["weight"].update(data_offsets=[0, 2**60]),
        lambda header: header["weight"].update(data_offsets=[24, 0]),
        lambda header: header["bias"].update(data_offsets=[0, 8]),
        lambda header: header.update(other=header.pop("weight")),
        lambda header: header["__metadata__"].pop("fingerprint"),
        lambda header: header["__metadata__"].update(step="8"),
        lambda header: header["__metadata__"].update(fingerprint="00" * 32),
        lambda header: header.pop("__metadata__"),
    ],
    ids=range(14),
)
def test_a_header_that_does_not_fit_is_refused(folder, change: Change):
    header, body = header_of(folder.state.read_bytes())
    change(header)  # type: ignore[arg-type]
    folder.state.write_bytes(safetensors(header, body))
    refused(folder)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        safetensors(b"[" * 100_000, b""),
        safetensors(b'{"a":' * 100_000, b""),
        safetensors(b"{}", b""),
        safetensors(b"\xff\xfe", b""),
        b"PK\x03\x04" + bytes(200),
        bytes(4096),
    ],
    ids=range(8),
)
def test_what_is_no_safetensors_file_is_refused(folder, raw):
    folder.state.write_bytes(raw)
    refused(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(folder, value):
    raw = bytearray(folder.state.read_bytes())
    raw[-4:] = struct.pack("<f", value)
    folder.state.write_bytes(raw)
    assert "not finite" in refused(folder)


@pytest.mark.parametrize("name", ["state", "layout", "marker"])
@pytest.mark.parametrize("what", ["missing", "folder", "pipe"])
def test_what_is_no_file_is_refused(folder, name, what):
    path = getattr(folder, name)
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)  # nobody ever writes to it
    assert refused(folder)


@pytest.mark.parametrize(
    "raw",
    [b"\xff\xfe\n", b"\0" * 10, b"x" * 201, b"x" * (5 << 20), b"a\nb\n", "é\ud800".encode("utf-8", "surrogatepass")],
    ids=range(6),
)
def test_a_damaged_run_id_is_refused_and_left_alone(folder, raw):
    path = folder.path / "run_id"
    path.write_bytes(raw)
    with pytest.raises(RunError, match="run_id must be one line"), folder.held():
        pass
    assert path.read_bytes() == raw


def test_an_empty_run_id_is_made_and_kept(folder):
    (folder.path / "run_id").write_bytes(b"\n")
    with folder.held() as first:
        assert len(first) == 16
    with folder.held() as second:
        assert second == first
