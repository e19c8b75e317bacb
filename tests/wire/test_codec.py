"""f32, bf16 and q4: golden bytes, the rounding rules derived anew, and everything a decoder must refuse."""

import json
import struct
import warnings
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from yeto_torch.wire import codec
from yeto_torch.wire.codec import q4
from yeto_torch.wire.codec.bounds import BLOCK
from yeto_torch.wire.constants import MAX_MAGNITUDE, WireDType
from yeto_torch.wire.errors import LocalError, PeerError

pytestmark = pytest.mark.usefixtures("either_way")

F32, BF16, Q4 = WireDType.F32, WireDType.BF16, WireDType.Q4
BF16_MAX = 3.3895313892515355e38
SIZES = [1, 2, 255, 256, 257, 1000, BLOCK, BLOCK + 1, 256 * q4.AT_ONCE + 300]


@pytest.fixture(scope="module")
def golden(request):
    path = request.config.rootpath / "tests" / "vectors" / "numerics.json"
    return json.loads(path.read_text(encoding="utf-8"))


def flat(values):
    return torch.tensor(values, dtype=torch.float32)


def wild(numel, seed=0):
    """Values over many magnitudes, with zeros of both signs and one block of zeros."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(numel) * np.exp(4 * rng.standard_normal(numel))).astype(np.float32)
    x[::7] = 0.0
    x[3::11] *= np.float32(-0.0)
    x[256:512] = 0.0
    return x


# ---------------------------------------------------------------- golden bytes


def test_golden_q4(golden):
    values = flat([1, -0.5, 0.25, 0])
    data = codec.encode(values, Q4)
    assert bytes(data).hex() == golden["q4_a"]["hex"]
    assert torch.equal(codec.decode(data, 4, Q4), values)


def test_golden_bf16(golden):
    bits = np.frombuffer(codec.encode(flat([1, -2.5, 0.1, 1.00390625, 1.01171875]), BF16), "<u2")
    assert " ".join(f"{b:04x}" for b in bits) == golden["bf16"]["text"]


def test_f32_is_little_endian():
    assert bytes(codec.encode(flat([1.0, -2.0]), F32)) == struct.pack("<2f", 1.0, -2.0)


# ---------------------------------------------------------------- bf16


def bf16_oracle(x):
    """Nearest even on the bit patterns of finite values, saturating."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (u + 0x7FFF + (u >> 16 & 1)) >> 16
    return np.where(bits & 0x7FFF > 0x7F7F, bits & 0x8000 | 0x7F7F, bits).astype("<u2")


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_bf16_rounds_to_nearest_even_and_saturates(values):
    x = np.array(values, np.float32)
    assert bytes(codec.encode(torch.from_numpy(x), BF16)) == bf16_oracle(x).tobytes()


@pytest.mark.parametrize("sign", [1, -1])
def test_bf16_does_not_overflow_to_infinity(sign):
    top = float(np.finfo(np.float32).max)
    data = codec.encode(flat([0.0] * BLOCK + [sign * top]), BF16)
    assert codec.as_tensor(data, BLOCK + 1, BF16)[-1].item() == sign * BF16_MAX


# ---------------------------------------------------------------- q4


def log2_to_f32(x):
    """The f32 nearest to the exact logarithm of an f32, from 50 digits."""
    with localcontext() as context:
        context.prec = 50
        exact = Decimal(float(x)).ln() / Decimal(2).ln()
        near = np.float32(float(exact))
        around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
        return min(around, key=lambda y: abs(Decimal(float(y)) - exact))


@pytest.mark.parametrize("level", range(1, 8))
def test_the_seven_thresholds_are_the_rule(level):
    """The rule: level = round half to even(log2 of the ratio, in f32) + 7. Around each threshold, ratio by ratio."""
    threshold = q4.LEVEL_BITS[level - 1]
    ratios = np.arange(threshold - 8, threshold + 8, dtype=np.uint32).view(np.float32)
    exact = np.rint(np.array([log2_to_f32(r) for r in ratios], np.float32)) + 7
    assert (exact >= level).tolist() == [False] * 8 + [True] * 8
    wide = np.arange(threshold - 5000, threshold + 5000, dtype=np.uint32)
    by_library = np.rint(np.log2(wide.view(np.float32))) + 7
    assert np.array_equal(by_library >= level, wide >= threshold)


