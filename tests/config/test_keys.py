"""Every key of the syncer: documented default, both ends of its range, and what keys mean together.

Values are set on the schema object directly, as Hydra leaves it; ``test_main.py`` goes through the door.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import MISSING, FrozenInstanceError, fields, is_dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.config.compose import compose, typed_as
from syncer.config.keys import SYNCER, SyncerConfig, profile_record, validate, warnings
from syncer.config.policy import IsoBackend
from tests.support.certificates import Authority
from yeto_torch.offline.rules import LocalRules
from yeto_torch.wire.profile import ProfileRecord

GOLDEN = json.loads((Path(__file__).parent.parent / "vectors" / "profile.json").read_text(encoding="utf-8"))
BALANCED = {"outer.lr": 0.7, "outer.momentum": 0.5, "merge.delta_correction": "heloco"}
U32, U64 = 2**32 - 1, 2**64 - 1
NAN, INF = math.nan, math.inf


def policy(**keys):
    """A validated policy of two learners and ten steps under the balanced preset, but for ``keys`` (dots as __)."""
    return of({name.replace("__", "."): value for name, value in keys.items()})


def of(keys):
    config = SyncerConfig()
    for name, value in ({"learners": 2, "total_steps": 10} | BALANCED | keys).items():
        section, _, key = name.rpartition(".")
        owner = getattr(config, section) if section else config
        assert hasattr(owner, key), name
        setattr(owner, key, value)
    return validate(config)


def refused(keys):
    """The one line of the error."""
    with pytest.raises(ValueError) as caught:
        of(keys)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------------------------ one key at a time

DOCUMENTED = {
    "learners": "???", "total_steps": "???",
    "listen.host": "127.0.0.1", "listen.port": 29400, "listen.address_file": None,
    "schedule.quorum": None, "schedule.quorum_timeout_s": 900, "schedule.start_grace_s": 60,
    "schedule.on_loss": "continue", "schedule.loss_after_s": 300, "schedule.pipeline": 2,
    "schedule.sync_interval_steps": 24.0, "schedule.min_round_interval_ms": 0,
    "schedule.grace_ms": 1000, "schedule.grace_gamma": 0.8, "schedule.grace_tau": 2.0,
    "merge.delta_correction": "???", "merge.iso_backend": "torch-svd",
    "merge.iso_scale": "mean", "merge.device": "auto", "merge.max_norm_ratio": None,
    "outer.lr": "???", "outer.momentum": "???", "outer.guard": "off",
    "svd.devices": ["auto"], "svd.queue_capacity": 16,
    "svd.startup_timeout_s": 300, "svd.request_timeout_s": 3540, "svd.drain_timeout_s": 3600,
    "checkpoint.path": None, "checkpoint.every": 8, "checkpoint.resume": False, "checkpoint.mark_final": False,
    "final.ack_timeout_s": None, "final.state_path": None, "final.layout_path": None, "tape.path": None,
    "session.require_profile_binding": False, "session.expected_contract": None,
    "session.handshake_timeout_s": 10, "session.write_timeout_s": 60, "session.idle_timeout_s": 60,
    "session.max_pending_handshakes": 64,
    "security.hmac_key_file": None, "security.tls_cert": None, "security.tls_key": None,
    "security.tls_client_ca": None,
    "budget.learner_steps": None, "progress": "auto",
}  # fmt: skip

SECONDS = ([1e-6, 0.5, 10**9], [0.0, -1.0, NAN, INF, 10**9 + 1, "soon", True])
SECONDS_OR_ZERO = ([0.0, 0.5, 10**9], [-1e-9, NAN, INF, 2e9, None, True])
WHOLE_SECONDS = ([1, 10**9], [0, -1, 10**9 + 1, 2.5, "many", True])
COUNT_U32 = ([1, U32], [0, -1, U32 + 1, 2.0, "many", True, None])
MILLISECONDS = ([0, 10**9], [-1, 10**9 + 1, 0.5, None])
FACTOR = ([0.0, 0.8, 1e9], [-1e-9, NAN, INF, 1.1e9, "much", False])
READABLE = ([], ["", "a\0b", "no/such/folder/file", "."])
WRITABLE = (["new.file"], ["", "a\0b", "no/such/folder/file", ".", 7])

# Every key: values inside its range and values outside. Where a value alone is legal only beside others, see below.
TABLE = {
    "learners": COUNT_U32,
    "total_steps": ([1, U64], [0, -1, U64 + 1, 1.0, "many", None]),
    "listen.host": (["localhost", "::1", "0.0.0.0"], ["", "a b", "a\n", None]),
    "listen.port": ([0, 1, 65535], [-1, 65536, 80.0, "http", None]),
    "listen.address_file": WRITABLE,
    "schedule.quorum": ([1, 2, None], [0, -1, 3, 1.0, "most"]),
    "schedule.quorum_timeout_s": WHOLE_SECONDS,
    "schedule.start_grace_s": SECONDS_OR_ZERO,
    "schedule.on_loss": (["continue", "stop"], ["", "halt", None, 1]),
    "schedule.loss_after_s": SECONDS_OR_ZERO,
    "schedule.pipeline": COUNT_U32,
    "schedule.sync_interval_steps": FACTOR,
    "schedule.min_round_interval_ms": MILLISECONDS,
    "schedule.grace_ms": MILLISECONDS,
    "schedule.grace_gamma": FACTOR,
    "schedule.grace_tau": FACTOR,
    "merge.delta_correction": (["heloco", "heloco-normalized", "none"], ["sometimes", "heloco_normalized", "", None]),
    "merge.iso_backend": (["torch-svd", "scalar"], ["abacus", "torch_svd", None]),
    "merge.iso_scale": (["mean", "norm"], ["max", 1, None]),
    "merge.max_norm_ratio": ([1 + 1e-9, 10, "100", 1e9, None], [1, 0.5, 0, -2, NAN, INF, 1.1e9, "much", True]),
    "merge.device": (["auto", "cpu", "cuda", "cuda:7"], ["gpu", "cuda:", "cuda:x", "cpu:0", "", None]),
    "outer.lr": (
        [1e-45, 1, 0.7, "0.5", 3.4e38, [[1, 0.7]], [[1, 0.7], [2, 0.1], [U64, 1]]],
        [0, -0.1, NAN, INF, 1e-46, 3.5e38, "fast", True, None, [], {}, [1, 2], [[2, 0.7]], [[1, 0.7], [1, 0.1]],
         [[1, 0.7], [5, 0.1], [4, 0.1]], [[1, NAN]], [[1, 0.0]], [[1.0, 0.7]], [[True, 0.7]], [[1, 2, 3]], ["ab"],
         [[1, 0.7], [U64 + 1, 0.1]], [[1, "x"]], [[1, None]]],
    ),
    "outer.momentum": ([0.0, 0.5, 0.9999], [-1e-9, 1.0, 1.5, 1 - 1e-12, NAN, INF, 1e300, None, True]),
    "outer.guard": (["off", "cap", False], ["warn", "on", True, None, 1.25]),
    "svd.devices": ([["auto"], ["cuda:0", "cuda:1"], ["cpu", "cpu"]], [[], "cpu", ["gpu"], ["cpu", 3], None]),
    "svd.queue_capacity": ([1, 65536], [0, 65537, 1.5]),
    "svd.startup_timeout_s": SECONDS,
    "svd.request_timeout_s": SECONDS,
    "svd.drain_timeout_s": SECONDS,
    "checkpoint.path": WRITABLE,
    "checkpoint.every": ([0, 1, U64], [-1, U64 + 1, 0.5, "always"]),
    "checkpoint.resume": ([False, "false"], ["perhaps", 1, 0, None, "True "]),
    "checkpoint.mark_final": ([False], ["yes", 1, None]),
    "final.ack_timeout_s": WHOLE_SECONDS,
    "final.state_path": WRITABLE,
    "final.layout_path": (["layout.json"], ["", "a\0b", "no/such/folder/file", "."]),
    "tape.path": WRITABLE,
    "session.require_profile_binding": ([False, True], ["yes", 1, None]),
    "session.expected_contract": (["aB" * 32, None], ["ab" * 31, "ab" * 33, "xy" * 32, "ab" * 31 + "a", 7]),
    "session.handshake_timeout_s": SECONDS,
    "session.write_timeout_s": SECONDS,
    "session.idle_timeout_s": SECONDS,
    "session.max_pending_handshakes": ([1, 65536], [0, 65537, 64.0]),
    "security.hmac_key_file": READABLE,
    "security.tls_cert": READABLE,
    "security.tls_key": READABLE,
    "security.tls_client_ca": READABLE,
    "budget.learner_steps": ([], [0, -1, 1.5, U64 + 1, "all"]),
    "progress": (["auto", "off", False], ["on", True, None]),
}  # fmt: skip


def test_defaults_and_keys_are_the_documented_ones():
    assert SYNCER.defaults == DOCUMENTED
    assert set(TABLE) == set(SYNCER.rules) == set(DOCUMENTED)
    assert set(SYNCER.sections) == {name.partition(".")[0] for name in DOCUMENTED if "." in name}
    assert all(rule.meaning and rule.legal for rule in SYNCER.rules.values())


@pytest.mark.parametrize("name", TABLE)
def test_inside_the_range(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in TABLE[name][0]:
        of({name: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TABLE)
def test_outside_the_range_the_error_names_key_and_value_and_range(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in TABLE[name][1]:
        message = refused({name: value})
        assert message.startswith(f"{name}="), message
        assert "must be " in message
        assert len(message) < 400
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["learners", "total_steps", *BALANCED])
def test_a_required_key_that_is_missing_is_named(name):
    assert refused({name: "???"}).startswith(f"{name} is missing")


def test_a_long_or_strange_value_stays_on_one_short_line():
    message = refused({"merge.device": "x\n\t\x1b[31m" * 500})
    assert message.startswith("merge.device=x ")
    assert len(message) < 250
    assert message.isprintable()


@given(st.integers(-5, 70_000))
def test_ports(port):
    if 0 <= port <= 65535:
        assert policy(listen__port=port).listen.port == port
    else:
        assert f"listen.port={port}: must be an integer from 0 to 65535" in refused({"listen.port": port})


@given(st.integers(1, 40), st.integers(-3, 45) | st.none())
def test_a_quorum_lies_in_the_fleet_and_null_is_the_majority(learners, quorum):
    keys = {"learners": learners, "schedule.quorum": quorum}
    if quorum is None:
        assert 2 * of(keys).schedule.quorum > learners >= 2 * (of(keys).schedule.quorum - 1)
    elif 1 <= quorum <= learners:
        assert of(keys).schedule.quorum == quorum
    else:
        assert refused(keys).startswith(f"schedule.quorum={quorum}: ")


@given(st.floats() | st.integers(-(2**1030), 2**1030))
def test_momentum_is_below_one_as_the_f32_it_becomes(value):
    if 0 <= value < 1 - 2**-25:  # from there on the nearest f32 is 1
        momentum = policy(outer__momentum=value).outer.momentum
        assert momentum == value
        assert math.copysign(1, momentum) == 1
    else:
        assert refused({"outer.momentum": value}).startswith("outer.momentum=")


@given(st.lists(st.tuples(st.integers(2, 10**6), st.floats(1e-3, 1e3)), max_size=5, unique_by=lambda pair: pair[0]))
def test_a_schedule_of_the_outer_rate(rest):
    pairs = [(1, 0.7), *sorted(rest)]
    outer = policy(outer__lr=[list(pair) for pair in pairs]).outer
    assert outer.lr == tuple(pairs)
    for (step, rate), nxt in zip(pairs, [*pairs[1:], (10**7, 0)], strict=True):
        assert outer.lr_at(step) == outer.lr_at(nxt[0] - 1) == rate


# ---------------------------------------------------------------------------------------------------- keys together


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"checkpoint.resume": True}, "checkpoint.resume=true"),
        ({"checkpoint.resume": "auto"}, "checkpoint.resume=auto"),
        ({"checkpoint.mark_final": True}, "checkpoint.mark_final=true"),
        ({"budget.learner_steps": 5}, "budget.learner_steps=5"),
    ],
)
def test_what_needs_a_checkpoint_path_says_so(keys, named):
    message = refused(keys)
    assert message.startswith(named)
    assert "checkpoint.path" in message


def test_a_budget_excludes_resuming_and_the_marker(tmp_path):
    keys = {"budget.learner_steps": 5, "checkpoint.path": str(tmp_path / "c")}
    for name, value in (("checkpoint.resume", "auto"), ("checkpoint.mark_final", True)):
        message = refused(keys | {name: value})
        assert message.startswith(name)
        assert "budget.learner_steps" in message


def test_a_budget_reaches_the_policy(tmp_path):
    assert of({"budget.learner_steps": 5, "checkpoint.path": str(tmp_path / "c")}).budget_learner_steps == 5


@pytest.mark.parametrize(("resume", "word"), [(False, "false"), (True, "true"), ("true", "true"), ("auto", "auto")])
def test_resume_words(resume, word, tmp_path):
    assert of({"checkpoint.path": str(tmp_path / "c"), "checkpoint.resume": resume}).checkpoint.resume == word


def test_binding_without_resume_is_warned_of(tmp_path):
    bound = {"session.require_profile_binding": True}
    assert "checkpoint.resume=auto" in warnings(of(bound))[0]
    assert warnings(of(bound | {"checkpoint.path": str(tmp_path / "c"), "checkpoint.resume": "auto"})) == []
    assert warnings(policy()) == []


def test_a_door_open_to_strangers_is_warned_of_loudly(tmp_path):
    key = tmp_path / "key"
    key.write_text("k")
    authority = Authority(tmp_path)
    pair = authority.issue("syncer", "localhost")
    tls = {"security.tls_cert": str(pair.cert), "security.tls_key": str(pair.key)}
    for host in ("0.0.0.0", "::", "192.0.2.7", "syncer.example"):
        listen = {"listen.host": host}
        for unprotected in (listen, listen | tls):
            (told,) = warnings(of(unprotected))
            assert told.startswith(f"NOT PROTECTED: listen.host={host} ")
            assert "security.hmac_key_file" in told
        assert warnings(of(listen | {"security.hmac_key_file": str(key)})) == []
        assert warnings(of(listen | tls | {"security.tls_client_ca": str(authority.ca)})) == []
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert warnings(of({"listen.host": host})) == []


# ------------------------------------------------------------------------------------------------------------ files

FILES = ["listen.address_file", "checkpoint.path", "final.state_path", "tape.path", "final.layout_path"]


@pytest.mark.parametrize(("one", "other"), [(a, b) for i, a in enumerate(FILES) for b in FILES[i + 1 :]])
def test_two_keys_may_not_name_one_file(one, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    message = refused({one: "there/f", other: str(tmp_path / "link" / ".." / "there" / "f")})
    assert one in message
    assert other in message
    assert list((tmp_path / "there").iterdir()) == []


def test_the_marker_is_a_file_of_its_own_too(tmp_path):
    message = refused({"checkpoint.path": str(tmp_path / "c"), "tape.path": str(tmp_path / "c.final")})
    assert message.startswith("tape.path=")
    assert "marker" in message


def test_distinct_files_are_fine_and_untouched(tmp_path):
    old = tmp_path / "tape"
    old.write_text("{}\n")
    found = of({name: str(tmp_path / name) for name in FILES} | {"tape.path": str(old)})
    assert found.tape_path == old
    assert found.checkpoint.path == tmp_path / "checkpoint.path"
    assert [p.name for p in tmp_path.iterdir()] == ["tape"]
    assert old.read_text() == "{}\n"


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert policy(checkpoint__path="~/c").checkpoint.path == tmp_path / "c"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_or_tape_this_user_may_not_write_to():
    """Asked in a process without privileges, because root may write anywhere."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        (folder / "tape").write_text("")
        (folder / "tape").chmod(0o444)
        code = (
            "import os, sys; sys.path[:0] = sys.argv[1:3]\n"
            "from test_keys import refused\n"
            "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "for key, file in ('checkpoint.path', 'new'), ('tape.path', 'new'), ('tape.path', 'tape'):\n"
            "    message = refused({key: f'{sys.argv[3]}/{file}'})\n"
            "    assert message.startswith(f'{key}='), message\n"
            "    assert 'may' in message, message\n"
        )
        here = Path(__file__).parent
        arguments = [sys.executable, "-c", code, str(here), str(here.parent.parent), str(folder)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        folder.chmod(0o755)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("content", "key"), [(b"secret\n", b"secret"), (b"secret", b"secret"), (b"a\n\n", b"a\n"), (b"\0\xff\n", b"\0\xff")]
)
def test_the_hmac_key_is_the_file_less_one_newline(content, key, tmp_path):
    file = tmp_path / "key"
    file.write_bytes(content)
    assert policy(security__hmac_key_file=str(file)).security.hmac_key == key


