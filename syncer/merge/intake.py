"""From a learner's answer to a signed outer gradient and its weight.

Bytes are decoded and negated once, here and nowhere else: a learner sends ``local - anchor``; every formula of the
merge wants ``anchor - local``. No learner's parameter is ever rebuilt, here or behind: no delta is added to the
syncer's present state.

Source: v4 §Deltas and staleness (negated exactly once; no learner's parameter is ever rebuilt here), v4 §Merging;
rulings §3.3, §4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from syncer.merge import kernels
from yeto_torch.wire import codec
from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.constants import WireDType


def decode_gradient(data: Buffer, numel: int, dtype: WireDType, device: torch.device) -> Tensor:
    """The signed outer gradient [numel] of a push's tensor bytes, on ``device``.

    It is f32, or bf16 if it came so and kernels are there to widen it on its way through the processor: half as much
    memory is written here, read by the merge, and held between them.

    Raises:
        PeerError: a wrong length, or a value no merge may see.
    """
    if dtype is WireDType.BF16 and kernels.compiled is not None and device.type == "cpu":
        return codec.decode(data, numel, dtype, negate=True, out=codec.empty(numel, torch.bfloat16))
    return codec.decode(data, numel, dtype, negate=True).to(device)


def learner_weight(c_tokens: int, c_steps: int) -> float:
    """``c_tokens^2 / c_steps`` in f64: tokens seen times tokens per step. 0 for a learner that made no step."""
    return float(c_tokens) ** 2 / c_steps if c_steps else 0.0
