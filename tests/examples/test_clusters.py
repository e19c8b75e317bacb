"""The files for Slurm and SkyPilot, as far as they can be looked at without a cluster.

``test_the_batch_script_runs`` executes the batch script with ``srun`` and ``scontrol`` replaced by two lines of shell;
what a real Slurm does with it is not shown here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from yeto_torch import load_final

ROOT = Path(__file__).resolve().parent.parent.parent
BATCH = ROOT / "examples" / "slurm" / "fleet.sbatch"
TASKS = sorted((ROOT / "examples" / "skypilot").glob("*.yaml"))
DEADLINE_S = 240.0


def check_shell(text):
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_batch_script_is_shell():
    check_shell(BATCH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", TASKS, ids=[path.stem for path in TASKS])
def test_a_task_file_is_yaml_with_commands_that_are_shell(path):
    task = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert task.keys() == {"name", "resources", "envs", "workdir", "file_mounts", "setup", "run"}
    check_shell(task["setup"])
    check_shell(task["run"])
    for name in task["envs"]:  # each is used by a command, or read by the learner
        assert f"${name}" in task["setup"] + task["run"] or name.startswith("YETO_")


def test_there_is_a_task_for_either_side():
    assert [path.stem for path in TASKS] == ["learner", "syncer"]


STANDINS = {
    "scontrol": '#!/bin/bash\n[ "$*" = "show hostnames localhost,localhost" ] && printf "localhost\\nlocalhost\\n"\n',
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
}


@pytest.mark.slow
def test_the_batch_script_runs(tmp_path):
    for name, text in STANDINS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    run_dir = tmp_path / "run folder"
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost,localhost",
        "RUN_DIR": str(run_dir),
        "TOTAL_STEPS": "8",
    }
    command = ["bash", str(BATCH), str(ROOT / "examples" / "plain.py")]
    done = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("final model, ") == 2
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    assert load_final(model, run_dir) == 8