@pytest.mark.parametrize("content", [b"", b"\n", None, b"0123456789abcdef" * 4097])
def test_an_unusable_hmac_key_file_is_named_and_its_content_is_not(content, tmp_path):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    message = refused({"security.hmac_key_file": str(file)})
    assert message.startswith(f"security.hmac_key_file={file}: must be ")
    assert "0123456789" not in message


def test_no_repr_of_a_policy_shows_the_key(tmp_path):
    file = tmp_path / "file"
    file.write_text("Tr0ub4dor&3")
    found = policy(security__hmac_key_file=str(file))
    assert "Tr0ub4dor" not in f"{found} {found!r} {found.security} {found.listen}"
    assert "hmac=set" in repr(found)


def test_tls_files_reach_the_policy_and_one_file_may_hold_them_all(tmp_path):
    authority = Authority(tmp_path)
    pair = authority.issue("syncer", "localhost")
    keys = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": authority.ca}
    found = of({f"security.{name}": str(path) for name, path in keys.items()}).security
    assert {name: getattr(found, name) for name in keys} == keys
    assert policy().security.tls_cert is None
    whole = tmp_path / "whole.pem"
    whole.write_bytes(b"".join(path.read_bytes() for path in keys.values()))
    of({f"security.{name}": str(whole) for name in keys})


