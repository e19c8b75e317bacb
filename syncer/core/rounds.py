"""One round's life: capture, quorum, attempts, grace, acceptance.

Decides whether an answer counts and when a round has enough of them. It must not know payloads, clocks or how many
rounds are in flight.

    state     | event                                  | next
    ----------|----------------------------------------|-----------------------------------------------
    EXPIRED   | launch(members)                        | PULLING, attempt + 1
    PULLING   | K answers, every other member answered | CLOSED
              |   or lost                              |
              | K answers otherwise                    | GRACE
              | deadline, or K out of reach            | EXPIRED: all answers dropped
    GRACE     | window over, or nobody left to wait for| CLOSED
    CLOSED    | merge started                          | MERGING
    MERGING   | gradient ready                         | READY
    READY     | every earlier round committed          | COMMITTED

A *rejection* is a value: late, duplicate, wrong-generation and future-base answers are ordinary.

Source: v4 §Rounds (members captured at launch, K frozen, only that exact generation may answer),
v4 §Quorum and grace (no merge below K; the attempt's number keeps late answers out),
v4 §Deltas and staleness (a future base version is invalid); rulings §6.4, §6.5, §6.6.
"""

from __future__ import annotations

from enum import Enum, auto

from syncer.core.events import Member, PushArrived
from syncer.core.outliers import Outlier


class RoundState(Enum):
    EXPIRED = auto()
    PULLING = auto()
    GRACE = auto()
    CLOSED = auto()
    MERGING = auto()
    READY = auto()
    COMMITTED = auto()


class Rejection(Enum):
    """Why an answer does not count; the value is its key on the tape."""

    OUT_OF_ROUND = "out_of_round"
    UNEXPECTED_MEMBER = "unexpected_member"
    FUTURE_BASE = "future_base"
    DUPLICATE = "duplicate"


class Round:
    """Round ``step`` on ``fragment``. ``base_version`` is the fragment's version at launch.

    Attributes:
        attempt: 0 before the first launch; rises by one per launch.
        members: captured at the latest launch; only exactly these may answer.
        quorum: frozen K of the latest launch.
        grace_s: the computed window, None when none was armed.
        outliers: accepted answers that the merge leaves out.
    """

    def __init__(self, step: int, fragment: int, base_version: int, quorum_timeout_s: float) -> None:
        self.step, self.fragment, self.base_version = step, fragment, base_version
        self.state = RoundState.EXPIRED
        self.attempt = 0
        self.members: tuple[Member, ...] = ()
        self.quorum = 0
        self.responses: dict[Member, PushArrived] = {}
        self.launched_at = 0.0
        self.quorum_s: float | None = None
        self.grace_s: float | None = None
        self.outliers: tuple[Outlier, ...] = ()
        self._quorum_timeout_s = quorum_timeout_s
        self._until = 0.0  # the deadline while PULLING, the end of the window in GRACE
        self._awaited: set[Member] = set()  # captured, not answered, not lost: kept, for every event asks

    @property
    def is_open(self) -> bool:
        return self.state in (RoundState.PULLING, RoundState.GRACE)

    @property
    def due(self) -> float | None:
        """When time alone changes this round."""
        return self._until if self.is_open else None

    @property
    def missing(self) -> tuple[Member, ...]:
        """Captured members that have not answered, ascending."""
        return tuple(m for m in self.members if m not in self.responses)

    @property
    def ordered_responses(self) -> tuple[PushArrived, ...]:
        """Accepted answers ascending by (id, generation): this order fixes the bits of the merge."""
        return tuple(self.responses[m] for m in self.members if m in self.responses)

    @property
    def merged_responses(self) -> tuple[PushArrived, ...]:
        """The answers that are merged, in the same order."""
        left_out = {outlier.member for outlier in self.outliers}
        return tuple(r for r in self.ordered_responses if r.member not in left_out)

    @property
    def weight(self) -> float:
        """W, the sum of the weights of the answers that are merged."""
        return sum(response.weight for response in self.merged_responses)

    def launch(self, members: tuple[Member, ...], quorum: int, now: float) -> None:
        """Capture ``members`` (ascending, not empty), freeze K = min(quorum, members) and start an attempt."""
        self.attempt += 1
        self.members, self.quorum = members, min(quorum, len(members))
        self.responses, self._awaited = {}, set(members)
        self.launched_at, self._until = now, now + self._quorum_timeout_s
        self.quorum_s = self.grace_s = None
        self.state = RoundState.PULLING

    def offer(self, push: PushArrived, now: float) -> Rejection | None:
        """Route one answer to this round; None when it was accepted."""
        if not self.is_open or push.fragment != self.fragment or push.attempt != self.attempt:
            return Rejection.OUT_OF_ROUND
        if push.member not in self._awaited and push.member not in self.members:
            return Rejection.UNEXPECTED_MEMBER
        if push.base_version > self.base_version:
            return Rejection.FUTURE_BASE
        if push.member in self.responses:
            return Rejection.DUPLICATE
        self.responses[push.member] = push
        self._awaited.discard(push.member)
        if self.state is RoundState.PULLING and len(self.responses) == self.quorum:
            self.quorum_s = max(now - self.launched_at, 0.0)
        return None

    @property
    def at_quorum(self) -> bool:
        """K answers are in and nothing has been decided about the grace window yet."""
        return self.state is RoundState.PULLING and len(self.responses) >= self.quorum

    def arm_grace(self, window_s: float, now: float) -> None:
        """K is reached and somebody is still missing: wait at most this long for more answers. Once per attempt."""
        self.grace_s, self._until = window_s, now + window_s
        self.state = RoundState.GRACE

    def lose(self, member: Member) -> None:
        """A captured generation is gone and never returns; an answer it gave stays."""
        self._awaited.discard(member)

    def settle(self, now: float) -> None:
        """Close or expire the round if its answers, its losses or the time say so."""
        awaited = self._awaited
        if len(self.responses) >= self.quorum:
            window_over = self.state is RoundState.GRACE and now >= self._until
            if self.is_open and (not awaited or window_over):
                self.state = RoundState.CLOSED
        elif self.state is RoundState.PULLING and (
            now >= self._until or len(self.responses) + len(awaited) < self.quorum
        ):
            self.responses = {}
            self.state = RoundState.EXPIRED

    def waiting_for(self) -> str:
        """What keeps this round, in one clause."""
        name = f"round {self.step} attempt {max(self.attempt, 1)}"
        match self.state:
            case RoundState.EXPIRED:
                return f"{name}: no learner is connected"
            case RoundState.PULLING | RoundState.GRACE:
                ids = ", ".join(str(m.learner_id) for m in self.members if m in self._awaited)
                noun = "learner" if "," not in ids else "learners"
                return f"{name}: {len(self.responses)} of {self.quorum}, missing {noun} {ids}"
            case RoundState.READY:
                return f"{name}: merged, an earlier round is not committed yet"
            case _:
                return f"{name}: merging"
