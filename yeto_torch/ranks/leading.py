"""Rank 0's exchange: what it does to the parameters, every rank does; each call sends the command first.

Decides which command stands before which collective, and judges over all ranks what is finite and bounded. It must not
know the session. ``exchange`` stays the only writer: this class adds the ranks, not the arithmetic.

Source: rulings §5.12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from yeto_torch.learner.exchange import Exchange
from yeto_torch.ranks.commands import Command, Commands, f64_bits
from yeto_torch.ranks.group import RankGroup
from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import NonFiniteError
from yeto_torch.wire.model_layout import Layout


class LeadingExchange(Exchange):
    """An exchange in which every rank takes part: each call sends the command first."""

    def __init__(self, ranks: RankGroup, commands: Commands, layout: Layout, *model: Any) -> None:
        super().__init__(layout, *model)
        self._names = [[tensor.name for tensor in fragment.tensors] for fragment in layout.fragments]
        self._ranks, self._commands = ranks, commands

    def values(self, fragment: int, dtype: WireDType = WireDType.F32) -> Tensor:
        self._commands.send(Command.GATHER, fragment)
        with self._ranks.collective():
            return super().values(fragment, dtype)

    def delta(self, fragment: int, anchor: Buffer, dtype: WireDType = WireDType.F32) -> Tensor:
        """As of one process; raises NonFiniteError too when a value is not finite on another rank."""
        self._commands.send(Command.CHECK, fragment)
        for name, mark in zip(self._names[fragment], marks(self, self._ranks, fragment), strict=True):
            if mark:
                raise NonFiniteError(
                    f"parameter {name!r}: a value on rank {mark - 1} of this learner is not finite, or above 2^100; "
                    "nothing of it was sent"
                )
        with self._ranks.collective():
            return super().delta(fragment, anchor, dtype)

    def write(self, fragment: int, source: Tensor, alpha: float) -> None:
        dtype = WireDType.F32 if source.dtype is torch.float32 else WireDType.BF16
        self._commands.send(Command.WRITE, fragment, int(dtype), f64_bits(alpha))
        super().write(fragment, self._ranks.broadcast_values(source, self.device(fragment)), alpha)

    def nonfinite(self, fragment: int) -> list[Tensor]:
        """Those that are not finite and bounded on any rank."""
        self._commands.send(Command.NONFINITE, fragment)
        return marked(self, fragment, marks(self, self._ranks, fragment))


def marks(exchange: Exchange, ranks: RankGroup, fragment: int) -> list[int]:
    """For each parameter 0, or the last rank on which it is not finite and bounded, plus one."""
    bad = {id(parameter) for parameter in Exchange.nonfinite(exchange, fragment)}
    return ranks.maximum([(ranks.rank + 1) * (id(p) in bad) for p in exchange.parameters[fragment]])


def marked(exchange: Exchange, fragment: int, marks: Sequence[int]) -> list[Tensor]:
    return [parameter for parameter, mark in zip(exchange.parameters[fragment], marks, strict=True) if mark]
