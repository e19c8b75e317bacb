"""Rank 0's exchange: what it does to the parameters, every rank does; each call gives the order first.

Decides which order stands before which collective, and judges soundness over all ranks. It must not know the session.
``exchange`` stays the only writer: this class adds the ranks, not the arithmetic.

Source: rulings on a learner of several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from yeto_torch.learner.exchange import Exchange
from yeto_torch.ranks.commands import Order, Orders, f64_bits
from yeto_torch.ranks.group import Team
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import NonFiniteError
from yeto_torch.wire.layout import Layout
from yeto_torch.wire.messages import Buffer


class LeadingExchange(Exchange):
    """An exchange in which every rank takes part: each call gives the order first."""

    def __init__(self, team: Team, orders: Orders, layout: Layout, *model: Any) -> None:
        super().__init__(layout, *model)
        self._names = [[tensor.name for tensor in fragment.tensors] for fragment in layout.fragments]
        self._team, self._orders = team, orders

    def values(self, fragment: int, dtype: WireDType = WireDType.F32) -> Tensor:
        self._orders.give(Order.GATHER, fragment)
        with self._team.guard():
            return super().values(fragment, dtype)

    def delta(self, fragment: int, anchor: Buffer, dtype: WireDType = WireDType.F32) -> Tensor:
        """As of one process; raises NonFiniteError too when a value is not finite on another rank."""
        self._orders.give(Order.CHECK, fragment)
        for name, mark in zip(self._names[fragment], marks(self, self._team, fragment), strict=True):
            if mark:
                raise NonFiniteError(
                    f"parameter {name!r}: a value on rank {mark - 1} of this learner is not finite, or above 2^100; "
                    "nothing of it was sent"
                )
        with self._team.guard():
            return super().delta(fragment, anchor, dtype)

    def write(self, fragment: int, source: Tensor, alpha: float) -> None:
        dtype = WireDType.F32 if source.dtype is torch.float32 else WireDType.BF16
        self._orders.give(Order.WRITE, fragment, int(dtype), f64_bits(alpha))
        super().write(fragment, self._team.share_values(source, self.device(fragment)), alpha)

    def unsound(self, fragment: int) -> list[Tensor]:
        """Those that are not sound on any rank."""
        self._orders.give(Order.UNSOUND, fragment)
        return marked(self, fragment, marks(self, self._team, fragment))


def marks(exchange: Exchange, team: Team, fragment: int) -> list[int]:
    """For each parameter 0, or the last rank on which it is not sound, plus one."""
    bad = {id(parameter) for parameter in Exchange.unsound(exchange, fragment)}
    return team.largest([(team.rank + 1) * (id(p) in bad) for p in exchange.parameters[fragment]])


def marked(exchange: Exchange, fragment: int, marks: Sequence[int]) -> list[Tensor]:
    return [parameter for parameter, mark in zip(exchange.parameters[fragment], marks, strict=True) if mark]
