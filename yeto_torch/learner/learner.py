"""The training thread's side of a session: counters, the step boundary, the waits at start and end.

Decides nothing that the session decides: it takes the session's effects and does them in order, parameters through
``exchange``, answers through ``link``. It knows no socket and no torch optimizer beyond the state of a parameter.

    Adopt   -> exchange.adopt         Respond -> answers
    Install -> exchange.install       Fail    -> raise

Between syncs a step costs two additions and one look at a flag.

Source: v4 §Anchors (adopted at a boundary), v4 §Budget (no step behind the report),
v4 §Final cut (installed, then acknowledged); rulings §5.1, §5.7, §5.8, §5.10 to §5.13.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from yeto_torch.config import LearnerConfig
from yeto_torch.learner.answers import Answers
from yeto_torch.learner.effects import Adopt, Effect, Fail, Install, Respond, Write
from yeto_torch.learner.exchange import Exchange
from yeto_torch.learner.link import RELEASE_S, Link, clock
from yeto_torch.learner.recovery import forget
from yeto_torch.learner.session import Phase, Session
from yeto_torch.learner.stats import Stats
from yeto_torch.learner.syncs import Syncs
from yeto_torch.wire.codec import encode
from yeto_torch.wire.constants import Direction
from yeto_torch.wire.errors import ConnectionLostError, RunError, YetoError
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import Hello
from yeto_torch.wire.model_layout import Layout

log = logging.getLogger("yeto_torch")
_SAY_EVERY_S = 5.0
_ACK_S = 1.0  # for the acknowledgement of the cut to be handed to the kernel


class Learner:
    """One learner of a fleet, as the training thread sees it.

    Attributes:
        local_step, tokens: totals of this process.
        installed: the parameters hold the final cut; no step may change them.
        frozen: the budget was reported; no step may be made.
    """

    def __init__(
        self, config: LearnerConfig, layout: Layout, exchange: Exchange, inner: Sequence[torch.optim.Optimizer]
    ) -> None:
        self.config, self._exchange, self._inner = config, exchange, inner
        self.local_step = self.tokens = 0
        self.installed = self.frozen = False
        self._stall_s = 0.0
        dtype = config.dtype
        mark, contract = layout.fingerprint, config.contract_for(layout.fingerprint)
        hello = Hello(config.identity, 0, dtype, layout.wire, mark, contract, config.profile_hash, config.streams)
        self._session = Session(len(layout))
        self._syncs = Syncs(len(layout), config.on_sync)
        limits = GroupLimits(layout.wire, dtype, Direction.TO_LEARNER)
        key, tls = config.hmac_key, config.client_tls
        self.link = Link(self._session, config.address, hello, limits, key, config.max_reconnects, tls)
        resync = config.on_nonfinite == "resync"
        self._answers = Answers(exchange, self._session, self.link, dtype, self._forget if resync else None)

    # ------------------------------------------------------------------------------------------ start, step, end

    def start(self) -> None:
        """Dial; with ``wait_for_start`` return once every fragment has its first anchor.

        Raises ConnectionLostError after ``connect_timeout_s``, RefusedError when the syncer says no, NonFiniteError
        when learner 0's starting values cannot be sent.
        """
        inits = range(len(self._session.versions)) if self.config.identity == 0 else ()
        bulk = self.config.dtype.bulk
        self.link.start(at_exit=self.close, inits={f: encode(self._exchange.values(f, bulk), bulk) for f in inits})
        if self.config.wait_for_start:
            self._await_start()
        self._syncs.begin()

    def _await_start(self) -> None:
        timeout_s = self.config.connect_timeout_s
        host, port = self.config.address
        self._serve_until(
            lambda: self._session.anchored or self._session.is_installed,
            timeout_s,
            lambda waiting: ConnectionLostError(
                f"the fleet did not start within {timeout_s:g} s (connect_timeout_s); "
                f"syncer {host}:{port}, still waiting for {waiting}"
            ),
        )

    def stepped(self, tokens: int | None) -> None:
        """The end of a ``step()`` that made a local step of ``tokens``, or None: that made none. Do what is due."""
        if tokens is None:
            return
        self.local_step = self.link.local_step = self.local_step + 1
        self.tokens += tokens
        if self._session.attention:
            self._boundary()

    def finish(self, timeout_s: float | None) -> None:
        """Serve until the final cut is installed and acknowledged, then wait up to 5 s for SHUTDOWN.

        Raises RunError when it does not come in time, and whatever ended the session.
        """
        self._serve_to_the_end(timeout_s)
        self.link.close()

    def _serve_to_the_end(self, timeout_s: float | None) -> None:
        limit_s = self.config.final_timeout_s if timeout_s is None else timeout_s
        with self.link.lock:
            if self.installed and self._session.phase is Phase.CLOSED:
                return
            self._session.enter_finish()
        self._serve_until(
            lambda: self._session.finished,
            limit_s,
            lambda waiting: RunError(f"the run did not end within {limit_s:g} s: still waiting for {waiting}"),
        )

    def resync(self) -> None:
        """Overwrite the parameters with the last broadcasts. Raises RunError once no step may be made any more."""
        if self.installed or self.frozen:
            what = "final cut was installed" if self.installed else "budget was reported"
            raise RunError(f"resync() after the {what}: the broadcasts before it are gone or out of date")
        fragments = range(len(self._session.versions))
        for fragment in fragments:
            anchor = self._session.anchor(fragment)
            if anchor is not None:  # else the first weights will overwrite the parameters when they come
                self._exchange.adopt(fragment, anchor, Write.OVERWRITE)
        with self.link.lock:
            self._session.restarted(fragments, self.local_step, self.tokens)

    def report_budget(self, steps: int) -> None:
        """Freeze the parameters and report ``steps``; returns when the report's bytes left."""
        target = self.config.budget_steps
        if target is not None and steps != target:
            raise ValueError(f"report_budget({steps}): budget_steps is {target}")
        if steps != self.local_step or steps < 1:
            raise ValueError(f"report_budget({steps}): {self.local_step} local steps were made")
        if self.frozen:
            raise RunError("the budget was reported already")
        self.frozen = True
        with self.link.lock:
            self._session.freeze(steps, self.tokens)
        self.link.nudge()
        limit_s = self.config.final_timeout_s
        self._serve_until(
            lambda: self._session.is_budget_sent,
            limit_s,
            lambda waiting: RunError(f"the budget could not be reported within {limit_s:g} s: waiting for {waiting}"),
        )

    def close(self) -> None:
        """Leave. A final cut that has begun to come is taken first, for at most 5 s: the fleet waits for our word."""
        if not self.link.is_ours:
            return
        with self.link.lock:
            is_ending = self._session.phase is Phase.FINALIZING and not self._session.is_installed
        try:
            if is_ending:
                self._serve_until(lambda: self._session.is_installed, RELEASE_S, RunError)
        except YetoError as error:
            log.warning("leaving without the final cut: %s", error)
        finally:  # on_sync may raise anything
            self.link.close()

    def abandon(self) -> None:
        """Leave without waiting: the optimizer is gone."""
        self.link.abandon()

    @property
    def finished(self) -> bool:
        return self._session.finished

    @property
    def stats(self) -> Stats:
        with self.link.lock:
            session, traffic = self._session, self.link.traffic
            return Stats(
                session.global_step,
                session.versions,
                traffic.pushes,
                traffic.bytes_sent,
                traffic.bytes_received,
                session.merges,
                self._stall_s,
                max(0, traffic.groups - 1),
                session.generation is not None,
            )

    # ------------------------------------------------------------------------------------------ the boundary

    def _serve_until(self, done: Callable[[], bool], timeout_s: float, too_late: Callable[[str], YetoError]) -> None:
        """Do what the session asks for until ``done()`` (called under the lock); say now and then what is missing."""
        deadline = clock() + timeout_s
        say_at = clock() + _SAY_EVERY_S
        while True:
            self._boundary()
            with self.link.lock:
                ready, closed = done(), self._session.phase is Phase.CLOSED
                waiting = self.link.waiting_for()
            now = clock()
            if ready:
                return
            if closed:  # by another thread
                raise RunError("the learner was closed before the final cut came")
            if now >= deadline:
                raise too_late(waiting)
            if now >= say_at:
                log.warning("waiting for %s", waiting)
                say_at = now + _SAY_EVERY_S
            self._wait(done, min(deadline, say_at) - now)

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Until ``ready()`` (called under the lock), or something is to be done; at most ``timeout_s``."""
        self.link.wait(ready, timeout_s)

    def _boundary(self) -> None:
        started = clock()
        with self.link.lock:
            effects = self._session.boundary(self.local_step, self.tokens)
        self._answers.begin()
        done = 0
        try:
            for effect in effects:
                self._do(effect)
                done += 1
        except YetoError as error:
            with self.link.lock:
                self._session.fail(error)
            self.link.nudge()
            raise
        except BaseException:  # Ctrl-C, or a GPU without memory for it: whoever trains on after that finds the rest due
            with self.link.lock:
                self._session.broken_off(effects[done:])
            raise
        finally:
            self._stall_s += clock() - started
        self._syncs.tell(lambda: self.stats)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Adopt():
                if effect.set_back_from is not None:
                    log.warning(
                        "the syncer was set back: fragment %d from version %d to %d; local progress on it is dropped",
                        effect.fragment,
                        effect.set_back_from,
                        effect.version,
                    )
                self._exchange.adopt(effect.fragment, effect.data, effect.write)
                self._syncs.adopted(effect.fragment, effect.version, self.local_step, self.tokens)
            case Respond():
                self._answers.answer(effect, self.local_step, self.tokens, may_resync=not self.frozen)
            case Install():
                self._exchange.install(effect.fragments)
                self.installed = True
                self._syncs.installed(effect.manifest.step, self.local_step, self.tokens)
                with self.link.lock:
                    self._session.installed(effect.manifest)
                self.link.nudge()
                # Training is over, so this wait costs nothing: a loop on `finished` makes no step too many.
                self._wait(lambda: self._session.finished, _ACK_S)
            case Fail():
                raise effect.error.with_traceback(None)

    def _forget(self, parameters: Sequence[Tensor]) -> None:
        """Drop what the inner optimizer made of parameters that were not finite."""
        forget(self._inner, parameters)
