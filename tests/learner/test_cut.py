"""The final cut's cache: exact versions, any order, nothing taken twice with other bytes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yeto_torch.learner.cut import FinalCut, same_bytes
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.messages import FinalFragment, FinalManifest

MANIFEST = FinalManifest(6, (4, 5, 6))
PARTS = [FinalFragment(0, 4, b"a"), FinalFragment(1, 5, b"b"), FinalFragment(2, 6, b"c"), MANIFEST]


def feed(cut, *messages):
    for message in messages:
        if isinstance(message, FinalManifest):
            cut.accept_manifest(message)
        else:
            cut.accept_fragment(message)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_completes_it_and_not_before_the_last(order):
    cut = FinalCut(3)
    for index in order:
        assert not cut.to_install
        feed(cut, PARTS[index])
    assert cut.to_install
    assert cut.data() == (b"a", b"b", b"c")


def test_a_lower_version_does_not_complete_it_and_a_higher_one_is_a_violation():
    cut = FinalCut(3)
    feed(cut, *PARTS[:2], MANIFEST, FinalFragment(2, 3, b"old"))
    assert cut.missing() == [2]
    with pytest.raises(PeerError, match="version 7"):
        feed(cut, FinalFragment(2, 7, b"new"))
    other = FinalCut(3)
    feed(other, FinalFragment(2, 7, b"new"))
    with pytest.raises(PeerError, match="version 7"):
        feed(other, MANIFEST)


def test_the_same_version_again_is_idempotent_only_with_the_same_bytes():
    cut = FinalCut(3)
    feed(cut, PARTS[0], PARTS[0])
    with pytest.raises(PeerError, match="different bytes"):
        feed(cut, FinalFragment(0, 4, b"z"))


def test_a_second_manifest_must_be_the_first_and_every_one_must_fit():
    cut = FinalCut(3)
    feed(cut, MANIFEST, MANIFEST)
    with pytest.raises(PeerError, match="differs"):
        feed(cut, FinalManifest(6, (4, 5, 5)))
    with pytest.raises(PeerError, match="2 fragments"):
        feed(FinalCut(3), FinalManifest(6, (4, 5)))


def test_installed_bytes_are_let_go_and_a_lost_connection_asks_for_the_cut_again():
    cut = FinalCut(3)
    feed(cut, *PARTS)
    cut.mark_installed(MANIFEST)
    assert cut.data() == (b"", b"", b"")
    assert (cut.to_install, cut.to_acknowledge) == (False, True)
    cut.started = cut.acked = True
    assert not cut.to_acknowledge
    cut.reset()
    feed(cut, MANIFEST)
    assert not cut.to_acknowledge
    feed(cut, *PARTS[:3])
    assert (cut.to_install, cut.to_acknowledge, cut.acked) == (False, True, True)
    assert cut.data() == (b"", b"", b"")


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_same_bytes_is_equality(one, other):
    assert same_bytes(one, bytearray(one))
    assert same_bytes(one, memoryview(other)) == (one == other)


def test_same_bytes_sees_the_last_byte_of_a_large_buffer():
    one = bytearray(3 * (1 << 20) + 5)
    other = bytearray(one)
    assert same_bytes(one, other)
    other[-1] = 1
    assert not same_bytes(one, other)