def test_tls_files_that_cannot_serve_are_named_by_their_key(tmp_path):
    authority = Authority(tmp_path)
    pair, other = authority.issue("syncer", "localhost"), authority.issue("other")
    junk, nothing = tmp_path / "junk", tmp_path / "nothing"
    junk.write_text("-----BEGIN NONSENSE-----\n")
    whole = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": authority.ca}

    def told(**changes):
        files = {name: path for name, path in (whole | changes).items() if path is not None}
        message = refused({f"security.{name}": str(path) for name, path in files.items()})
        assert "NONSENSE" not in message
        return message

    for name in whole:
        for file, legal in ((junk, "PEM"), (nothing, "readable file")):
            message = told(**{name: file})
            assert message.startswith(f"security.{name}={file}: must be ")
            assert legal in message
    assert told(tls_key=other.key).startswith(f"security.tls_key={other.key}: must be the private key of the cert")
    for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        message = told(**{other: None, "tls_client_ca": None})
        assert message.startswith(f"security.{one}={whole[one]}: must be null while security.{other} is null")
    message = told(tls_cert=None, tls_key=None)
    assert message.startswith(f"security.tls_client_ca={authority.ca}: must be null while security.tls_cert is null")


# ----------------------------------------------------------------------------------------------------------- policy


