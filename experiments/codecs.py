"""How answers travel: the product's wire dtypes, and one that is bad on purpose.

q2 has four evenly spaced levels of the block's largest magnitude (-1, -1/3, 1/3, 1), without a zero: nearly every small
value becomes a third of the largest. A test that calls q2 as good as f32 would call anything so.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from syncer.merge.intake import decode_gradient
from yeto_torch.wire.codec import encode
from yeto_torch.wire.constants import WireDType

BLOCK = 256
_CPU = torch.device("cpu")
_LEVELS = np.array([-1, -1 / 3, 1 / 3, 1], np.float32)


def bulk_of(wire: str) -> WireDType:
    """The dtype of broadcasts."""
    return WireDType.BF16 if wire == "q2" else WireDType[wire.upper()].bulk


def answer_dtype(wire: str) -> WireDType:
    """The dtype of a session with such answers; of q2 the one it stands in for."""
    return WireDType.Q4 if wire == "q2" else WireDType[wire.upper()]


def encode_answer(delta: Tensor, wire: str) -> memoryview:
    """Bytes of local - anchor, [n] f32."""
    return _q2_encode(delta).data if wire == "q2" else encode(delta, WireDType[wire.upper()])


def decode_answer(data: memoryview, numel: int, wire: str) -> Tensor:
    """The signed outer gradient (anchor - local), [numel] f32."""
    return (
        _q2_decode(data, numel).neg_() if wire == "q2" else decode_gradient(data, numel, WireDType[wire.upper()], _CPU)
    )


def _q2_encode(values: Tensor) -> np.ndarray:
    """[n] f32 -> per block a scale in f32 and 64 bytes of four levels each."""
    blocks = np.zeros((-(-values.numel() // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: values.numel()] = values.numpy()
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    ratio = blocks / np.where(scales == 0, np.float32(1), scales)
    level = np.clip(np.floor((ratio + 1) * 1.5 + 0.5), 0, 3).astype(np.uint8).reshape(len(blocks), -1, 4)
    packed = (level << np.array([0, 2, 4, 6], np.uint8)).sum(axis=2).astype(np.uint8)
    return np.concatenate([scales.view(np.uint8), packed], axis=1).reshape(-1)


def _q2_decode(data: memoryview, numel: int) -> Tensor:
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 4 + BLOCK // 4)
    scales = blocks[:, :4].copy().view(np.float32)
    level = blocks[:, 4:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return torch.from_numpy((_LEVELS[level].reshape(len(blocks), BLOCK) * scales).reshape(-1)[:numel].copy())
