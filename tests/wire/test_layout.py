"""Layouts: golden fingerprints, what moves a fingerprint, counts the bytes cannot back, the JSON file."""

import hashlib
import itertools
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.wire_by_hand import GOLDEN, LAYOUT_G, golden
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.errors import PeerError, StateError
from yeto_torch.wire.layout import WireFragment, WireLayout, version_at
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor, contract_hash

dims = st.integers(1, 2**20)
names = st.text(min_size=1, max_size=12)


def a_fragment(mode: MergeMode) -> st.SearchStrategy[Fragment]:
    shapes = st.tuples(dims, dims) if mode is MergeMode.ISO else st.lists(dims, max_size=3).map(tuple)
    return st.lists(st.builds(Tensor, names, shapes), min_size=1, max_size=4).map(lambda ts: Fragment(mode, tuple(ts)))


layouts = st.lists(st.sampled_from(MergeMode).flatmap(a_fragment), min_size=1, max_size=5).map(
    lambda fragments: Layout(tuple(fragments))
)


def one(mode: MergeMode, *tensors: tuple[str, tuple[int, ...]]) -> Layout:
    return Layout((Fragment(mode, tuple(Tensor(name, shape) for name, shape in tensors)),))


def test_golden_fingerprints():
    assert LAYOUT_G.fingerprint == golden("layout_g_fingerprint")
    flat = one(MergeMode.RDA, ("model.body.weight", (4,)))
    square = one(MergeMode.RDA, ("model.body.weight", (2, 2)))
    assert flat.fingerprint == golden("l1_fingerprint")
    assert square.fingerprint == golden("l1_fingerprint_2x2")


def test_a_scalar_is_hashed_without_dimensions():
    expected = hashlib.sha256(
        b"yeto-layout-v1\0" + struct.pack("<IBII", 1, 1, 1, 4) + b"gate" + struct.pack("<QI", 1, 0)
    ).digest()
    assert one(MergeMode.RDA, ("gate", ())).fingerprint == expected


def test_whatever_means_another_model_has_another_fingerprint():
    models = [
        one(MergeMode.AVG, ("a", (4,)), ("b", (4,))),
        one(MergeMode.AVG, ("b", (4,)), ("a", (4,))),
        one(MergeMode.RDA, ("a", (4,)), ("b", (4,))),
        one(MergeMode.AVG, ("a", (2, 2)), ("b", (4,))),
        one(MergeMode.AVG, ("a", (4, 1)), ("b", (4,))),
        one(MergeMode.AVG, ("ab", (4,)), ("", (4,))),
        one(MergeMode.AVG, ("a", (8,))),
        Layout((*one(MergeMode.AVG, ("a", (4,))).fragments, *one(MergeMode.AVG, ("b", (4,))).fragments)),
    ]
    assert len({model.fingerprint for model in models}) == len(models)


