"""LearnerConfig: every wrong value is one sentence; the environment fills what was not given."""

import inspect
import logging
import math
import re

import pytest
import torch

import yeto_torch.config
from yeto_torch import YetoOuterOptimizer
from yeto_torch.config import LearnerConfig, LearnerOptions, disabled, parse_address
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.model_layout import contract_hash
from yeto_torch.wire.profile import ProfileRecord

GOOD = {"syncer": "host:1", "learner_id": 0, "run_id": "r"}
WRONG = [
    ("syncer", "host", "host:port"),
    ("syncer", "host:0", "1 to 65535"),
    ("syncer", "host:65536", "1 to 65535"),
    ("syncer", ":29400", "host:port"),
    ("syncer", "::1:29400", "IPv6"),
    ("syncer", "tcp://host:1", "host:port"),
    ("syncer", 29400, "host:port"),
    ("learner_id", -1, "0 to"),
    ("learner_id", 2**32, "0 to"),
    ("learner_id", True, "integer"),
    ("learner_id", "0", "integer"),
    ("run_id", "", "not empty"),
    ("run_id", 7, "text"),
    ("fragments", 0, "from 1"),
    ("pattern", "random", "binpack, strided"),
    ("matrix_merge", "avg", "rda, iso"),
    ("average", "(", "regular expression"),
    ("wire_dtype", "f16", "f32, bf16, q4"),
    ("streams", -1, "from 0 to 256"),
    ("streams", 257, "from 0 to 256"),
    ("merge_alpha", 1.5, "from 0 to 1"),
    ("merge_alpha", -0.1, "from 0 to 1"),
    ("merge_alpha", math.nan, "from 0 to 1"),
    ("tokens_per_step", 0, "from 1"),
    ("profile", b"short", "32 bytes"),
    ("contract", "ab", "64 hex digits"),
    ("contract", bytes(31), "32 bytes"),
    ("hmac_key", b"", "at least one"),
    ("hmac_key", "text", "bytes"),
    ("tls", 7, "a mapping of ca, cert, key, server_hostname"),
    ("tls", {"ca": 7}, "a mapping of ca, cert, key, server_hostname"),
    ("budget_steps", 0, "from 1"),
    ("wait_for_start", 1, "True, False"),
    ("on_nonfinite", "ignore", "raise, resync"),
    ("max_reconnects", -1, "from 0"),
    ("connect_timeout_s", 0, "above 0"),
    ("final_timeout_s", "long", "above 0"),
]


@pytest.mark.parametrize(("name", "value", "legal"), WRONG, ids=[f"{n}={v!r}"[:40] for n, v, _ in WRONG])
def test_a_wrong_value_is_named_with_its_legal_range(name, value, legal):
    with pytest.raises(ValueError, match=name) as error:
        LearnerConfig.resolve({}, **{**GOOD, name: value})
    assert legal in str(error.value)
    if name not in ("profile", "contract", "hmac_key"):
        assert repr(value) in str(error.value)


def test_the_key_is_never_shown():
    config = LearnerConfig.resolve({}, **GOOD, hmac_key=b"secret-key")
    assert "secret" not in repr(config)
    with pytest.raises(ValueError) as error:
        LearnerConfig.resolve({}, **GOOD, hmac_key="secret-key")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(("name", "variable"), [("syncer", "YETO_SYNCER"), ("learner_id", "YETO_LEARNER_ID")])
def test_what_is_missing_is_named_with_its_variable(name, variable):
    with pytest.raises(ValueError, match=f"{name}.*{variable}"):
        LearnerConfig.resolve({}, **{k: v for k, v in GOOD.items() if k != name})


