"""The door of ``python -m syncer``: presets, files of the user's own, one-line errors, exit codes, the wheel.

Most tests compose in this process; a few start the real one, because exit codes, stderr and signals are its own.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from syncer.config.compose import compose, typed_as
from syncer.config.keys import SYNCER, profile_record, validate

FLEET = ("learners=4", "total_steps=10")


def load(*overrides, **files):
    return validate(typed_as(SYNCER, compose([*FLEET, *overrides], **files)))


def refused(*overrides, **files):
    with pytest.raises(ValueError) as caught:
        validate(typed_as(SYNCER, compose(list(overrides), **files)))
    message = str(caught.value)
    assert "\n" not in message
    return message


def regime(policy):
    return policy.outer.lr[0][1], policy.outer.momentum, policy.merge.delta_correction


# ---------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (None, (0.7, 0.5, "heloco")),
        ("balanced", (0.7, 0.5, "heloco")),
        ("direct", (1.0, 0.0, "none")),
        ("paper", (0.7, 0.9, "heloco")),
    ],
)
def test_presets(preset, expected):
    policy = load(*([f"preset={preset}"] if preset else []))
    assert regime(policy) == expected
    assert policy.schedule.quorum == (1 if preset == "paper" else 3)
    assert (policy.schedule.pipeline, policy.schedule.sync_interval_steps, policy.schedule.grace_ms) == (2, 24.0, 1000)


def test_lockstep_waits_for_all_and_for_nothing_else():
    schedule = load("preset=lockstep").schedule
    assert (schedule.quorum, schedule.pipeline) == (4, 1)
    assert (schedule.sync_interval_steps, schedule.min_round_interval_ms, schedule.grace_ms) == (0.0, 0, 0)


def test_single_keys_override_the_preset_wherever_they_stand():
    for order in (["outer.lr=0.25", "preset=paper"], ["preset=paper", "outer.lr=0.25"]):
        assert regime(load(*order)) == (0.25, 0.9, "heloco")
    assert load("preset=lockstep", "schedule.quorum=null").schedule.quorum == 3


def test_an_unknown_preset_is_answered_with_the_known_ones():
    assert refused("preset=nope") == "preset=nope: must be one of balanced, direct, lockstep, paper"
    assert refused(*FLEET, "preset=null").startswith("preset=null: must be one of balanced")


# ----------------------------------------------------------------------------------------------- files of the user's


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "it's, a [folder]"  # whatever Hydra's grammar makes of such a name
    (made / "preset").mkdir(parents=True)
    return made


def test_a_file_of_keys_only_is_laid_over_the_defaults(folder):
    (folder / "mine.yaml").write_text(
        "learners: 7\nouter: {momentum: 0.25}\nprogress: off\ncheckpoint: {resume: off}\n"
    )
    for name in ("mine", "mine.yaml"):
        policy = validate(typed_as(SYNCER, compose(["total_steps=3", "preset=paper"], str(folder), name)))
        assert policy.learners == 7
        assert regime(policy) == (0.7, 0.25, "heloco")
        assert (policy.schedule.quorum, policy.progress, policy.checkpoint.resume) == (1, "off", "false")
    assert load(config_dir=str(folder), config_name="mine").learners == 4  # the command line wins


def test_a_file_with_a_defaults_list_says_itself_what_it_builds_on(folder):
    (folder / "mine.yaml").write_text("defaults: [config, override preset: paper, _self_]\nschedule: {pipeline: 5}\n")
    policy = load(config_dir=str(folder), config_name="mine")
    assert regime(policy) == (0.7, 0.9, "heloco")
    assert policy.schedule.pipeline == 5
    assert regime(load("preset=direct", config_dir=str(folder), config_name="mine")) == (1.0, 0.0, "none")


def test_a_preset_of_the_users_own(folder):
    text = "# @package _global_\nouter: {lr: 0.5, momentum: 0.5}\nmerge: {delta_correction: none}\n"
    (folder / "preset" / "own.yaml").write_text(text)
    assert regime(load("preset=own", config_dir=str(folder))) == (0.5, 0.5, "none")
    assert "own" in refused("preset=nope", config_dir=str(folder))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learners: [", "broken.yaml"),
        ("- 1\n", "broken"),
        ("schedule: {quorum: lots}\n", "schedule.quorum=lots: must be null or an integer"),
        ("schedule: {bananas: 1}\n", "schedule.bananas: unknown key"),
        ("bananas: 1\n", "bananas: unknown key"),
        ("schedule: 3\n", "schedule=3: must be a group of keys: schedule.quorum"),
        ("defaults: [_self_]\nlearners: 1\n", "--config-name: must be a file of keys only"),
        ("defaults: [_self_, config]\nbananas: 1\n", "bananas: unknown key"),
        ("outer: {lr: .nan}\n", "outer.lr=nan"),
        ('security: {hmac_key_file: "a\\0b"}\n', "security.hmac_key_file=a b: must be"),
    ],
)
def test_a_broken_file_is_refused_by_name(text, expected, folder):
    (folder / "broken.yaml").write_text(text)
    assert expected in refused(*FLEET, config_dir=str(folder), config_name="broken")


def test_files_that_are_not_there(tmp_path):
    assert refused(config_dir=str(tmp_path / "no")).startswith(f"--config-dir {tmp_path / 'no'}: must be")
    assert refused(config_dir=str(tmp_path), config_name="no").startswith("--config-name no: must be")


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", SYNCER.rules)
def test_a_wrong_value_of_any_key_is_named_at_the_door(name):
    message = refused(*FLEET, f"{name}={{a:[1]}}")
    assert message.startswith(f"{name}="), message
    assert SYNCER.rules[name].legal in message


@pytest.mark.parametrize("name", [*SYNCER.sections, "learners", "outer.lr", "svd.devices"])
def test_a_key_below_any_section_that_is_not_there(name):
    for form in (f"{name}.bananas=1", f"+{name}.bananas=1", f"++{name}.bananas=1"):
        assert refused(*FLEET, form).startswith(f"{name}.bananas: unknown key")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "learners is missing"),
        (["learners=2"], "total_steps is missing"),
        (["preset=lockstep"], "learners is missing"),
        (["preset=lockstep", "learners=0", "total_steps=1"], "learners=0: must be"),
        ([*FLEET, "bananas=1"], "bananas: unknown key"),
        ([*FLEET, "hydra.bananas=1"], "hydra.bananas: unknown key"),
        ([*FLEET, "schedule=null"], "schedule=null: must be a group of keys"),
        ([*FLEET, "schedule=${outer}"], "schedule=${outer}: must be a group of keys"),
        ([*FLEET, "~schedule.quorum"], "~schedule.quorum: a key cannot be removed"),
        ([*FLEET, "~schedule"], "~schedule: a key cannot be removed"),
        (["learners"], "learners: cannot be read as key=value"),
        (["learners=["], "learners=[: cannot be read as key=value"),
        (["=3"], "=3: unknown key"),
        (["learners=1,2", "total_steps=1"], "learners=1,2: Ambiguous value"),
        (
            ["learners=${nope}", "total_steps=1"],
            "learners=${nope}: Interpolation key 'nope' not found; must be an integer",
        ),
        ([*FLEET, "outer.lr=${oc.env:YETO_NO_SUCH}"], "outer.lr=${oc.env:YETO_NO_SUCH}: "),
        ([*FLEET, "svd.devices=[${nope}]"], "svd.devices[0]: "),
        ([*FLEET, "learners=many"], "learners=many: must be an integer from 1 to 4294967295"),
        ([*FLEET, "outer.lr=nan"], "outer.lr=nan: must be a number above 0"),
        ([*FLEET, "schedule.grace_gamma=inf"], "schedule.grace_gamma=inf: must be a number"),
    ],
)
def test_errors_of_the_command_line(overrides, expected):
    assert refused(*overrides).startswith(expected)


def test_values_from_the_environment(monkeypatch):
    monkeypatch.setenv("RATE", "0.125")
    monkeypatch.setenv("STEPS", "77")
    policy = load("outer.lr=${oc.env:RATE}", "total_steps=${oc.env:STEPS}")
    assert (policy.outer.lr, policy.total_steps) == (((1, 0.125),), 77)


def test_a_schedule_on_the_command_line():
    assert load("outer.lr=[[1,0.7],[100,0.1]]").outer.lr == ((1, 0.7), (100, 0.1))


# ------------------------------------------------------------------------------------------------------ the process


def run(*arguments, root, cwd, path=None, module="syncer"):
    environment = os.environ | {"PYTHONPATH": str(path or root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ([*FLEET, "schedule.bananas=1"], "schedule.bananas"),
        (["total_steps=3"], "learners"),
        (
            [*FLEET, "outer.momentum=1.5", "tape.path=tape", "checkpoint.path=c", "listen.address_file=a"],
            "outer.momentum",
        ),
        (["--multirun", *FLEET], "--multirun"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(arguments, key, root, tmp_path):
    done = run(*arguments, root=root, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"syncer: configuration error: .*\n", done.stderr)
    assert key in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_torch_is_not_imported_for_a_wrong_configuration(root, tmp_path):
    code = (
        "import sys\n"
        "from syncer.__main__ import main\n"
        "code = main(['learners=0', 'total_steps=1'])\n"
        "print(code, 'torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 False\n", done.stderr


def test_cfg_job_prints_and_leaves_no_trace(root, tmp_path):
    key = tmp_path / "key"
    key.write_text("Tr0ub4dor&3")
    done = run(*FLEET, "preset=lockstep", f"security.hmac_key_file={key}", "--cfg", "job", root=root, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "schedule:\n  quorum: ${learners}\n" in done.stdout
    assert "outer:\n  lr: 0.7\n  momentum: 0.5\n" in done.stdout
    assert "Tr0ub4dor" not in done.stdout
    resolved = run(*FLEET, "preset=lockstep", "--cfg", "job", "--resolve", root=root, cwd=tmp_path)
    assert "schedule:\n  quorum: 4\n" in resolved.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_help_shows_every_key_with_its_default_and_range(root, tmp_path):
    done = run("--help", root=root, cwd=tmp_path)
    assert done.returncode == 0
    for name, rule in SYNCER.rules.items():
        assert re.search(rf"^  {re.escape(name)}=", done.stdout, re.MULTILINE), name
        assert rule.legal in done.stdout
    assert "preset=balanced|direct|lockstep|paper" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_configuring_ends_at_once_with_130(number, root, tmp_path):
    pipe = tmp_path / "key"
    os.mkfifo(pipe)  # validation blocks on it: the process is then known to be configuring
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "syncer", *FLEET, f"security.hmac_key_file={pipe}"]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    writer = -1
    try:
        deadline = time.monotonic() + 60
        while writer < 0:
            try:
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # succeeds once the reader is there
            except OSError:
                assert child.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
        child.send_signal(number)
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 130
        assert errors == ""
    finally:
        child.kill()
        child.communicate()
        if writer >= 0:
            os.close(writer)


# -------------------------------------------------------------------------------------------------------- the wheel


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="builds a wheel without a network")
def test_an_installed_wheel_starts_in_an_empty_folder(root, tmp_path):
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "empty"
    source.mkdir()
    empty.mkdir()
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("yeto_torch", "syncer", "conf"):
        shutil.copytree(root / name, source / name, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert not (site / "conf").exists()
    shown = run(*FLEET, "preset=paper", "--cfg", "job", root=root, cwd=empty, path=site)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "momentum: 0.9" in shown.stdout
    assert run(*FLEET, "preset=nope", root=root, cwd=empty, path=site).returncode == 2
    shown = run(
        "learners=2", "budget_steps=9", "--cfg", "job", root=root, cwd=empty, path=site, module="syncer.benchmark"
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "budget_steps: 9\n" in shown.stdout
    assert list(empty.iterdir()) == []


def test_the_profile_of_a_fleet_is_the_same_by_every_road(folder):
    (folder / "mine.yaml").write_text("learners: 4\ntotal_steps: 10\nschedule: {quorum: 3}\n")
    by_file = validate(typed_as(SYNCER, compose([], str(folder), "mine")))
    assert profile_record(by_file) == profile_record(load()) == profile_record(load("schedule.quorum=3"))
