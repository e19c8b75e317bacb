"""``profile=``: what the syncer prints of its configuration gives the hash the syncer computes, in every form.

Source: rulings §2.7; the canonical record is tested in ``tests/wire/test_profile.py``.
"""

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from syncer.config.compose import as_yaml, compose, typed_as
from syncer.config.keys import SYNCER, profile_record, validate
from yeto_torch.config import LearnerConfig
from yeto_torch.wire.profile import ProfileRecord

GOOD = {"syncer": "host:1", "learner_id": 0, "run_id": "r"}
FLEET = ("learners=5", "total_steps=700")
PLAIN = compose(list(FLEET))


def bound(profile) -> bytes | None:
    return LearnerConfig.resolve({}, **GOOD, profile=profile).profile_hash


def printed(*overrides):
    """What ``--cfg job --resolve`` prints, and the hash of a syncer that runs with it."""
    config = compose([*FLEET, *overrides])
    return as_yaml(config, resolve=True), profile_record(validate(typed_as(SYNCER, config))).hash


CONFIGURATIONS = [
    (),
    ("preset=paper",),
    ("preset=lockstep",),
    ("preset=direct", "learners=2", "schedule.quorum=1"),
    ("outer.lr=1",),
    ("outer.lr=1e-5", "outer.momentum=0.1"),
    ("outer.lr=[[1,0.7],[50,0.1]]",),
    ("outer.lr=[[1,1]]",),
    ("final.ack_timeout_s=7", "schedule.quorum_timeout_s=8"),
    ("schedule.quorum_timeout_s=8",),
    ("checkpoint.path=c", "checkpoint.resume=auto", "checkpoint.every=0"),
    ("checkpoint.path=c", "checkpoint.resume=true", "checkpoint.mark_final=true"),
    ("checkpoint.path=c", "budget.learner_steps=64"),
    ("session.require_profile_binding=true", "session.expected_contract=" + 32 * "ab"),
    ("schedule.on_loss=stop", "schedule.loss_after_s=301", "schedule.start_grace_s=0"),
    ("schedule.sync_interval_steps=0", "schedule.grace_tau=1e-3", "schedule.grace_gamma=1000000.0"),
    ("merge.iso_scale=norm", "merge.max_norm_ratio=100", "merge.iso_backend=scalar", "merge.device=cpu"),
    ("total_steps=18446744073709551615", "schedule.pipeline=4294967295"),
    ("listen.port=0", "progress=off", "svd.devices=[cpu]", "tape.path=t"),
    ("outer.guard=cap", "merge.delta_correction=heloco-normalized"),
    ("outer.guard=off", "merge.delta_correction=none"),
    ("outer.guard=cap", "outer.lr=[[1,0.7],[50,0.1]]", "merge.delta_correction=heloco-normalized"),
]


@pytest.mark.parametrize("overrides", CONFIGURATIONS, ids=lambda overrides: " ".join(overrides)[:50])
def test_the_printed_configuration_has_the_hash_of_the_syncer(overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, expected = printed(*overrides)
    assert bound(text) == expected
    file = tmp_path / "syncer.yaml"
    file.write_text(text)
    assert bound(file) == bound(str(file)) == expected


@settings(max_examples=25)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "outer.lr": st.floats(1e-40, 3e38) | st.integers(1, 9),
            "outer.momentum": st.floats(0, 0.99),
            "schedule.grace_gamma": st.floats(0, 1e9),
            "schedule.sync_interval_steps": st.floats(0, 1e9) | st.integers(0, 10**9),
            "schedule.loss_after_s": st.floats(0, 1e9) | st.integers(0, 10**9),
            "merge.max_norm_ratio": st.none() | st.floats(1.001, 1e9),
            "schedule.quorum": st.none() | st.integers(1, 5),
            "final.ack_timeout_s": st.none() | st.integers(1, 10**9),
        },
    )
)
def test_every_number_survives_being_printed(values):
    config = PLAIN.copy()
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    assert bound(as_yaml(config, resolve=True)) == profile_record(validate(typed_as(SYNCER, config))).hash