def q4_oracle(x):
    """The rule in its own words, block by block, with the library's f32 logarithm."""
    out = bytearray()
    for start in range(0, len(x), 256):
        block = np.zeros(256, np.float32)
        block[: len(x) - start] = x[start : start + 256]
        scale = np.abs(block).max()
        nibbles = []
        for value in block:
            ratio = np.abs(value) / scale if scale else np.float32(0)
            level = min(max(int(np.rint(np.log2(ratio))) + 7, 0), 7) if ratio else 0  # a ratio may underflow to 0
            nibbles.append(level | (8 if value < 0 and level else 0))
        out += struct.pack("<f", scale) + bytes(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2], strict=True))
    return bytes(out)


@pytest.mark.parametrize("numel", [*SIZES[:-1], 3 * 256 + 17])
def test_q4_equals_the_rule_at_every_size(numel):
    x = wild(numel)
    assert bytes(codec.encode(torch.from_numpy(x), Q4)) == q4_oracle(x)


def test_q4_pieces_make_no_difference():
    x = wild(SIZES[-1])
    whole = bytes(codec.encode(torch.from_numpy(x), Q4))
    cut = 256 * (q4.AT_ONCE - 1)
    parts = [bytes(codec.encode(torch.from_numpy(part), Q4)) for part in (x[:cut], x[cut:])]
    assert whole == b"".join(parts)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=300),
    st.sampled_from([1.0, 2.0**-140, 2.0**90]),
)
def test_q4_equals_the_rule(values, factor):
    with np.errstate(over="ignore", under="ignore"):
        x = np.clip(np.array(values, np.float32) * np.float32(factor), -(2.0**100), 2.0**100).astype(np.float32)
    data = codec.encode(torch.from_numpy(x), Q4)
    assert bytes(data) == q4_oracle(x)
    back = codec.decode(data, len(x), Q4)
    assert bytes(codec.encode(back, Q4)) == bytes(data) or np.abs(x).max() < 2.0**-120  # exact but for subnormals


@pytest.mark.parametrize("scale", [1.0, 3.0, 1e-30, 7.7e20])
def test_q4_at_the_ties_of_other_scales(scale):
    """A ratio comes from a division that rounds: each threshold's neighbours, at scales that are no power of two."""
    near = [np.arange(t - 3, t + 4, dtype=np.uint32).view(np.float32) for t in q4.LEVEL_BITS]
    x = np.concatenate([[1.0], *near]).astype(np.float32) * np.float32(scale)
    assert bytes(codec.encode(torch.from_numpy(x), Q4)) == q4_oracle(x)


def test_q4_decodes_every_nibble():
    data = struct.pack("<f", 2.0) + bytes(range(128))
    got = codec.decode(data, 256, Q4).tolist()
    for i, byte in enumerate(range(128)):
        for nibble, value in ((byte & 15, got[2 * i]), (byte >> 4, got[2 * i + 1])):
            level, sign = nibble & 7, -1 if nibble & 8 else 1
            assert value == (sign * 2.0 ** (level - 7) * 2.0 if level else 0.0)


def test_q4_keeps_each_value_within_half_an_octave_or_drops_it():
    x = torch.from_numpy(wild(5000))
    y = codec.decode(codec.encode(x, Q4), 5000, Q4)
    kept = y != 0
    ratio = y[kept] / x[kept]
    assert ratio.min() > 2**-0.501
    assert ratio.max() < 2**0.501
    scale = torch.nn.functional.pad(x, (0, 120)).view(-1, 256).abs().amax(1).repeat_interleave(256)[:5000]
    assert bool((x[~kept].abs() <= scale[~kept] * 2**-6.499).all())


def test_q4_padding_is_not_looked_at():
    data = bytearray(codec.encode(flat([1.0, 0.5, 0.25]), Q4))
    data[5] |= 0xF0  # the fourth nibble, behind the three values
    data[6:] = b"\xff" * 126
    assert codec.decode(data, 3, Q4).tolist() == [1.0, 0.5, 0.25]


# ---------------------------------------------------------------- encode


def test_f32_of_a_contiguous_cpu_tensor_is_a_view():
    values = flat([1.0, 2.0])
    data = codec.encode(values, F32)
    values[0] = 5.0
    assert struct.unpack("<2f", data) == (5.0, 2.0)


@pytest.mark.parametrize("dtype", [BF16, Q4])
def test_other_dtypes_own_their_bytes(dtype):
    values = flat([1.0, 2.0])
    data = codec.encode(values, dtype)
    before = bytes(data)
    values.fill_(9.0)
    assert bytes(data) == before