def test_what_a_learner_takes_for_a_default_is_the_syncers():
    """It binds to a profile, or goes without a syncer, and imports nothing of this."""
    plain = typed_as(SYNCER, compose(["learners=2", "total_steps=10"]))
    assert profile_record(validate(plain)) == ProfileRecord(learners=2, quorum=2, total_steps=10)
    assert LocalRules() == LocalRules(
        plain.schedule.sync_interval_steps,
        plain.outer.lr,
        plain.outer.momentum,
        plain.merge.delta_correction,
        plain.merge.iso_scale,
    )


def test_a_policy_has_no_defaults_of_its_own():
    found = policy()
    for part in (found, *(getattr(found, entry.name) for entry in fields(found))):
        for entry in fields(part) if is_dataclass(part) else ():
            assert entry.default is entry.default_factory is MISSING, f"{type(part).__name__}.{entry.name}"


def test_a_policy_is_frozen_all_the_way_down(tmp_path):
    found = policy(outer__lr=[[1, 0.5], [9, 0.1]], svd__devices=["cpu", "cuda:1"], checkpoint__path=str(tmp_path / "c"))
    for entry in fields(found):
        value = getattr(found, entry.name)
        with pytest.raises(FrozenInstanceError):
            setattr(found, entry.name, value)
        if is_dataclass(value):
            inner = fields(value)[0].name
            with pytest.raises(FrozenInstanceError):
                setattr(value, inner, getattr(value, inner))
        hash(value)  # nothing mutable inside, no list, no dict


