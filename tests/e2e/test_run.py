"""The local launcher with a real syncer and real learners of a user's script."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from yeto_torch import load_final
from yeto_torch import run as launcher
from yeto_torch.launcher import fleet
from yeto_torch.launcher.processes import Children, Exited, Line
from yeto_torch.wire.errors import StateError

DEADLINE_S = 120.0
KEYS = ["preset=direct", "schedule.sync_interval_steps=0", "merge.device=cpu"]

SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
import torch
from yeto_torch import YetoOuterOptimizer

learner = int(os.environ["YETO_LEARNER_ID"])
assert os.environ["OMP_NUM_THREADS"] and os.environ["YETO_LEARNERS"] == "2"
torch.manual_seed(learner)  # they meet at learner 0's weights
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = YetoOuterOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, fragments=2, streams=1)
print("training with pid", os.getpid(), "as", os.environ["YETO_RUN_ID"], flush=True)
x = torch.randn(64, 4)
while not optimizer.finished:
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if sys.argv[1:] == ["fail", str(learner)]:
        raise ArithmeticError("the data of this learner is broken")
    if sys.argv[1:2] == ["fail-once"]:
        died, back = Path(sys.argv[2]), Path(sys.argv[3])
        if learner == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if learner == 1:
            back.touch()
        while died.exists() and not back.exists():  # without this learner's steps no round ends
            threading.Event().wait(0.02)
optimizer.finish()
print("final", sum(p.double().sum().item() for p in model.parameters()))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def run(capfd, folder, script, *arguments, total_steps=8, options=()):
    """The launcher in this process; its exit code, standard output and standard error."""
    options = ["--learners", "2", "--run-dir", str(folder), *options]
    code = launcher.main([*options, f"total_steps={total_steps}", *KEYS, "--", script, *arguments])
    out, err = capfd.readouterr()
    return code, out, err


def the_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def final_sums(out):
    return re.findall(r"^\[learner \d\] final (\S+)$", out, re.MULTILINE)


def run_ids(out):
    return set(re.findall(r"training with pid \d+ as (\w+)$", out, re.MULTILINE))


def test_a_run_completes_and_the_same_folder_goes_on(capfd, tmp_path, script):
    folder = tmp_path / "a run's folder"  # a space and a quote, which Hydra's grammar must survive
    code, out, err = run(capfd, folder, script)
    assert code == 0, out + err
    assert all(re.match(r"\[(syncer|learner 0|learner 1)\] ", line) for line in out.splitlines())
    assert len(set(final_sums(out))) == 1
    assert len(final_sums(out)) == 2
    assert "complete" in err

    model = the_model()
    assert load_final(model, folder) == 8
    assert repr(sum(p.double().sum().item() for p in model.parameters())) == final_sums(out)[0]

    code, more, err = run(capfd, folder, script, total_steps=12)
    assert code == 0, more + err
    assert "resuming" in more
    assert run_ids(more) == run_ids(out)
    assert load_final(model, folder) == 12


def test_a_failed_learner_is_reported_and_the_others_go_on(capfd, tmp_path, script):
    code, out, err = run(capfd, tmp_path / "run", script, "fail", "1")
    assert code == 1
    assert "[syncer]" in out
    assert "training complete after 8 outer steps" in out
    assert len(final_sums(out)) == 1
    report = err[err.index("first failure: learner 1, exit code 1") :]
    assert report.count("Traceback (most recent call last):") == 1
    assert "ArithmeticError: the data of this learner is broken" in report


def test_a_failed_learner_may_be_started_again(capfd, tmp_path, script):
    arguments = ["fail-once", str(tmp_path / "died"), str(tmp_path / "back")]
    code, out, err = run(capfd, tmp_path / "run", script, *arguments, options=["--max-restarts", "1"])
    assert code == 0, out + err
    assert "learner 1 ended with exit code 137; starting it again" in err
    assert len(final_sums(out)) == 2


@pytest.mark.slow
def test_a_learner_that_comes_back_too_late_is_stopped(capfd, tmp_path, script):
    (tmp_path / "back").touch()  # so learner 0 does not wait for the other, and ends the run alone
    arguments = ["fail-once", str(tmp_path / "died"), str(tmp_path / "back")]
    code, out, err = run(capfd, tmp_path / "run", script, *arguments, options=["--max-restarts", "1"])
    assert code == 0, out + err
    assert "the run was complete before learner 1 had joined; stopping it" in err
    assert "Traceback" not in out
    assert len(final_sums(out)) == 1
    load_final(the_model(), tmp_path / "run")


def test_when_every_learner_has_failed_the_syncer_is_stopped(capfd, tmp_path, script):
    Path(script).write_text("import os, sys\nsys.exit(40 + int(os.environ['YETO_LEARNER_ID']))")
    code, out, err = run(capfd, tmp_path / "run", script)
    assert code in (40, 41)
    assert f"first failure: learner {code - 40}, exit code {code}" in err
    assert "no learner is left" in err
    with pytest.raises(StateError, match="not complete"):
        load_final(the_model(), tmp_path / "run")
    assert "training complete" not in out


def test_a_script_that_ends_without_its_fleet_is_told_so(capfd, tmp_path, script, monkeypatch):
    monkeypatch.setattr(fleet, "IDLE_SYNCER_S", 0.2)
    Path(script).write_text("print('all done')")
    code, out, err = run(capfd, tmp_path / "run", script)
    assert code == 1
    assert out.count("all done") == 2
    assert "the run is not complete" in err


def test_what_the_syncer_refuses_is_one_line_and_its_exit_code(capfd, tmp_path, script):
    code, out, err = run(capfd, tmp_path / "run", script, total_steps="many")
    assert code == 2
    assert "total_steps" in out
    assert "Traceback" not in out + err
    assert "[learner" not in out


def test_one_ctrl_c_stops_all_and_the_run_can_be_resumed(capfd, tmp_path, script):
    folder = tmp_path / "run"
    children = Children()
    command = [sys.executable, "-m", "yeto_torch.run", "--learners", "2", "--run-dir", str(folder)]
    command += ["total_steps=1000000", *KEYS, "--", script]
    root = str(Path(__file__).resolve().parents[2])
    child = children.start("launcher", command, {**os.environ, "PYTHONPATH": root})
    pids, lines = [], []
    while True:
        event = children.next_event(DEADLINE_S)
        assert event is not None, lines
        if isinstance(event, Exited):
            code = event.code
            break
        assert isinstance(event, Line)
        lines.append(event.text)
        if found := re.search(r"training with pid (\d+)", event.text):
            pids.append(int(found[1]))
            if len(pids) == 2:
                child.signal(signal.SIGINT)
    output = "\n".join(lines)
    assert code == 130, output
    assert "Traceback" not in output
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not (folder / "checkpoint.yeto.final").exists()

    merges = [json.loads(line) for line in (folder / "tape.jsonl").read_text().splitlines()]
    done = max((merge["step"] for merge in merges if "event" not in merge), default=0)
    code, out, err = run(capfd, folder, script, total_steps=done + 4)
    assert code == 0, out + err
    assert f"at step {done}" in out
    assert load_final(the_model(), folder) == done + 4


LEAVES_ONE_BEHIND = """
import os, signal, subprocess, sys

