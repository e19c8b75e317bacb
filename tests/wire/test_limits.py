"""Limits: one table of the largest legal payloads, directions, exact bulk lengths, bounds on partial messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.wire_by_hand import plain_layout
from yeto_torch.wire.constants import Direction, MessageType, WireDType
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.limits import FirstFrameLimits, GroupLimits
from yeto_torch.wire.messages import BcastFragment, FinalFragment, InitParams, PushFragment

M = MessageType
LAYOUT = plain_layout(1000, 300)  # q4: 4 and 2 blocks of 132 bytes

# type -> bytes under (f32, bf16, q4)
TO_SYNCER = {
    M.INIT_PARAMS: (4 + 4000, 4 + 2000, 4 + 2000),
    M.PUSH_FRAGMENT: (48 + 4000, 48 + 2000, 48 + 528),
    M.HEARTBEAT: (12, 12, 12),
    M.FINAL_ACK: (10, 10, 10),
    M.BUDGET_DONE: (8, 8, 8),
    M.CHUNK: (24 + 4 * 2**20,) * 3,
}
TO_LEARNER = {
    M.PULL_REQ: (16, 16, 16),
    M.BCAST_FRAGMENT: (12 + 4000, 12 + 2000, 12 + 2000),
    M.FINAL_FRAGMENT: (12 + 4000, 12 + 4000, 12 + 4000),
    M.FINAL_MANIFEST: (14 + 16,) * 3,
    M.SHUTDOWN: (0, 0, 0),
    M.ERROR: (65_536,) * 3,
    M.CHUNK: (24 + 4 * 2**20,) * 3,
}
TABLES = {Direction.TO_SYNCER: TO_SYNCER, Direction.TO_LEARNER: TO_LEARNER}


@pytest.mark.parametrize("kind", M)
@pytest.mark.parametrize(("column", "dtype"), list(enumerate(WireDType)))
@pytest.mark.parametrize("direction", Direction)
def test_the_table_of_limits(direction, column, dtype, kind):
    limits = GroupLimits(LAYOUT, dtype, direction, pipeline=3)
    if kind in TABLES[direction]:
        assert limits.max_payload(kind) == TABLES[direction][kind][column]
    else:
        with pytest.raises(PeerError, match=kind.name):
            limits.max_payload(kind)


@pytest.mark.parametrize("kind", M)
def test_the_first_frame(kind):
    legal = {M.HELLO: 16 * 2**20, M.DATA_HELLO: 16}
    if kind in legal:
        assert FirstFrameLimits().max_payload(kind) == legal[kind]
    else:
        with pytest.raises(PeerError, match="first frame"):
            FirstFrameLimits().max_payload(kind)


@pytest.mark.parametrize(
    ("dtype", "to_syncer", "to_learner"),
    [
        (WireDType.F32, 13 + 4048, 13 + 4012),
        (WireDType.BF16, 13 + 2048, 13 + 4012),
        (WireDType.Q4, 13 + 2004, 13 + 4012),
    ],
)
def test_bounds_on_partial_messages(dtype, to_syncer, to_learner):
    up = GroupLimits(LAYOUT, dtype, Direction.TO_SYNCER, pipeline=3)
    assert (up.max_inner, up.max_partials) == (to_syncer, 64)
    assert up.max_reserved_bytes == 1300 * dtype.bulk.nbytes(1) + 2 * 3 * to_syncer
    down = GroupLimits(LAYOUT, dtype, Direction.TO_LEARNER, pipeline=3)
    assert down.max_inner == to_learner
    assert down.max_partials >= 2 * 2 + 64
    every_fragment_at_once = sum(13 + 12 + 4 * numel for numel in LAYOUT.numels)
    assert down.max_reserved_bytes >= 2 * every_fragment_at_once


@given(st.sampled_from(WireDType), st.sampled_from([0, 1]), st.integers(-300, 300))
def test_bulk_has_exactly_the_bytes_of_its_fragment(dtype, fragment, off):
    limits = GroupLimits(LAYOUT, dtype, Direction.TO_SYNCER)
    numel = LAYOUT.numels[fragment]
    for make, nbytes in [
        (lambda d: InitParams(fragment, d), dtype.bulk.nbytes(numel)),
        (lambda d: BcastFragment(fragment, 1, d), dtype.bulk.nbytes(numel)),
        (lambda d: PushFragment(0, fragment, 1, 1, 0, 1, 1, 1, d), dtype.nbytes(numel)),
        (lambda d: FinalFragment(fragment, 1, d), 4 * numel),
    ]:
        message = make(bytes(max(0, nbytes + off)))
        if len(message.data) == nbytes:
            limits.check_bulk(message)
        else:
            with pytest.raises(PeerError, match=f"expected {nbytes}"):
                limits.check_bulk(message)


@pytest.mark.parametrize("fragment", [2, 2**32 - 1])
def test_a_fragment_the_layout_does_not_have(fragment):
    limits = GroupLimits(LAYOUT, WireDType.F32, Direction.TO_LEARNER)
    with pytest.raises(PeerError, match=f"fragment {fragment}"):
        limits.check_bulk(BcastFragment(fragment, 1, bytes(4000)))