def test_values_arrive_under_their_names():
    contract = "0f" * 32
    found = of({
        "listen.host": "::1", "listen.port": 0, "schedule.quorum_timeout_s": 7, "schedule.pipeline": 3,
        "merge.iso_backend": "scalar", "merge.device": "cpu", "merge.delta_correction": "none", "outer.lr": 1,
        "svd.devices": ["cpu", "cuda:1"], "session.expected_contract": contract, "schedule.on_loss": "stop",
        "progress": False,
    })  # fmt: skip
    assert (found.listen.host, found.listen.port) == ("::1", 0)
    assert (found.schedule.quorum, found.schedule.pipeline, found.schedule.on_loss) == (2, 3, "stop")
    assert (found.final.ack_timeout_s, found.schedule.quorum_timeout_s) == (7, 7)
    assert found.merge.iso_backend is IsoBackend.SCALAR
    assert (found.merge.device, found.merge.delta_correction) == ("cpu", "none")
    assert found.outer.lr == ((1, 1.0),)
    assert found.svd.devices == ("cpu", "cuda:1")
    assert found.session.expected_contract == bytes.fromhex(contract)
    assert found.progress == "off"
    assert (found.outer.guard, policy(outer__guard="cap").outer.guard) == ("off", "cap")
    assert policy(final__ack_timeout_s=3).final.ack_timeout_s == 3


