"""What ``on_sync`` is told: one record per broadcast that a step boundary took over, and one for the final cut.

It decides what a record says and when the user hears of it: behind the boundary, when every parameter is in place, and
never from within the constructor, where the user has no optimizer yet. It must not know sockets, locks or tensors.

* pure
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yeto_torch.learner.stats import Stats


@dataclass(frozen=True, slots=True)
class Sync:
    """A fragment of the fleet's model has just become this learner's.

    Attributes:
        fragment: which; None for the final cut, which is all of them.
        version: the outer step that made it; of the final cut the run's last step.
        previous_version: what it replaced; None where there was none yet.
        skipped: versions of this fragment in between that this learner never held. 0 = it keeps up.
        global_step: the newest outer step that this learner has taken over.
        local_step: steps of the inner optimizer in this process.
        c_steps: local steps since this fragment was last taken over; of the final cut since the start of the process.
        c_tokens: tokens since then.
        final: the parameters are the run's result; nothing changes them any more.
        stats: the learner's counters now.
    """

    fragment: int | None
    version: int
    previous_version: int | None
    skipped: int
    global_step: int
    local_step: int
    c_steps: int
    c_tokens: int
    final: bool
    stats: Stats


OnSync = Callable[[Sync], object]


@dataclass(frozen=True, slots=True)
class _Taken:
    """A version in the parameters, and the learner's totals when it came."""

    version: int
    local_step: int = 0
    tokens: int = 0


class Syncs:
    """Notes what a boundary takes over, and tells the user's ``on_sync``; None = nobody listens."""

    def __init__(self, fragments: int, on_sync: OnSync | None) -> None:
        self._on_sync = on_sync
        self._held: list[_Taken | None] = [None] * fragments
        self._news: list[tuple[int | None, _Taken | None, _Taken]] = []
        self._begun = False

    def begin(self) -> None:
        """The constructor is done; what it took over itself stays untold."""
        self._begun = True

    def adopted(self, fragment: int, version: int, local_step: int, tokens: int) -> None:
        """A broadcast is in the parameters."""
        old, new = self._held[fragment], _Taken(version, local_step, tokens)
        self._held[fragment] = new
        self._note(fragment, old, new)

    def installed(self, step: int, local_step: int, tokens: int) -> None:
        """The final cut is in the parameters."""
        newest = max((taken.version for taken in self._held if taken is not None), default=None)
        self._note(None, None if newest is None else _Taken(newest), _Taken(step, local_step, tokens))

    def tell(self, stats: Callable[[], Stats]) -> None:
        """Call ``on_sync`` for everything noted since the last call, in order.

        What it raises goes on to the caller, with a note; records behind it are dropped.
        """
        if not self._news or self._on_sync is None:
            return
        news, self._news = self._news, []
        snapshot = stats()
        for fragment, old, new in news:
            try:
                self._on_sync(self._record(fragment, old, new, snapshot))
            except Exception as error:
                what = "the final cut" if fragment is None else f"version {new.version} of fragment {fragment}"
                error.add_note(f"raised by on_sync, which was told of {what}; the parameters are in place")
                raise

    def _note(self, fragment: int | None, old: _Taken | None, new: _Taken) -> None:
        if self._on_sync is not None and self._begun:
            self._news.append((fragment, old, new))

    def _record(self, fragment: int | None, old: _Taken | None, new: _Taken, stats: Stats) -> Sync:
        skipped = 0
        if fragment is not None and old is not None:  # a fragment has a new version every F outer steps
            skipped = max(0, -(-(new.version - old.version) // len(self._held)) - 1)
        return Sync(
            fragment=fragment,
            version=new.version,
            previous_version=None if old is None else old.version,
            skipped=skipped,
            global_step=stats.global_step,
            local_step=new.local_step,
            c_steps=new.local_step - (0 if old is None else old.local_step),
            c_tokens=new.tokens - (0 if old is None else old.tokens),
            final=fragment is None,
            stats=stats,
        )
