"""Every example through the real launcher: two learners, one run folder, the final model in each learner's file."""

import ast
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.examples.conftest import tokens_per_step
from yeto_torch import load_final
from yeto_torch import run as launcher
from yeto_torch.launcher.folder import RunFolder

KEYS = ["total_steps=16", "schedule.sync_interval_steps=4", "merge.device=cpu"]


class Saved(torch.nn.Module):
    """A module whose parameters have the names and values of a saved state."""

    def __init__(self, state):
        super().__init__()
        for name, value in state.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, torch.nn.Parameter(value.clone()))


def lightning_state(folder):
    return torch.load(folder / "final.ckpt", weights_only=True)["state_dict"]


def safetensors_state(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "state_of"),
    [
        ("plain", safetensors_state),
        pytest.param("accelerate_loop", safetensors_state, marks=pytest.mark.slow),
        pytest.param("huggingface", safetensors_state, marks=pytest.mark.slow),  # each learner imports for seconds
        pytest.param("lightning_module", lightning_state, marks=pytest.mark.slow),
    ],
)
def test_an_example_trains_a_fleet_to_one_model(name, state_of, root, tmp_path, capfd):
    folder = RunFolder(tmp_path / "run")
    command = ["--learners", "2", "--run-dir", str(folder.path), *KEYS, "--", str(root / "examples" / f"{name}.py")]
    code = launcher.main(command)
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert "Warning" not in out, "a user's first run should have nothing to explain"
    for learner in (0, 1):
        assert f"[learner {learner}] final model, " in out
        state = state_of(folder.path / f"learner-{learner}")
        model = Saved({key: torch.full_like(value, torch.nan) for key, value in state.items()})
        assert load_final(model, folder.path) == 16
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key]), key
    tokens = tokens_per_step(folder)
    if name == "huggingface":  # sentences of 8 to 15 words, 32 to a step, in 16 places each
        assert all(32 * 8 <= count < 32 * 15 for count in tokens)
    else:
        assert max(tokens) in (1, 32)


WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == {library!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Absent())
import yeto_torch.integrations.{module}
"""


@pytest.mark.parametrize(("module", "library"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_an_integration_names_the_package_it_misses(module, library, root):
    code = WITHOUT.format(module=module, library=library)
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: yeto_torch.integrations.{module} needs {library}: pip install 'yeto-torch[ecosystem]'"
    )


def test_examples_stay_short_and_say_how_they_are_started(root):
    found = sorted((root / "examples").glob("*.py"))
    assert len(found) >= 4
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 80
        assert f"-- examples/{path.name}" in ast.get_docstring(ast.parse(text))
