"""The one loop: take an event, ask the coordinator, do its effects in order.

The main thread is the actor; only it touches the global state, the tape and the checkpoint. It decides nothing: what
to do and in which order comes from ``core/coordinator``. Events carry the time they arrived, and the inbox is drained
before a deadline may fire, so that a slow merge or checkpoint cannot make a punctual answer late; nor can its own
decoding, which time does not pass.

Source: v4 §Scheduler (one sequential scheduler actor), v4 §Checkpoints (durable before its broadcast is visible),
v4 §Final cut (checkpoint, final state, fragments, manifest); rulings §6.7, §6.10.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import cast

import torch

from syncer.checkpoint.files import write_checkpoint, write_marker
from syncer.checkpoint.format import FragmentRecord, LedgerEntry, Snapshot
from syncer.config.policy import DRIVE_LIMIT, SyncerPolicy
from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.admission import Identity
from syncer.core.coordinator import Coordinator
from syncer.core.drive import Driven
from syncer.core.ledger import LedgerRow
from syncer.core.lifecycle import Phase
from syncer.core.record import MeasuredLine
from syncer.final_state import write_final_state
from syncer.merger import Merger, MergerEvent, PoolDrained, merger_for, outer_momentum
from syncer.progress import Progress
from syncer.server import Server
from syncer.state import GlobalState
from syncer.tape import Tape
from yeto_torch.wire.errors import RunError, StateError
from yeto_torch.wire.messages import BcastFragment, FinalFragment, FinalManifest, Hello, PullReq, Shutdown
from yeto_torch.wire.model_layout import Layout

log = logging.getLogger("syncer")

_STALL_S = 3.0  # nothing committed for so long: say what is awaited, once per reason
_BATCH = 256  # events taken between two looks at the clock

Item = tuple[ev.Event | MergerEvent, float, Callable[[], None] | None]
clock = time.monotonic


class Inbox(queue.SimpleQueue[Item]):
    """What has arrived for the actor, oldest first."""

    def post(self, event: ev.Event | MergerEvent, now: float, handled: Callable[[], None] | None = None) -> None:
        """Queue an event that arrived at ``now``; from any thread. ``handled`` is called once it is settled."""
        self.put((event, now, handled))


@dataclass(slots=True, eq=False, repr=False)
class Actor:
    """Runs one syncer process from the first event to its exit code.

    ``resumed`` is the checkpoint to continue from; its tensors are handed to the state at the first HELLO.
    """

    policy: SyncerPolicy
    coordinator: Coordinator
    device: torch.device
    tape: Tape
    server: Server
    inbox: Inbox
    resumed: Snapshot | None = None
    # The session, from the Admit that opens it; the coordinator orders nothing before that needs one of these.
    identity: Identity = field(init=False)
    state: GlobalState = field(init=False)
    merger: Merger = field(init=False)
    _progress: Progress = field(init=False)
    _cleanup: ExitStack = field(default_factory=ExitStack)
    _backlog: deque[Item] = field(default_factory=deque)  # taken from the inbox, not handled yet
    _own: deque[ev.Event] = field(default_factory=deque)  # events the effects themselves cause
    _finish: fx.Finish | None = None
    _told: str = ""
    _moved: tuple[Phase, int] = (Phase.ASSEMBLING, -1)  # phase and step when something last moved
    _moved_at: float = field(default_factory=clock)

    def __post_init__(self) -> None:
        self._progress = Progress(self.policy, lambda: self.server.bytes_moved)

    def run(self) -> fx.Finish:
        """Serve until the coordinator says Finish. A failing effect ends the run with its sentence."""
        self._show(self.coordinator.waiting_for())
        with self._cleanup:
            try:
                while self._finish is None:
                    self._turn()
            except (RunError, StateError) as error:
                # A full disk can be mended and the run resumed: learners may redial. One that cannot go on tells them.
                self._finish = fx.Finish(1, str(error), terminal=isinstance(error, RunError))
                self._write_end(str(error))
            finally:
                self._progress.close()
        return self._finish

    def _write_end(self, reason: str) -> None:
        try:
            self.tape.event("end", step=self.coordinator.committed, code=1, reason=reason)
        except StateError as error:
            log.error("%s", error)

    # ------------------------------------------------------------------ the loop

    def _turn(self) -> None:
        batch, settled = self._next_batch()
        for event, now, handled in batch:
            try:
                if isinstance(event, ev.Event):
                    self._perform(self.coordinator.handle(event, min(now, settled)))
                else:
                    self._on_merger(event)
            finally:
                if handled is not None:
                    handled()
            if self._finish is not None:
                return
        settled = self.server.settled_until(clock())
        self._gather()
        # A flood must not hold up time, nor time outrun what has arrived.
        self._perform(self.coordinator.on_time(min([settled, *(arrived for _, arrived, _ in self._backlog)])))
        self._explain_waiting()

    def _on_merger(self, event: MergerEvent) -> None:
        if isinstance(event, PoolDrained):
            self._own.append(ev.Drained())
        elif (step := self.merger.delivered(event)) is not None:
            self._own.append(ev.MergeDone(step))
        self._perform([])

    def _next_batch(self) -> tuple[list[Item], float]:
        """The oldest of what has arrived, and how late it is for it; waits for the first until the next deadline."""
        if not self._backlog:
            with suppress(queue.Empty):
                self._backlog.append(self.inbox.get(timeout=self._patience_s()))
        settled = self.server.settled_until(clock())
        self._gather()
        return [self._backlog.popleft() for _ in range(min(_BATCH, len(self._backlog)))], settled

    def _gather(self) -> None:
        """Take what has arrived; the server bounds how much that can be."""
        with suppress(queue.Empty):
            while True:
                self._backlog.append(self.inbox.get_nowait())

    def _patience_s(self) -> float | None:
        deadline, now = self.coordinator.next_deadline(), clock()
        times = []
        # A deadline that has passed waits for what arrived before it: its event wakes us, or the end of its group.
        if deadline is not None and (deadline > now or deadline <= self.server.settled_until(now)):
            times.append(deadline)
        if self.coordinator.waiting_for() != self._told:
            times.append(self._moved_at + _STALL_S)
        return max(0.0, min(times) - now) if times else None

    def _explain_waiting(self) -> None:
        text, now = self.coordinator.waiting_for(), clock()
        self._show(text)
        moved = (self.coordinator.phase, self.coordinator.committed)
        if moved != self._moved:
            self._moved, self._moved_at = moved, now
        if text != self._told and self._finish is None and now >= self._moved_at + _STALL_S:
            self._told = text
            log.info("waiting for %s", text)

    def _show(self, waiting: str) -> None:
        if self._progress.live:
            self._progress.standing(self.coordinator.connected, waiting)

    def _perform(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self._do(effect)
        while self._own and self._finish is None:
            for effect in self.coordinator.handle(self._own.popleft(), clock()):
                self._do(effect)

    # ------------------------------------------------------------------ effects

    def _do(self, effect: fx.Effect) -> None:  # noqa: C901 - one flat table of effects reads best in one place
        match effect:
            case fx.Admit(ticket, member, hello, opens):
                if opens:
                    self._open(hello)
                self.server.admit(ticket, member, hello)
            case fx.RefuseHello(ticket, text):
                self.server.refuse(ticket, text)
            case fx.Expel(member, text):
                self.server.expel(member, text)
            case fx.Release(member):
                self.server.expel(member, None)
            case fx.Initialize(fragment, values):
                self.state.initialize(fragment, cast(torch.Tensor, values))
            case fx.SendPull(member, fragment, step, attempt):
                self.server.send(member, PullReq(fragment, step, attempt))
            case fx.Merge(step, fragment):
                if self.merger.start(effect, self.state.momentum(fragment)):
                    self._own.append(ev.MergeDone(step))
            case fx.Commit(step, fragment):
                self._commit(step, fragment)
            case fx.Record():
                self._record(effect)
            case fx.Note(event, fields):
                self.tape.event(event, **fields)
            case fx.SaveCheckpoint(_, ledger):
                self._save_checkpoint(ledger)
            case fx.Broadcast():
                self._broadcast(effect)
            case fx.Drain():
                if self.merger.drain():
                    self._own.append(ev.Drained())
            case fx.WriteFinal(_, ledger):
                self._write_final(ledger)
            case fx.SendCut():
                self._send_cut(effect)
            case fx.WriteMarker(step):
                if (path := self.policy.checkpoint.path) is not None:
                    write_marker(path, step)
            case fx.SendShutdown(member):
                self.server.send(member, Shutdown())
            case fx.Say(text, warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s", text)
            case fx.Finish():
                self._finish = effect

    def _open(self, hello: Hello) -> None:
        self.identity, self.state = Identity.of(hello), GlobalState(hello.layout, self.device)
        if self.resumed is not None:
            for index, record in enumerate(self.resumed.fragments):
                self.state.restore(index, record.version, _floats(record.params), _floats(record.momentum))
            self.state.step = self.resumed.step
            self.resumed = None  # the state owns the tensors now
        self.merger = merger_for(self.policy, hello.layout, lambda event: self.inbox.post(event, clock()))
        self._cleanup.callback(self.merger.close)

    def _commit(self, step: int, fragment: int) -> None:
        started = clock()
        merged = self.merger.finished(step)
        outer, lr = self.policy.outer, self.policy.outer.lr_at(step)
        merged.momentum = outer_momentum(outer.guard, merged.alignment, lr, outer.momentum)
        self.state.commit(step, fragment, merged.gradient, lr, merged.momentum, merged.norm)
        merged.seconds += clock() - started

    def _record(self, effect: fx.Record) -> None:
        merged = self.merger.finished(effect.step)
        found, mu, lr = merged.alignment, merged.momentum, self.policy.outer.lr_at(effect.step)
        gain, drive = (found.gain(lr, mu), found.drive(lr, mu)) if found is not None else (None, None)
        if found is not None and gain is not None and drive is not None:
            enough = found.capped(lr, self.policy.outer.momentum, DRIVE_LIMIT)
            driven = Driven(drive, gain, found.agreement, found.lag or 0.0, enough)
            self._own.append(ev.StepMeasured(effect.line["fragment"], driven, lr, mu))
        line: MeasuredLine = {
            **effect.line,
            "gnorm": merged.norm,
            "gain": gain,
            "drive": drive,
            "agreement": found.agreement if found is not None else None,
            "lag_cosine": found.lag if found is not None else None,
            "momentum": mu,
            "ms": 1000 * (clock() - effect.launched_at),
            "sync_ms": 1000 * merged.seconds,
            "time": time.time(),
        }
        self.tape.write(line)
        self._progress.committed(line, self.coordinator.connected)

    def _broadcast(self, effect: fx.Broadcast) -> None:
        started = clock()
        data = self.state.broadcast_bytes(effect.fragment, self.identity.dtype)
        message = BcastFragment(effect.fragment, effect.version, data)
        for member in effect.members:
            self.server.send(member, message)
        merged = self.merger.forget(effect.version)
        if merged is not None:
            self._own.append(ev.RoundSynced(effect.version, merged.seconds + clock() - started))

    def _snapshot(self, ledger: tuple[LedgerRow, ...]) -> Snapshot:
        identity, fragments = self.identity, []
        for index, version in enumerate(self.state.versions):
            params, momentum = self.state.host(index)
            fragments.append(FragmentRecord(version, _bytes(params), _bytes(momentum)))
        rows = tuple(LedgerEntry(*row) for row in ledger)
        backend = int(self.policy.merge.iso_backend)
        return Snapshot(3, backend, identity.fingerprint, identity.contract, self.state.step, fragments, rows)

    def _save_checkpoint(self, ledger: tuple[LedgerRow, ...]) -> None:
        if self.policy.checkpoint.path is not None:
            self.merger.check()
            write_checkpoint(self.policy.checkpoint.path, self._snapshot(ledger))

    def _write_final(self, ledger: tuple[LedgerRow, ...]) -> None:
        self.merger.check()
        self._save_checkpoint(ledger)
        final, identity = self.policy.final, self.identity
        if final.state_path is not None:
            params = [self.state.host(f)[0] for f in range(len(identity.layout))]
            names = self._names()
            write_final_state(final.state_path, params, identity.layout, self.state.step, identity.fingerprint, names)

    def _names(self) -> Layout | None:
        """Names for the final state. A layout file that does not fit costs the names, not the finished run."""
        path = self.policy.final.layout_path
        if path is None:
            return None
        try:
            names = Layout.load(path)
        except StateError as error:
            log.warning("final.state_path gets numbered tensors: %s", error)
            return None
        if names.fingerprint != self.identity.fingerprint:
            log.warning("final.state_path gets numbered tensors: layout file %s describes another model", path)
            return None
        return names

    def _send_cut(self, effect: fx.SendCut) -> None:
        for fragment, version in enumerate(effect.versions):
            data = self.state.final_bytes(fragment)
            self.server.send(effect.member, FinalFragment(fragment, version, data))
        self.server.send(effect.member, FinalManifest(effect.step, effect.versions))


def _floats(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """A checkpoint's raw f32 bytes as a tensor on the same memory."""
    return torch.frombuffer(data, dtype=torch.float32)


def _bytes(values: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    return values.numpy().data.cast("B")
