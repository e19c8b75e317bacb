"""How a pull is answered: by the local progress, by zeros, or by dropping progress that is not finite.

Decides what happens to parameters that went bad when their progress is asked for. It must not know sockets; what is
sent goes to ``link``, what is written through ``exchange``.

Source: v4 §Deltas and staleness (only the progress since the anchor); rulings §5.7.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from yeto_torch.learner.effects import Respond, Write
from yeto_torch.learner.exchange import Exchange
from yeto_torch.learner.link import Link, Outgoing
from yeto_torch.learner.session import Session
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import NonFiniteError

log = logging.getLogger("yeto_torch")


class Answers:
    """The answers of one learner, on its training thread.

    Args:
        exchange, session, link: the learner's.
        dtype: in which answers travel.
        forget: drops what the inner optimizers made of parameters that were not finite; None when progress that is not
            finite must be raised instead of dropped.
    """

    def __init__(
        self,
        exchange: Exchange,
        session: Session,
        link: Link,
        dtype: WireDType,
        forget: Callable[[Sequence[Tensor]], None] | None,
    ) -> None:
        self._exchange, self._session, self._link, self._forget = exchange, session, link, forget
        self._dtype = dtype
        self._resynced: set[int] = set()  # fragments, in the boundary under way

    def begin(self) -> None:
        """A boundary begins."""
        self._resynced.clear()

    def answer(self, respond: Respond, local_step: int, tokens: int, *, may_resync: bool) -> None:
        """Answer one pull, at these totals. Raises NonFiniteError where progress may not be dropped."""
        fragment = respond.pull.fragment
        if respond.zero:
            self._link.submit(Outgoing(respond, None))
            return
        if fragment in self._resynced:  # its progress went while an earlier answer of this boundary was made
            with self._link.lock:
                self._session.resynced(respond, [], local_step, tokens)
            return
        try:
            delta = self._exchange.delta(fragment, respond.anchor, self._dtype)
        except NonFiniteError as error:
            if self._forget is None or not may_resync:
                raise
            self._resync(self._forget, fragment)
            log.warning("%s; fragments %s were put back on the last broadcast", error, sorted(self._resynced))
            with self._link.lock:
                self._session.resynced(respond, sorted(self._resynced), local_step, tokens)
        else:
            self._link.submit(Outgoing(respond, delta))

    def _resync(self, forget: Callable[[Sequence[Tensor]], None], asked: int) -> None:
        """Put ``asked``, and every other fragment that is not finite, back on its anchor."""
        for fragment in range(len(self._session.versions)):
            nonfinite = self._exchange.nonfinite(fragment)
            anchor = self._session.anchor(fragment)
            if anchor is None or not (nonfinite or fragment == asked):
                continue
            self._exchange.adopt(fragment, anchor, Write.OVERWRITE)
            forget(nonfinite)
            self._resynced.add(fragment)
