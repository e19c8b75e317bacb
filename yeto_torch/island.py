"""A learner of several ranks: rank 0 is the learner, the others obey it.

Rank 0 (``Leader``) owns the session and decides; before each thing that concerns the parameters it gives an order, and
at the end of its turn it releases the others (``Follower``), with its state or its error. So all ranks leave a step
with equal parameters (of shards: each with its own of the same fragment), and none waits in a collective that rank 0
does not enter. This file must not know the protocol, and writes no parameter: ``exchange`` does.

    every rank    step, finish, report_budget, resync, start    -> rank 0's turn, in the same order on all of them
    rank 0 alone  close                                         -> told in its next turn
    no turn       close of another rank; anything behind ``finished``, a told ``close`` or an error that ended it all

A turn in which nothing is due is one broadcast of 64 bytes. Where steps are so short that this would count, turns are
left out: rank 0 says for how many steps.

Source: rulings on a learner of several ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from yeto_torch.config import LearnerConfig
from yeto_torch.exchange import Exchange
from yeto_torch.learner import Learner
from yeto_torch.link import clock
from yeto_torch.orders import Flag, Order, Orders, Release
from yeto_torch.protocol.codec import empty
from yeto_torch.protocol.constants import WireDType
from yeto_torch.protocol.errors import NonFiniteError, RunError
from yeto_torch.protocol.layout import Layout
from yeto_torch.protocol.messages import Buffer
from yeto_torch.recovery import forget
from yeto_torch.session import Phase
from yeto_torch.stats import Stats
from yeto_torch.team import Team, TeamError

_BEAT_S = 1.0  # while rank 0 waits, the others hear from it this often; every process group's timeout is longer
_SHARE = 0.01  # of the time of a step, for its turn
_MOST_FREE_STEPS = 15
_RESYNC_CLOSED = "resync() after close(): the ranks of this learner no longer act together"
_DTYPES = {WireDType.F32: torch.float32, WireDType.BF16: torch.bfloat16}


def enlist(
    config: LearnerConfig,
    layout: Layout,
    parameters: Sequence[Sequence[Tensor]],
    inner: Sequence[torch.optim.Optimizer],
    team: Team | None,
) -> Learner | Follower:
    """This rank's learner: a plain one without a team, else rank 0's or another's."""
    bulk, alpha = config.dtype.bulk, config.merge_alpha
    if team is None or team.size == 1:
        return Learner(config, layout, Exchange(layout, parameters, bulk, alpha), inner)
    orders = Orders(team)
    if team.rank == 0:
        exchange = LeadingExchange(layout, parameters, bulk, alpha, team, orders)
        return Leader(config, layout, exchange, inner, team, orders)
    return Follower(config, Exchange(layout, parameters, bulk, alpha), inner, team, orders)