@pytest.mark.parametrize("dtype", WireDType)
@pytest.mark.parametrize("numel", SIZES)
def test_encode_gives_flat_bytes_of_the_right_number(dtype, numel):
    data = codec.encode(torch.ones(numel, requires_grad=True), dtype)
    assert (data.format, data.ndim, data.nbytes) == ("B", 1, dtype.nbytes(numel))


@pytest.mark.parametrize("dtype", WireDType)
def test_a_strided_tensor_is_encoded_by_value(dtype):
    values = torch.from_numpy(wild(1200))
    assert bytes(codec.encode(values[::2], dtype)) == bytes(codec.encode(values[::2].clone(), dtype))


@pytest.mark.parametrize("values", [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2)])
def test_encode_takes_flat_f32_only(values):
    with pytest.raises(LocalError, match="flat f32"):
        codec.encode(values, BF16)


def test_rounded_values_are_not_copied():
    values = flat([1.0, -2.5]).to(torch.bfloat16)
    data = codec.encode(values, BF16)
    assert bytes(data) == bytes(codec.encode(values.float(), BF16))
    values[0] = 3.0
    assert codec.as_tensor(data, 2, BF16).tolist() == [3.0, -2.5]


@pytest.mark.parametrize("dtype", [F32, Q4])
def test_rounded_values_are_bf16_only(dtype):
    with pytest.raises(LocalError, match="flat f32"):
        codec.encode(torch.zeros(4, dtype=torch.bfloat16), dtype)


# ---------------------------------------------------------------- decode


@pytest.mark.parametrize("dtype", WireDType)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("offset", [0, 25, 61])
def test_decode_reads_any_alignment_and_owns_the_result(dtype, numel, offset):
    values = torch.from_numpy(np.clip(wild(numel, seed=numel), -1e20, 1e20))
    data = codec.encode(values, dtype)
    held = bytearray(offset) + data
    got = codec.decode(memoryview(held)[offset:], numel, dtype)
    want = values if dtype is F32 else values.to(torch.bfloat16).float() if dtype is BF16 else None
    if want is not None:
        assert torch.equal(got, want)
    again = codec.decode(bytes(data), numel, dtype, negate=True)
    assert torch.equal(again, -got)
    before = got.clone()
    held[offset:] = bytes(len(data))
    assert torch.equal(got, before)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_negation_is_that_of_ieee(dtype):
    data = codec.encode(flat([0.0, -0.0, 1.0]), dtype)
    assert torch.signbit(codec.decode(data, 3, dtype, negate=True)).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", WireDType)
def test_decode_into_a_given_tensor(dtype):
    values = torch.from_numpy(wild(700)).clamp(-100, 100)
    data, out = codec.encode(values, dtype), torch.empty(700)
    assert codec.decode(data, 700, dtype, out=out) is out
    assert torch.equal(out, codec.decode(data, 700, dtype))


@pytest.mark.parametrize("out", [torch.empty(3), torch.empty(4, dtype=torch.float64), torch.empty(8)[::2]])
def test_decode_refuses_a_tensor_that_does_not_fit(out):
    with pytest.raises(LocalError, match="decode into"):
        codec.decode(bytes(16), 4, F32, out=out)


@pytest.mark.parametrize("dtype", WireDType)
@pytest.mark.parametrize("by", [-132, -1, 1, 132])
def test_a_wrong_length_is_the_peers_fault(dtype, by):
    data = bytes(dtype.nbytes(300) + by)
    with pytest.raises(PeerError, match=f"{len(data)} tensor bytes, expected {dtype.nbytes(300)} for 300 values"):
        codec.decode(data, 300, dtype)


BAD = [float("nan"), float("inf"), -float("inf"), MAX_MAGNITUDE * 1.01, -MAX_MAGNITUDE * 1.01]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, BLOCK + 6])
def test_values_no_merge_may_see_are_refused_wherever_they_stand(dtype, bad, at):
    values = torch.ones(BLOCK + 7)
    values[at] = bad
    data = values.to(torch.bfloat16 if dtype is BF16 else torch.float32).view(torch.uint8).numpy().tobytes()
    why = "above 2\\^100" if np.isfinite(bad) else "not finite"
    with pytest.raises(PeerError, match=why):
        codec.decode(data, values.numel(), dtype)
    with pytest.raises(PeerError, match=why):
        codec.check_bounded(codec.as_tensor(data, values.numel(), dtype))
    assert not codec.is_bounded(values)


