"""``python -m syncer.plan``: what people type, what they read, what they did wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from syncer.plan.__main__ import USAGE, command, situation_of, told, wishes_of
from syncer.plan.advice import plan
from syncer.plan.situation import Situation

GIVEN = [
    "model=8M",
    "learners=2",
    "step=0.5s",
    "link=1gbit",
    "fragments=4",
    "wire_dtype=bf16",
    "interval=24",
    "quorum=2",
]


def test_it_says_what_to_type_next(tmp_path, capsys):
    command([*GIVEN, f"json={tmp_path / 'plan.json'}"])
    text = capsys.readouterr().out
    assert "python -m syncer learners=2 schedule.sync_interval_steps=24 schedule.quorum=2 schedule.pipeline=2" in text
    assert 'YetoOuterOptimizer(..., fragments=4, wire_dtype="bf16")' in text
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["settings"]["interval"] == 24
    assert 0 < content["forecast"]["goodput"] <= 1
    assert content["memory"] == {"syncer_bytes": 120_000_000, "learner_bytes": 32_000_000}
    assert "memory of tensors      syncer up to 120 MB, learner 32 MB beyond its model" in text


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("model=0", "model=0: must be a number of parameters from 1"),
        ("model=lots", "model=lots: must be a number of parameters"),
        ("learners=0", "learners=0: must be an integer from 1 to 1024"),
        ("step=5parsec", "step=5parsec: must be a time above 0"),
        ("link=100", "link=100: must be a rate above 0 with its unit"),
        ("link=-1mbit", "link=-1mbit: must be a rate"),
        ("quorum=3", "quorum=3: must be an integer from 1 to 2"),
        ("wire_dtype=int8", "wire_dtype=int8: must be one of f32, bf16, q4"),
        ("interval=0", "interval=0: must be a number of steps above 0"),
        ("speeds=1", "speeds=1: must be 2 numbers from 0.01 to 1"),
        ("speeds=1,0.0000001", "speeds=1,0.0000001: must be 2 numbers from 0.01 to 1"),
        ("speeds=0.5,0.5", "speeds=0.5,0.5: must be"),
        ("mtbf=0h", "mtbf=0h: must be a time above 0"),
        ("model=1e999", "model=1e999: must be a number of parameters"),
        ("colour=red", "'colour=red' is not one of model=…"),
    ],
)
def test_a_wrong_word_is_named(changed, sentence):
    key = changed.partition("=")[0]
    with pytest.raises(ValueError) as caught:
        command([word for word in GIVEN if word.partition("=")[0] != key] + [changed])
    assert sentence in str(caught.value)


def test_a_rate_that_is_given_replaces_the_default():
    values = dict(word.split("=") for word in GIVEN)
    assert situation_of(values).merge_rate == Situation(1, 1, 1.0, 1.0, 1.0).merge_rate
    assert situation_of(values | {"merge_rate": "20GB"}).merge_rate == 20e9


def test_usage_errors_exit_with_two():
    done = subprocess.run([sys.executable, "-m", "syncer.plan"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"model: missing, must be given as model=… (usage: {USAGE})\n"


def test_a_network_that_cannot_keep_up_is_said():
    values = dict(word.split("=") for word in GIVEN) | {"link": "1mbit"}
    situation = situation_of(values)
    assert "held up: the syncer's link is" in told(situation, plan(situation, wishes_of(values)))
