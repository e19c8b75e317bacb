"""A learner of several ranks: rank 0 is the learner, the others follow it.

Rank 0 (``Leader``) owns the session and decides; before each thing that concerns the parameters it sends a command, and
at the end of its turn it releases the others (``Follower``), with its state or its error. So all ranks leave a step
with equal parameters (of shards: each with its own of the same fragment), and none waits in a collective that rank 0
does not enter. This file must not know the protocol, and writes no parameter: ``exchange`` does.

    every rank    step, finish, report_budget, resync, start    -> rank 0's turn, in the same order on all of them
    rank 0 alone  close                                         -> told in its next turn
    no turn       close of another rank; anything behind ``finished``, a told ``close`` or an error that ended it all

A turn in which nothing is due is one broadcast of 64 bytes. Where steps are so short that this would count, turns are
left out: rank 0 says for how many steps.

Source: rulings §5.12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from yeto_torch.config import LearnerConfig
from yeto_torch.learner.exchange import Exchange
from yeto_torch.learner.learner import Learner
from yeto_torch.learner.link import clock
from yeto_torch.learner.points import points_beside
from yeto_torch.learner.recovery import forget
from yeto_torch.learner.session import Phase
from yeto_torch.learner.stats import numbers_of
from yeto_torch.offline.local import LocalLearner
from yeto_torch.ranks.commands import Command, Commands, Flag, Release
from yeto_torch.ranks.follower import RESYNC_CLOSED, Follower
from yeto_torch.ranks.group import RankGroup, RankLostError
from yeto_torch.ranks.leading import LeadingExchange
from yeto_torch.wire.errors import RunError
from yeto_torch.wire.model_layout import Layout

_BEAT_S = 1.0  # while rank 0 waits, the others hear from it this often; every process group's timeout is longer
_SHARE = 0.01  # of the time of a step, for its turn
_MOST_FREE_STEPS = 15


def make_learner(
    config: LearnerConfig,
    layout: Layout,
    parameters: Sequence[Sequence[Tensor]],
    inner: Sequence[torch.optim.Optimizer],
    ranks: RankGroup | None,
    written: Callable[[], None],
) -> Learner | Follower | LocalLearner:
    """This rank's learner: a plain one without a group, else rank 0's or another's. ``written``: see ``Exchange``."""
    model = (layout, parameters, config.dtype.bulk, config.merge_alpha, partial(points_beside, inner), written)
    if config.is_local:
        if ranks is not None and ranks.size > 1:
            raise ValueError("syncer='local': a learner of several ranks needs a syncer; leave process_group out")
        return LocalLearner(config, layout, Exchange(*model), inner)
    if ranks is None or ranks.size == 1:
        return Learner(config, layout, Exchange(*model), inner)
    commands = Commands(ranks)
    if ranks.rank == 0:
        return Leader(config, layout, LeadingExchange(ranks, commands, *model), inner, ranks, commands)
    return Follower(config, Exchange(*model), inner, ranks, commands)


class Leader(Learner):
    """Rank 0's learner."""

    def __init__(
        self,
        config: LearnerConfig,
        layout: Layout,
        exchange: LeadingExchange,
        inner: Sequence[torch.optim.Optimizer],
        ranks: RankGroup,
        commands: Commands,
    ) -> None:
        super().__init__(config, layout, exchange, inner)
        self._ranks, self._commands, self._pace = ranks, commands, _Pace()
        self._own_tokens = self._free_steps = 0
        self._told = Flag(0)
        self._is_news = False  # a boundary has changed the statistics
        self._is_turn = False
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
            raise RunError(RESYNC_CLOSED)
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
        if self._is_turn:  # its end would release the others from a turn that goes on
            raise RunError("on_sync must not step, finish or resync: it is called on rank 0 alone, these on all ranks")
        self._is_turn = True
        try:
            yield
        except RankLostError as error:
            self._end(error)
            raise
        except Exception as error:
            self._release(error, free_steps=0)
            raise
        except BaseException:
            self._end(RankLostError("rank 0 of this learner was interrupted in the middle of its turn"))
            raise
        finally:
            self._is_turn = False
        self._release(None, free_steps=self._pace.free_steps if is_step else 0)

    def _release(self, error: Exception | None, free_steps: int) -> None:
        numbers = numbers_of(self.stats) if self._is_news else ()
        release = Release(self.local_step, free_steps, self._flags(), error, numbers)
        started, self._is_news = clock(), False
        try:
            self._commands.release(release)
        except RankLostError as lost:
            self._end(lost)
            raise
        ended = clock()
        self._stall_s += ended - started
        self._pace.released(started, ended, self.local_step)
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

    def _end(self, error: RankLostError) -> None:
        """The ranks have come apart: leave the fleet, so that it does not wait for us."""
        self._error = error
        with self.link.lock:
            self._session.fail(error)
        self.link.nudge()

    def _boundary(self) -> None:
        self._is_news = True
        super()._boundary()

    def _count(self) -> None:
        if not self._is_alone:
            self._commands.send(Command.COUNT)
            self.tokens = self._ranks.sum(self._own_tokens)

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        if not self._is_alone:
            self._commands.send(Command.IDLE)
        super()._wait(ready, min(timeout_s, _BEAT_S))

    def _forget(self, parameters: Sequence[Tensor]) -> None:
        self._commands.send(Command.FORGET)
        forget(self._inner, parameters, self._ranks.any)


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
