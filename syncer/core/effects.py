"""What the actor must do, in the order given.

The order is the contract: the effects of one commit are Commit, Record, SaveCheckpoint (if due), Broadcast, so that
under ``checkpoint.every=1`` nothing becomes visible before it is durable; the end of a run is WriteFinal, SendCut...,
and later WriteMarker before any SendShutdown. An effect that fails stops the run; the ones behind it are not done.

Source: v4 §Scheduler (commit and broadcast of one completion are not mixed with another's),
v4 §Checkpoints (durable before its broadcast is visible),
v4 §Final cut (checkpoint, final state, every FINAL_FRAGMENT, then the manifest); rulings §6.7, §6.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from syncer.core.events import Member, PushArrived
from syncer.core.ledger import LedgerRow
from syncer.core.record import MergeLine
from yeto_torch.wire.messages import Hello


class Effect:
    """An order to the actor."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Admit(Effect):
    """The socket behind ``ticket`` becomes a connection group. ``opens``: this HELLO, the first, fixes the session."""

    ticket: int
    member: Member
    hello: Hello
    opens: bool = False


@dataclass(frozen=True, slots=True)
class RefuseHello(Effect):
    """ERROR with this sentence to the socket behind ``ticket``, and close it."""

    ticket: int
    text: str


@dataclass(frozen=True, slots=True)
class Expel(Effect):
    """ERROR with this sentence to a group, and close it: its peer broke the protocol or cannot go on."""

    member: Member
    text: str


@dataclass(frozen=True, slots=True)
class Release(Effect):
    """Close a superseded group without a word; its replacement is here."""

    member: Member


@dataclass(frozen=True, slots=True)
class Initialize(Effect):
    """Install the starting values of a fragment: version 0, momentum 0."""

    fragment: int
    values: object


@dataclass(frozen=True, slots=True)
class SendPull(Effect):
    member: Member
    fragment: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Merge(Effect):
    """Merge these answers, ascending by member, and report MergeDone."""

    step: int
    fragment: int
    responses: tuple[PushArrived, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Commit(Effect):
    """Take the outer step with the merged gradient of round ``step``; the fragment's version becomes ``step``."""

    step: int
    fragment: int


@dataclass(frozen=True, slots=True)
class Record(Effect):
    """Append a merge line to the event tape. ``launched_at`` is the attempt's launch; the actor adds its timings."""

    step: int
    launched_at: float
    line: MergeLine


@dataclass(frozen=True, slots=True)
class Note(Effect):
    """Append an ``event`` line to the tape."""

    event: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class SaveCheckpoint(Effect):
    """Make the state at ``step`` durable before anything behind this effect happens.

    ``ledger`` is that of the same step: rounds behind it may be decided already, their effects still to be done.
    """

    step: int
    ledger: tuple[LedgerRow, ...]


@dataclass(frozen=True, slots=True)
class Broadcast(Effect):
    """Queue a fragment at its current version to these groups."""

    fragment: int
    version: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Drain(Effect):
    """Let the SVD pool finish what it has admitted, and report Drained. Nothing is written before that."""


@dataclass(frozen=True, slots=True)
class WriteFinal(Effect):
    """Rewrite the checkpoint at the final quiescent cut, then the final state file."""

    step: int
    ledger: tuple[LedgerRow, ...]


@dataclass(frozen=True, slots=True)
class SendCut(Effect):
    """Queue every FINAL_FRAGMENT and then the manifest to one group."""

    member: Member
    step: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteMarker(Effect):
    """The marker beside the final checkpoint, after the last acknowledgement."""

    step: int


@dataclass(frozen=True, slots=True)
class SendShutdown(Effect):
    member: Member


@dataclass(frozen=True, slots=True)
class Say(Effect):
    """One line for the operator's log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Finish(Effect):
    """The run is over with this exit code; ``text`` says why when it is not 0.

    ``terminal``: learners are told so with ERROR. Otherwise a restart of the syncer can take them up again, and they
    see a closed connection only.
    """

    code: int
    text: str = ""
    terminal: bool = False
