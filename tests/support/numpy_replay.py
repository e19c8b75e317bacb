"""A run once more, in numpy: the tape says who answered, the recorded pushes what, the formulas give every broadcast.

The wire's tensors are decoded here a second time; nothing is shared with the product but message objects. Formulas:
``merge_oracle``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support import merge_oracle as oracle
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.layout import WireLayout
from yeto_torch.wire.messages import PushFragment

Pushes = Mapping[tuple[int, int, int, int], PushFragment]


def decode(data: Any, numel: int, dtype: WireDType) -> np.ndarray:
    """[numel] f32 of tensor bytes."""
    raw = np.frombuffer(data, np.uint8)
    if dtype is WireDType.F32:
        return raw.copy().view("<f4")
    if dtype is WireDType.BF16:
        return (raw.copy().view("<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = raw.reshape(-1, 132)
    scales = blocks[:, :4].copy().view("<f4")
    nibbles = np.stack([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=2).reshape(len(blocks), 256)
    level = (nibbles & 7).astype(np.int32)
    size = np.where(level > 0, np.ldexp(scales.astype(np.float64), level - 7), 0.0)
    return np.where(nibbles & 8, -size, size).reshape(-1)[:numel].astype(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round f32 to bf16, nearest even; as f32."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


class Replay:
    """The coordinator's state, from INIT on.

    Args:
        layout, dtype: of the session.
        initial: [numel] f32 of every fragment, as the INITs carried them.
        lr, momentum, correction: the outer optimizer.
    """

    def __init__(
        self,
        layout: WireLayout,
        dtype: WireDType,
        initial: list[np.ndarray],
        *,
        lr: float,
        momentum: float,
        correction: bool,
    ) -> None:
        self.layout, self.dtype = layout, dtype
        self.params = [value.copy() for value in initial]
        self.momentum = [np.zeros_like(value) for value in initial]
        self.versions = [0] * len(initial)
        self._lr, self._mu, self._correction = lr, momentum, correction

    def commit(self, line: Mapping[str, Any], pushes: Pushes) -> None:
        """One merge line of the tape."""
        fragment = (line["step"] - 1) % len(self.layout)
        assert line["fragment"] == fragment
        assert line["launch_base_version"] == self.versions[fragment]
        members = [(r["id"], r["generation"]) for r in line["responders"]]
        assert members == sorted(members)
        found = [pushes[learner, generation, line["step"], line["attempt"]] for learner, generation in members]
        self._check_facts(line, found)
        part = self.layout.fragments[fragment]
        gradients = [-decode(push.data, part.numel, self.dtype) for push in found]
        merged = oracle.merge(
            MergeMode(part.mode).name.lower(),
            part.numels,
            part.dims,
            gradients,
            [oracle.weight(push.c_tokens, push.c_steps) for push in found],
            self.momentum[fragment],
            correction=self._correction,
        ).astype(np.float32)
        norm = float(np.linalg.norm(merged.astype(np.float64)))
        assert abs(line["gnorm"] - norm) <= 1e-5 * max(norm, 1e-30), (line["gnorm"], norm)
        self.params[fragment], self.momentum[fragment] = oracle.outer(
            self.params[fragment], self.momentum[fragment], merged, self._lr, self._mu
        )
        self.versions[fragment] = line["step"]

    def _check_facts(self, line: Mapping[str, Any], pushes: list[PushFragment]) -> None:
        """What the tape says of each answer is what the answer said."""
        whole = sum(oracle.weight(push.c_tokens, push.c_steps) for push in pushes)
        for told, push in zip(line["responders"], pushes, strict=True):
            weight = oracle.weight(push.c_tokens, push.c_steps)
            assert (told["base_version"], told["c_steps"], told["c_tokens"]) == (
                push.base_version,
                push.c_steps,
                push.c_tokens,
            )
            assert told["staleness"] == line["launch_base_version"] - push.base_version >= 0
            assert told["bytes"] == len(push.data)
            assert told["weight"] == weight
            assert told["contribution"] == (weight / whole if whole else 0.0)

    def distance(self, fragment: int, broadcast: Any) -> float:
        """How far a BCAST's bytes are from this state, in units of the fragment's largest magnitude.

        Under bf16 the broadcast must be what some f32 values so far away round to.
        """
        want = self.params[fragment]
        got = decode(broadcast, len(want), self.dtype.bulk)
        scale = max(float(np.abs(want).max()), 1e-30)
        if self.dtype.bulk is WireDType.F32:
            return float(np.abs(got.astype(np.float64) - want).max()) / scale
        bits = got.view(np.uint32)
        step = (bits + np.uint32(0x10000)).view(np.float32).astype(np.float64) - got  # to the next bf16 outwards
        outside = np.abs(got.astype(np.float64) - want) - np.abs(step) / 2
        return float(max(outside.max(), 0.0)) / scale
