"""One trip over memory: the same bits as step by step, at every size, address and dtype; bad values found anywhere."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from yeto_torch.learner.snapshot import Snapshots
from yeto_torch.wire.codec.bounds import BLOCK
from yeto_torch.wire.constants import MAX_MAGNITUDE
from yeto_torch.wire.errors import LocalError

pytestmark = pytest.mark.usefixtures("either_way")

SIZES = [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK + 5]
F32, BF16 = torch.float32, torch.bfloat16
LOCALS = (F32, BF16, torch.float16, torch.float64)


def random(numel, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(numel, generator=generator).exp()
    return torch.randn(numel, generator=generator).mul_(scale).to(dtype)


def at(values, offset):
    """``values`` at an address ``offset`` bytes past a multiple of 16."""
    if values.numel() == 0:
        return values
    held = np.zeros(values.nbytes + 32, np.uint8)
    start = -held.ctypes.data % 16 + offset
    held = held[start : start + values.nbytes]
    held[:] = values.view(torch.uint8).numpy()
    return torch.from_numpy(held).view(values.dtype)


def same_bits(one, other):
    return one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("out", [F32, BF16])
@pytest.mark.parametrize(("base", "offset"), [(F32, 0), (F32, 1), (BF16, 0), (BF16, 1), (BF16, 2)])
def test_a_difference_has_the_bits_of_its_steps(numel, out, base, offset):
    local, anchor = random(numel, F32, 1), random(numel, base, 2)
    target = torch.full((numel,), float("nan"), dtype=out)
    assert Snapshots().take([local], at(anchor, offset), target)
    assert same_bits(target, (local - anchor.float()).to(out))


def test_tensors_that_are_too_few_for_their_place_are_an_error():
    """The place may hold another answer's values, and would be sent."""
    with pytest.raises(LocalError):
        Snapshots().take([torch.ones(3)], None, torch.full((8,), 7.0))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("out", [F32, BF16])
@pytest.mark.parametrize("local", LOCALS)
def test_a_copy_has_the_bits_of_its_steps(numel, out, local):
    values = random(numel, local, 3)
    target = torch.full((numel,), float("nan"), dtype=out)
    assert Snapshots().take([values], None, target)
    assert same_bits(target, values.float().to(out))


@pytest.mark.parametrize("local", [BF16, torch.float16, torch.float64])
@pytest.mark.parametrize("base", [F32, BF16])
def test_any_local_dtype_is_met_in_f32(local, base):
    values, anchor = random(2 * BLOCK + 9, local, 4), random(2 * BLOCK + 9, base, 5)
    target = torch.empty(2 * BLOCK + 9)
    assert Snapshots().take([values], at(anchor, 1), target)
    assert same_bits(target, values.float() - anchor.float())


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 100, BLOCK, 2 * BLOCK - 1, 2 * BLOCK]), st.sampled_from(list(LOCALS))),
        max_size=6,
    ),
    st.sampled_from([F32, BF16]),
    st.sampled_from([None, F32, BF16]),
)
def test_tensors_one_behind_the_other_are_as_one(row, out, base):
    tensors = [random(numel, dtype, index) for index, (numel, dtype) in enumerate(row)]
    whole = torch.cat([tensor.float() for tensor in tensors] or [torch.empty(0)])
    target = torch.full((whole.numel(),), float("nan"), dtype=out)
    anchor = None if base is None else random(whole.numel(), base, 9)
    assert Snapshots().take(tensors, anchor if anchor is None else at(anchor, 1), target)
    assert same_bits(target, (whole if anchor is None else whole - anchor.float()).to(out))


def test_one_after_another_leaves_nothing_behind():
    snapshots = Snapshots()
    for numel in reversed(SIZES):
        local, anchor, target = random(numel, F32, 6), random(numel, BF16, 7), torch.empty(numel, dtype=BF16)
        assert snapshots.take([local], anchor, target)
        assert same_bits(target, (local - anchor.float()).to(BF16))


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf"), 1.01 * MAX_MAGNITUDE, -1.01 * MAX_MAGNITUDE]
)
@pytest.mark.parametrize("where", [0, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 8])
@pytest.mark.parametrize("out", [F32, BF16])
def test_a_bad_value_is_found_wherever_it_stands(bad, where, out):
    values, anchor, target = (
        torch.zeros(2 * BLOCK + 9),
        torch.zeros(2 * BLOCK + 9, dtype=BF16),
        torch.empty(2 * BLOCK + 9, dtype=out),
    )
    values[where] = bad
    assert not Snapshots().take([values], anchor, target)
    assert not Snapshots().take([values], None, target)
    values[where] = 0.0
    anchor[where] = bad
    assert not Snapshots().take([values], anchor, target)


@pytest.mark.parametrize("out", [F32, BF16])
def test_judged_is_what_is_to_be_sent_before_it_is_rounded(out):
    """The distance of two legal values may be too large; one that rounding would make legal is not."""
    target = torch.empty(1, dtype=out)
    assert Snapshots().take([torch.tensor([MAX_MAGNITUDE])], torch.tensor([0.0]), target)
    assert target.item() == MAX_MAGNITUDE
    assert not Snapshots().take([torch.tensor([MAX_MAGNITUDE])], torch.tensor([-MAX_MAGNITUDE]), target)
    beyond = torch.tensor([MAX_MAGNITUDE]).nextafter(torch.tensor([float("inf")]))
    assert beyond.to(BF16).item() == MAX_MAGNITUDE
    assert not Snapshots().take([beyond], torch.tensor([0.0]), target)