late = "print(open(sys.argv[1]).read(), flush=True)"  # as soon as somebody has written
if os.environ["YETO_LEARNER_ID"] == "1":
    signal.pause()
subprocess.Popen([sys.executable, "-c", "import sys;" + late, sys.argv[1]], start_new_session=True)
sys.exit(3)
"""


def test_what_a_learner_left_behind_may_still_write_when_it_has_ended(tmp_path):
    """A process in a session of its own, as a logger's: it holds the pipe, and its words are shown."""
    script, pipe = tmp_path / "train.py", tmp_path / "pipe"
    script.write_text(LEAVES_ONE_BEHIND)
    os.mkfifo(pipe)
    options = ["--learners", "2", "--run-dir", str(tmp_path / "run"), "total_steps=8", *KEYS]
    children, said = Children(), []
    launched = children.start(
        "launcher", [sys.executable, "-u", "-m", "yeto_torch.run", *options, "--", str(script), str(pipe)], os.environ
    )
    try:
        while not isinstance(event := children.next_event(DEADLINE_S), Exited):
            assert event is not None, said
            said.append(event.text)
            if event.text == "[run] learner 0 failed with exit code 3; the others go on":
                pipe.write_text("a late word")
            if event.text == "[learner 0] a late word":
                launched.signal(signal.SIGINT)
    finally:
        children.kill()
    assert "[learner 0] a late word" in said
    assert event.code == 130, said


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a child")
def test_a_launcher_that_is_killed_leaves_nobody_behind(tmp_path):
    script, children = tmp_path / "train.py", Children()
    script.write_text("import signal; print('ready', flush=True); signal.pause()")
    options = ["--learners", "2", "--run-dir", str(tmp_path / "run"), "total_steps=8", *KEYS]
    launched = children.start(
        "launcher", [sys.executable, "-u", "-m", "yeto_torch.run", *options, "--", str(script)], os.environ
    )
    said, left = [], []
    try:
        while sum(text.endswith("ready") for text in said) < 2:
            event = children.next_event(DEADLINE_S)
            assert isinstance(event, Line), (event, said)
            said.append(event.text)
        left = [os.pidfd_open(pid) for pid in children_of(launched.process.pid)]
        assert len(left) == 3
        os.kill(launched.process.pid, signal.SIGKILL)
        for pid in left:
            assert select.select([pid], [], [], DEADLINE_S)[0]
    finally:
        children.kill()
        for pid in left:
            os.close(pid)


