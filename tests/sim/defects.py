"""Planted defects: the real machines with one mistake each, to see that the simulation bites.

Each is one plausible error of a programmer, planted in the product's own code while a seed is played. Some are real:
the simulation found them first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from syncer.checkpoint import files
from syncer.core import effects as fx
from syncer.core.assembly import Assembly
from syncer.core.finalization import Finalization
from syncer.core.flight import Flight
from syncer.core.ledger import Ledger
from syncer.core.lifecycle import Lifecycle, Phase
from syncer.core.roster import Roster
from syncer.core.rounds import Rejection, Round, RoundState
from syncer.core.schedule import Schedule
from syncer.merge import intake
from yeto_torch.learner import session as sessions
from yeto_torch.learner.cut import FinalCut
from yeto_torch.learner.exchange import Exchange
from yeto_torch.learner.session import Session
from yeto_torch.wire.chunks import Reassembler
from yeto_torch.wire.constants import WireDType

Plant = AbstractContextManager[Any]
DEFECTS: dict[str, Callable[[], Plant]] = {}


def _defect(name: str) -> Callable[[Callable[[], Plant]], Callable[[], Plant]]:
    def register(plant: Callable[[], Plant]) -> Callable[[], Plant]:
        DEFECTS[name] = plant
        return plant

    return register


# ---------------------------------------------------------------------- the syncer: answers


@_defect("an answer is negated twice")
def _() -> Plant:
    real = intake.decode_gradient
    return mock.patch.object(intake, "decode_gradient", lambda *args: -real(*args))


@_defect("any generation of a captured learner may answer")
def _() -> Plant:
    real = Round.offer

    def offer(self: Round, push: Any, now: float) -> Rejection | None:
        ids = {member.learner_id for member in self.members}
        if push.member not in self.members and push.member.learner_id in ids:
            self.members = tuple(sorted((*self.members, push.member)))
        return real(self, push, now)

    return mock.patch.object(Round, "offer", offer)


@_defect("an answer to a discarded attempt counts")
def _() -> Plant:
    real = Round.offer

    def offer(self: Round, push: Any, now: float) -> Rejection | None:
        attempt, self.attempt = self.attempt, push.attempt
        try:
            return real(self, push, now)
        finally:
            self.attempt = attempt

    return mock.patch.object(Round, "offer", offer)


@_defect("a relaunch keeps the answers it has")
def _() -> Plant:
    real = Round.settle

    def settle(self: Round, now: float) -> None:
        kept = dict(self.responses)
        real(self, now)
        if self.state is RoundState.EXPIRED:
            self._kept = {**getattr(self, "_kept", {}), **kept}

    launch = Round.launch

    def relaunch(self: Round, members: Any, quorum: int, now: float) -> None:
        launch(self, members, quorum, now)
        self.responses = {m: r for m, r in getattr(self, "_kept", {}).items() if m in members}

    return _both(mock.patch.object(Round, "settle", settle), mock.patch.object(Round, "launch", relaunch))


@_defect("K shrinks when a captured learner is lost")
def _() -> Plant:
    real = Round.lose

    def lose(self: Round, member: Any) -> None:
        if member in self.members and member not in self.responses:
            self.quorum = max(1, self.quorum - 1)
        real(self, member)

    return mock.patch.object(Round, "lose", lose)


@_defect("a disconnect erases an accepted answer")
def _() -> Plant:
    real = Round.lose

    def lose(self: Round, member: Any) -> None:
        if self.is_open:
            self.responses.pop(member, None)
        real(self, member)

    return mock.patch.object(Round, "lose", lose)


@_defect("a lost learner is waited for until the deadline")
def _() -> Plant:
    return mock.patch.object(Round, "lose")


@_defect("own work moves deadlines: a punctual answer behind a slow merge is late")
def _() -> Plant:
    def handle(self: Lifecycle, event: Any, now: float) -> list[fx.Effect]:
        if self.phase not in (Phase.DONE, Phase.FAILED):
            self._settle(now)
            self._dispatch(event, now)
            self._settle(now)
        return self._take()

    return mock.patch.object(Lifecycle, "handle", handle)


@_defect("the late end of a superseded group removes its replacement")
def _() -> Plant:
    def leave(self: Roster, member: Any, now: float) -> None:
        self._live.get(member.learner_id, []).remove(member)
        if self._current.pop(member.learner_id, None) is not None:
            self._absent_since[member.learner_id] = now

    return mock.patch.object(Roster, "leave", leave)


# ---------------------------------------------------------------------- the syncer: commits


@_defect("answers are merged in the order they came")
def _() -> Plant:
    return mock.patch.object(Round, "ordered_responses", property(lambda self: tuple(self.responses.values())))


@_defect("rounds are committed as they get ready")
def _() -> Plant:
    def pop_ready(self: Schedule) -> Round | None:
        ready = [r for r in self.rounds.values() if r.state is RoundState.READY]
        if not ready:
            return None
        del self.rounds[ready[0].step]
        self.committed = ready[0].step
        return ready[0]

    return mock.patch.object(Schedule, "pop_ready", pop_ready)


@_defect("one round too many is in flight")
def _() -> Plant:
    real = Schedule.__init__

    def init(self: Schedule, *args: Any) -> None:
        real(self, *args)
        self._window += 1

    return mock.patch.object(Schedule, "__init__", init)


@_defect("a broadcast leaves before its checkpoint is durable")
def _() -> Plant:
    real = Flight.merged

    def merged(self: Flight, step: int, audience: Any) -> list[fx.Effect]:
        effects = real(self, step, audience)
        for i, effect in enumerate(effects[:-1]):
            if isinstance(effect, fx.SaveCheckpoint):
                effects[i : i + 2] = [effects[i + 1], effect]
        return effects

    return mock.patch.object(Flight, "merged", merged)


@_defect("the tape is written after the broadcast")
def _() -> Plant:
    real = Flight.merged

    def merged(self: Flight, step: int, audience: Any) -> list[fx.Effect]:
        effects = real(self, step, audience)
        lines = [effect for effect in effects if isinstance(effect, fx.Record)]
        return [effect for effect in effects if not isinstance(effect, fx.Record)] + lines

    return mock.patch.object(Flight, "merged", merged)


@_defect("the starting values are broadcast before they are durable")
def _() -> Plant:
    real = Lifecycle._save

    def save(self: Lifecycle) -> None:
        if self.committed:
            real(self)

    return mock.patch.object(Lifecycle, "_save", save)


@_defect("an answer enters the ledger when its merge begins")
def _() -> Plant:
    real, add = Flight._merge, Ledger.add

    def merge(self: Flight, round_: Round, *rest: Any) -> Any:
        for response in round_.ordered_responses:
            add(self._ledger, response)
        return real(self, round_, *rest)

    return _both(mock.patch.object(Flight, "_merge", merge), mock.patch.object(Ledger, "add"))


def _writes_without(method: str) -> Plant:
    real = files.write_atomically

    def write(path: Any, parts: Any, what: str, disk: Any) -> None:
        with mock.patch.object(disk, method):
            real(path, parts, what, disk)

    return mock.patch.object(files, "write_atomically", write)


@_defect("a checkpoint is renamed before it is synced")
def _() -> Plant:
    return _writes_without("sync")


@_defect("the directory of a checkpoint is not synced")
def _() -> Plant:
    return _writes_without("sync_directory")


@_defect("a joiner of a running fleet is sent nothing")
def _() -> Plant:
    return mock.patch.object(Lifecycle, "_send_fragments")


# ---------------------------------------------------------------------- the syncer: the end


@_defect("a disconnect drops an accepted acknowledgement")
def _() -> Plant:
    def lost(self: Finalization, member: Any) -> None:
        self._queued.discard(member)
        self._acked.pop(member.learner_id, None)

    return mock.patch.object(Finalization, "lost", lost)


@_defect("the first acknowledgement ends the run")
def _() -> Plant:
    return mock.patch.object(Finalization, "complete", property(lambda self: bool(self._acked)))


@_defect("the marker follows the shutdowns")
def _() -> Plant:
    real = Lifecycle._complete

    def complete(self: Lifecycle) -> None:
        real(self)
        markers = [effect for effect in self._effects if isinstance(effect, fx.WriteMarker)]
        rest = [effect for effect in self._effects if not isinstance(effect, fx.WriteMarker)]
        self._effects = rest[:-1] + markers + rest[-1:]

    return mock.patch.object(Lifecycle, "_complete", complete)


@_defect("a reconnect during delivery is not served the cut")
def _() -> Plant:
    real = Lifecycle._greet

    def greet(self: Lifecycle, member: Any, now: float) -> None:
        phase = self.phase
        if phase is Phase.FINALIZING:
            self._send_fragments(member, self._assembly.initialized)
        else:
            real(self, member, now)

    return mock.patch.object(Lifecycle, "_greet", greet)


@_defect("a restart waits for a learner that is gone for good")
def _() -> Plant:
    return mock.patch.object(Assembly, "start_at", None)


@_defect("a checkpoint holds the ledger of all that is decided")
def _() -> Plant:
    real = Flight.merged

    def merged(self: Flight, step: int, audience: Any) -> list[fx.Effect]:
        effects, rows = real(self, step, audience), self._ledger.rows()
        return [fx.SaveCheckpoint(e.step, rows) if isinstance(e, fx.SaveCheckpoint) else e for e in effects]

    return mock.patch.object(Flight, "merged", merged)


@_defect("who joins while the cut is prepared sees the last step at once")
def _() -> Plant:
    real = Lifecycle._greet

    def greet(self: Lifecycle, member: Any, now: float) -> None:
        real(self, member, now)
        if self.phase is Phase.CUTTING:
            self._send_fragments(member, self._assembly.initialized)

    return mock.patch.object(Lifecycle, "_greet", greet)


# ---------------------------------------------------------------------- the learner


@_defect("the final cut is blended")
def _() -> Plant:
    def install(self: Exchange, fragments: Any) -> None:
        for fragment, data in enumerate(fragments):
            self.write(fragment, self._view(fragment, data, WireDType.F32), 0.5)

    return mock.patch.object(Exchange, "install", install)


@_defect("a broadcast older than the anchor is adopted")
def _() -> Plant:
    real = Session._accept_broadcast

    def broadcast(self: Session, message: Any) -> None:
        self._slots[message.fragment].heard = None
        real(self, message)

    return mock.patch.object(Session, "_accept_broadcast", broadcast)


@_defect("a push resets the counters")
def _() -> Plant:
    real = Session._answer

    def answer(self: Session, slot: Any, local_step: int, tokens: int) -> Any:
        respond = real(self, slot, local_step, tokens)
        if respond is not None:
            slot.steps_then, slot.tokens_then = local_step, tokens
        return respond

    return mock.patch.object(Session, "_answer", answer)


@_defect("a pull outlives its connection")
def _() -> Plant:
    def forget(self: Any) -> None:
        self.queued = self.heard = None

    return mock.patch.object(sessions._Slot, "forget", forget)


@_defect("a pull that overtook its broadcast is answered from the old anchor")
def _() -> Plant:
    real = Session._answer

    def answer(self: Session, slot: Any, local_step: int, tokens: int) -> Any:
        heard, slot.heard = slot.heard, slot.heard or slot.anchor
        try:
            return real(self, slot, local_step, tokens)
        finally:
            slot.heard = heard

    return mock.patch.object(Session, "_answer", answer)


@_defect("the first anchor is blended like any other")
def _() -> Plant:
    real = sessions._adoption

    def adoption(message: Any, anchor: Any, set_back_from: int | None) -> Any:
        adopt = real(message, anchor, set_back_from)
        return sessions.replace(adopt, write=sessions.Write.BLEND)

    return mock.patch.object(sessions, "_adoption", adoption)


@_defect("a lost acknowledgement is not sent again")
def _() -> Plant:
    def reset(self: FinalCut) -> None:
        self._held.clear()
        self.manifest = None

    return mock.patch.object(FinalCut, "reset", reset)


@_defect("a message is whole when half of it has come")
def _() -> Plant:
    real = Reassembler.commit

    def commit(self: Reassembler, msg_id: int, size: int) -> bytearray | None:
        if msg_id not in self._partials:
            return None
        partial = self._partials[msg_id]
        if 2 * (partial.received + size) >= len(partial.buffer):
            partial.received = len(partial.buffer) - size
        return real(self, msg_id, size)

    return mock.patch.object(Reassembler, "commit", commit)


class _both(AbstractContextManager[None]):  # noqa: N801 - reads as a word
    """Two patches as one."""

    def __init__(self, *plants: Plant) -> None:
        self._plants = plants

    def __enter__(self) -> None:
        for plant in self._plants:
            plant.__enter__()

    def __exit__(self, *error: object) -> None:
        for plant in reversed(self._plants):
            plant.__exit__(None, None, None)
