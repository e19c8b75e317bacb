"""The benchmark's door: its keys, what it refuses and why, and the words it hands to its children."""

import socket

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from syncer.benchmark.config import BENCHMARK, make_plan
from syncer.benchmark.experiment import default_learner, free_port, override
from syncer.config.compose import compose, typed_as
from syncer.config.keys import SYNCER, validate

FLEET = ("learners=2", "budget_steps=48")


def plan(*overrides, command=None, **files):
    return make_plan(typed_as(BENCHMARK, compose([*overrides], keys=BENCHMARK, **files)), command)


def refused(*overrides, command=None, **files):
    with pytest.raises(ValueError) as caught:
        plan(*overrides, command=command, **files)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_two_keys_are_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = plan(*FLEET)
    assert (found.learners, found.budget_steps, found.command, found.baseline) == (2, 48, None, False)
    assert found.folder.parent == tmp_path / "runs"
    assert (found.host, found.port) == ("127.0.0.1", 0)
    assert list(tmp_path.iterdir()) == [], "nothing is made before it is started"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["learners=2"], "budget_steps is missing: it must be given, an integer from 1 to"),
        (["budget_steps=2"], "learners is missing"),
        ([*FLEET, "budget_steps=0"], "budget_steps=0: must be an integer from 1 to"),
        ([*FLEET, "profile=abcd"], "profile=abcd: must be null: the two processes differ by design"),
        (
            [*FLEET, "session.require_profile_binding=true"],
            "session.require_profile_binding=true: must be false: the two",
        ),
        ([*FLEET, "checkpoint.resume=auto"], "checkpoint.resume=auto: must be left out: the benchmark decides it"),
        ([*FLEET, "total_steps=9"], "total_steps=9: must be left out"),
        ([*FLEET, "budget.learner_steps=9"], "budget.learner_steps=9: must be left out"),
        ([*FLEET, "checkpoint.path=x"], "checkpoint.path=x: must be left out"),
        ([*FLEET, "tape.path=x"], "tape.path=x: must be left out"),
        ([*FLEET, "learner.wire_dtype=f16"], "learner.wire_dtype=f16: must be one of f32, bf16, q4"),
        ([*FLEET, "learner.matrix_merge=avg"], "learner.matrix_merge=avg: must be one of rda, iso"),
        ([*FLEET, "learner.average='('"], "learner.average=(: must be null or a regular expression"),
        ([*FLEET, "learner.streams=257"], "learner.streams=257: must be an integer from 0 to 256"),
        ([*FLEET, "learner.bananas=1"], "learner.bananas: unknown key; known are learner.task"),
        ([*FLEET, "bananas=1"], "bananas: unknown key; known are"),
        ([*FLEET, "learner.split=classes", "learner.task=text"], "learner.split=classes: must be even for"),
        (["learners=11", "budget_steps=1", "learner.split=classes"], "learners=11: must be at most 10"),
        ([*FLEET, "schedule.quorum=3"], "schedule.quorum=3: must be null or an integer from 1 to learners, 2"),
        ([*FLEET, "preset=nope"], "preset=nope: must be one of balanced, direct, lockstep, paper"),
        ([*FLEET, "stop_grace_s=0"], "stop_grace_s=0.0: must be a number above 0"),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_and_range(overrides, expected):
    assert refused(*overrides).startswith(expected)


def test_every_key_has_its_rule_and_meaning():
    assert set(SYNCER.rules) < set(BENCHMARK.rules)
    assert all(rule.legal and rule.meaning for rule in BENCHMARK.rules.values())


def test_the_run_folder_is_new_or_empty(tmp_path):
    assert plan(*FLEET, f"run_dir={tmp_path}").folder == tmp_path
    assert plan(*FLEET, f"run_dir={tmp_path}/a/b").folder == tmp_path / "a" / "b"
    (tmp_path / "file").touch()
    for name in (tmp_path, tmp_path / "file", tmp_path / "file" / "below"):
        assert refused(*FLEET, f"run_dir={name}").startswith(f"run_dir={name}: must be")