def refusal(profile):
    with pytest.raises(ValueError) as caught:
        bound(profile)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_configuration_that_lacks_a_key_of_the_record_is_refused_by_it():
    needed, expected = set(), profile_record(validate(typed_as(SYNCER, PLAIN))).hash
    for key in SYNCER.rules:
        section, _, name = key.rpartition(".")
        whole = OmegaConf.to_container(PLAIN)
        del (whole[section] if section else whole)[name]
        try:
            found = bound(whole)
        except ValueError:
            assert refusal(OmegaConf.to_yaml(whole)).startswith(f"profile: {key} is missing")
            needed.add(key)
        else:
            assert found == expected, "it is no part of the record"
    moving = {key for key in SYNCER.rules if key.startswith(("schedule.", "outer.", "checkpoint."))}
    moving |= {"learners", "total_steps", "merge.delta_correction", "merge.iso_scale", "merge.max_norm_ratio"}
    moving |= {"final.ack_timeout_s", "budget.learner_steps", "session.require_profile_binding"}
    assert needed == moving
    assert refusal("learners: 2\ntotal_steps: 3\n").startswith("profile: schedule.quorum is missing")
    assert refusal(as_yaml(compose([]), resolve=True)).startswith("profile: learners is missing")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("learners: 5", "learners: five"), "learners='five': must be an integer"),
        (("learners: 5", "learners: 5.0"), "learners=5.0: must be an integer"),
        (("quorum: null", "quorum: -1"), "schedule.quorum=-1"),
        (("grace_gamma: 0.8", "grace_gamma: much"), "schedule.grace_gamma='much': must be a finite number"),
        (("grace_gamma: 0.8", "grace_gamma: .inf"), "schedule.grace_gamma=inf"),
        (("delta_correction: heloco", "delta_correction: some"), "merge.delta_correction='some': must be one of"),
        (("resume: false", "resume: perhaps"), "checkpoint.resume='perhaps'"),
        (("mark_final: false", "mark_final: 1"), "checkpoint.mark_final=1: must be true or false"),
        (("lr: 0.7", "lr: [[1, 2, 3]]"), "outer.lr=[[1, 2, 3]]: must be"),
        (("momentum: 0.5", "momentum: ${oc.env:HOME}"), "outer.momentum='${oc.env:HOME}'"),
        (("guard: 'off'", "guard: warn"), "outer.guard='warn': must be one of off, cap"),
        (("pipeline: 2", "pipeline: 4294967296"), "profile pipeline=4294967296"),
        (("  pipeline: 2", "  pipeline: 2\n  bananas: 3"), "schedule.bananas: unknown to this version"),
        (("learners: 5", "learners: [5"), "not YAML"),
    ],
)
def test_a_printed_configuration_with_a_wrong_value_is_refused_by_its_key(change, told):
    text, _ = printed()
    assert change[0] in text
    message = refusal(text.replace(*change))
    assert message.startswith("profile: ")
    assert told in message


def test_a_guard_written_without_quotes_is_the_word_it_looks_like():
    text, expected = printed()
    assert bound(text.replace("guard: 'off'", "guard: off")) == expected


def test_keys_that_do_not_move_the_record_may_be_anything():
    text, expected = printed()
    changed = text.replace("host: 127.0.0.1", "host: 0.0.0.0").replace("iso_backend: torch-svd", "iso_backend: new")
    assert changed != text
    assert bound(changed + "watch: {every: 3}\n") == expected


def test_a_mapping_of_fields():
    record = ProfileRecord(learners=5, quorum=3, total_steps=700)
    assert bound(record) == bound(asdict(record)) == record.hash
    assert bound({"learners": 5, "total_steps": 700}) == record.hash, "defaults, and the majority"
    assert bound({"learners": 5, "total_steps": 700, "quorum": None, "final_ack_timeout_s": None}) == record.hash
    assert bound({"learners": 5, "total_steps": 700, "quorum_timeout_s": 9}) == bound(
        ProfileRecord(learners=5, quorum=3, total_steps=700, quorum_timeout_s=9, final_ack_timeout_s=9)
    )
    for resume, word in ((True, "auto"), (True, True), (False, False), (False, "false")):
        expected = ProfileRecord(learners=5, quorum=3, total_steps=700, resume=resume)
        assert bound({"learners": 5, "total_steps": 700, "resume": word}) == expected.hash
    for heloco, word in ((True, "heloco"), (False, "none")):
        expected = ProfileRecord(learners=5, quorum=3, total_steps=700, heloco=heloco)
        assert bound({"learners": 5, "total_steps": 700, "delta_correction": word}) == expected.hash
    extensions = {"merge.delta_correction": "heloco-normalized", "outer.guard": "cap"}
    expected = ProfileRecord(learners=5, quorum=3, total_steps=700, extensions=extensions)
    given_fields = {"learners": 5, "total_steps": 700, "extensions": {"outer.guard": "cap"}}
    assert bound(given_fields | {"delta_correction": "heloco-normalized"}) == expected.hash


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"total_steps": 3}, "profile: learners is missing"),
        ({"learners": 3}, "profile: total_steps is missing"),
        ({}, "profile: learners is missing"),
        ({"learners": 2, "total_steps": 3, "bananas": 1}, "profile: 'bananas' is no field of the record"),
        ({"learners": "2", "total_steps": 3}, "profile: learners='2'"),
        ({"learners": 2, "total_steps": 3, "grace_gamma": "0.8"}, "profile: profile grace_gamma='0.8'"),
        ({"learners": 2, "total_steps": 3, "resume": "maybe"}, "profile: resume='maybe'"),
        ({"learners": 2, "total_steps": 3, "delta_correction": 1}, "profile: delta_correction=1"),
    ],
)
def test_a_mapping_that_is_no_record_is_refused_by_its_field(fields, told):
    assert refusal(fields).startswith(told)


def test_a_hash_as_bytes_or_digits():
    assert bound(bytes(range(32))) == bound(bytes(range(32)).hex()) == bound(bytes(range(32)).hex().upper())
    assert bound(None) is None


@pytest.mark.parametrize("wrong", ["ab", "no/such/file.yaml", 7, ["learners"], b"short", "just text\n", "\n"])
def test_anything_else_is_told_what_is_legal(wrong):
    message = refusal(wrong)
    assert message.startswith("profile")
    assert "32 bytes" in message or "is missing" in message
