"""A real syncer for one learner that lives in the test's own process, set up as a run folder."""

import copy

import pytest
import torch

from syncer.tape import merges
from tests.support.processes import Processes, processes, zygote  # noqa: F401 - fixtures
from yeto_torch import load_final
from yeto_torch.launcher.folder import RunFolder


@pytest.fixture
def fleet(processes: Processes, tmp_path, monkeypatch):  # noqa: F811
    """fleet(total_steps) -> (syncer, run folder); the YETO_* environment is that of learner 0 of 1."""

    def start(total_steps):
        folder = RunFolder(tmp_path / "run")
        folder.path.mkdir()
        syncer = processes.syncer(
            "schedule.sync_interval_steps=0",
            f"checkpoint.path={folder.checkpoint}",
            "checkpoint.mark_final=true",
            f"tape.path={folder.tape}",
            f"final.state_path={folder.state}",
            f"final.layout_path={folder.layout}",
            learners=1,
            total_steps=total_steps,
        )
        environment = {"SYNCER": syncer.address, "LEARNER_ID": "0", "RUN_ID": "examples", "RUN_DIR": str(folder.path)}
        for name, value in environment.items():
            monkeypatch.setenv(f"YETO_{name}", value)
        return syncer, folder

    return start


def assert_final(model: torch.nn.Module, folder: RunFolder) -> None:
    """``model`` holds the final parameters of the run, bit for bit."""
    final = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in final.parameters():
            parameter.zero_()
    load_final(final, folder.path)
    named = dict(final.named_parameters())
    assert named
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), named[name].cpu()), name


def parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """A copy."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def same_state(one: dict, other: dict) -> bool:
    """Two optimizers' ``state_dict()["state"]``."""
    return one.keys() == other.keys() and all(
        all(torch.equal(torch.as_tensor(value), torch.as_tensor(other[number][name])) for name, value in entry.items())
        for number, entry in one.items()
    )


def tokens_per_step(folder: RunFolder) -> set[float]:
    """What the tape says of every answer that was merged; 0 are those given after the data had ended."""
    return {r["c_tokens"] / r["c_steps"] for line in merges(folder.tape) for r in line["responders"]}
