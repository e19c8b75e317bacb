"""``--nproc-per-learner``: learners of several ranks under the launcher, and torchrun by hand."""

import os
import re
import signal
import socket
import sys

import pytest

from tests.support.processes import processes, zygote  # noqa: F401  # fixtures
from yeto_torch import run as launcher
from yeto_torch.launcher.processes import Children, Exited, Line

DEADLINE_S = 120.0
KEYS = ["preset=direct", "schedule.sync_interval_steps=0", "schedule.grace_ms=100", "merge.device=cpu"]

SCRIPT = """
import os, signal, sys, threading
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from yeto_torch import YetoOuterOptimizer

learner, rank = int(os.environ["YETO_LEARNER_ID"]), int(os.environ["RANK"])
assert os.environ["LOCAL_RANK"] == os.environ["RANK"]
assert os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] == "2"
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
torch.manual_seed(learner)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = YetoOuterOptimizer(optimizer, model, fragments=2, streams=1, process_group=dist.group.WORLD)
print("training on port", os.environ["MASTER_PORT"], "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
what, died, back = sys.argv[1], Path(sys.argv[2] + "died"), Path(sys.argv[2] + "back")
step = 0
while not optimizer.finished:
    step += 1
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    optimizer.step()
    if (learner, rank) == (1, 1) and what == "raise":
        raise ArithmeticError("the data of this rank is broken")
    if (learner, rank) == (1, 1) and what == "die" and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if learner == 1 and what == "die" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        back.touch()
    while what == "die" and died.exists() and not back.exists():  # the run must not end without the other learner
        threading.Event().wait(0.02)
optimizer.finish()
print("final", sum(p.double().sum().item() for p in model.parameters()), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(capfd, folder, script, what, *options):
    """The launcher in this process; its exit code, standard output and standard error."""
    options = ["--learners", "2", "--nproc-per-learner", "2", "--run-dir", str(folder), *options]
    command = [str(script), what, f"{folder}-"]
    code = launcher.main([*options, "total_steps=8", *KEYS, "--", *command])
    out, err = capfd.readouterr()
    return code, out, err


def finals(out):
    return re.findall(r"^\[learner (\d\.\d)\] final (\S+)$", out, re.MULTILINE)


@pytest.mark.slow
def test_a_learner_that_lost_a_rank_is_started_again_whole(capfd, tmp_path, script):
    code, out, err = run(capfd, tmp_path / "run", script, "die", "--max-restarts", "1")
    assert code == 0, out + err
    assert "learner 1.1 ended with exit code 137; ending the other ranks of learner 1" in err
    assert "learner 1 ended with exit code 137; starting it again" in err
    assert sorted(name for name, _ in finals(out)) == ["0.0", "0.1", "1.0", "1.1"]
    assert len({value for _, value in finals(out)}) == 1
    met = re.findall(r"^\[learner (\d)\.(\d)\] training on port (\d+) attempt (\d)$", out, re.MULTILINE)
    assert len({(learner, port) for learner, _, port, _ in met}) == 3  # one place to meet for every start of a learner
    assert {attempt for learner, _, _, attempt in met if learner == "1"} == {"0", "1"}


@pytest.mark.slow
def test_the_first_failure_of_a_rank_is_shown_whole(capfd, tmp_path, script):
    code, out, err = run(capfd, tmp_path / "run", script, "raise")
    assert code == 1
    report = err[err.index("first failure: learner 1.1, exit code 1") :]
    assert report.count("Traceback (most recent call last):") == 1
    assert "ArithmeticError: the data of this rank is broken" in report
    assert "learner 1 failed with exit code 1; the others go on" in err
    assert sorted(name for name, _ in finals(out)) == ["0.0", "0.1"]


def test_a_wrong_number_of_ranks(capfd, script):
    arguments = ["--learners", "2", "--nproc-per-learner", "0", "total_steps=4", "--", str(script)]
    assert launcher.main(arguments) == 2
    assert "--nproc-per-learner 0: must be at least 1" in capfd.readouterr().err


@pytest.mark.slow
def test_one_ctrl_c_stops_every_rank(tmp_path, script, root):
    children = Children()
    command = [sys.executable, "-m", "yeto_torch.run", "--learners", "2", "--nproc-per-learner", "2"]
    command += ["--run-dir", str(tmp_path / "run"), "total_steps=1000000", *KEYS, "--", str(script), "", "x"]
    child = children.start("launcher", command, {**os.environ, "PYTHONPATH": str(root)})
    lines = []
    while not isinstance(event := children.next_event(DEADLINE_S), Exited):
        assert isinstance(event, Line), lines
        lines.append(event.text)
        if "training on port" in event.text and sum("training on port" in line for line in lines) == 4:
            child.signal(signal.SIGINT)
    output = "\n".join(lines)
    assert event.code == 130, output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_examples(capfd, tmp_path, root, name):
    pytest.importorskip("sklearn")
    example = root / "examples" / "islands" / f"{name}.py"
    command = ["--learners", "2", "--nproc-per-learner", "2", "--run-dir", str(tmp_path / "run")]
    code = launcher.main([*command, "total_steps=80", "--", str(example)])
    out, err = capfd.readouterr()
    assert code == 0, out + err
    accuracies = [float(text) for text in re.findall(r"final model, ([\d.]+) % of unseen digits", out)]
    assert len(accuracies) == 4
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 80


@pytest.mark.slow
def test_torchrun_by_hand(processes, script):  # noqa: F811
    syncer = processes.syncer(*KEYS, "schedule.quorum=1", learners=1, total_steps=8)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"YETO_SYNCER": syncer.address, "YETO_LEARNER_ID": "0", "YETO_RUN_ID": "by hand"}
    options = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    ranks = processes.start("torchrun", ["-m", "torch.distributed.run", *options, str(script), "", "x"], env, cold=True)
    assert syncer.wait() == 0, syncer.told()
    assert ranks.wait() == 0, ranks.told()
    assert len(re.findall(r"^final ", ranks.text, re.MULTILINE)) == 2
