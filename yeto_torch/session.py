"""The learner's mind: which broadcast to adopt, which pull to answer and how, when to install, acknowledge and end.

It decides from messages and the training thread's counters alone. It must not know tensors, threads, sockets or
clocks: payloads are opaque buffers, and whoever owns it calls it under one lock.

    event             | what it does
    attached          | a fresh generation: queued broadcasts, pulls, final cache and manifest of the old one are gone
    detached          | the same; training goes on
    BCAST             | queued if newer; the newest of a fragment wins; same version with other bytes is a violation.
                      | The first one of a generation is the syncer's present truth, even if it is older than ours
    PULL_REQ          | the newest per fragment waits for the next boundary that can answer it
    FINAL_FRAGMENT    | own cache, never mixed with BCAST; FINAL_MANIFEST says which versions it must hold
    SHUTDOWN          | a violation until our acknowledgement of this generation has been started
    boundary          | the training thread's turn: broadcasts first, then answers; or the final cut
    enter_finish      | data has ended: a pull we have no steps for gets a zero delta of weight 0
    freeze            | budget reported: broadcasts move anchors only, answers carry the budget and the exact total

    phase, derived from the facts; the first that holds
    FAILED      an error is terminal          CLOSED      left, or released by SHUTDOWN
    ACKED       acknowledgement handed over   FINALIZING  the manifest is here, or the cut is installed
    FROZEN      budget reported               PASSING     inside finish()
    ATTACHING   an anchor is missing          TRAINING    otherwise

An anchor is the raw bytes of the last adopted broadcast; the counters of a fragment run from its adoption and are
reset by nothing else. Memory is bounded: at most one queued broadcast, one pull and one final fragment per fragment.

Source: protocol v4, sections on anchors, monotone adoption, final cut, learner budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from yeto_torch.protocol.constants import U32_MAX
from yeto_torch.protocol.errors import PeerError, RefusedError, YetoError
from yeto_torch.protocol.messages import (
    BcastFragment,
    Buffer,
    FinalFragment,
    FinalManifest,
    Message,
    PullReq,
    Shutdown,
)

_COMPARE_BYTES = 1 << 20


class Phase(Enum):
    """Where a learner stands; see the table above."""

    ATTACHING = auto()
    TRAINING = auto()
    PASSING = auto()
    FROZEN = auto()
    FINALIZING = auto()
    ACKED = auto()
    CLOSED = auto()
    FAILED = auto()


class Write(Enum):
    """What adopting a broadcast does to the parameters."""

    BLEND = auto()  # alpha * local + (1 - alpha) * global
    OVERWRITE = auto()  # a first anchor, or a syncer that was set back
    KEEP = auto()  # frozen: the anchor moves alone


@dataclass(frozen=True, slots=True)
class Adopt:
    """Bring a broadcast into the parameters; its raw bytes are the anchor from now on."""

    fragment: int
    version: int
    data: Buffer
    write: Write
    set_back_from: int | None = None  # our version, when the syncer's is not newer


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer ``pull``: local minus ``anchor``, or zeros."""

    pull: PullReq
    generation: int
    base_version: int
    anchor: Buffer
    local_step: int
    c_steps: int
    c_tokens: int
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Install:
    """Overwrite every parameter with the f32 cut, then call ``installed`` with it."""

    manifest: FinalManifest
    fragments: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise in the training loop."""

    error: YetoError


Effect = Adopt | Respond | Install | Fail


@dataclass(frozen=True, slots=True)
class _Anchor:
    version: int
    data: Buffer


@dataclass(slots=True)
class _Slot:
    """One fragment."""

    anchor: _Anchor | None = None
    steps_then: int = 0  # the learner's totals when the anchor was adopted
    tokens_then: int = 0
    queued: Adopt | None = None
    pull: PullReq | None = None
    heard: _Anchor | None = None  # the newest of this generation

    def forget(self) -> None:
        """What a teardown takes: everything but the anchor and its counters."""
        self.queued = self.pull = self.heard = None


class Session:
    """One learner's session over all its connection generations.

    Attributes:
        generation: of the living connection, None without one.
        attention: True when ``boundary`` may have something to do. May be read without the lock.
        news: True when something happened since the last ``boundary``, so that a waiting thread need not spin.
        unseen: fragments of which no broadcast has arrived in the life of the process (learner 0 sends their INIT).
        merges: broadcasts adopted so far.
    """

    def __init__(self, fragments: int) -> None:
        self._slots = [_Slot() for _ in range(fragments)]
        self.generation: int | None = None
        self.attention = self.news = False
        self.unseen = set(range(fragments))
        self.merges = 0
        self.failure: YetoError | None = None
        self.warning: str | None = None  # why the end was not quite as it should be
        self._passing = False
        self._left = False
        self._released = False
        # the learner budget: (steps, tokens) once frozen
        self._budget: tuple[int, int] | None = None
        self._budget_sent = False
        # the final cut: what this generation has sent of it, what is installed, how far the acknowledgement got
        self._manifest: FinalManifest | None = None
        self._finals: dict[int, FinalFragment] = {}
        self._installed: FinalManifest | None = None
        self._ack_started = False
        self._acked = False

    # ------------------------------------------------------------------------------------------ what is so now

    @property
    def phase(self) -> Phase:
        if self.failure is not None:
            return Phase.FAILED
        if self._left or self._released:
            return Phase.CLOSED
        if self._acked:
            return Phase.ACKED
        if self._manifest is not None or self._installed is not None:
            return Phase.FINALIZING
        if self._budget is not None:
            return Phase.FROZEN
        if self._passing:
            return Phase.PASSING
        return Phase.TRAINING if self.anchored else Phase.ATTACHING

    @property
    def anchored(self) -> bool:
        """Has every fragment an anchor?"""
        return all(slot.anchor is not None for slot in self._slots)

    @property
    def is_installed(self) -> bool:
        """Do the parameters hold a final cut?"""
        return self._installed is not None

    @property
    def finished(self) -> bool:
        """Is the cut installed, and has its acknowledgement been handed to a socket?"""
        return self._acked

    @property
    def frozen(self) -> bool:
        return self._budget is not None

    @property
    def is_budget_sent(self) -> bool:
        return self._budget_sent

    @property
    def over(self) -> bool:
        """Is there no more reason to be connected?"""
        return self.phase in (Phase.CLOSED, Phase.FAILED)

    @property
    def versions(self) -> tuple[int, ...]:
        """Adopted version per fragment; 0 where there is none yet. The cut's, once it is installed."""
        if self._installed is not None:
            return self._installed.versions
        return tuple(0 if slot.anchor is None else slot.anchor.version for slot in self._slots)

    @property
    def global_step(self) -> int:
        """The newest outer step this learner has taken over."""
        return self._installed.step if self._installed is not None else max(self.versions)

    def waiting_for(self) -> str:
        """What the session cannot go on without, in words."""
        if self.failure is not None:
            return f"nothing: {self.failure}"
        if self.generation is None:
            return "a connection to the syncer"
        missing = [f for f, slot in enumerate(self._slots) if slot.anchor is None and slot.queued is None]
        if missing and self._manifest is None:
            return f"the first weights of {_listed(missing)} of {len(self._slots)}"
        if self._budget is not None and not self._budget_sent:
            return "the budget report to leave"
        if self._manifest is None:
            return "the final cut" if self._installed is None else "the final cut on this connection"
        absent = [f for f in range(len(self._slots)) if not self._holds_final(f)]
        if absent:
            return f"the final values of {_listed(absent)} at step {self._manifest.step}"
        return "SHUTDOWN" if self._acked else "the final acknowledgement to leave"

    # ------------------------------------------------------------------------------------------ the connection

    def attached(self, generation: int) -> None:
        """A connection of a fresh generation is open."""
        self._reset()
        self.generation = generation

    def detached(self) -> None:
        """It is gone. Nothing it brought and was not adopted is used any more."""
        self._reset()
        self.generation = None

    def fail(self, error: YetoError) -> None:
        """The session cannot go on; the first reason counts."""
        if self.failure is None and not self._released:
            self.failure = error
        self._look()

    def refused(self, text: str) -> None:
        """The syncer said ERROR on the control stream: terminal, but only worth a warning once the cut is acknowledged."""
        if self._acked:
            self.warning = f"the syncer refused the last connection after the final cut: {text}"
            self._released = True
        else:
            self.fail(RefusedError(f"the syncer ended the session: {text}"))

    def leave(self) -> None:
        """We go."""
        self._left = True
        self._reset()

    def received(self, message: Message) -> None:
        """A message of the living generation. Raises PeerError on a violation."""
        match message:
            case BcastFragment():
                self._broadcast(message)
            case PullReq():
                self._pull(message)
            case FinalFragment():
                self._final(message)
            case FinalManifest():
                self._accept_manifest(message)
            case Shutdown():
                if not self._ack_started:
                    raise PeerError("SHUTDOWN before the final cut was installed and acknowledged on this connection")
                self._acked = self._released = True
            case _:
                raise PeerError(f"{message.TYPE.name} is not for a learner")
        self._look()

    # ------------------------------------------------------------------------------------------ the training thread

    def boundary(self, local_step: int, tokens: int) -> list[Effect]:
        """What the training thread must do now, in order.

        Args:
            local_step, tokens: totals of the process, the step just made included.
        """
        if self.failure is not None:
            return [Fail(self.failure)]
        if self._cut_is_new():
            assert self._manifest is not None
            effects: list[Effect] = [
                Install(self._manifest, tuple(self._finals[f].data for f in range(len(self._slots))))
            ]
        else:
            effects = [*self._adoptions(local_step, tokens), *self._answers(local_step, tokens)]
        self._look()
        self.news = False
        return effects

    def installed(self, manifest: FinalManifest) -> None:
        """The cut of ``manifest`` is in the parameters; its acknowledgement is due."""
        self._installed = manifest
        self._drop_final_bytes()
        for slot in self._slots:
            slot.forget()
        self._look()

    def resynced(self, respond: Respond, fragments: list[int], local_step: int, tokens: int) -> None:
        """Local progress of ``fragments`` was dropped and their anchors taken again: count anew, answer later."""
        for fragment in fragments:
            slot = self._slots[fragment]
            slot.steps_then, slot.tokens_then = local_step, tokens
        slot = self._slots[respond.pull.fragment]
        if respond.generation == self.generation and slot.pull is None:
            slot.pull = respond.pull
        self._look()

    def anchor(self, fragment: int) -> Buffer | None:
        """The raw bytes of the last adopted broadcast."""
        anchor = self._slots[fragment].anchor
        return None if anchor is None else anchor.data

    def enter_finish(self) -> None:
        """The data has ended; the session has not."""
        self._passing = True
        self._look()

    def freeze(self, steps: int, tokens: int) -> None:
        """The budget of ``steps`` is used up; ``tokens`` is the exact total."""
        self._budget = (steps, tokens)
        self._look()

    # ------------------------------------------------------------------------------------------ what the link must send

    @property
    def budget_due(self) -> int | None:
        """The steps to report now, None when nothing is to be reported."""
        due = self._budget is not None and not self._budget_sent and self.generation is not None
        return self._budget[0] if due and self._budget is not None else None

    def budget_sent(self) -> None:
        """The report's bytes left; it is never sent again."""
        self._budget_sent = True

    @property
    def ack_due(self) -> int | None:
        """The step to acknowledge on this generation now: its whole cut has arrived, and it is the one installed."""
        if self._installed is None or self._ack_started or self.over:
            return None
        return self._installed.step if self._cut_is_whole() and self._manifest == self._installed else None

    def ack_started(self) -> None:
        """The acknowledgement was queued on this generation."""
        self._ack_started = True

    def ack_sent(self, generation: int) -> None:
        """Its bytes were handed to the socket."""
        if generation == self.generation:
            self._acked = True

    # ------------------------------------------------------------------------------------------ rules

    def _broadcast(self, message: BcastFragment) -> None:
        fragment, version = message.fragment, message.version
        self.unseen.discard(fragment)
        if self._installed is not None:
            return
        slot = self._slots[fragment]
        new = _Anchor(version, message.data)
        if slot.heard is None:
            slot.queued = self._first_of_generation(fragment, slot, new)
        elif version < slot.heard.version:
            return
        elif version == slot.heard.version:
            if not same_bytes(slot.heard.data, message.data):
                raise PeerError(f"BCAST of fragment {fragment}: version {version} came twice with different bytes")
            return
        else:
            set_back = slot.queued.set_back_from if slot.queued is not None else None
            slot.queued = self._adoption(fragment, slot, new, set_back)
        # An idempotent replay brings the same bytes as the anchor: keep one buffer, not two.
        slot.heard = new if slot.queued is not None else slot.anchor

    def _first_of_generation(self, fragment: int, slot: _Slot, new: _Anchor) -> Adopt | None:
        """The syncer's present truth about a fragment; None when it is what we hold."""
        anchor = slot.anchor
        if anchor is None or new.version > anchor.version:
            return self._adoption(fragment, slot, new, None)
        if new.version == anchor.version and same_bytes(new.data, anchor.data):
            return None
        return self._adoption(fragment, slot, new, anchor.version)

    def _adoption(self, fragment: int, slot: _Slot, new: _Anchor, set_back_from: int | None) -> Adopt:
        write = Write.OVERWRITE if slot.anchor is None or set_back_from is not None else Write.BLEND
        return Adopt(fragment, new.version, new.data, write, set_back_from)

    def _pull(self, pull: PullReq) -> None:
        if pull.fragment >= len(self._slots):
            raise PeerError(f"PULL_REQ names fragment {pull.fragment}, the layout has {len(self._slots)}")
        if self._installed is not None:
            return
        slot = self._slots[pull.fragment]
        if slot.pull is None or (pull.step, pull.attempt) > (slot.pull.step, slot.pull.attempt):
            slot.pull = pull

    def _final(self, message: FinalFragment) -> None:
        fragment, version = message.fragment, message.version
        if self._manifest is not None:
            self._check_final(fragment, version, self._manifest)
        held = self._finals.get(fragment)
        if held is None or version > held.version:
            self._finals[fragment] = message
        elif version == held.version and len(held.data) and not same_bytes(held.data, message.data):
            raise PeerError(f"FINAL_FRAGMENT {fragment}: version {version} came twice with different bytes")
        self._drop_if_installed()

    def _accept_manifest(self, manifest: FinalManifest) -> None:
        if len(manifest.versions) != len(self._slots):
            raise PeerError(f"FINAL_MANIFEST names {len(manifest.versions)} fragments, the layout {len(self._slots)}")
        if self._manifest is not None and manifest != self._manifest:
            raise PeerError(f"a second FINAL_MANIFEST (step {manifest.step}) differs from the first")
        for fragment, final in self._finals.items():
            self._check_final(fragment, final.version, manifest)
        self._manifest = manifest
        self._drop_if_installed()

    def _check_final(self, fragment: int, version: int, manifest: FinalManifest) -> None:
        if version > manifest.versions[fragment]:
            raise PeerError(
                f"FINAL_FRAGMENT {fragment} of version {version}, the manifest says {manifest.versions[fragment]}"
            )

    def _holds_final(self, fragment: int) -> bool:
        final = self._finals.get(fragment)
        return final is not None and self._manifest is not None and final.version == self._manifest.versions[fragment]

    def _cut_is_whole(self) -> bool:
        return self._manifest is not None and all(self._holds_final(f) for f in range(len(self._slots)))

    def _cut_is_new(self) -> bool:
        return self._manifest != self._installed and self._cut_is_whole()

    def _drop_if_installed(self) -> None:
        if self._installed is not None and self._manifest == self._installed:
            self._drop_final_bytes()

    def _drop_final_bytes(self) -> None:
        """The cut is in the parameters: only its versions are still of interest."""
        self._finals = {f: FinalFragment(f, final.version, b"") for f, final in self._finals.items()}

    def _adoptions(self, local_step: int, tokens: int) -> list[Effect]:
        effects: list[Effect] = []
        for slot in self._slots:
            if slot.queued is None:
                continue
            effects.append(slot.queued if self._budget is None else replace(slot.queued, write=Write.KEEP))
            slot.anchor = slot.heard  # one buffer: what was heard last is what was queued
            slot.steps_then, slot.tokens_then = local_step, tokens
            slot.queued = None
            self.merges += 1
        return effects

    def _answers(self, local_step: int, tokens: int) -> list[Effect]:
        assert self.generation is not None or all(slot.pull is None for slot in self._slots)
        effects: list[Effect] = []
        for slot in self._slots:
            respond = self._answer(slot, local_step, tokens)
            if respond is not None:
                effects.append(respond)
                slot.pull = None
        return effects

    def _answer(self, slot: _Slot, local_step: int, tokens: int) -> Respond | None:
        if slot.pull is None or slot.anchor is None or self.generation is None:
            return None
        head = (slot.pull, self.generation, slot.anchor.version, slot.anchor.data)
        if self._budget is not None:
            return Respond(*head, self._budget[0], self._budget[0], self._budget[1])
        c_steps = local_step - slot.steps_then
        if c_steps >= 1:
            return Respond(*head, local_step, min(c_steps, U32_MAX), tokens - slot.tokens_then)
        return Respond(*head, local_step, 1, 0, zero=True) if self._passing else None

    def _reset(self) -> None:
        for slot in self._slots:
            slot.forget()
        self._manifest = None
        self._finals.clear()
        self._ack_started = False
        self._look()

    def _look(self) -> None:
        self.news = True
        self.attention = (
            self.failure is not None
            or any(slot.queued is not None or slot.pull is not None for slot in self._slots)
            or self._cut_is_new()
        )


def same_bytes(one: Buffer, other: Buffer) -> bool:
    """Equality of two buffers, piece by piece: as fast as memory, without a second copy of either."""
    a, b = memoryview(one).cast("B"), memoryview(other).cast("B")
    return len(a) == len(b) and all(
        bytes(a[i : i + _COMPARE_BYTES]) == bytes(b[i : i + _COMPARE_BYTES]) for i in range(0, len(a), _COMPARE_BYTES)
    )


def _listed(fragments: list[int]) -> str:
    return f"fragment{'s' if len(fragments) > 1 else ''} {', '.join(map(str, fragments))}"