def children_of(parent):
    """Process ids, from the kernel's table."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may have ended meanwhile
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def test_output_that_nobody_reads_any_more_ends_the_run(tmp_path, script):
    command = [sys.executable, "-m", "yeto_torch.run", "--learners", "2", "--run-dir", str(tmp_path / "run")]
    command += ["total_steps=1000000", *KEYS, "--", script]
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 130
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--learners"),
        (["--learners", "0", "total_steps=4", "--", "SCRIPT"], "--learners 0: must be at least 1"),
        (["--learners", "two", "total_steps=4", "--", "SCRIPT"], "invalid int value: 'two'"),
        (["--learners", "2", "--", "SCRIPT"], "total_steps=T is missing"),
        (["--learners", "2", "total_steps=4"], "no script"),
        (["--learners", "2", "total_steps=4", "--", "-m"], "no script"),
        (["--learners", "2", "total_steps=4", "train.py"], "'train.py' is not key=value"),
        (["--learners", "2", "total_steps=4", "--", "nowhere.py"], "no such script: nowhere.py"),
        (["--learners", "2", "total_steps=4", "learners=3", "--", "SCRIPT"], "the launcher sets learners itself"),
        (["--learners", "2", "--max-restarts", "-1", "total_steps=4", "--", "SCRIPT"], "--max-restarts -1"),
        (["--learners", "2", "--grace-s", "nan", "total_steps=4", "--", "SCRIPT"], "--grace-s nan"),
        (["--learners", "2", "--run-dir", "/dev/null/x", "total_steps=4", "--", "SCRIPT"], "/dev/null/x"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(capfd, script, arguments, complaint):
    assert launcher.main([script if argument == "SCRIPT" else argument for argument in arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert complaint in err


def test_two_launchers_do_not_share_a_folder(capfd, tmp_path, script):
    from yeto_torch.launcher.folder import RunFolder

    with RunFolder(tmp_path / "run").held():
        code, _, err = run(capfd, tmp_path / "run", script)
    assert code == 2
    assert "in use by another launcher" in err
