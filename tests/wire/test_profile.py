"""The profile record: golden hash, every byte by an independent decoder, what moves the hash, what has no place."""

import hashlib
import json
import struct
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yeto_torch.wire.profile import ProfileRecord

GOLDEN = json.loads((Path(__file__).parent.parent / "vectors" / "profile.json").read_text(encoding="utf-8"))
PLAIN = ProfileRecord(learners=2, quorum=1, total_steps=100, outer_momentum=0.9)

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
f64 = st.floats(allow_nan=False, allow_infinity=False)
records = st.builds(
    ProfileRecord,
    learners=u32,
    quorum=u32,
    total_steps=u64,
    grace_ms=u64,
    grace_gamma=f64,
    grace_tau=f64,
    pipeline=u32,
    min_round_interval_ms=u64,
    sync_interval_steps=f64,
    heloco=st.booleans(),
    quorum_timeout_s=u64,
    final_ack_timeout_s=u64,
    outer_lr=f32,
    outer_momentum=f32,
    checkpoint=st.booleans(),
    checkpoint_every=u64,
    resume=st.booleans(),
    mark_final=st.booleans(),
    learner_budget_steps=st.none() | u64,
    require_profile_binding=st.booleans(),
    extensions=st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8), max_size=3),
)


class Cursor:
    """Reads the record from front to back, field by field, as its definition lists them."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, code):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def opt(self, code):
        return self.take(code) if self.take("B") else None

    def text(self):
        size = self.take("I")
        self.at += size
        return self.data[self.at - size : self.at].decode()


def decode(data):
    c = Cursor(data)
    assert c.take("32s") == b"yeto-syncer-semantic-profile-v1\0"
    got = {"learners": c.take("I"), "quorum": c.take("I"), "grace_ms": c.take("Q")}
    got |= {"grace_gamma": c.take("d"), "grace_tau": c.take("d"), "pipeline": c.take("I")}
    got |= {"min_round_interval_ms": c.take("Q"), "sync_interval_steps": c.take("d"), "heloco": bool(c.take("B"))}
    got |= {"quorum_timeout_s": c.take("Q"), "final_ack_timeout_s": c.take("Q"), "total_steps": c.take("Q")}
    assert c.opt("I") is None
    got |= {"outer_lr": c.take("f"), "outer_momentum": c.take("f"), "checkpoint": bool(c.take("B"))}
    got |= {"checkpoint_every": c.take("Q"), "resume": bool(c.take("B")), "mark_final": bool(c.take("B"))}
    got["learner_budget_steps"] = c.opt("Q")
    assert c.opt("Q") is None
    assert c.take("B") == 0
    got["require_profile_binding"] = bool(c.take("B"))
    got["extensions"] = {}
    if c.at < len(data):
        assert c.take("12s") == b"yeto-ext-v1\0"
        pairs = [(c.text(), json.loads(c.text())) for _ in range(c.take("I"))]
        assert [key for key, _ in pairs] == sorted(key for key, _ in pairs)
        got["extensions"] = dict(pairs)
    assert c.at == len(data)
    return ProfileRecord(**got)


def test_golden():
    assert PLAIN.hash.hex() == GOLDEN["hex"]
    assert len(PLAIN.encode()) == GOLDEN["bytes"]
    assert PLAIN.hash == hashlib.sha256(PLAIN.encode()).digest()


@given(records)
def test_every_field_is_found_again_where_it_belongs(record):
    assert decode(record.encode()) == record
    budget, block = 8 * (record.learner_budget_steps is not None), 0
    if record.extensions:
        block = 16 + sum(8 + len(k.encode()) + len(json.dumps(v)) for k, v in record.extensions.items())
    assert len(record.encode()) == 133 + budget + block


@given(f64.filter(lambda x: abs(x) < 3e38), st.sampled_from(["outer_lr", "outer_momentum"]))
def test_f32_fields_are_rounded_to_the_nearest_f32(value, name):
    assert replace(PLAIN, **{name: value}).hash == replace(PLAIN, **{name: float(np.float32(value))}).hash


@pytest.mark.parametrize("name", [field.name for field in fields(ProfileRecord)])
def test_every_field_moves_the_hash(name):
    value = getattr(PLAIN, name)
    other = {"learner_budget_steps": 7, "extensions": {"schedule.on_loss": "stop"}}.get(name)
    if other is None:
        other = not value if isinstance(value, bool) else value + 1
    assert replace(PLAIN, **{name: other}).hash != PLAIN.hash


def test_extensions_byte_for_byte():
    record = replace(PLAIN, extensions={"schedule.on_loss": "stop", "outer.lr": [[1, 0.7], [50, 0.1]]})
    block = b"yeto-ext-v1\0" + b"\2\0\0\0"
    block += b"\x08\0\0\0outer.lr" + b"\x12\0\0\0[[1,0.7],[50,0.1]]"
    block += b"\x10\0\0\0schedule.on_loss" + b"\x06\0\0\0" + b'"stop"'
    assert record.encode() == PLAIN.encode() + block
    assert replace(PLAIN, extensions={}).encode() == PLAIN.encode()


def test_the_order_extensions_are_given_in_does_not_matter():
    one, two = {"b": {"y": 1, "x": 2}, "a": 1}, {"a": 1, "b": {"x": 2, "y": 1}}
    assert replace(PLAIN, extensions=one).hash == replace(PLAIN, extensions=two).hash


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learners", 2**32),
        ("learners", -1),
        ("learners", 2.0),
        ("quorum", None),
        ("total_steps", 2**64),
        ("heloco", 2),
        ("resume", "auto"),
        ("grace_gamma", float("nan")),
        ("sync_interval_steps", float("inf")),
        ("outer_lr", 1e39),
        ("outer_lr", "0.7"),
        ("learner_budget_steps", -1),
        ("extensions", {"outer.lr": float("nan")}),
        ("extensions", {"outer.lr": object()}),
    ],
)
def test_a_value_without_a_place_is_named(name, value):
    with pytest.raises(ValueError) as caught:
        _ = replace(PLAIN, **{name: value}).hash
    assert (name if name != "extensions" else "outer.lr") in str(caught.value)
