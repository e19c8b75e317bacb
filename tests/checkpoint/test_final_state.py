"""The final state: a file every safetensors reader takes, bit for bit, with names, shapes and identity."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from syncer.checkpoint.format import PIECE_BYTES
from syncer.final_state import NamedTensor, safetensors_parts, write_final_state
from tests.support.fake_disk import FakeDisk
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.errors import LocalError, StateError
from yeto_torch.wire.layout import WireFragment, WireLayout
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

LAYOUT = Layout(
    (
        Fragment(MergeMode.AVG, (Tensor("emb.weight", (5, 3)), Tensor("scale", ()))),
        Fragment(MergeMode.RDA, (Tensor("l0.w", (2, 2, 2)), Tensor("l0.größe", (7,)))),
        Fragment(MergeMode.ISO, (Tensor("l1.w", (4, 3)), Tensor("l1.v", (3, 5)))),
    )
)
PARAMS = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)) for numel in LAYOUT.wire.numels]
FINGERPRINT = LAYOUT.fingerprint


def pieces_of(fragment):
    return PARAMS[fragment].split([tensor.numel for tensor in LAYOUT.fragments[fragment].tensors])


def test_without_names_tensors_are_numbered_and_iso_ones_are_matrices(tmp_path):
    path = tmp_path / "final.safetensors"
    write_final_state(path, PARAMS, LAYOUT.wire, 17, FINGERPRINT)
    loaded = load_file(path)
    shapes = {(0, 0): (15,), (0, 1): (1,), (1, 0): (8,), (1, 1): (7,), (2, 0): (4, 3), (2, 1): (3, 5)}
    assert set(loaded) == {f"fragment.{f}.tensor.{i}" for f, i in shapes}
    for (f, i), shape in shapes.items():
        tensor = loaded[f"fragment.{f}.tensor.{i}"]
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, pieces_of(f)[i].reshape(shape))


def test_with_a_layout_tensors_have_their_own_names_and_shapes(tmp_path):
    path = tmp_path / "final.safetensors"
    write_final_state(path, PARAMS, LAYOUT.wire, 17, FINGERPRINT, LAYOUT)
    loaded = load_file(path)
    assert set(loaded) == {tensor.name for tensor in LAYOUT.tensors}
    for f, fragment in enumerate(LAYOUT.fragments):
        for tensor, piece in zip(fragment.tensors, pieces_of(f), strict=True):
            assert torch.equal(loaded[tensor.name], piece.reshape(tensor.shape))


@pytest.mark.parametrize("names", [None, LAYOUT])
def test_step_and_fingerprint_are_strings_in_the_metadata(tmp_path, names):
    path = tmp_path / "final.safetensors"
    write_final_state(path, PARAMS, LAYOUT.wire, 2**64 - 1, FINGERPRINT, names)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": str(2**64 - 1), "fingerprint": FINGERPRINT.hex()}


def test_values_keep_their_bits(tmp_path):
    bits = torch.tensor([0, 1, 0x80000000, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3DCCCCCD], dtype=torch.uint32)
    wire = WireLayout((WireFragment(MergeMode.AVG, (7,)),))
    write_final_state(tmp_path / "final", [bits.view(torch.float32)], wire, 1, FINGERPRINT)
    assert torch.equal(load_file(tmp_path / "final")["fragment.0.tensor.0"].view(torch.uint32), bits)


def test_parameters_that_require_grad_or_are_not_contiguous_are_taken(tmp_path):
    wire = WireLayout((WireFragment(MergeMode.AVG, (3,)),))
    column = torch.arange(6.0).reshape(3, 2)[:, 0].requires_grad_()
    write_final_state(tmp_path / "final", [column], wire, 1, FINGERPRINT)
    assert load_file(tmp_path / "final")["fragment.0.tensor.0"].tolist() == [0, 2, 4]


def test_the_tensors_begin_aligned():
    for length in range(1, 20):
        tensor = NamedTensor("n" * length, (1,), memoryview(bytes(4)))
        head = next(iter(safetensors_parts([tensor], {})))
        (size,) = struct.unpack_from("<Q", head)
        assert size % 8 == 0
        assert len(head) == 8 + size
        assert json.loads(head[8:])["n" * length]["data_offsets"] == [0, 4]


def test_tensors_are_lent_in_pieces_never_copied():
    data = bytearray(PIECE_BYTES + 4)
    parts = list(safetensors_parts([NamedTensor("a", (PIECE_BYTES // 4 + 1,), memoryview(data))], {}))
    assert [len(part) for part in parts[1:]] == [PIECE_BYTES, 4]
    assert all(part.obj is data for part in parts[1:])


def test_the_layout_of_another_model_is_refused_and_nothing_is_written(tmp_path):
    other = Layout((Fragment(MergeMode.AVG, (Tensor("other", (15,)), Tensor("scale", ()))), *LAYOUT.fragments[1:]))
    with pytest.raises(StateError, match="names the parameters of another model"):
        write_final_state(tmp_path / "final", PARAMS, LAYOUT.wire, 17, FINGERPRINT, other)
    assert not list(tmp_path.iterdir())


def test_two_tensors_of_one_name_are_refused(tmp_path):
    twice = Layout((Fragment(MergeMode.AVG, (Tensor("a", (2,)), Tensor("a", (2,)))),))
    with pytest.raises(StateError, match="not distinct"):
        write_final_state(tmp_path / "final", [torch.zeros(4)], twice.wire, 1, twice.fingerprint, twice)


@pytest.mark.parametrize(
    "params",
    [
        PARAMS[:2],
        [*PARAMS[:2], torch.zeros(26)],
        [*PARAMS[:2], torch.zeros(28)],
        [*PARAMS[:2], torch.zeros(27, dtype=torch.int32)],
    ],
    ids=["fragments", "too-few", "too-many", "int"],
)
def test_parameters_that_do_not_fit_are_our_own_error(tmp_path, params):
    with pytest.raises(LocalError):
        write_final_state(tmp_path / "final", params, LAYOUT.wire, 17, FINGERPRINT)
    assert not list(tmp_path.iterdir())


def test_the_file_is_durable_when_the_call_returns():
    path = Path("/disk/final.safetensors")
    disk = FakeDisk({path: b"old"})
    write_final_state(path, PARAMS, LAYOUT.wire, 17, FINGERPRINT, None, disk)
    assert disk.operations[-4:] == ["sync", "close", "replace", "sync_directory"]
    assert disk.survivors(path) == {disk.files[path]}
    with pytest.raises(StateError, match=r"final state /disk/final\.safetensors: cannot be written: No space"):
        write_final_state(path, PARAMS, LAYOUT.wire, 17, FINGERPRINT, None, FakeDisk({path: b"old"}, fail_at=3))
