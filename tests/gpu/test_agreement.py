"""The mathematics on CUDA agrees with the CPU to 1e-5, and with itself to the bit."""

import pytest
import torch

from syncer.merge import blocks
from syncer.merge.intake import decode_gradient
from syncer.merge.merge import merge_fragment
from syncer.merge.nesterov import nesterov_step
from syncer.state import GlobalState
from tests.support import merge_oracle as oracle
from yeto_torch.wire import codec
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FRAGMENTS = {
    MergeMode.AVG: WireFragment(MergeMode.AVG, (70_001, 3)),
    MergeMode.RDA: WireFragment(MergeMode.RDA, (70_001, 300)),
    MergeMode.ISO: WireFragment(MergeMode.ISO, (60 * 80, 33 * 20), ((60, 80), (33, 20))),
}


def round_of(fragment, lean):
    rng = torch.Generator().manual_seed(11)
    momentum = torch.randn(fragment.numel, generator=rng)
    gradients = [torch.randn(fragment.numel, generator=rng) + lean * momentum for _ in range(3)]
    return gradients, momentum


@pytest.mark.parametrize("mode", MergeMode)
@pytest.mark.parametrize("lean", [-0.5, 0.05, 1.0])
@pytest.mark.parametrize("block", [1000, 1 << 26])
def test_merges_agree(mode, lean, block, monkeypatch):
    monkeypatch.setattr(blocks, "GPU_BLOCK", block)
    fragment = FRAGMENTS[mode]
    gradients, momentum = round_of(fragment, lean)
    on_gpu = [g.to(GPU) for g in gradients]
    weights = [3.0, 1.0, 2.0]
    want = merge_fragment(fragment, gradients, weights, momentum, correction=True)[0]
    first, second = (merge_fragment(fragment, on_gpu, weights, momentum.to(GPU), correction=True)[0] for _ in range(2))
    assert first.device.type == "cuda"
    assert torch.equal(first, second)
    assert oracle.close(first.cpu(), want, 1e-5)
    assert blocks.norm(first) == pytest.approx(blocks.norm(want), rel=1e-5)


def test_outer_steps_agree_to_the_bit():
    """Products and sums are separate kernels on both devices, so nothing fuses and nothing may differ."""
    rng = torch.Generator().manual_seed(1)
    p, m, d = (torch.randn(100_003, generator=rng) for _ in range(3))
    p_gpu, m_gpu = p.to(GPU), m.to(GPU)
    nesterov_step(p, m, d, 0.7, 0.9)
    nesterov_step(p_gpu, m_gpu, d.to(GPU), 0.7, 0.9)
    assert torch.equal(p_gpu.cpu(), p)
    assert torch.equal(m_gpu.cpu(), m)


@pytest.mark.parametrize("dtype", WireDType)
def test_bytes_are_the_same(dtype):
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(2))
    data = codec.encode(values.to(GPU), dtype)
    assert bytes(data) == bytes(codec.encode(values, dtype))
    gradient = decode_gradient(data, 70_001, dtype, GPU)
    assert gradient.device.type == "cuda"
    assert torch.equal(gradient.cpu(), decode_gradient(data, 70_001, dtype, CPU))


@pytest.mark.parametrize("dtype", WireDType)
def test_state_lives_on_the_device_and_leaves_as_bytes(dtype):
    layout = WireLayout((WireFragment(MergeMode.RDA, (1000,)),))
    states = [GlobalState(layout, device) for device in (CPU, GPU)]
    start = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    for state in states:
        state.initialize(0, start.clone())
        state.commit(1, 0, torch.full((1000,), 0.25, device=state.device), 0.7, 0.9)
        assert state.params(0).device.type == state.device.type
    on_cpu, on_gpu = states
    assert bytes(on_cpu.broadcast_bytes(0, dtype)) == bytes(on_gpu.broadcast_bytes(0, dtype))
    assert bytes(on_cpu.final_bytes(0)) == bytes(on_gpu.final_bytes(0))
    for a, b in zip(on_cpu.host(0), on_gpu.host(0), strict=True):
        assert b.device.type == "cpu"
        assert torch.equal(a, b)
