"""Is the outer step too hard on the fleet? Says so once.

Decides from the gain of every commit (how far it went along the learners' mean progress, in units of that progress)
whether to warn, and in which words. A single merge is noise, so a fragment's gain is smoothed over ``MERGES`` of its
merges, and nothing is said before it has had so many. It must not know tensors, nor what becomes of the warning; what
it remembers decides about no merge, so it need not survive a restart.

Source: the key ``outer.guard``.
"""

from __future__ import annotations

from dataclasses import dataclass

MERGES = 8


@dataclass(slots=True)
class _Smooth:
    """A fragment's means: of all its merges up to ``MERGES``, each newer one counting 1 / ``MERGES`` from then on."""

    merges: int = 0
    gain: float = 0.0
    agreement: float = 0.0
    lag: float = 0.0
    enough: float = 0.0

    def add(self, gain: float, agreement: float, lag: float, enough: float) -> None:
        self.merges += 1
        share = 1.0 / min(self.merges, MERGES)
        self.gain += share * (gain - self.gain)
        self.agreement += share * (agreement - self.agreement)
        self.lag += share * (lag - self.lag)
        self.enough += share * (enough - self.enough)


class DriveWatch:
    """Watches the commits of one process.

    Args:
        limit: the gain at which the band ends.
        is_capped: momentum is limited already, merge by merge.
    """

    def __init__(self, limit: float, *, is_capped: bool = False) -> None:
        self._limit, self._is_capped = limit, is_capped
        self._fragments: dict[int, _Smooth] = {}
        self._said = False

    def committed(
        self, fragment: int, gain: float, agreement: float, lag: float | None, enough: float, lr: float, mu: float
    ) -> str | None:
        """One commit; the warning, if it is due now.

        Args:
            gain, agreement, lag: of this commit; no momentum yet is no lag.
            enough: the momentum coefficient that would have kept the gain at the limit; 0 where none does.
            lr, mu: the outer learning rate and momentum that were used.
        """
        smooth = self._fragments.setdefault(fragment, _Smooth())
        smooth.add(gain, agreement, 0.0 if lag is None else lag, enough)
        if self._said or smooth.merges < MERGES or not smooth.gain > self._limit:
            return None
        self._said = True
        return (
            f"the outer step over-drives fragment {fragment}: over its last {MERGES} merges it went {smooth.gain:.2f} "
            f"times as far along the learners' mean progress as they had come (at most {self._limit:g} is sound; their "
            f"agreement is {smooth.agreement:.2f}, their lag cosine {smooth.lag:.2f}); {self._cure(smooth, lr, mu)}"
        )

    def _cure(self, smooth: _Smooth, lr: float, mu: float) -> str:
        if mu > 0 and smooth.enough > 0 and not self._is_capped:
            return (
                f"lower outer.momentum from {mu:g} to about {smooth.enough:.2f}, or set outer.guard=cap, "
                f"which does so merge by merge"
            )
        return f"lower outer.lr from {lr:g} to about {lr * self._limit / smooth.gain:.2g}, momentum alone is no cure"
