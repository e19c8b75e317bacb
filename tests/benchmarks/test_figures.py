"""Every figure of ``benchmarks`` runs, at a size that takes seconds, and says something; real processes throughout.

What the values are is not judged here: at this size a machine measures its own overhead.
"""

import json
import math
import os

import pytest
import torch

from benchmarks import FIGURES, figures, harness
from benchmarks import __main__ as command
from benchmarks import round as whole_round
from benchmarks.gpu import Crossings
from benchmarks.harness import Figure, Size, Target
from tests.support.processes import processes, zygote

__all__ = ["processes", "zygote"]
FEWEST_LINES = {"step": 2, "stall": 2, "wire": 4, "codec": 4, "merge": 5, "memory": 3}


@pytest.fixture
def start(processes):
    """Children of the measurements are forked from the warm interpreter, and are gone when the test is."""
    return lambda name, arguments, _folder: processes.start(name, list(arguments))


@pytest.mark.parametrize("name", [name for name in FIGURES if name not in ("round", "gpu", "start")])
def test_a_figure_is_measured(name, start):
    found = figures(name, Size.TINY, start)
    assert len(found) >= FEWEST_LINES.get(name, 1)
    for figure in found:
        assert harness.finite(figure), figure
        assert figure.note
        assert figure.target is not None
        assert figure.spread[0] <= figure.value <= figure.spread[1]


def test_a_round_is_measured_against_gloo(start, monkeypatch):
    monkeypatch.setattr(whole_round, "RIVALS", [rival for rival in whole_round.RIVALS if rival[2] == "gloo"])
    figure, limit = figures("round", Size.TINY, start)
    assert harness.finite(figure)
    assert harness.finite(limit)
    assert min(figure.value, limit.value) > 0
    assert (figure.target is None, limit.target is None) == (False, True)


def test_rivals_that_are_not_installed_are_told_of(monkeypatch, tmp_path):
    monkeypatch.setattr(whole_round, "ROOT", tmp_path)
    monkeypatch.setattr(whole_round, "RIVALS", [rival for rival in whole_round.RIVALS if rival[2] != "gloo"])
    found = figures("round", Size.TINY)
    assert [figure.value for figure in found] == [None, None]
    assert {figure.note for figure in found} == {"make bench-rivals"}
    assert {figure.verdict for figure in found} == {"not measured"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_the_gpu_figure_says_so():
    (figure,) = figures("gpu", Size.TINY)
    assert figure.note == "no CUDA here"


def test_copies_between_devices_are_counted():
    with Crossings() as crossings:
        torch.zeros(10).to("meta").add_(1).clone()
        torch.empty(4, device="meta").copy_(torch.zeros(4))
        torch.zeros(3).clone().copy_(torch.ones(3))
    assert crossings.seen == [("cpu", "meta", 40), ("cpu", "meta", 16)]


def test_turns_alternate_and_the_first_is_not_counted():
    calls = []
    found = harness.alternate(2, lambda: calls.append("a") or len(calls), lambda: calls.append("b") or len(calls))
    assert calls == ["a", "b"] * 3
    assert found == [[3, 5], [4, 6]]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target(1.25, 1.1), ["aim", "ok", "misses"]),
        (Target(0.7, 0.9, more_is_better=True), ["misses", "misses", "aim"]),
    ],
)
def test_a_target_judges_the_median(target, words):
    values = [1.1, 1.2, 1.3] if not target.more_is_better else [0.5, 0.69, 0.9]
    judged = [Figure("name", "rival", "x", target, (0.0, value, 9.0)).verdict for value in values]
    assert judged == words
    assert target.met(math.nan) == "misses"


def test_the_table_and_the_file_hold_every_figure(tmp_path, capsys, monkeypatch):
    path = tmp_path / "new" / "figures.json"
    monkeypatch.setattr(command, "figures", lambda name, _: [Figure(name, "rival", "%", Target(3, 1), (2.0, 4.0, 2.5))])
    assert command.main(["step", "gpu", "--quick", "--json", os.fspath(path)]) == 0
    document = json.loads(path.read_text())
    assert document["size"] == "quick"
    assert [(f["name"], f["value"], f["spread"], f["verdict"]) for f in document["figures"]] == [
        ("step", 2.5, [2.0, 4.0], "ok"),
        ("gpu", 2.5, [2.0, 4.0], "ok"),
    ]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert all(word in printed[1] for word in ("step", "<= 3 %", "2.5 %", "2 .. 4", "ok"))


def test_an_unknown_figure_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["stepp"])
    assert ended.value.code == 2
    assert "figure 'stepp': expected one of step, stall" in capsys.readouterr().err
