"""q4 and bf16, encoded and decoded, against copying the f32 values they stand for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Figure, Size, Target, alternate, both, ratios, seconds
from benchmarks.model import millions
from benchmarks.stage import Launch, launch
from yeto_torch.wire import codec
from yeto_torch.wire.constants import WireDType

TARGETS = {WireDType.Q4: Target(12, 6), WireDType.BF16: Target(2, 1.2)}


def measure(size: Size, _start: Launch = launch) -> Iterator[Figure]:
    """One thread on both sides; the copy goes into memory that is there, our results into fresh memory, as in use."""
    numel = size.of(16_000_000, 4_000_000, 20_000)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).mul_(0.01)
    target = torch.empty_like(values).copy_(values)
    copy = seconds(lambda: target.copy_(values))
    for dtype, aim in TARGETS.items():
        data = bytes(codec.encode(values, dtype))
        works = {
            "encode": lambda dtype=dtype: codec.encode(values, dtype),
            "decode": lambda dtype=dtype, data=data: codec.decode(data, numel, dtype, negate=True),
        }
        for name, work in works.items():
            ours, theirs = alternate(size.of(15, 7, 2), seconds(work), copy)
            yield Figure(
                f"{dtype.name.lower()} {name}, {millions(numel)} values",
                "copying the f32 values",
                "x",
                aim,
                ratios(ours, theirs),
                both(ours, theirs),
            )
