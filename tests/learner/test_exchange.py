"""Parameters against anchors: exact deltas, blends that leave the anchor alone, nothing half-applied."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from yeto_torch.fragments import build_layout
from yeto_torch.learner.effects import Write
from yeto_torch.learner.exchange import Exchange
from yeto_torch.wire.codec import encode
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import NonFiniteError, PeerError

F32, BF16 = WireDType.F32, WireDType.BF16


def exchange(*tensors, bulk=F32, alpha=0.0):
    """One fragment of tensors named t0, t1, ... in that order (sizes must not increase)."""
    parameters = [torch.nn.Parameter(t) if t.is_leaf and not t.requires_grad else t for t in tensors]
    layout = build_layout([(f"t{i}", tuple(t.shape)) for i, t in enumerate(tensors)], fragments=1)
    assert [t.name for t in layout.tensors] == [f"t{i}" for i in range(len(tensors))]
    return Exchange(layout, [parameters], bulk, alpha), parameters


def anchor(values, bulk=F32):
    """Bytes at the odd offset that a received BCAST has."""
    raw = bytearray(25) + bytearray(encode(torch.as_tensor(values, dtype=torch.float32).flatten(), bulk))
    return memoryview(raw)[25:]


def widened(data, numel, bulk):
    dtype = torch.float32 if bulk is F32 else torch.bfloat16
    return torch.frombuffer(bytearray(data), dtype=dtype)[:numel].float()


FLOATS = hnp.arrays(np.float32, 12, elements=st.floats(-(2.0**90), 2.0**90, width=32))


@given(FLOATS, FLOATS, st.sampled_from([F32, BF16]))
def test_the_delta_is_local_minus_anchor_in_f32(local, global_values, bulk):
    ex, _ = exchange(torch.from_numpy(local.copy()).reshape(2, 6), bulk=bulk)
    data = anchor(global_values, bulk)
    expected = local - widened(data, 12, bulk).numpy()
    assert np.array_equal(ex.delta(0, data).numpy(), expected)


def test_tensors_follow_each_other_in_logical_order_whatever_their_strides():
    matrix = torch.arange(6.0).reshape(2, 3).t()  # (3, 2), transposed storage
    assert not matrix.is_contiguous()
    ex, (first, second, third) = exchange(matrix, torch.tensor([10.0, 11.0]), torch.tensor(20.0))
    assert ex.values(0).tolist() == [0, 3, 1, 4, 2, 5, 10, 11, 20]
    ex.adopt(0, anchor(range(1, 10)), Write.OVERWRITE)
    assert first.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert first.stride() == (1, 3)
    assert (second.tolist(), third.item()) == ([7, 8], 9)
    with torch.no_grad():
        first[2, 0] += 0.5
    assert ex.delta(0, anchor(range(1, 10))).tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bulk", [F32, BF16])
def test_other_parameter_dtypes_meet_f32_anchors(dtype, bulk):
    start = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    ex, (parameter,) = exchange(start.clone(), bulk=bulk, alpha=0.25)
    data = anchor([0.3, 100.7, -0.001], bulk)
    wide = widened(data, 3, bulk)
    assert torch.equal(ex.delta(0, data), start.float() - wide)
    ex.adopt(0, data, Write.BLEND)
    assert parameter.dtype is dtype
    blended = start.double() * 0.25 + wide.double() * 0.75
    assert torch.allclose(parameter.double(), blended, rtol=0, atol=float(torch.finfo(dtype).eps) * 101)
    ex.adopt(0, data, Write.OVERWRITE)
    assert torch.equal(parameter, wide.to(dtype))


def test_an_in_place_blend_does_not_touch_the_anchor():
    ex, (parameter,) = exchange(torch.tensor([4.0, 8.0]), alpha=0.5)
    data = anchor([0.0, 2.0])
    before = bytes(data)
    ex.adopt(0, data, Write.BLEND)
    assert parameter.tolist() == [2.0, 5.0]
    with torch.no_grad():
        parameter.add_(1.0)
    assert bytes(data) == before
    assert ex.delta(0, data).tolist() == [3.0, 4.0]  # measured from the raw broadcast, not from the blend


def test_alpha_zero_takes_the_broadcast_even_over_values_that_are_not_finite():
    ex, (parameter,) = exchange(torch.tensor([float("nan"), float("inf")]))
    ex.adopt(0, anchor([1.0, 2.0]), Write.BLEND)
    assert parameter.tolist() == [1.0, 2.0]


def test_keep_moves_nothing_but_still_judges():
    ex, (parameter,) = exchange(torch.tensor([1.0]))
    ex.adopt(0, anchor([5.0]), Write.KEEP)
    assert parameter.item() == 1.0
    with pytest.raises(PeerError, match="not finite"):
        ex.adopt(0, anchor([float("nan")]), Write.KEEP)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**101])
def test_a_bad_broadcast_touches_no_parameter(bad):
    ex, parameters = exchange(torch.ones(2), torch.ones(1))
    with pytest.raises(PeerError):
        ex.adopt(0, anchor([7.0, 7.0, bad]), Write.OVERWRITE)
    assert all(bool((p == 1).all()) for p in parameters)


def test_a_bad_fragment_of_the_cut_touches_no_fragment():
    layout = build_layout([("a", (2,)), ("b", (1,))], fragments=2)
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))]
    ex = Exchange(layout, [[p] for p in parameters], BF16, 0.5)
    with pytest.raises(PeerError):
        ex.install([anchor([3.0, 3.0]), anchor([float("inf")])])
    assert [p.tolist() for p in parameters] == [[1, 1], [1]]
    ex.install([anchor([1 / 3, 3.0]), anchor([4.0])])  # f32 although the session is bf16, alpha off
    assert parameters[0][0].item() == np.float32(1 / 3)
    assert parameters[1].tolist() == [4.0]


@pytest.mark.parametrize(
    ("bad", "words"), [(float("nan"), "not finite"), (float("-inf"), "not finite"), (2.0**101, "2\\^100")]
)
def test_the_first_bad_tensor_is_named(bad, words):
    ex, (_, second, third) = exchange(torch.zeros(3), torch.zeros(2), torch.zeros(2))
    with torch.no_grad():
        second[1] = bad
        third[0] = bad
    with pytest.raises(NonFiniteError, match=f"'t1'.*{words}"):
        ex.delta(0, anchor([0.0] * 7))
    with pytest.raises(NonFiniteError, match="'t1'"):
        ex.values(0)
    assert [t is second or t is third for t in ex.nonfinite(0)] == [True, True]


def test_the_largest_legal_magnitude_passes():
    ex, _ = exchange(torch.tensor([2.0**100, -(2.0**100)]))
    assert ex.delta(0, anchor([0.0, 0.0])).tolist() == [2.0**100, -(2.0**100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bulk", [F32, BF16])
def test_what_travels_in_bf16_comes_rounded_and_is_the_same_on_the_wire(dtype, bulk):
    matrix = torch.randn(30, 500, generator=torch.Generator().manual_seed(1)).to(dtype).t()
    ex, _ = exchange(matrix, torch.randn(7).to(dtype), bulk=bulk)
    data = anchor(torch.randn(15007), bulk)
    for whole, rounded in ((ex.delta(0, data), ex.delta(0, data, BF16)), (ex.values(0), ex.values(0, BF16))):
        assert (whole.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
        assert bytes(encode(rounded, BF16)) == bytes(encode(whole, BF16))
    for dtype_ in (F32, WireDType.Q4):
        assert torch.equal(ex.delta(0, data, dtype_), ex.delta(0, data))


def test_an_answer_keeps_its_memory_for_as_long_as_anybody_looks_at_it():
    numel = 2**20
    ex, (parameter,) = exchange(torch.zeros(numel))
    data = anchor(torch.zeros(numel))
    addresses, held = set(), []
    for value in range(4):
        with torch.no_grad():
            parameter.fill_(value)
        delta = ex.delta(0, data, BF16)
        addresses.add(delta.data_ptr())
        held.append(encode(delta, BF16))
        del delta
    assert len(addresses) == 4
    for value, sent in enumerate(held):
        assert torch.frombuffer(sent, dtype=torch.bfloat16).unique().tolist() == [value]
    del held, sent
    assert ex.delta(0, data, BF16).data_ptr() in addresses  # lent again


def test_a_bad_value_is_named_in_every_dtype():
    ex, (_, second) = exchange(torch.zeros(3), torch.zeros(2))
    with torch.no_grad():
        second[1] = float("nan")
    for dtype in WireDType:
        with pytest.raises(NonFiniteError, match="'t1'"):
            ex.delta(0, anchor([0.0] * 5), dtype)
        with pytest.raises(NonFiniteError, match="'t1'"):
            ex.values(0, dtype)


def test_values_and_deltas_are_copies():
    ex, (parameter,) = exchange(torch.ones(2))
    values, delta = ex.values(0), ex.delta(0, anchor([0.0, 0.0]))
    with torch.no_grad():
        parameter.zero_()
    assert values.tolist() == delta.tolist() == [1, 1]


def test_autograd_does_not_notice():
    parameter = torch.nn.Parameter(torch.ones(2))
    ex, _ = exchange(parameter)
    ex.adopt(0, anchor([3.0, 3.0]), Write.OVERWRITE)
    assert parameter.is_leaf
    assert parameter.grad_fn is None
    (parameter * 2).sum().backward()
    assert parameter.grad.tolist() == [2, 2]
    assert not ex.delta(0, anchor([0.0, 0.0])).requires_grad