# ---------------------------------------------------------------------------------------------------------- profile


def test_the_golden_profile_is_that_of_its_configuration():
    found = policy(total_steps=100, schedule__quorum=1, outer__momentum=0.9)
    assert profile_record(found).hash.hex() == GOLDEN["hex"]


def test_a_record_with_the_learner_side_defaults_is_that_of_the_defaults():
    assert profile_record(policy()) == ProfileRecord(learners=2, quorum=2, total_steps=10)


MOVES = {
    "learners": 3, "total_steps": 11, "schedule.quorum": 1, "schedule.quorum_timeout_s": 901, "schedule.pipeline": 3,
    "schedule.sync_interval_steps": 25.0, "schedule.min_round_interval_ms": 1, "schedule.grace_ms": 1001,
    "schedule.grace_gamma": 0.9, "schedule.grace_tau": 2.5, "schedule.start_grace_s": 61.0, "schedule.on_loss": "stop",
    "schedule.loss_after_s": 301.0, "merge.delta_correction": "none", "merge.iso_scale": "norm", "outer.lr": 0.8,
    "merge.max_norm_ratio": 10.0, "outer.guard": "cap",
    "outer.momentum": 0.6, "checkpoint.path": "c", "checkpoint.every": 9, "final.ack_timeout_s": 901,
    "session.require_profile_binding": True,
}  # fmt: skip
STAYS = {
    "listen.host": "0.0.0.0", "listen.port": 0, "listen.address_file": "a", "merge.iso_backend": "scalar",
    "merge.device": "cpu", "svd.devices": ["cpu"], "svd.queue_capacity": 1, "svd.startup_timeout_s": 1.0,
    "svd.request_timeout_s": 1.0, "svd.drain_timeout_s": 1.0, "final.state_path": "s", "final.layout_path": "l",
    "tape.path": "t", "session.expected_contract": "ab" * 32, "session.handshake_timeout_s": 1.0,
    "session.write_timeout_s": 1.0, "session.idle_timeout_s": 1.0, "session.max_pending_handshakes": 1,
    "progress": "off",
}  # fmt: skip