class LeadingExchange(Exchange):
    """An exchange in which every rank takes part: each call gives the order first."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[Sequence[Tensor]],
        bulk: WireDType,
        alpha: float,
        team: Team,
        orders: Orders,
    ) -> None:
        super().__init__(layout, parameters, bulk, alpha)
        self._names = [[tensor.name for tensor in fragment.tensors] for fragment in layout.fragments]
        self._team, self._orders = team, orders

    def values(self, fragment: int) -> Tensor:
        self._orders.give(Order.GATHER, fragment)
        with self._team.guard():
            return super().values(fragment)

    def delta(self, fragment: int, anchor: Buffer) -> Tensor:
        """As of one process; raises NonFiniteError too when a value is not finite on another rank."""
        self._orders.give(Order.CHECK, fragment)
        for name, mark in zip(self._names[fragment], _marks(self, self._team, fragment), strict=True):
            if mark:
                raise NonFiniteError(
                    f"parameter {name!r}: a value on rank {mark - 1} of this learner is not finite, or above 2^100; "
                    "nothing of it was sent"
                )
        with self._team.guard():
            return super().delta(fragment, anchor)

    def write(self, fragment: int, source: Tensor, alpha: float) -> None:
        dtype = WireDType.F32 if source.dtype is torch.float32 else WireDType.BF16
        self._orders.give(Order.WRITE, fragment, int(dtype), _bits(alpha))
        super().write(fragment, self._team.share_values(source, self.device(fragment)), alpha)

    def unsound(self, fragment: int) -> list[Tensor]:
        """Those that are not sound on any rank."""
        self._orders.give(Order.UNSOUND, fragment)
        return _marked(self, fragment, _marks(self, self._team, fragment))


def _marks(exchange: Exchange, team: Team, fragment: int) -> list[int]:
    """For each parameter 0, or the last rank on which it is not sound, plus one."""
    bad = {id(parameter) for parameter in Exchange.unsound(exchange, fragment)}
    return team.largest([(team.rank + 1) * (id(p) in bad) for p in exchange.parameters[fragment]])


def _marked(exchange: Exchange, fragment: int, marks: Sequence[int]) -> list[Tensor]:
    return [parameter for parameter, mark in zip(exchange.parameters[fragment], marks, strict=True) if mark]


class Leader(Learner):
    """Rank 0's learner."""

    def __init__(
        self,
        config: LearnerConfig,
        layout: Layout,
        exchange: LeadingExchange,
        inner: Sequence[torch.optim.Optimizer],
        team: Team,
        orders: Orders,
    ) -> None:
        super().__init__(config, layout, exchange, inner)
        self._team, self._orders, self._pace = team, orders, _Pace()
        self._own_tokens = self._free_steps = 0
        self._told = Flag(0)
        self._is_news = False  # a boundary has changed the statistics
        self._error: Exception | None = None  # it ended the session, and every rank knows

    def start(self) -> None:
        with self._turn():
            super().start()

    def stepped(self, tokens: int | None) -> None:
        if tokens is not None:
            self.local_step = self.link.local_step = self.local_step + 1
            self._own_tokens += tokens
        if self._free_steps and self._error is None:
            self._free_steps -= 1
            return
        with self._turn(is_step=True):
            if self._session.attention and not self._is_alone:
                self._count()
                self._boundary()

    def finish(self, timeout_s: float | None) -> None:
        if Flag.FINISHED not in self._told:
            with self._turn():
                self._count()
                self._serve_to_the_end(timeout_s)
        self.link.close()

    def report_budget(self, steps: int) -> None:
        with self._turn():
            self._count()
            super().report_budget(steps)

    def resync(self) -> None:
        if self._is_alone and not self.installed:
            raise RunError(_RESYNC_CLOSED)
        with self._turn():
            self._count()
            super().resync()

    def close(self) -> None:
        """Leave at once, also while a final cut is coming: to take it needs the other ranks, who may be gone."""
        self.link.close()

    @property
    def finished(self) -> bool:
        """As every rank knows it: a loop on it ends at the same step everywhere."""
        return Flag.FINISHED in self._told

    @property
    def _is_alone(self) -> bool:
        """Do the others no longer listen?"""
        return bool(self._told & (Flag.FINISHED | Flag.CLOSED))

    @contextmanager
    def _turn(self, *, is_step: bool = False) -> Iterator[None]:
        """What happens inside happens on all ranks; its error is theirs too."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._is_alone:
            yield
            return
        try:
            yield
        except TeamError as error:
            self._end(error)
            raise
        except Exception as error:
            self._release(error, free_steps=0)
            raise
        except BaseException:
            self._end(TeamError("rank 0 of this learner was interrupted in the middle of its turn"))
            raise
        self._release(None, free_steps=self._pace.free_steps if is_step else 0)

    def _release(self, error: Exception | None, free_steps: int) -> None:
        numbers = _numbers(self.stats) if self._is_news else ()
        release = Release(self.local_step, free_steps, self._flags(), error, numbers)
        started, self._is_news = clock(), False
        try:
            self._orders.release(release)
        except TeamError as lost:
            self._end(lost)
            raise
        self._pace.released(started, clock(), self.local_step)
        self._told, self._free_steps = release.flags, free_steps
        if error is not None and Flag.FINAL in release.flags:
            self._error = error

    def _flags(self) -> Flag:
        with self.link.lock:
            phase, finished = self._session.phase, self._session.finished
        facts = {
            Flag.INSTALLED: self.installed,
            Flag.FINISHED: finished,
            Flag.FROZEN: self.frozen,
            Flag.CLOSED: phase is Phase.CLOSED and not finished,
            Flag.FINAL: phase is Phase.FAILED,
        }
        return Flag(sum(flag for flag, is_so in facts.items() if is_so))

    def _end(self, error: TeamError) -> None:
        """The team has come apart: leave the fleet, so that it does not wait for us."""
        self._error = error
        with self.link.lock:
            self._session.fail(error)
        self.link.nudge()

    def _boundary(self) -> None:
        self._is_news = True
        super()._boundary()

    def _count(self) -> None:
        if not self._is_alone:
            self._orders.give(Order.COUNT)
            self.tokens = self._team.total(self._own_tokens)

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        if not self._is_alone:
            self._orders.give(Order.IDLE)
        super()._wait(ready, min(timeout_s, _BEAT_S))

    def _forget(self, parameters: Sequence[Tensor]) -> None:
        self._orders.give(Order.FORGET)
        forget(self._inner, parameters, self._team.any)


class Follower:
    """Any other rank's learner: it obeys, and shows what rank 0 told it. Its methods are those of ``Learner``."""

    def __init__(
        self,
        config: LearnerConfig,
        exchange: Exchange,
        inner: Sequence[torch.optim.Optimizer],
        team: Team,
        orders: Orders,
    ) -> None:
        self.config, self._exchange, self._inner = config, exchange, inner
        self._team, self._orders = team, orders
        self._tokens = 0  # of this rank
        self._release = Release()
        self._numbers: tuple[int, ...] = _numbers(Stats(versions=(0,) * len(exchange.parameters)))
        self._unsound: list[Tensor] = []
        self._stall_s = 0.0
        self._error: Exception | None = None

    def start(self) -> None:
        self._obey()

    def stepped(self, tokens: int | None) -> None:
        self._tokens += tokens or 0
        if self._release.free_steps and self._error is None:
            self._release = replace(self._release, free_steps=self._release.free_steps - 1)
        else:
            self._obey()

    def finish(self, timeout_s: float | None) -> None:  # noqa: ARG002  # rank 0's counts
        while not self.finished:
            self._check_not_left("the learner was closed before the final cut came")
            self._obey()

    def report_budget(self, steps: int) -> None:  # noqa: ARG002  # rank 0's counts
        self._check_not_left("the learner was closed before the budget was reported")
        self._obey()

    def resync(self) -> None:
        if Flag.FINISHED in self._release.flags:
            raise RunError("resync() after the final cut was installed")
        self._check_not_left(_RESYNC_CLOSED)
        self._obey()

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
        return _stats(self._numbers, self._stall_s)

    def _check_not_left(self, sentence: str) -> None:
        if Flag.CLOSED in self._release.flags:
            raise RunError(sentence)

    def _obey(self) -> None:
        """One turn of rank 0. Raises its error."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._release.flags & (Flag.FINISHED | Flag.CLOSED):
            return
        started = clock()
        try:
            self._release = self._until_released()
        except BaseException as error:
            self._error = error if isinstance(error, TeamError) else TeamError(f"this rank failed in a turn: {error!r}")
            raise
        finally:
            self._stall_s += clock() - started
        self._numbers = self._release.numbers or self._numbers
        if self._release.error is not None:
            self._error = self._release.error if Flag.FINAL in self._release.flags else None
            raise self._release.error

    def _until_released(self) -> Release:
        while True:
            order, numbers = self._orders.take()
            if order is Order.RELEASE:
                return self._orders.released(numbers)
            self._do(order, numbers)

    def _do(self, order: Order, numbers: Sequence[int]) -> None:
        fragment = numbers[0]
        match order:
            case Order.COUNT:
                self._team.total(self._tokens)
            case Order.GATHER:
                self._gather(fragment)
            case Order.CHECK:
                if not any(_marks(self._exchange, self._team, fragment)):
                    self._gather(fragment)
            case Order.WRITE:
                self._write(fragment, WireDType(numbers[1]), _alpha(numbers[2]))
            case Order.UNSOUND:
                self._unsound = _marked(self._exchange, fragment, _marks(self._exchange, self._team, fragment))
            case Order.FORGET:
                forget(self._inner, self._unsound, self._team.any)

    def _gather(self, fragment: int) -> None:
        with self._team.guard():
            self._exchange.gather(fragment)

    def _write(self, fragment: int, dtype: WireDType, alpha: float) -> None:
        numel = sum(parameter.numel() for parameter in self._exchange.parameters[fragment])
        values = self._team.share_values(empty(numel, _DTYPES[dtype]), self._exchange.device(fragment))
        self._exchange.write(fragment, values, alpha)


class _Pace:
    """How many steps may go without a turn, so that turns take a hundredth of the time."""

    def __init__(self) -> None:
        self.free_steps = 0
        self._turn_s = float("inf")
        self._ended: tuple[float, int] | None = None  # the last turn: when, and at which step

    def released(self, started: float, now: float, local_step: int) -> None:
        """A turn's release took from ``started`` to ``now``; waiting for slower ranks is in it, so the least counts."""
        self._turn_s = min(self._turn_s, now - started)
        if self._ended is not None and local_step > self._ended[1]:
            step_s = max(started - self._ended[0], 1e-9) / (local_step - self._ended[1])
            self.free_steps = min(_MOST_FREE_STEPS, int(self._turn_s / (_SHARE * step_s)))
        self._ended = now, local_step


def _numbers(stats: Stats) -> tuple[int, ...]:
    return (
        stats.global_step,
        stats.pushes,
        stats.bytes_sent,
        stats.bytes_received,
        stats.merges,
        stats.reconnects,
        int(stats.connected),
        *stats.versions,
    )


def _stats(numbers: Sequence[int], stall_s: float) -> Stats:
    step, pushes, sent, received, merges, reconnects, connected, *versions = numbers
    return Stats(step, tuple(versions), pushes, sent, received, merges, stall_s, reconnects, bool(connected))


def _bits(value: float) -> int:
    """The bits of an f64, as a number that fits into an order."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _alpha(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