def test_the_environment_fills_what_was_not_given(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(b"abc\n\n")
    environment = {
        "YETO_SYNCER": "[::1]:5",
        "YETO_LEARNER_ID": "3",
        "YETO_LEARNERS": "4",
        "YETO_RUN_ID": "from-env",
        "YETO_BUDGET_STEPS": "12",
        "YETO_HMAC_KEY_FILE": str(key),
        "YETO_RUN_DIR": "/somewhere",
    }
    config = LearnerConfig.resolve(environment, run_id="given")
    assert (config.address, config.identity, config.run_id, config.budget_steps) == (("::1", 5), 3, "given", 12)
    assert config.hmac_key == b"abc\n"
    assert config.run_dir == "/somewhere"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"YETO_LEARNER_ID": "one"}, "YETO_LEARNER_ID='one'"),
        ({"YETO_LEARNER_ID": "2", "YETO_LEARNERS": "2"}, "learner_id=2: must be 0 to 1"),
        ({"YETO_LEARNER_ID": "0", "YETO_HMAC_KEY_FILE": "/no/such/key"}, "YETO_HMAC_KEY_FILE='/no/such/key'"),
        ({"YETO_LEARNER_ID": "0", "YETO_TLS_CA": "ca.pem"}, "YETO_TLS_CA='ca.pem'"),
    ],
)
def test_a_wrong_environment_is_named_by_its_variable(environment, words):
    with pytest.raises(ValueError) as error:
        LearnerConfig.resolve(environment, syncer="h:1", run_id="r")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "parsed"), [("a.b-c:1", ("a.b-c", 1)), ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535))]
)
def test_addresses(text, parsed):
    assert parse_address(text) == parsed


def test_disabled_reads_one_variable():
    assert [disabled({"YETO_DISABLE": v}) for v in ("1", "", "0")] == [True, False, False]
    assert not disabled({})


def test_dtype_and_hashes():
    config = LearnerConfig.resolve({}, **GOOD, wire_dtype="q4", contract="ab" * 32, profile="cd" * 32)
    assert config.dtype is WireDType.Q4
    assert config.contract_for(bytes(32)) == b"\xab" * 32
    assert config.profile_hash == b"\xcd" * 32
    record = ProfileRecord(learners=2, quorum=2, total_steps=10)
    assert LearnerConfig.resolve({}, **GOOD, profile=record).profile_hash == record.hash
    assert LearnerConfig.resolve({}, **GOOD).profile_hash is None


def test_without_a_run_id_the_contract_is_the_fingerprint_and_a_warning_says_so_once(caplog):
    yeto_torch.config._warn_about_run_id.cache_clear()
    fingerprint = bytes(range(32))
    with caplog.at_level(logging.WARNING, "yeto_torch"):
        config = LearnerConfig.resolve({}, syncer="h:1", learner_id=0)
        assert config.contract_for(fingerprint) == fingerprint
        assert config.contract_for(fingerprint) == fingerprint
    assert len([r for r in caplog.records if "run_id" in r.message]) == 1
    assert LearnerConfig.resolve({}, **GOOD).contract_for(fingerprint) == contract_hash(fingerprint, "r")


def test_an_unknown_argument_is_named():
    with pytest.raises(ValueError, match="'learner'"):
        LearnerConfig.resolve({}, **GOOD, learner=1)


def test_the_constructor_shows_the_options_with_their_types_and_defaults():
    shown = inspect.signature(YetoOuterOptimizer).parameters
    own = inspect.signature(LearnerOptions).parameters
    assert list(shown) == ["inner", "named_parameters", *own]
    assert list(own)[:7] == ["syncer", "learner_id", "run_id", "fragments", "pattern", "matrix_merge", "average"]
    assert all(shown[name] == parameter for name, parameter in own.items())
    assert shown["named_parameters"].default is None
    for name in own:
        assert f"\n        {name}: " in LearnerOptions.__doc__, "not documented"


def test_the_constructor_refuses_a_name_it_does_not_know():
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sentence = "YetoOuterOptimizer got an unexpected keyword argument 'lerner_id'; did you mean 'learner_id'?"
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        YetoOuterOptimizer(inner, model, "host:1", lerner_id=0)
    with pytest.raises(TypeError, match="'inner'"):
        YetoOuterOptimizer(syncer="host:1")


def test_the_options_may_be_given_by_position():
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with YetoOuterOptimizer(inner, model, "local", None, None, 1) as optimizer:
        assert len(optimizer.layout) == 1