def test_a_command_of_ones_own(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert plan(*FLEET, command=[str(script), "--epochs", "3"]).command == (str(script), "--epochs", "3")
    assert plan(*FLEET, command=["-m", "mine"]).command == ("-m", "mine")
    assert refused(*FLEET, command=[]).startswith("no script behind --")
    assert refused(*FLEET, command=["-m"]).startswith("no script behind --")
    assert refused(*FLEET, command=["no.py"]) == "-- no.py: must be an existing script, or -m MODULE"
    assert refused(*FLEET, "baseline=true", command=[str(script)]).startswith("baseline=true: must be false")
    for key in ("learner.wire_dtype=q4", "learner.seed=1", "learner.matrix_merge=iso"):
        assert refused(*FLEET, key, command=[str(script)]).startswith(f"{key}: must be left out")


def test_a_file_of_the_users_own(tmp_path):
    (tmp_path / "mine.yaml").write_text("learners: 3\nlearner: {wire_dtype: q4}\nouter: {momentum: 0.25}\n")
    found = plan("budget_steps=2", "preset=paper", config_dir=str(tmp_path), config_name="mine")
    assert (found.learners, found.options["wire_dtype"], found.syncer["outer.momentum"]) == (3, "q4", 0.25)
    (tmp_path / "mine.yaml").write_text("defaults: [benchmark, override preset: direct, _self_]\nbudget_steps: 9\n")
    found = plan("learners=1", config_dir=str(tmp_path), config_name="mine")
    assert (found.budget_steps, found.syncer["outer.lr"]) == (9, 1.0)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("preset=lockstep",),
        ("preset=paper", "outer.lr=[[1,0.5],[20,1e-05]]", "svd.devices=[cpu,auto]", "schedule.grace_ms=7"),
        ("merge.device=cpu", "listen.host='::1'", "schedule.on_loss=stop", "schedule.sync_interval_steps=1e-07"),
    ],
)
def test_what_is_said_about_the_syncer_reaches_it(overrides):
    found = plan(*FLEET, *overrides)
    words = [override(key, value) for key, value in found.syncer.items()]
    expected = validate(typed_as(SYNCER, compose(["learners=2", "total_steps=9", "listen.port=0", *overrides])))
    assert validate(typed_as(SYNCER, compose([*words, "total_steps=9"]))) == expected


@example("a${b}c")
@example("a\\'b\\\\${c}\\")
@given(st.text(st.characters(exclude_categories=["C"]), min_size=1) | st.text("\\'\"${}ab[],:= ", min_size=1))
def test_any_path_survives_the_grammar(text):
    assume(text != "???")  # a value that is missing, wherever it comes from
    for path in (text, f"/{text}"):
        value = OverridesParser.create().parse_override(override("tape.path", path)).value()
        assert OmegaConf.create({"path": value}).path == path


@pytest.mark.parametrize(
    "text", ["null", "true", "Off", "nan", "1e5", "[a]", "{a: 1}", "a,b", "~", "a=b", "$x", "'\\'"]
)
def test_words_that_mean_something_stay_words(text):
    assert compose(["learners=1", "total_steps=1", override("tape.path", text)]).tape.path == text


def test_learners_are_told_how_to_join_a_protected_syncer(tmp_path):
    (tmp_path / "key").write_text("secret")
    assert plan(*FLEET).secrets == {}
    found = plan(*FLEET, f"security.hmac_key_file={tmp_path}/key")
    assert found.secrets == {"YETO_HMAC_KEY_FILE": f"{tmp_path}/key"}
    assert found.syncer["security.hmac_key_file"] == f"{tmp_path}/key"


def test_the_default_learner_is_told_its_layout():
    found = plan(*FLEET, "learner.average='.*'", "learner.streams=2", "learner.task=text")
    words = default_learner(found.options)
    assert words[:2] == ("-m", "yeto_torch.demos.learner")
    assert set(words[2:]) == {
        "--task=text",
        "--split=even",
        "--seed=0",
        "--matrix-merge=rda",
        "--average=.*",
        "--wire-dtype=bf16",
        "--streams=2",
    }


def test_the_port_is_free_and_not_one_that_connections_leave_from():
    port = free_port("127.0.0.1")
    assert 20_000 <= port < 30_000
    with socket.create_server(("127.0.0.1", port)):
        pass
