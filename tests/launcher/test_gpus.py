"""Which GPUs the learners of one machine see."""

from __future__ import annotations

import pytest

from yeto_torch.launcher.folder import RunFolder
from yeto_torch.launcher.launch import Launch, visible_gpus


def shares(tmp_path, learners: int, ranks: int, gpus: str) -> list[str | None]:
    launch = Launch(RunFolder(tmp_path), learners, ("train.py",), nproc_per_learner=ranks)
    return [launch.gpus_of(i, gpus.split()).get("CUDA_VISIBLE_DEVICES") for i in range(learners)]


@pytest.mark.parametrize(
    ("learners", "ranks", "gpus", "expected"),
    [
        (2, 1, "0 1", ["0", "1"]),
        (2, 2, "0 1 2 3", ["0,1", "2,3"]),
        (1, 1, "0 1 2 3", ["0,1,2,3"]),  # a script that spreads its model itself
        (2, 1, "0 1 2 3", ["0,1", "2,3"]),
        (3, 1, "0 1", ["0", "1", "0"]),  # too few: they take turns
        (2, 2, "4 7", ["4,7", "4,7"]),
        (2, 2, "0", [None, None]),  # not even one learner's: the script must cope
        (2, 1, "", [None, None]),
        (2, 1, "GPU-a MIG-b", ["GPU-a", "MIG-b"]),
    ],
)
def test_every_learner_has_its_share(tmp_path, learners, ranks, gpus, expected):
    assert shares(tmp_path, learners, ranks, gpus) == expected


def test_what_the_user_hides_stays_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert visible_gpus() == ["2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_gpus_are_counted_as_cuda_counts_them(monkeypatch, tmp_path):
    """A container that was given the host's GPUs 3 and 5: to CUDA they are 0 and 1."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == []
    for name in ("nvidia3", "nvidia5", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]
