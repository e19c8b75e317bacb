"""Models to measure with: many equal matrices, and a chain of layers that can really be trained."""

from __future__ import annotations

import torch
from torch import nn


class Matrices(nn.Module):
    """``numel`` parameters (or a few less) in equal matrices named like layers; no forward, no gradients of its own."""

    def __init__(self, numel: int, count: int = 24) -> None:
        super().__init__()
        side = max(1, round((numel / count) ** 0.5))
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList()
        for _ in range(count):
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.randn(side, side, generator=generator).mul_(0.02))
            self.layers.append(layer)

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def chain(numel: int, depth: int = 8) -> nn.Sequential:
    """About ``numel`` parameters in ``depth`` square layers with a nonlinearity between them."""
    width = max(4, round((numel / depth) ** 0.5))
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())))


def millions(numel: int) -> str:
    """A count of values for a figure's name."""
    return f"{numel / 1e6:.3g} M"
