"""The learner's mind: which broadcast to adopt, which pull to answer and how, when to install, acknowledge and end.

It decides from messages and the training thread's counters alone. It must not know tensors, threads, sockets or
clocks: payloads are opaque buffers, and whoever owns it calls it under one lock.

    event         | what it does
    attached      | a fresh generation: queued broadcasts, pulls, final cache and manifest of the old one are gone
    detached      | the same; training goes on
    BCAST         | queued if newer; the newest of a fragment wins; the same version with other bytes is a violation.
                  | The first one of a generation is the syncer's present truth, even if it is older than ours
    PULL_REQ      | the newest per fragment waits for the next boundary that can answer it
    FINAL_*       | see ``cut``
    SHUTDOWN      | a violation until our acknowledgement on this generation has been started
    boundary      | the training thread's turn: broadcasts first, then answers; or the final cut
    broken_off    | an error of the user's ended a boundary: what it left undone is asked for again
    enter_finish  | data has ended: a pull we have no steps for gets a zero delta of weight 0
    freeze        | budget reported: broadcasts move anchors only, answers carry the budget and the exact total

    phase, derived from the facts; the first that holds
    FAILED      an error is terminal          CLOSED      left, or released by SHUTDOWN
    ACKED       acknowledgement handed over   FINALIZING  the manifest is here, or the cut is installed
    FROZEN      budget reported               PASSING     inside finish()
    ATTACHING   an anchor is missing          TRAINING    otherwise

An anchor is the raw bytes of the last adopted broadcast; the counters of a fragment run from its adoption, and
only a resync (``restarted``) resets them too. Memory is bounded: at most one queued broadcast, one pull and one final
fragment per fragment.

* pure

Source: v4 §Anchors (raw bytes before blending; a pull waits for its first anchor; versions only rise),
v4 §Deltas and staleness (the base version is the adopted anchor's),
v4 §Final cut (installed before it is acknowledged),
v4 §Budget (frozen: broadcasts move anchors only; answers carry budget and exact total); rulings §5.1 to §5.5, §5.10,
§5.11.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from yeto_torch.learner.cut import FinalCut, same_bytes
from yeto_torch.learner.effects import Adopt, Effect, Fail, Respond, Write
from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.constants import U32_MAX, U64_MAX
from yeto_torch.wire.errors import PeerError, RefusedError, YetoError
from yeto_torch.wire.messages import BcastFragment, FinalFragment, FinalManifest, Message, PullReq, Shutdown


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
    is_torn: bool = False  # the anchor was not taken over: the boundary that should have done so was broken off

    def forget(self) -> None:
        """What a teardown takes: everything but the anchor, its counters, and whether it was taken over."""
        self.queued = self.pull = self.heard = None


class Session:
    """One learner's session over all its connection generations.

    Attributes:
        generation: of the living connection, None without one.
        attention: True when ``boundary`` may have something to do. May be read without the lock.
        news: True when something happened since the last ``boundary``, so that a waiting thread need not spin.
        unseen: fragments of which no broadcast has arrived in the life of the process (learner 0 sends their INIT).
        merges: broadcasts adopted so far.
        failure: why the session cannot go on.
        warning: why its end was not quite as it should be.
    """

    def __init__(self, fragments: int) -> None:
        self._slots = [_Slot() for _ in range(fragments)]
        self._cut = FinalCut(fragments)
        self.generation: int | None = None
        self.attention = self.news = False
        self.unseen = set(range(fragments))
        self.merges = 0
        self.failure: YetoError | None = None
        self.warning: str | None = None
        self._passing = self._left = self._released = False
        self._budget: tuple[int, int] | None = None  # (steps, tokens) once frozen
        self.is_budget_sent = False

    # ------------------------------------------------------------------------------------------ what is so now

    @property
    def phase(self) -> Phase:
        """See the table above."""
        if self.failure is not None:
            return Phase.FAILED
        if self._left or self._released:
            return Phase.CLOSED
        if self._cut.acked:
            return Phase.ACKED
        if self._cut.manifest is not None or self.is_installed:
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
        return self._cut.installed is not None

    @property
    def finished(self) -> bool:
        """Is the cut installed, and has its acknowledgement been handed to a socket?"""
        return self._cut.acked

    @property
    def over(self) -> bool:
        """Is there no more reason to be connected?"""
        return self.phase in (Phase.CLOSED, Phase.FAILED)

    @property
    def versions(self) -> tuple[int, ...]:
        """Adopted version per fragment; 0 where there is none yet. The cut's, once it is installed."""
        if self._cut.installed is not None:
            return self._cut.installed.versions
        return tuple(0 if slot.anchor is None else slot.anchor.version for slot in self._slots)

    @property
    def global_step(self) -> int:
        """The newest outer step this learner has taken over."""
        return max(self.versions) if self._cut.installed is None else self._cut.installed.step

    def anchor(self, fragment: int) -> Buffer | None:
        """The raw bytes of the last adopted broadcast."""
        anchor = self._slots[fragment].anchor
        return None if anchor is None else anchor.data

    def waiting_for(self) -> str:
        """What the session cannot go on without, in words."""
        missing = [f for f, slot in enumerate(self._slots) if slot.anchor is None and slot.queued is None]
        manifest = self._cut.manifest
        if self.generation is None:
            return "a connection to the syncer"
        if missing and manifest is None:
            return f"the first weights of {_listed(missing)} of {len(self._slots)}"
        if self._budget is not None and not self.is_budget_sent:
            return "the budget report to leave"
        if manifest is None:
            return "the final cut"
        if not self._cut.is_whole:
            return f"the final values of {_listed(self._cut.missing())} at step {manifest.step}"
        return "SHUTDOWN" if self._cut.acked else "the final acknowledgement to leave"

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
        """The session cannot go on; the first reason counts. Behind the acknowledgement it is only worth a warning."""
        if self.over:
            return
        if self._cut.acked:
            self.warning = f"no SHUTDOWN came after the final acknowledgement: {error}"
            self._released = True
        else:
            self.failure = error
        self._recompute_attention()

    def refused(self, text: str) -> None:
        """The syncer said ERROR on the control stream: a retry cannot help."""
        self.fail(RefusedError(f"the syncer ended the session: {text}"))

    def leave(self) -> None:
        """We go."""
        self._left = True
        self._reset()

    def received(self, message: Message) -> None:
        """A message of the living generation. Raises PeerError on a violation."""
        match message:
            case BcastFragment():
                self._accept_broadcast(message)
            case PullReq():
                self._accept_pull(message)
            case FinalFragment():
                self._cut.accept_fragment(message)
            case FinalManifest():
                self._cut.accept_manifest(message)
            case Shutdown():
                if not self._cut.started:
                    raise PeerError("SHUTDOWN before the final cut was installed and acknowledged on this connection")
                self._cut.acked = self._released = True
            case _:
                raise PeerError(f"{message.TYPE.name} is not for a learner")
        self._recompute_attention()

    # ------------------------------------------------------------------------------------------ the training thread

    def boundary(self, local_step: int, tokens: int) -> list[Effect]:
        """What the training thread must do now, in order; the totals of the process include the step just made."""
        if self.failure is not None:
            return [Fail(self.failure)]
        install = self._cut.installation()
        effects: list[Effect]
        if install is not None:
            effects = [install]
        else:
            effects = [*self._adoptions(local_step, tokens), *self._answers(local_step, tokens)]
        self._recompute_attention()
        self.news = False
        return effects

    def installed(self, manifest: FinalManifest) -> None:
        """The cut of ``manifest`` is in the parameters; its acknowledgement is due."""
        self._cut.mark_installed(manifest)
        for slot in self._slots:
            slot.forget()
            slot.is_torn = False
        self._recompute_attention()

    def broken_off(self, effects: Iterable[Effect]) -> None:
        """These effects of the last boundary were not carried out, or not to their end, and training may go on.

        Without this a fragment would answer from an anchor that its parameters have never seen.
        """
        for effect in effects:
            match effect:
                case Adopt() if effect.write is not Write.KEEP:
                    self._slots[effect.fragment].is_torn = True
                case Respond():
                    self._put_back(effect)
        self._recompute_attention()

    def restarted(self, fragments: Iterable[int], local_step: int, tokens: int) -> None:
        """The parameters of ``fragments`` are their anchors again: their counters start anew."""
        for fragment in fragments:
            slot = self._slots[fragment]
            slot.steps_then, slot.tokens_then = local_step, tokens
            slot.is_torn = False
        self._recompute_attention()

    def resynced(self, respond: Respond, fragments: list[int], local_step: int, tokens: int) -> None:
        """Local progress of ``fragments`` was dropped while ``respond`` was made: answer later."""
        self._put_back(respond)
        self.restarted(fragments, local_step, tokens)

    def enter_finish(self) -> None:
        """The data has ended; the session has not."""
        self._passing = True
        self._recompute_attention()

    def freeze(self, steps: int, tokens: int) -> None:
        """The budget of ``steps`` is used up; ``tokens`` is the exact total."""
        self._budget = (steps, tokens)
        self._recompute_attention()

    # ------------------------------------------------------------------------------------------ what the link must send

    @property
    def budget_due(self) -> int | None:
        """The steps to report now, None when nothing is to be reported. Once sent it is never due again."""
        if self._budget is None or self.is_budget_sent or self.generation is None:
            return None
        return self._budget[0]

    @property
    def ack_due(self) -> int | None:
        """The step to acknowledge on this generation now: its whole cut has arrived, and it is the one installed."""
        manifest = self._cut.installed
        return manifest.step if manifest is not None and self._cut.to_acknowledge and not self.over else None

    def ack_started(self) -> None:
        """The acknowledgement was queued on this generation."""
        self._cut.started = True

    def ack_sent(self, generation: int) -> None:
        """Its bytes were handed to the socket."""
        if generation == self.generation:
            self._cut.acked = True

    # ------------------------------------------------------------------------------------------ rules

    def _accept_broadcast(self, message: BcastFragment) -> None:
        fragment, version = message.fragment, message.version
        self.unseen.discard(fragment)
        if self.is_installed:
            return
        slot = self._slots[fragment]
        if slot.heard is None:
            slot.queued = _first_of_generation(message, slot.anchor)
        elif version < slot.heard.version:
            return
        elif version == slot.heard.version:
            if not same_bytes(slot.heard.data, message.data):
                raise PeerError(f"BCAST of fragment {fragment}: version {version} came twice with different bytes")
            return
        else:
            set_back_from = slot.queued.set_back_from if slot.queued is not None else None
            slot.queued = _adoption(message, slot.anchor, set_back_from)
        # A replay that equals our anchor is dropped: the anchor's buffer stays, not a second equal one.
        slot.heard = slot.anchor if slot.queued is None else _Anchor(version, message.data)

    def _accept_pull(self, pull: PullReq) -> None:
        if pull.fragment >= len(self._slots):
            raise PeerError(f"PULL_REQ names fragment {pull.fragment}, the layout has {len(self._slots)}")
        if self.is_installed:
            return
        slot = self._slots[pull.fragment]
        if slot.pull is None or (pull.step, pull.attempt) > (slot.pull.step, slot.pull.attempt):
            slot.pull = pull

    def _put_back(self, respond: Respond) -> None:
        """Answer this pull later, unless a newer one has come."""
        slot = self._slots[respond.pull.fragment]
        if respond.generation == self.generation and slot.pull is None:
            slot.pull = respond.pull

    def _adoptions(self, local_step: int, tokens: int) -> list[Effect]:
        effects: list[Effect] = []
        for fragment, slot in enumerate(self._slots):
            adopt = slot.queued
            if adopt is not None:
                adopt = replace(adopt, write=Write.OVERWRITE) if slot.is_torn else adopt
                slot.anchor, slot.queued = slot.heard, None
                self.merges += 1
            elif slot.is_torn and slot.anchor is not None and self._budget is None:
                adopt = Adopt(fragment, slot.anchor.version, slot.anchor.data, Write.OVERWRITE)
            else:
                continue
            effects.append(adopt if self._budget is None else replace(adopt, write=Write.KEEP))
            slot.steps_then, slot.tokens_then = local_step, tokens
            slot.is_torn = False
        return effects

    def _answers(self, local_step: int, tokens: int) -> list[Effect]:
        effects: list[Effect] = []
        for slot in self._slots:
            respond = self._answer(slot, local_step, tokens)
            if respond is not None:
                effects.append(respond)
                slot.pull = None
        return effects

    def _answer(self, slot: _Slot, local_step: int, tokens: int) -> Respond | None:
        # A pull that overtook the first broadcast of its generation waits for it: our anchor may be one that a syncer
        # that was set back has never made.
        if slot.pull is None or slot.anchor is None or slot.heard is None or self.generation is None:
            return None
        head = (slot.pull, self.generation, slot.anchor.version, slot.anchor.data)
        if self._budget is not None:
            steps, total = self._budget
            return Respond(*head, local_step=steps, c_steps=steps, c_tokens=min(total, U64_MAX))
        c_steps = local_step - slot.steps_then
        if c_steps >= 1:
            c_tokens = tokens - slot.tokens_then
            return Respond(*head, local_step, min(c_steps, U32_MAX), min(c_tokens, U64_MAX))
        return Respond(*head, local_step, c_steps=1, c_tokens=0, zero=True) if self._passing else None

    def _reset(self) -> None:
        for slot in self._slots:
            slot.forget()
        self._cut.reset()
        self._recompute_attention()

    def _recompute_attention(self) -> None:
        self.news = True
        self.attention = not self._left and (
            self.failure is not None
            or any(slot.queued is not None or slot.pull is not None or slot.is_torn for slot in self._slots)
            or self._cut.to_install
        )


def _first_of_generation(message: BcastFragment, anchor: _Anchor | None) -> Adopt | None:
    """The syncer's present truth about a fragment; None when it is what we hold."""
    if anchor is None or message.version > anchor.version:
        return _adoption(message, anchor, None)
    if message.version == anchor.version and same_bytes(message.data, anchor.data):
        return None
    return _adoption(message, anchor, anchor.version)


def _adoption(message: BcastFragment, anchor: _Anchor | None, set_back_from: int | None) -> Adopt:
    overwrite = anchor is None or set_back_from is not None
    write = Write.OVERWRITE if overwrite else Write.BLEND
    return Adopt(message.fragment, message.version, message.data, write, set_back_from)


def _listed(fragments: list[int]) -> str:
    return f"fragment{'s' if len(fragments) > 1 else ''} {', '.join(map(str, fragments))}"