@pytest.mark.parametrize("at", [0, 4 * BLOCK - 1, 4 * BLOCK + 3])
@pytest.mark.parametrize("offset", [0, 1])
def test_soundness_is_exact_where_the_sum_of_squares_says_nothing(at, offset):
    """Legal magnitudes whose squares have no f32, at addresses of every kind."""
    values = torch.ones(4 * BLOCK + 7)
    held = np.zeros(values.nbytes + offset, np.uint8)[offset:]
    beyond = float(np.nextafter(np.float32(MAX_MAGNITUDE), np.float32(np.inf)))
    for value, sound in ((2.0**64, True), (-MAX_MAGNITUDE, True), (beyond, False)):
        values[at] = value
        held[:] = values.view(torch.uint8).numpy()
        assert codec.is_bounded(torch.from_numpy(held).view(torch.float32)) is sound


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_soundness_of_every_bf16(offset):
    every = np.arange(2**16).astype("<u2")
    floats = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).float()
    sound = ((floats >= -MAX_MAGNITUDE) & (floats <= MAX_MAGNITUDE)).numpy()
    held = np.zeros(6 + offset, np.uint8)[offset:]
    values = torch.from_numpy(held).view(torch.bfloat16)
    for at in range(3):
        for bits in (*every[~sound][::97], *every[sound][::97], 0x7180, 0xF180, 0x7181, 0xF181, 0x7F80, 0xFF80, 0xFFFF):
            held[:] = np.array([0x8000, 0x3F80, 0xBF80], "<u2").view(np.uint8)  # -0, 1, -1
            held[2 * at : 2 * at + 2] = np.array([bits], "<u2").view(np.uint8)
            assert codec.is_bounded(values) is bool(sound[bits])


@pytest.mark.parametrize("bad", [*BAD, -1e-30])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_q4_scales_are_checked(bad, block):
    data = bytearray(codec.encode(torch.ones(600), Q4))
    struct.pack_into("<f", data, 132 * block, bad)
    with pytest.raises(PeerError, match="q4 scale"):
        codec.decode(data, 600, Q4)


@pytest.mark.parametrize("dtype", WireDType)
def test_the_largest_legal_magnitude_passes(dtype):
    values = flat([MAX_MAGNITUDE, -MAX_MAGNITUDE])
    assert torch.equal(codec.decode(codec.encode(values, dtype), 2, dtype), values)
    assert codec.is_bounded(values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", WireDType)
def test_what_should_not_have_been_encoded_is_refused_or_saturated(dtype, bad):
    data = codec.encode(flat([1.0, bad, 0.0]), dtype)
    with pytest.raises(PeerError):
        codec.decode(data, 3, dtype)


@given(st.binary(min_size=264, max_size=264))
def test_any_q4_bytes_decode_to_sound_values_or_raise(data):
    try:
        values = codec.decode(data, 300, Q4)
    except PeerError:
        return
    assert codec.is_bounded(values)


# ---------------------------------------------------------------- views


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_view_copies_nothing_and_warns_of_nothing(dtype):
    held = bytearray(b"\0" * 61) + codec.encode(flat([1.0, 2.0, 3.0]), dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        views = [
            codec.as_tensor(memoryview(held)[61:], 3, dtype),
            codec.as_tensor(memoryview(held)[61:].toreadonly(), 3, dtype),
            codec.as_tensor(bytes(held[61:]), 3, dtype),
        ]
    assert [view.tolist() for view in views] == [[1.0, 2.0, 3.0]] * 3
    held[61:] = codec.encode(flat([4.0, 5.0, 6.0]), dtype)
    assert [view.tolist() for view in views[:2]] == [[4.0, 5.0, 6.0]] * 2


def test_a_view_keeps_its_buffer():
    view = codec.as_tensor(bytes(codec.encode(flat([1.5] * 100_000), F32)), 100_000, F32)
    other = [bytes(400_000) for _ in range(20)]  # would reuse the memory had it been given back
    assert view.unique().tolist() == [1.5]
    assert len(other) == 20


def test_q4_has_no_view():
    with pytest.raises(LocalError, match="Q4"):
        codec.as_tensor(bytes(132), 4, Q4)


def test_a_view_of_the_wrong_length_is_refused():
    with pytest.raises(PeerError, match="7 tensor bytes"):
        codec.as_tensor(bytes(7), 4, BF16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_memory(dtype):
    tensor = codec.empty(12_345, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((12_345,), dtype, True)