def test_merge_schedule_and_recovery_move_the_profile_and_nothing_else_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = profile_record(policy()).hash
    for name, value in MOVES.items():
        assert profile_record(of({name: value})).hash != plain, name
    for name, value in STAYS.items():
        assert profile_record(of({name: value})).hash == plain, name
    only_beside_a_path = {"checkpoint.resume", "checkpoint.mark_final"}
    only_beside_a_path |= {"budget.learner_steps"}
    secrets = {name for name in SYNCER.rules if name.startswith("security.")}
    assert set(MOVES) | set(STAYS) | only_beside_a_path | secrets == set(SYNCER.rules)
    path = {"checkpoint.path": "c"}
    kinds = [{}, {"checkpoint.resume": "auto"}, {"checkpoint.mark_final": True}, {"budget.learner_steps": 5}]
    assert len({profile_record(of(path | kind)).hash for kind in kinds}) == 4
    pair = Authority(tmp_path).issue("syncer")
    (tmp_path / "key").write_text("k")
    files = {"hmac_key_file": "key", "tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": pair.cert}
    assert profile_record(of({f"security.{name}": str(path) for name, path in files.items()})).hash == plain


def test_auto_and_true_are_one_profile(tmp_path):
    records = [
        profile_record(of({"checkpoint.path": str(tmp_path / "c"), "checkpoint.resume": word}))
        for word in (True, "auto")
    ]
    assert records[0] == records[1]
    assert records[0].resume


def test_the_normalised_correction_and_the_guard_enter_the_record_as_extensions():
    """So that the record's own bytes, and the hash of every other v4 peer's configuration, stay what they are."""
    plain = profile_record(policy())
    normalized = profile_record(policy(merge__delta_correction="heloco-normalized"))
    assert normalized.heloco
    assert normalized.extensions == {"merge.delta_correction": "heloco-normalized"}
    capped = profile_record(policy(outer__guard="cap", merge__delta_correction="none"))
    assert not capped.heloco
    assert capped.extensions == {"outer.guard": "cap"}
    assert profile_record(policy(outer__guard=False)) == plain
    assert not plain.extensions
    assert normalized.encode().startswith(plain.encode())


def test_extensions_hold_what_is_not_at_its_default():
    assert profile_record(policy(outer__lr=[[1, 0.7]])) == profile_record(policy())
    found = profile_record(
        policy(
            outer__lr=[[1, 0.7], [50, 0.1]],
            schedule__on_loss="stop",
            schedule__loss_after_s=5.0,
            merge__max_norm_ratio=8,
        )
    )
    assert found.outer_lr == 0.7
    assert found.extensions == {
        "outer.lr": [[1, 0.7], [50, 0.1]],
        "schedule.on_loss": "stop",
        "schedule.loss_after_s": 5.0,
        "merge.max_norm_ratio": 8.0,
    }
