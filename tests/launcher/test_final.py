"""load_final: the complete run's parameters and nothing else."""

import pytest
import torch
from safetensors.torch import save_file

from yeto_torch import Layout, StateError, load_final
from yeto_torch.launcher.folder import RunFolder
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.model_layout import Fragment, Tensor


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's too, a matrix, a scalar, and a buffer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3, dtype=dtype)
        self.scale = torch.nn.Parameter(torch.ones((), dtype=dtype))
        self.middle = torch.nn.Linear(3, 3, bias=False, dtype=dtype)
        self.head = torch.nn.Linear(3, 5, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(7))


LAYOUT = Layout(
    (
        Fragment(MergeMode.AVG, (Tensor("embed.weight", (5, 3)),)),
        Fragment(MergeMode.RDA, (Tensor("middle.weight", (3, 3)), Tensor("scale", ()))),
    )
)
VALUES = {
    "embed.weight": torch.arange(15.0).reshape(5, 3) + 1 / 3,
    "middle.weight": -torch.arange(9.0).reshape(3, 3),
    "scale": torch.tensor(0.125),
}


@pytest.fixture
def folder(tmp_path):
    """A complete run of 12 outer steps."""
    folder = RunFolder(tmp_path)
    LAYOUT.save(folder.layout)
    write_state(folder)
    folder.marker.write_bytes(b"YETO_FINAL_V1\nglobal_step=12\n")
    return folder


def write_state(folder, values=VALUES, step="12", fingerprint=None):
    metadata = {"step": step, "fingerprint": fingerprint or LAYOUT.fingerprint.hex()}
    save_file({name: value.clone() for name, value in values.items()}, folder.state, metadata)


def values_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def unchanged(model, folder, error, match):
    before = values_of(model)
    with pytest.raises(error, match=match):
        load_final(model, folder.path)
    assert all(torch.equal(value, before[name]) for name, value in values_of(model).items())


def test_every_parameter_is_the_final_one_and_stays_tied(folder):
    model = Tied()
    assert load_final(model, folder.path) == 12
    assert values_of(model).keys() == VALUES.keys()
    for name, value in values_of(model).items():
        assert torch.equal(value, VALUES[name])
    assert model.head.weight is model.embed.weight
    assert model.seen == 7


def test_a_lower_precision_rounds(folder):
    model = Tied(torch.bfloat16)
    load_final(model, str(folder.path))
    assert model.embed.weight.dtype == torch.bfloat16
    assert torch.equal(model.embed.weight, VALUES["embed.weight"].bfloat16())


def test_numbered_tensors_get_their_names_from_the_layout(folder):
    numbered = {
        "fragment.0.tensor.0": VALUES["embed.weight"].flatten(),
        "fragment.1.tensor.0": VALUES["middle.weight"].flatten(),
        "fragment.1.tensor.1": VALUES["scale"].reshape(1),
    }
    write_state(folder, numbered)
    model = Tied()
    load_final(model, folder.path)
    assert all(torch.equal(value, VALUES[name]) for name, value in values_of(model).items())


def test_a_compiled_or_wrapped_model_has_the_same_names(folder):
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = Tied()
    load_final(Wrapper(model), folder.path)
    assert torch.equal(model.scale, VALUES["scale"])


def test_a_run_without_its_marker_is_not_complete(folder):
    folder.marker.unlink()
    unchanged(Tied(), folder, StateError, r"not complete .*checkpoint\.yeto\.final")


@pytest.mark.parametrize(
    "text", ["", "YETO_FINAL_V1\n", "YETO_FINAL_V1\nglobal_step=12", "YETO_FINAL_V1\nglobal_step=-1\n"]
)
def test_a_damaged_marker_is_refused(folder, text):
    folder.marker.write_text(text)
    unchanged(Tied(), folder, StateError, "not a completion marker")


def test_another_step_or_another_layout_is_refused(folder):
    write_state(folder, step="11")
    unchanged(Tied(), folder, StateError, "its step is '11'")
    write_state(folder, fingerprint="00" * 32)
    unchanged(Tied(), folder, StateError, "its fingerprint")


def test_missing_and_damaged_files_are_named(folder):
    whole = folder.state.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        folder.state.write_bytes(whole[:size])
        unchanged(Tied(), folder, StateError, r"model\.safetensors")
    folder.state.unlink()
    unchanged(Tied(), folder, StateError, r"model\.safetensors")
    folder.layout.unlink()
    unchanged(Tied(), folder, StateError, r"layout\.json")


def test_a_tensor_that_is_missing_or_too_small_is_named(folder):
    write_state(folder, {name: value for name, value in VALUES.items() if name != "scale"})
    unchanged(Tied(), folder, StateError, "'scale'")
    write_state(folder, {**VALUES, "middle.weight": torch.zeros(2, 3)})
    unchanged(Tied(), folder, StateError, r"9 values for 'middle\.weight'")


def test_another_model_is_refused(folder):
    model = Tied()
    model.middle = torch.nn.Linear(3, 4, bias=False)
    unchanged(model, folder, ValueError, r"'middle\.weight' is \(4, 3\) in the model, but \(3, 3\) in the run")
    unchanged(torch.nn.Linear(3, 3), folder, ValueError, r"no parameter 'embed\.weight'")


def test_parameters_the_run_did_not_train(folder):
    model = Tied()
    model.extra = torch.nn.Linear(2, 2)
    unchanged(model, folder, ValueError, r"did not train 'extra\.weight' \(2 such")
    before = model.extra.weight.detach().clone()
    assert load_final(model, folder.path, strict=False) == 12
    assert torch.equal(model.extra.weight, before)
    assert torch.equal(model.scale, VALUES["scale"])
    model.extra.requires_grad_(False)
    load_final(model, folder.path)


def test_a_folder_of_something_else_is_not_a_run(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StateError, match="not a run folder"):
            load_final(Tied(), path)