@given(layouts)
def test_the_wire_view_survives_the_wire(layout):
    raw = layout.wire.encoded
    decoded, end = WireLayout.decode(memoryview(b"head" + raw + b"tail"), 4, len(layout))
    assert decoded == layout.wire
    assert end == 4 + len(raw)
    assert decoded.numels == tuple(fragment.numel for fragment in layout.fragments)
    for fragment, numel in enumerate(decoded.numels):
        assert decoded.nbytes(fragment, WireDType.F32) == 4 * numel
        assert decoded.nbytes(fragment, WireDType.BF16) == 2 * numel
        assert decoded.nbytes(fragment, WireDType.Q4) == 132 * ((numel + 255) // 256)
    assert decoded.max_nbytes(WireDType.Q4) == max(decoded.nbytes(f, WireDType.Q4) for f in range(len(decoded)))


@given(layouts, st.data())
def test_a_layout_cut_anywhere_is_refused(layout, data):
    raw = layout.wire.encoded
    size = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(PeerError):
        WireLayout.decode(memoryview(raw)[:size], 0, len(layout))


@given(st.integers(0, 40), st.binary(max_size=120))
def test_random_bytes_are_a_layout_or_a_peer_error(fragments, raw):
    try:
        layout, end = WireLayout.decode(memoryview(raw), 0, fragments)
    except PeerError:
        return
    assert layout.encoded == raw[:end]


@pytest.mark.parametrize("tensors", [2**32 - 1, 2**31, 9])
def test_a_count_the_bytes_cannot_back_allocates_nothing(tensors):
    with pytest.raises(PeerError, match="tensors"):
        WireLayout.decode(memoryview(struct.pack("<BI", 0, tensors) + bytes(64)), 0, 1)


def test_totals_beyond_64_bits_are_refused():
    half = struct.pack("<BIQ", 0, 1, 2**63)
    with pytest.raises(PeerError, match="64 bits"):
        WireLayout.decode(memoryview(half + half), 0, 2)
    rows = struct.pack("<BIQQQ", 2, 1, 16, 2**63, 2**5)  # the product wraps to 0 in 64 bits, not to 16
    with pytest.raises(PeerError, match="matrix"):
        WireLayout.decode(memoryview(rows), 0, 1)
    wrapped = struct.pack("<BIQQQ", 2, 1, 2, 2**63 + 1, 2)  # (2^63 + 1) * 2 is 2 in 64 bits
    with pytest.raises(PeerError, match="matrix"):
        WireLayout.decode(memoryview(wrapped), 0, 1)


def test_sizes_above_4_gib_do_not_wrap():
    layout = WireLayout((WireFragment(MergeMode.AVG, (2**31, 2**31 + 5)),))
    assert layout.nbytes(0, WireDType.F32) == 4 * (2**32 + 5)
    assert layout.nbytes(0, WireDType.Q4) == 132 * (2**24 + 1)


def test_tensors_are_listed_in_wire_order():
    assert [tensor.name for tensor in LAYOUT_G.tensors] == ["emb.weight", "l0.w", "l0.b", "l1.w"]


# ---------------------------------------------------------------------------------------------------- the file


@given(layout=layouts)
def test_a_saved_layout_loads_as_itself(tmp_path_factory, layout):
    path = tmp_path_factory.mktemp("layout") / "layout.json"
    layout.save(path)
    assert Layout.load(path) == layout


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.update(format="yeto-layout-v2"),
        lambda d: d.update(fingerprint="00" * 32),
        lambda d: d.pop("fingerprint"),
        lambda d: d.pop("fragments"),
        lambda d: d.update(fragments=[]),
        lambda d: d["fragments"][0].update(merge="median"),
        lambda d: d["fragments"][0].update(tensors=[]),
        lambda d: d["fragments"][0]["tensors"][0].update(shape=[2.0, 2]),
        lambda d: d["fragments"][0]["tensors"][0].update(shape=[-2, -2]),
        lambda d: d["fragments"][0]["tensors"][0].update(shape=4),
        lambda d: d["fragments"][0]["tensors"][0].update(shape=[10**30]),
        lambda d: d["fragments"][0]["tensors"][0].update(shape=[2**40, 2**40]),
        lambda d: d["fragments"][0]["tensors"][0].update(shape=[1] * 65),
        lambda d: d["fragments"][0]["tensors"][0].update(shape={}),
        lambda d: d["fragments"][0]["tensors"][0].update(shape=["x" * 100_000]),
        lambda d: d["fragments"][0]["tensors"][0].update(name=None),
        lambda d: d["fragments"][0]["tensors"][0].update(name="\ud800"),
        lambda d: d["fragments"][2]["tensors"][0].update(shape=[6]),
        lambda d: d["fragments"].reverse(),
    ],
)
def test_a_damaged_layout_file_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "layout.json"
    LAYOUT_G.save(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    damage(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(StateError, match=str(path)) as refused:
        Layout.load(path)
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


DEEP = 100_000  # more than any parser of nested text can follow


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * DEEP, '{"a":' * DEEP, "1" * DEEP])
def test_what_is_no_layout_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "layout.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(StateError, match=str(path)):
        Layout.load(path)
    with pytest.raises(StateError, match="missing"):
        Layout.load(tmp_path / "missing.json")


# ---------------------------------------------------------------------------------------------------- identities


def test_contract_hash():
    fingerprint = LAYOUT_G.fingerprint
    assert contract_hash(fingerprint, None) == fingerprint
    assert (
        contract_hash(fingerprint, "run é")
        == hashlib.sha256(b"yeto-torch-run-v1\0" + fingerprint + "run é".encode()).digest()
    )
    assert contract_hash(fingerprint, "") != fingerprint


def test_version_law_golden():
    rows = GOLDEN["version_law"]["text"].split()
    assert ["".join(str(version_at(f, step, 3)) for f in range(3)) for step in range(7)] == rows


@pytest.mark.parametrize("fragments", [1, 2, 5])
def test_version_law_is_what_rounds_do(fragments):
    versions = [0] * fragments
    for step in itertools.chain([0], range(1, 23)):
        if step:
            versions[(step - 1) % fragments] = step
        assert [version_at(f, step, fragments) for f in range(fragments)] == versions
