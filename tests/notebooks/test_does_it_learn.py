"""Notebook 05 says what the records say: other records, other words; none, "not run". Live runs are left out here."""

from __future__ import annotations

import io
import json
import random
import sys
from contextlib import redirect_stdout
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from experiments.specs import EXPERIMENTS
from tests.support.invented_records import made_up, write

NOTEBOOK = Path(__file__).resolve().parent.parent.parent / "notebooks" / "05_does_it_learn.ipynb"
LIVE = ("training.run(", "fleet_of(trace")
FAILURES = ("decoupled", "of_ideal", "stalled", "elastic")
FORMS = ("decoupled_bound", "of_ideal_bound", "stalled_formula", "elastic_formula")


def recorded(path, percent, goodput=0.9):
    """Every run; fleets are ``percent`` worse than synchronous training but for a little noise, q2 a percent more."""
    rng = random.Random(0)

    def result_of(job):
        match job.kind:
            case "train":
                fleet = job.config["fleet"]
                worse = 0.0 if fleet is None else percent + rng.uniform(-0.05, 0.05) + (fleet["wire"] == "q2")
                return {"loss": 2.0 * (1 + worse / 100), "gain": [1.0 + (fleet or {}).get("momentum", 0.0)] * 4}
            case "alone":
                return {"loss": 2.0 * (1 + (percent + rng.uniform(-0.05, 0.05)) / 100)}
            case "trace":
                values = {name: goodput + rng.uniform(-0.01, 0.01) for name in FAILURES}
                return values | dict.fromkeys(("made", *FORMS), 0.95)
            case "wire":
                deviation = rng.uniform(-0.1, 0.1)
                return {"deviation": deviation, "per_step": 1e4, "ddp_f32": 4e5, "ddp_bf16": 2e5}
            case _:
                return {"ratio": 2.0 + rng.uniform(0, 0.1), "decoupled": goodput, "synchronous": goodput / 2}

    write(made_up(EXPERIMENTS, result_of), path)


@pytest.fixture
def told(monkeypatch):
    """Runs the notebook on a file of records; all that it prints, and how many figures it leaves to be shown."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(path):
        monkeypatch.setenv("EVIDENCE_RECORDS", str(path))
        cells = [
            cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
        ]
        sources = ["".join(cell["source"]) for cell in cells]
        assert sum(any(word in source for word in LIVE) for source in sources) == len(LIVE)
        names, said = {}, io.StringIO()
        with redirect_stdout(said):
            for source in sources:
                if not any(word in source for word in LIVE):
                    exec(compile(source, NOTEBOOK.name, "exec"), names)
        return said.getvalue(), len(plt.get_fignums())

    plt.switch_backend("Agg")
    yield run
    plt.close("all")


def test_without_records_everything_is_not_run(told, tmp_path):
    said, figures = told(tmp_path / "none.jsonl")
    assert figures == 0
    assert "0 recorded runs" in said
    assert said.count("not run") > 20
    assert not any(word in said for word in ("better", "worse", " met", "%, n ="))


@pytest.mark.parametrize(
    ("percent", "word", "parity", "iso"),
    [
        (5.0, "worse than synchronous", "not met", "not met"),
        (-5.0, "better than synchronous", "not met", "met"),
        (0.0, "not told apart from synchronous", "met", "not met"),
    ],
)
def test_the_words_are_those_of_the_records(told, tmp_path, percent, word, parity, iso):
    path = tmp_path / "records.jsonl"
    recorded(path, percent)
    said, figures = told(path)
    lines = said.splitlines()
    assert figures == 9
    assert "not run" not in said
    words = [line for line in lines if line.startswith(("char, M =", "digits, M =")) and " synchronous: " in line]
    assert len(words) == 11
    assert sum(word in line for line in words) >= len(words) - 2  # an interval of 95 % misses once in a while
    assert f"± 1 %: {parity}" in next(line for line in lines if line.startswith("The claim, M = 2"))
    assert f"(M = 2): {iso}" in next(line for line in lines if line.startswith("The claim, iso"))
    assert "The claim, q4 within ± 0.25 % of f32: met." in lines
    assert "The same test does not let q2 pass: it has power." in lines


@pytest.mark.parametrize(("goodput", "verdict"), [(0.9, "met"), (0.8, "not met")])
def test_goodput_is_judged_by_its_margin(told, tmp_path, goodput, verdict):
    path = tmp_path / "records.jsonl"
    recorded(path, 0.0, goodput)
    said, _ = told(path)
    line = next(line for line in said.splitlines() if line.startswith("virtual time") and "at least 0.87:" in line)
    assert f"at least 0.87: {verdict} (" in line
