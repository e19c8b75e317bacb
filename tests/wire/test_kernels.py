"""The codec's compiled loops against torch and numpy, to the bit, on odd values too; and what they refuse."""

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.kernel_switch import both_ways, same
from yeto_torch.wire import codec
from yeto_torch.wire.codec import kernels, plain, q4
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import PeerError

compiled = kernels.compiled
built = pytest.mark.skipif(compiled is None, reason="the kernels were not built here")

STRETCH, LARGE = 1024, 1 << 18  # values: what is worked on at once, and from where on f32 stores go past the cache
SIZES = [1, 3, 255, 256, 257, STRETCH - 1, STRETCH, STRETCH + 1, 5 * STRETCH + 7, LARGE + 13]
TWO_TO_100 = 0x71800000
BF16 = torch.bfloat16


def test_they_are_built_where_they_can_be():
    """Slower code would quietly take their place."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which("cc") is None or not headers.exists():
        pytest.skip("no C compiler, or no headers of Python, on this machine")
    assert compiled is not None


def any_bits(numel, seed):
    """f32 of every kind: each exponent, NaN, infinities, subnormals, zeros of both signs."""
    bits = np.random.default_rng(seed).integers(0, 2**32, numel, dtype=np.uint32)
    odd = np.array(
        [0, 1, 0x7F800000, 0x7FC00001, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x00800000, TWO_TO_100], np.uint32
    )
    special = np.concatenate([odd, odd | 0x80000000])[: numel // 2]
    bits[: special.size] = special
    return torch.from_numpy(bits.view(np.float32))


def bounded_bits(numel, seed):
    values = any_bits(numel, seed).numpy().view(np.uint32)
    values[(values & 0x7FFFFFFF) > TWO_TO_100] &= 0xBFFFFFFF
    return torch.from_numpy(values.view(np.float32))


def at(data, offset):
    """The same bytes, ``offset`` bytes past a multiple of 16."""
    held = np.zeros(len(data) + 32, np.uint8)
    start = -held.ctypes.data % 16 + offset
    held = held[start : start + len(data)]
    held[:] = np.frombuffer(data, np.uint8)
    return held.data


@built
@pytest.mark.parametrize("numel", SIZES)
def test_rounding_to_bf16(numel):
    values = any_bits(numel, numel)
    one, other = both_ways(lambda: codec.as_tensor(codec.encode(values, WireDType.BF16), numel, WireDType.BF16))
    assert bool((one.isnan() == other.isnan()).all())
    assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert torch.equal(one.isnan(), values.isnan())


@built
def test_every_bf16_and_its_neighbours_round_to_nearest_even():
    top = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([top, top | 0x7FFF, top | 0x8000, top | 0x8001, top | 0xFFFF])
    values = torch.from_numpy(bits.view(np.float32))
    values = values[values.isfinite()]
    expected = values.clamp(-plain._BF16_MAX, plain._BF16_MAX).to(torch.bfloat16)
    out = torch.empty(values.numel(), dtype=torch.bfloat16)
    plain.round_to_bf16(values, out)
    assert same(out, expected)


@built
@pytest.mark.parametrize("negate", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", list(WireDType))
def test_decoding(dtype, offset, negate):
    for numel in SIZES:
        data = at(codec.encode(bounded_bits(numel, numel), dtype), offset)
        one, other = both_ways(lambda data=data, numel=numel: codec.decode(data, numel, dtype, negate=negate))
        assert same(one, other), numel


@built
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("negate", [False, True])
def test_bf16_that_stays_bf16_is_the_same_value(numel, negate):
    data = at(codec.encode(bounded_bits(numel, 1), WireDType.BF16), 1)
    wide = codec.decode(data, numel, WireDType.BF16, negate=negate)
    halves = both_ways(lambda: codec.decode(data, numel, WireDType.BF16, negate=negate, out=codec.empty(numel, BF16)))
    for half in halves:
        assert half.dtype is BF16
        assert same(half.float(), wide)


@built
@pytest.mark.parametrize("numel", SIZES)
def test_q4(numel):
    values = bounded_bits(numel, 3)
    one, other = both_ways(lambda: bytes(codec.encode(values, WireDType.Q4)))
    assert one == other


@built
@pytest.mark.parametrize("at_index", [0, STRETCH - 1, STRETCH, 3 * STRETCH + 5])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**100 * (1 + 2.0**-7), -(2.0**120)])
@pytest.mark.parametrize("dtype", [WireDType.F32, WireDType.BF16])
def test_what_is_not_bounded_is_found_wherever_it_is(dtype, bad, at_index):
    values = torch.ones(3 * STRETCH + 6)
    values[at_index] = bad
    wire = values if dtype is WireDType.F32 else values.to(torch.bfloat16)
    data = at(wire.view(torch.uint8).numpy().tobytes(), 1)
    assert not codec.is_bounded(codec.as_tensor(data, values.numel(), dtype))
    for out in (None, torch.empty(values.numel(), dtype=wire.dtype)):
        with pytest.raises(PeerError, match="tensor bytes hold a value"):
            codec.decode(data, values.numel(), dtype, out=out)


@built
def test_two_to_the_hundredth_is_bounded():
    for dtype in (WireDType.F32, WireDType.BF16):
        values = torch.tensor([2.0**100, -(2.0**100), 0.0])
        assert torch.equal(codec.decode(codec.encode(values, dtype), 3, dtype), values)


F = np.zeros(8, np.float32)
H = np.zeros(8, np.int16)
READ_ONLY = np.zeros(8, np.float32)
READ_ONLY.flags.writeable = False


@built
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("decode", (F, F[:7], False, False)),
        ("decode", (H[:7], F, True, False)),
        ("decode", (F, H, True, False)),
        ("decode", (F[:6], F[:7], True, False)),
        ("decode", (bytes(30), F, False, False)),
        ("round_to_bf16", (F, H[:7])),
        ("round_to_bf16", (F, F)),
        ("subtract", (F, F[:7], False, F, False)),
        ("subtract", (F, H[:7], True, F, False)),
        ("subtract", (F, None, False, H[:7], True)),
        ("encode_q4", (F, np.zeros(131, np.uint8), q4._LEVELS)),
        ("encode_q4", (F, np.zeros(132, np.uint8), q4._LEVELS[:6])),
        ("decode_q4", (np.zeros(131, np.uint8), F, False)),
    ],
)
def test_arrays_that_do_not_fit_are_refused_untouched(name, arguments):
    before = [np.array(a, copy=True) for a in arguments if isinstance(a, np.ndarray)]
    with pytest.raises(ValueError, match="bytes where"):
        getattr(compiled, name)(*arguments)
    assert all(
        np.array_equal(a, b) for a, b in zip(before, [a for a in arguments if isinstance(a, np.ndarray)], strict=True)
    )


@built
@pytest.mark.parametrize("odd", [F[::2], READ_ONLY, "text", None, 3])
def test_what_is_no_writable_contiguous_array_is_refused(odd):
    with pytest.raises((ValueError, BufferError, TypeError)):
        compiled.round_to_bf16(np.zeros(len(odd) if hasattr(odd, "__len__") else 1, np.float32), odd)
    with pytest.raises((ValueError, BufferError, TypeError)):
        compiled.decode(bytes(32), odd, False, False)
