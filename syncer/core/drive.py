"""Is the outer step too hard on the fleet? Says so once.

Decides from the drive of every commit (how far it went along the learners' mean progress, in units of what the merged
gradient by itself would have gone) whether to warn, and in which words. A single merge is noise, so a fragment's values
are smoothed over ``MERGES`` of its merges, and nothing is said before it has had so many. It must not know tensors, nor
what becomes of the warning; what it remembers decides about no merge, so it need not survive a restart.

Source: the key ``outer.guard``.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

MERGES = 8


@dataclass(frozen=True, slots=True)
class Driven:
    """One commit, or the mean of several.

    Attributes:
        drive: what is judged.
        gain, agreement, lag: of the learners' answers; 0 = no momentum yet.
        enough: the momentum coefficient that would have kept the drive within its limit; 0 where none does.
    """

    drive: float
    gain: float
    agreement: float
    lag: float
    enough: float

    def towards(self, other: Driven, share: float) -> Driven:
        """This mean with another commit in it, which counts ``share``."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Driven(*(old + share * (new - old) for old, new in pairs))


class DriveWatch:
    """Watches the commits of one process.

    Args:
        limit: the drive at which the band ends.
        is_capped: momentum is limited already, merge by merge.
    """

    def __init__(self, limit: float, *, is_capped: bool = False) -> None:
        self._limit, self._is_capped = limit, is_capped
        # Per fragment its merges and their mean: at first a plain one, then 1 / MERGES new.
        self._fragments: dict[int, tuple[int, Driven]] = {}
        self._said = False

    def committed(self, fragment: int, commit: Driven, lr: float, mu: float) -> str | None:
        """One commit, made with this outer learning rate and momentum; the warning, if it is due now."""
        merges, mean = self._fragments.get(fragment, (0, commit))
        merges += 1
        mean = mean.towards(commit, 1.0 / min(merges, MERGES))
        self._fragments[fragment] = merges, mean
        if self._said or merges < MERGES or not mean.drive > self._limit:
            return None
        self._said = True
        return (
            f"the outer step over-drives fragment {fragment}: over its last {MERGES} merges it went {mean.drive:.2f} "
            f"times as far along the learners' mean progress as the merge itself, where {self._limit:g} is the limit "
            f"(gain {mean.gain:.2f}, agreement {mean.agreement:.2f}, lag cosine {mean.lag:.2f}); "
            f"{self._cure(mean, lr, mu)}"
        )

    def _cure(self, mean: Driven, lr: float, mu: float) -> str:
        if mu > 0 and mean.enough > 0 and not self._is_capped:
            return (
                f"lower outer.momentum from {mu:g} to about {mean.enough:.2f}, or set outer.guard=cap, "
                f"which does so merge by merge"
            )
        return f"lower outer.lr from {lr:g} to about {lr * self._limit / mean.drive:.2g}, momentum alone is no cure"
