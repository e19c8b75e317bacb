"""What can happen to the coordinator.

Every event reaches ``Coordinator.handle(event, now)`` with the moment it arrived, in arrival order. Tensors are opaque
handles here: the core passes them from a push to a merge and never looks inside.

Source: v4 §Messages (what a learner says, decoded), v4 §Rounds (members are learner and generation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from syncer.core.drive import Driven
from yeto_torch.wire.constants import MessageType
from yeto_torch.wire.messages import Hello


class Member(NamedTuple):
    """One learner in one connection generation; the unit of capture, answer and acknowledgement.

    A tuple: it is hashed and compared many times for every message.
    """

    learner_id: int
    generation: int

    def __str__(self) -> str:
        return f"learner {self.learner_id} (generation {self.generation:016x})"


class Event:
    """Something that has happened."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class HelloArrived(Event):
    """A socket said a well-formed HELLO; ``ticket`` names the socket until it is admitted or refused."""

    ticket: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class InitArrived(Event):
    """Starting values of one fragment from learner 0, decoded and finite."""

    member: Member
    fragment: int
    values: object


@dataclass(frozen=True, slots=True)
class PushArrived(Event):
    """A well-formed answer: counters, weight, and the signed outer gradient, decoded, finite and negated once.

    ``norm``: its l2 norm in f64, where ``merge.max_norm_ratio`` asks for it; else 0.
    """

    member: Member
    fragment: int
    step: int
    attempt: int
    base_version: int
    local_step: int
    c_steps: int
    c_tokens: int
    weight: float
    nbytes: int
    gradient: object
    norm: float = 0.0


@dataclass(frozen=True, slots=True)
class BeatArrived(Event):
    member: Member
    local_step: int


@dataclass(frozen=True, slots=True)
class AckArrived(Event):
    member: Member
    step: int


@dataclass(frozen=True, slots=True)
class BudgetReported(Event):
    member: Member
    steps: int


@dataclass(frozen=True, slots=True)
class GroupLost(Event):
    """A connection group is gone; nothing more comes from it. ``violated``: the message type it got wrong, if any."""

    member: Member
    reason: str
    violated: MessageType | None = None


@dataclass(frozen=True, slots=True)
class MergeDone(Event):
    """The merged signed outer gradient of round ``step`` is ready and waits with the actor."""

    step: int


@dataclass(frozen=True, slots=True)
class StepMeasured(Event):
    """How hard the outer step of a commit drove its fragment, and with which learning rate and momentum."""

    fragment: int
    driven: Driven
    lr: float
    momentum: float


@dataclass(frozen=True, slots=True)
class RoundSynced(Event):
    """Round ``step`` is committed and its broadcast queued; ``seconds`` it took to compute, commit and queue."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Drained(Event):
    """The SVD pool has delivered all it had admitted, or there is none: a checkpoint may be published."""


@dataclass(frozen=True, slots=True)
class Interrupted(Event):
    """Ctrl-C or SIGTERM: end cleanly, now."""
