"""``python -m syncer.benchmark`` as a user runs it: valid experiments pass, spoilt ones fail with a sentence."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from syncer.benchmark.experiment import override
from tests.support.processes import child_environment
from tests.support.waiting import until
from yeto_torch.demos.digits import Digits
from yeto_torch.launcher.final import load_final

SCRIPT = str(Path(__file__).parent.parent / "support" / "budget_learner_script.py")
FAST = ("schedule.sync_interval_steps=4", "schedule.grace_ms=50", "merge.device=cpu")
WAIT_S = 300.0  # for what takes some seconds: four cold starts of Python on a machine that others use as well


def benchmark(processes, folder, *words, learners=2, budget=24, script=None):
    """The command, started; its children are real and cold, as a user's are."""
    own = [f"learners={learners}", f"budget_steps={budget}", override("run_dir", folder), *FAST, *words]
    behind = [] if script is None else ["--", SCRIPT, *script]
    return processes.start("benchmark", ["-m", "syncer.benchmark", *own, *behind])


def valid(running, folder):
    """It has passed; its verdict as a program reads it."""
    assert running.wait(WAIT_S) == 0, running.told()
    assert "PASS: a valid experiment" in running.text
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["valid"]
    assert not any(check["deviations"] for check in verdict["checks"])
    assert [check["name"] for check in verdict["checks"]][-1] == "model"
    assert verdict["final_step"] == verdict["cutoff_step"] + verdict["fragments"]
    assert (folder / "checkpoint.yeto.final").read_text() == f"YETO_FINAL_V1\nglobal_step={verdict['final_step']}\n"
    assert not left_over(folder)
    return verdict


def left_over(folder):
    """Living processes of an experiment, by what their command line or environment says (Linux; elsewhere unknown)."""
    marks = (f"YETO_RUN_DIR={folder}\0".encode(), f"tape.path={folder}".encode())
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes() + b"\0"
        except OSError:  # it ended meanwhile, or is not ours
            continue
        if any(mark in told for mark in marks):
            found.append(int(process.name))
    return found


@pytest.fixture
def folder(tmp_path):
    """A run folder; whatever a failed test left running for it is killed."""
    yield tmp_path / "run"
    for pid in left_over(tmp_path / "run"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_digits_and_the_synchronous_arm(processes, folder):
    running = benchmark(processes, folder, "--baseline", "preset=balanced", budget=60)
    verdict = valid(running, folder)
    assert verdict["fragments"] == 4
    model = Digits(seed=0).model()
    assert load_final(model, folder) == verdict["final_step"]
    arms = verdict["arms"]
    assert arms["synchronous"]["samples"] == 2 * 60 * 32
    assert arms["fleet"]["accuracy"] > 60.0, "ten classes"
    assert arms["synchronous"]["accuracy"] > 60.0
    assert re.search(
        r"^  fleet +accuracy .* %  loss .*  training .* s, consolidation .* s$", running.text, re.MULTILINE
    )
    assert re.search(r"^  synchronous +accuracy .* %  loss .*  training .* s$", running.text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("learners", [2, 4])
@pytest.mark.parametrize("wire", ["f32", "bf16", "q4"])
@pytest.mark.parametrize("layout", ["learner.average='.*'", "learner.matrix_merge=rda", "learner.matrix_merge=iso"])
def test_the_digits_on_every_layout_and_wire(processes, folder, learners, wire, layout):
    valid(benchmark(processes, folder, layout, f"learner.wire_dtype={wire}", learners=learners), folder)


@pytest.mark.slow
def test_a_script_of_ones_own_with_four_learners_on_iso_and_q4(processes, tmp_path):
    folder = tmp_path / "run" / "a run, 'mine'"
    verdict = valid(benchmark(processes, folder, script=["", "iso", "q4"], learners=4), folder)
    found = {check["name"]: check["found"] for check in verdict["checks"]}
    assert found["budgets"] == "24 steps each; tokens 192, 192, 192, 192"
    assert found["model"] == "model.safetensors, named by the layout"
    assert set(load_file(folder / "model.safetensors")) == {
        f"{part}.{kind}" for part in ("embed", "hidden", "out") for kind in ("weight", "bias")
    }


VOID = "the cut-off process ended with exit code 1: the experiment is void: learner"


@pytest.mark.parametrize(
    ("wrong", "learners", "sentence"),
    [
        ("twice", 2, f"{VOID} 1 reported its budget twice"),
        pytest.param("short", 1, f"{VOID} 0 reported 23 local steps, the budget is 24", marks=pytest.mark.slow),
        ("killed", 1, "learner 0 ended with exit code 137 (between the two processes|before the final cut)"),
        pytest.param("untidy", 1, r"round \d+ is missing on the tape", marks=pytest.mark.slow),
        pytest.param(
            "early",
            1,
            "learner 0 ended with exit code 0 before the cut-off checkpoint was written",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "broken",
            1,
            "learner 0 ended with exit code 1 before the cut-off checkpoint was written",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_spoilt_experiment_fails_with_the_right_sentence(processes, folder, wrong, learners, sentence):
    running = benchmark(processes, folder, "stop_grace_s=5", script=[wrong], learners=learners)
    assert running.wait(WAIT_S) == 1, running.told()
    assert re.search(f"^  - {sentence}$", running.text, re.MULTILINE), running.text
    assert re.search(r"^FAIL: \d+ deviations?$", running.text, re.MULTILINE)
    assert not json.loads((folder / "verdict.json").read_text())["valid"]
    assert not (folder / "model.safetensors").exists(), "only a valid experiment's model is exported"
    assert not left_over(folder)
    if wrong == "broken":
        assert "RuntimeError: the data set is not there" in running.text


def test_ctrl_c_stops_everything(processes, folder):
    running = benchmark(processes, folder, "stop_grace_s=5", script=["slow"], budget=10_000)
    running.wait_for("cut-off process on", WAIT_S)
    log = folder / "learner-1.log"
    until(lambda: log.exists() and "step 3" in log.read_text(), "the learners train", WAIT_S)
    running.signal(signal.SIGINT)
    assert running.wait(WAIT_S) == 130, running.told()
    assert not left_over(folder)
    assert not (folder / "verdict.json").exists()


def test_a_wrong_configuration_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "syncer.benchmark", "learners=2", "budget_steps=0", f"run_dir={tmp_path}/run"]
    done = subprocess.run(command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"syncer.benchmark: configuration error: budget_steps=0: must be .*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []
