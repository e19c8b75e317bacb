"""A fleet of one, without a syncer: the outer step as an in-process optimizer, in the manner of Lookahead.

Every H / F steps one fragment is merged: the outer gradient is anchor minus local, the merge and the outer step are the
syncer's own functions, and the new global fragment becomes the parameters and the next anchor. Nothing travels, so
everything is f32 on the parameters' device. This file must not know sessions, links or messages.

    round t   fragment (t - 1) mod F, at the first step boundary at or behind t * H / F steps
    finish    one more round for every fragment that has steps, so that nothing learnt is lost

Source: v4 §Deltas and staleness, v4 §Merging, v4 §Outer step (all in process); Zhang et al.,
"Lookahead Optimizer" (2019); Douillard et al., "DiLoCo" (2023).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yeto_torch.learner.exchange import Exchange
from yeto_torch.learner.recovery import forget
from yeto_torch.learner.stats import Stats
from yeto_torch.learner.syncs import Syncs
from yeto_torch.wire.errors import NonFiniteError, RunError
from yeto_torch.wire.model_layout import Layout

if TYPE_CHECKING:
    from yeto_torch.config import LearnerConfig

log = logging.getLogger("yeto_torch")


@dataclass(slots=True)
class _Fragment:
    """The global side of one fragment, and the learner's totals at its last merge."""

    params: Tensor
    momentum: Tensor
    version: int = 0
    steps_then: int = 0
    tokens_then: int = 0


class LocalLearner:
    """What ``Learner`` is to a fleet, for a single machine; see there for the attributes.

    Args:
        config: validated; ``config.local`` holds the rules.
        layout: of the parameters.
        exchange: the parameters, in that layout.
        inner: the optimizers that train them.
    """

    def __init__(
        self, config: LearnerConfig, layout: Layout, exchange: Exchange, inner: Sequence[torch.optim.Optimizer]
    ) -> None:
        self.config, self._layout, self._exchange, self._inner = config, layout, exchange, inner
        self._rules = config.local_rules
        self.local_step = self.tokens = 0
        self.installed = self.frozen = self.finished = False
        self._step = 0  # outer steps made
        self._due = self._rules.sync_interval_steps / len(layout)
        self._stall_s = 0.0
        self._left = False
        self._syncs = Syncs(len(layout), config.on_sync)
        self._fragments: list[_Fragment] = []

    def start(self) -> None:
        """Take the parameters as they are for the global ones. Raises NonFiniteError."""
        for index in range(len(self._layout)):
            values = self._exchange.values(index).to(self._exchange.device(index))
            self._fragments.append(_Fragment(values, torch.zeros_like(values)))
        self._syncs.begin()

    def stepped(self, tokens: int | None) -> None:
        """The end of a ``step()``; None: it made no local step."""
        if tokens is None or self._left:
            return
        self.local_step += 1
        self.tokens += tokens
        while self.local_step >= self._due:
            self._due += self._rules.sync_interval_steps / len(self._layout)
            self._round()

    def finish(self, timeout_s: float | None) -> None:  # noqa: ARG002  # nothing is waited for
        """Merge what has not been merged; the parameters are then the global ones."""
        if self._left and not self.finished:
            raise RunError("the learner was closed before finish()")
        if self.finished:
            return
        for _ in self._fragments:
            self._round()
        for index, fragment in enumerate(self._fragments):
            self._exchange.write(index, fragment.params, 0.0)
        self.installed = self.finished = True
        self._syncs.installed(self._step, self.local_step, self.tokens)
        self._syncs.tell(lambda: self.stats)

    def resync(self) -> None:
        """Overwrite the parameters with the global ones."""
        if self.installed:
            raise RunError("resync() after finish()")
        for index, fragment in enumerate(self._fragments):
            self._put_back(index, fragment)

    def report_budget(self, steps: int) -> None:
        raise RunError(f"report_budget({steps}): a budget is reported to a syncer, and syncer='local' is none")

    def close(self) -> None:
        """The inner optimizer goes on alone."""
        self._left = True

    def abandon(self) -> None:
        """Nothing is held."""

    @property
    def stats(self) -> Stats:
        versions = tuple(fragment.version for fragment in self._fragments)
        return Stats(self._step, versions, merges=self._step, stall_seconds=self._stall_s)

    # ------------------------------------------------------------------------------------------ a round

    def _round(self) -> None:
        """The next round; of a fragment without steps it leaves everything as it is."""
        started = time.monotonic()
        index = self._step % len(self._layout)
        fragment = self._fragments[index]
        self._step += 1
        if self.local_step > fragment.steps_then:
            self._merge(index, fragment)
        self._stall_s += time.monotonic() - started
        self._syncs.tell(lambda: self.stats)

    def _merge(self, index: int, fragment: _Fragment) -> None:
        from syncer.merge.intake import learner_weight  # only this mode needs these
        from syncer.merge.merge import merge_fragment
        from syncer.merge.nesterov import nesterov_step
        from syncer.merge_words import correction_of, spectrum_of

        try:
            delta = self._exchange.distance(index, fragment.params)
        except NonFiniteError as error:
            if self.config.on_nonfinite == "raise":
                raise
            self._recover(error)
            return
        steps, tokens = self.local_step - fragment.steps_then, self.tokens - fragment.tokens_then
        merged, _ = merge_fragment(
            self._layout.wire.fragments[index],
            [delta.neg_()],
            [learner_weight(tokens, steps)],
            fragment.momentum,
            correction=correction_of(self._rules.delta_correction, self._rules.momentum),
            spectrum=spectrum_of(self._rules.iso_scale),
        )
        nesterov_step(fragment.params, fragment.momentum, merged, self._rules.lr, self._rules.momentum)
        fragment.version, fragment.steps_then, fragment.tokens_then = self._step, self.local_step, self.tokens
        self._exchange.write(index, fragment.params, self.config.merge_alpha)
        self._syncs.adopted(index, self._step, self.local_step, self.tokens)

    def _recover(self, error: NonFiniteError) -> None:
        """Put every fragment that is not finite back on its anchor, and forget what the inner optimizer made of it."""
        back = []
        for index, fragment in enumerate(self._fragments):
            nonfinite = self._exchange.nonfinite(index)
            if nonfinite:
                self._put_back(index, fragment)
                forget(self._inner, nonfinite)
                back.append(index)
        log.warning("%s; fragments %s were put back on their last merge", error, back)

    def _put_back(self, index: int, fragment: _Fragment) -> None:
        self._exchange.write(index, fragment.params, 0.0)
        fragment.steps_then, fragment.tokens_then = self.local_step, self.tokens
