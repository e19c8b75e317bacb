"""Any rank of a learner but the first: it follows rank 0 and shows what it was told.

Decides nothing: which command is which collective is written in ``commands``, and ``leading`` is the other side of
each. It must not know the session; parameters are written through ``exchange``.

Source: rulings §5.12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from yeto_torch.config import LearnerConfig
from yeto_torch.learner.exchange import Exchange
from yeto_torch.learner.link import clock
from yeto_torch.learner.recovery import forget
from yeto_torch.learner.stats import Stats, numbers_of, stats_of
from yeto_torch.ranks.commands import Command, Commands, Flag, Release, f64_of
from yeto_torch.ranks.group import RankGroup, RankLostError
from yeto_torch.ranks.leading import marked, marks
from yeto_torch.wire.codec import TORCH_DTYPE, empty
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import RunError

RESYNC_CLOSED = "resync() after close(): the ranks of this learner no longer act together"


class Follower:
    """Any other rank's learner. Its methods are those of ``Learner``."""

    def __init__(
        self,
        config: LearnerConfig,
        exchange: Exchange,
        inner: Sequence[torch.optim.Optimizer],
        ranks: RankGroup,
        commands: Commands,
    ) -> None:
        self.config, self._exchange, self._inner = config, exchange, inner
        self._ranks, self._commands = ranks, commands
        self._tokens = 0  # of this rank
        self._release = Release()
        self._numbers: tuple[int, ...] = numbers_of(Stats(versions=(0,) * len(exchange.parameters)))
        self._nonfinite: list[Tensor] = []
        self._stall_s = 0.0
        self._error: Exception | None = None

    def start(self) -> None:
        self._follow_turn()

    def stepped(self, tokens: int | None) -> None:
        self._tokens += tokens or 0
        if self._release.free_steps and self._error is None:
            self._release = replace(self._release, free_steps=self._release.free_steps - 1)
        else:
            self._follow_turn()

    def finish(self, timeout_s: float | None) -> None:  # noqa: ARG002  # rank 0's counts
        while not self.finished:
            self._check_not_left("the learner was closed before the final cut came")
            self._follow_turn()

    def report_budget(self, steps: int) -> None:  # noqa: ARG002  # rank 0's counts
        self._check_not_left("the learner was closed before the budget was reported")
        self._follow_turn()

    def resync(self) -> None:
        if Flag.FINISHED in self._release.flags:
            raise RunError("resync() after the final cut was installed")
        self._check_not_left(RESYNC_CLOSED)
        self._follow_turn()

    def close(self) -> None:
        """Nothing: rank 0's ``close`` ends the session."""

    def abandon(self) -> None:
        """Nothing: there is no connection here."""

    @property
    def local_step(self) -> int:
        return self._release.local_step

    @property
    def installed(self) -> bool:
        return Flag.INSTALLED in self._release.flags

    @property
    def frozen(self) -> bool:
        return Flag.FROZEN in self._release.flags

    @property
    def finished(self) -> bool:
        return Flag.FINISHED in self._release.flags

    @property
    def stats(self) -> Stats:
        return stats_of(self._numbers, self._stall_s)

    def _check_not_left(self, sentence: str) -> None:
        if Flag.CLOSED in self._release.flags:
            raise RunError(sentence)

    def _follow_turn(self) -> None:
        """Follow one turn of rank 0. Raises its error."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._release.flags & (Flag.FINISHED | Flag.CLOSED):
            return
        started = clock()
        try:
            self._release = self._until_released()
        except BaseException as error:
            self._error = (
                error if isinstance(error, RankLostError) else RankLostError(f"this rank failed in a turn: {error!r}")
            )
            raise
        finally:
            self._stall_s += clock() - started
        self._numbers = self._release.numbers or self._numbers
        if self._release.error is not None:
            self._error = self._release.error if Flag.FINAL in self._release.flags else None
            raise self._release.error

    def _until_released(self) -> Release:
        while True:
            command, numbers = self._commands.receive()
            if command is Command.RELEASE:
                return self._commands.released(numbers)
            self._carry_out(command, numbers)

    def _carry_out(self, command: Command, numbers: Sequence[int]) -> None:
        fragment = numbers[0]
        match command:
            case Command.COUNT:
                self._ranks.sum(self._tokens)
            case Command.GATHER:
                self._gather(fragment)
            case Command.CHECK:
                if not any(marks(self._exchange, self._ranks, fragment)):
                    self._gather(fragment)
            case Command.WRITE:
                self._write(fragment, WireDType(numbers[1]), f64_of(numbers[2]))
            case Command.NONFINITE:
                self._nonfinite = marked(self._exchange, fragment, marks(self._exchange, self._ranks, fragment))
            case Command.FORGET:
                forget(self._inner, self._nonfinite, self._ranks.any)

    def _gather(self, fragment: int) -> None:
        with self._ranks.collective():
            self._exchange.gather(fragment)

    def _write(self, fragment: int, dtype: WireDType, alpha: float) -> None:
        numel = sum(parameter.numel() for parameter in self._exchange.parameters[fragment])
        values = self._ranks.broadcast_values(empty(numel, TORCH_DTYPE[dtype]), self._exchange.device(fragment))
        self._exchange.write(fragment, values, alpha)
