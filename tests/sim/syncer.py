"""The syncer's machine room in the simulated world: an actor's loop, a door and a disk around the real coordinator.

The order of things is the real actor's: drain the inbox, each event with the stamp of its arrival; do the effects in
order; then what the effects themselves caused; ``on_time`` only when the inbox is empty. State, merges, decoding,
checkpoint format and write sequence are the real ones. Work takes time, and a crash may come between any two effects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from syncer.checkpoint.files import remove_marker, write_checkpoint, write_marker
from syncer.checkpoint.format import FragmentRecord, LedgerEntry, Snapshot
from syncer.checkpoint.resume import at_hello, at_start
from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.admission import ResumePoint
from syncer.core.coordinator import Coordinator
from syncer.core.events import Member
from syncer.core.ledger import LedgerRow
from syncer.merge import intake
from syncer.merge.intake import learner_weight
from syncer.merge.merge import merge_fragment
from syncer.state import GlobalState
from tests.sim.disk import CHECKPOINT, SimDisk
from tests.sim.faults import CrashError, Faults
from tests.sim.judge import Judge
from tests.sim.network import Connection
from tests.sim.scenario import Scenario
from tests.sim.world import SafetyError, Thread, Wait, World
from tests.support.checkpoint_bytes import parse_bytes
from tests.support.coordinator_desk import CONTRACT, PROFILE
from tests.support.fake_disk import PowerCutError
from yeto_torch.wire import codec, messages
from yeto_torch.wire.errors import RunError, StateError

CPU = torch.device("cpu")
_BATCH = 256


class SyncerNode:
    """The place the syncer runs at: a disk that outlives its processes.

    Attributes:
        process: the living one, or None.
        exits: how its processes ended; None stands for a crash.
        restarted_fresh: called when a process finds no checkpoint although there was a run.
    """

    def __init__(self, world: World, scenario: Scenario, judge: Judge, faults: Faults) -> None:
        self.world, self.scenario, self.judge, self.faults = world, scenario, judge, faults
        self.disk = SimDisk()
        self.process: Process | None = None
        self.exits: list[fx.Finish | None] = []
        self.restarted_fresh = lambda: None
        faults.syncer = self

    def start(self) -> None:
        """Begin a process, from whatever the disk holds."""
        data = self.disk.files.get(CHECKPOINT)
        snapshot = None if data is None else parse_bytes(data)
        if snapshot is None and self.exits:
            self.restarted_fresh()
        self.process = Process(self, snapshot)

    @property
    def over(self) -> bool:
        """Has the run ended for good?"""
        return self.process is None and bool(self.exits) and self._is_final(self.exits[-1])

    def _is_final(self, finish: fx.Finish | None) -> bool:
        return finish is not None and (finish.code == 0 or "not acknowledged within" in finish.text)

    def knock(self, connection: Connection, hello: messages.Hello) -> None:
        """A first frame has arrived."""
        if self.process is None:
            connection.syncer.close()
        else:
            self.process.hello(connection, hello)

    def ended(self, finish: fx.Finish | None) -> None:
        """The process is gone; somebody restarts it unless the run is over."""
        self.process = None
        self.exits.append(finish)
        self.disk.heal()
        if finish is None:
            self.disk = (
                self.disk.after_power_cut(self.world.rng) if self.scenario.power_cuts else self.disk.after_kill()
            )
        if not self.over:
            self.world.after(self.world.rng.choice([0.2, 2.0, 10.0]), self.start)


class Process:
    """One syncer process."""

    def __init__(self, node: SyncerNode, snapshot: Snapshot | None) -> None:
        self._node, self._world, self._judge = node, node.world, node.judge
        self._scenario, self._policy, self._faults = node.scenario, node.scenario.policy, node.faults
        self._layout = node.scenario.layout
        self._resumed = snapshot
        self.inbox: deque[tuple[Any, float]] = deque()
        self._own: deque[ev.Event] = deque()
        self._tickets: dict[int, Connection] = {}
        self._hellos = 0
        self._groups: dict[Member, Connection] = {}
        self._state: GlobalState | None = None
        self._gradients: dict[int, torch.Tensor] = {}
        self._in_pool: set[int] = set()
        self._finish: fx.Finish | None = None
        self.coordinator = Coordinator(self._policy, PROFILE, self._resume_point())
        self._judge.started(snapshot, self.inbox)
        step = self.coordinator.committed
        if self._policy.checkpoint.mark_final and step < self._policy.total_steps:
            remove_marker(CHECKPOINT, node.disk)
        self.tell(f"listens, at step {step}")
        self._task = self._world.spawn(self._main())

    def tell(self, what: str) -> None:
        self._world.tell("syncer", what)

    def _resume_point(self) -> ResumePoint | None:
        snapshot = self._resumed
        if snapshot is None:
            return None
        refusal = at_start(snapshot.facts, int(self._policy.merge.iso_backend), self._policy.total_steps)
        if refusal is not None:
            raise SafetyError(f"our own checkpoint is refused: {refusal}")
        rows = tuple((e.learner, e.merges, e.steps, e.tokens) for e in snapshot.ledger)
        return ResumePoint(snapshot.step, rows, partial(at_hello, snapshot.facts))

    # ------------------------------------------------------------------ the door

    def hello(self, connection: Connection, hello: messages.Hello) -> None:
        self._hellos += 1
        self._tickets[self._hellos] = connection
        self.post(ev.HelloArrived(self._hellos, hello))

    def post(self, event: Any) -> None:
        """Something has arrived, now."""
        if self._finish is None:
            self.inbox.append((event, self._world.now))
            self._task.wake()

    def _receive(self, member: Member, message: messages.Message) -> None:
        dtype, numels = self._scenario.dtype, self._layout.wire.numels
        match message:
            case messages.PushFragment() as p:
                if p.learner_id != member.learner_id:
                    raise SafetyError(f"{member} signs as learner {p.learner_id}")
                gradient = intake.decode_gradient(p.data, numels[p.fragment], dtype, CPU)
                head = (member, p.fragment, p.step, p.attempt, p.base_version, p.local_step, p.c_steps, p.c_tokens)
                event = ev.PushArrived(*head, learner_weight(p.c_tokens, p.c_steps), len(p.data), gradient)
                self._judge.heard_at_the_door(event, p)
                self.post(event)
            case messages.InitParams(fragment, data):
                self.post(ev.InitArrived(member, fragment, codec.decode(data, numels[fragment], dtype.bulk)))
            case messages.Heartbeat(_, local_step):
                self.post(ev.BeatArrived(member, local_step))
            case messages.FinalAck(step):
                self.post(ev.AckArrived(member, step))
            case _:
                raise SafetyError(f"{member} sends {message}")

    def _lost(self, member: Member, reason: str) -> None:
        self._groups.pop(member, None)
        self.post(ev.GroupLost(member, reason))

    def connection_of(self, member: Member) -> Connection | None:
        return self._groups.get(member)

    # ------------------------------------------------------------------ the loop

    def _main(self) -> Thread:
        try:
            while self._finish is None:
                if not self.inbox:
                    yield Wait(self.coordinator.next_deadline())
                yield from self._turn()
        except (RunError, StateError) as error:
            self._finish = fx.Finish(1, str(error), isinstance(error, RunError))
        except (CrashError, PowerCutError) as crash:
            self._die(str(crash))
            return
        self._close()

    def _turn(self) -> Thread:
        for _ in range(min(len(self.inbox), _BATCH)):
            event, stamp = self.inbox.popleft()
            if isinstance(event, ev.MergeDone | ev.Drained):  # from the pool: the actor's own from here on
                self._own.append(event)
                self._in_pool.discard(getattr(event, "step", -1))
                yield from self._perform([])
            else:
                self._judge.handling(event, stamp)
                self._faults.handled(event)
                yield from self._perform(self.coordinator.handle(event, stamp))
            if self._finish is not None:
                return
        if not self.inbox:
            self._judge.decided_at = self._world.now
            yield from self._perform(self.coordinator.on_time(self._world.now))
            if self._finish is None:
                self._judge.explained(self.coordinator.waiting_for())

    def _perform(self, effects: Iterable[fx.Effect]) -> Thread:
        for effect in effects:
            yield from self._do(effect)
        self._judge.settled()
        while self._own and self._finish is None:
            self._judge.decided_at = self._world.now
            for effect in self.coordinator.handle(self._own.popleft(), self._world.now):
                yield from self._do(effect)
            self._judge.settled()

    def _die(self, why: str) -> None:
        """No goodbye: the kernel closes the sockets, or the machine takes them with it."""
        self.tell(f"CRASH {why}")
        self._finish = fx.Finish(-1)
        late = self._world.rng.choice([None, None, 4.0, 15.0])
        for connection in [*self._groups.values(), *self._tickets.values()]:
            if late is None:
                connection.syncer.close()
            elif not connection.syncer.closed:
                connection.syncer.closed = True
                connection.cut(late=connection.learner, late_s=late)
        self._node.ended(None)

    def _close(self) -> None:
        finish = self._finish
        assert finish is not None
        self.tell(f"EXIT {finish.code} {finish.text}")
        if finish.code == 1:
            self._judge.failed(finish)
        for connection in self._groups.values():
            connection.syncer.close(finish.text if finish.terminal else None, flush=finish.code == 0)
        for connection in self._tickets.values():
            connection.syncer.close()
        self._node.ended(finish)

    # ------------------------------------------------------------------ effects

    def _do(self, effect: fx.Effect) -> Thread:
        self._faults.before(effect, self)
        self._judge.ordered(effect, self._node.disk)
        if text := _told(effect):
            self.tell(text)
        yield from self._work(effect)
        self._faults.behind(effect)

    def _work(self, effect: fx.Effect) -> Thread:  # noqa: C901 - the actor's flat table of effects
        match effect:
            case fx.Admit():
                self._admit(effect)
            case fx.RefuseHello(ticket, text):
                self._tickets.pop(ticket).syncer.close(text)
            case fx.Expel(member, text):
                self._expel(member, text)
            case fx.Release(member):
                self._expel(member, None)
            case fx.Initialize(fragment, values):
                self.state.initialize(fragment, values)
                self._judge.initialized(fragment, self.state)
            case fx.SendPull(member, fragment, step, attempt):
                self._send(member, messages.PullReq(fragment, step, attempt))
            case fx.Merge():
                yield from self._merge(effect)
            case fx.Commit(step, fragment):
                lr, momentum = self._policy.outer.lr_at(step), self._policy.outer.momentum
                self.state.commit(step, fragment, self._gradients[step], lr, momentum)
                self._judge.committed_now(step, fragment, self.state)
            case fx.Record(step, _, line):
                self._judge.recorded(step, dict(line))
            case fx.SaveCheckpoint(_, ledger) | fx.WriteFinal(_, ledger):
                yield from self._save(ledger)
            case fx.Broadcast():
                self._broadcast(effect)
            case fx.Drain():
                self._drain()
            case fx.SendCut():
                self._send_cut(effect)
            case fx.WriteMarker(step):
                write_marker(CHECKPOINT, step, self._node.disk)
            case fx.SendShutdown(member):
                self._send(member, messages.Shutdown())
            case fx.Finish():
                self._finish = effect

    @property
    def state(self) -> GlobalState:
        assert self._state is not None
        return self._state

    def _send(self, member: Member, message: messages.Message) -> None:
        if (connection := self._groups.get(member)) is not None:
            connection.syncer.send(message)

    def _admit(self, effect: fx.Admit) -> None:
        if effect.opens:
            self._state = GlobalState(effect.hello.layout, CPU)
            if self._resumed is not None:
                for index, record in enumerate(self._resumed.fragments):
                    self._state.restore(index, record.version, _floats(record.params), _floats(record.momentum))
                self._state.step = self._resumed.step
        connection, member = self._tickets.pop(effect.ticket), effect.member
        self._groups[member] = connection
        if connection.syncer.closed:
            self._lost(member, "it was gone before it was admitted")
            return
        connection.syncer.on_message = lambda message: self._receive(member, message)
        connection.syncer.on_closed = lambda reason, _: self._lost(member, reason)
        connection.admit()

    def _expel(self, member: Member, text: str | None) -> None:
        if (connection := self._groups.get(member)) is not None:
            connection.syncer.close(text)
            self._lost(member, "closed here")

    def _merge(self, merge: fx.Merge) -> Thread:
        self._gradients[merge.step] = merge_fragment(
            self._layout.wire.fragments[merge.fragment],
            [response.gradient for response in merge.responses],
            merge.weights,
            self.state.momentum(merge.fragment),
            correction=self._policy.merge.delta_correction == "heloco",
        )[0]
        took = self._scenario.merge_s * self._world.rng.random()
        if self._scenario.pooled:
            self._in_pool.add(merge.step)
            self._world.after(took, self.post, ev.MergeDone(merge.step))
        else:
            yield took
            self._own.append(ev.MergeDone(merge.step))

    def _drain(self) -> None:
        if self._scenario.pooled:
            self._world.after(self._world.rng.choice([0.0, self._scenario.merge_s, 4.0]), self.post, ev.Drained())
        else:
            self._own.append(ev.Drained())

    def _broadcast(self, effect: fx.Broadcast) -> None:
        data = self.state.broadcast_bytes(effect.fragment, self._scenario.dtype)
        self._judge.broadcast_sent(effect.fragment, effect.version, bytes(data), effect.members)
        for member in effect.members:
            self._send(member, messages.BcastFragment(effect.fragment, effect.version, data))
        if self._gradients.pop(effect.version, None) is not None:
            self._own.append(ev.RoundSynced(effect.version, 0.001))

    def _save(self, ledger: tuple[LedgerRow, ...]) -> Thread:
        yield self._scenario.save_s * self._world.rng.random()
        records = []
        for index, version in enumerate(self.state.versions):
            params, momentum = self.state.host(index)
            records.append(FragmentRecord(version, _bytes(params), _bytes(momentum)))
        rows = tuple(LedgerEntry(*row) for row in ledger)
        fingerprint, backend = self._layout.fingerprint, int(self._policy.merge.iso_backend)
        snapshot = Snapshot(3, backend, fingerprint, CONTRACT, self.state.step, records, rows)
        write_checkpoint(CHECKPOINT, snapshot, self._node.disk)
        self._judge.saved(self.state.step, self._node.disk)

    def _send_cut(self, effect: fx.SendCut) -> None:
        for fragment, version in enumerate(effect.versions):
            self._send(effect.member, messages.FinalFragment(fragment, version, self.state.final_bytes(fragment)))
        self._send(effect.member, messages.FinalManifest(effect.step, effect.versions))


def _told(effect: fx.Effect) -> str:
    """An effect as half a line of the story; nothing for what is not worth one."""
    match effect:
        case fx.Say(text):
            return text
        case fx.Note() | fx.Finish():
            return ""
        case fx.SendPull(member, fragment, step, attempt):
            return f"pull {step}.{attempt} (fragment {fragment}) -> {_name(member)}"
        case fx.Merge(step, _, responses):
            return f"merge {step} of {', '.join(_name(r.member) for r in responses)}"
        case fx.Broadcast(fragment, version, members):
            return f"broadcast fragment {fragment} version {version} -> {', '.join(map(_name, members)) or 'nobody'}"
        case fx.Admit(_, member) | fx.Expel(member) | fx.Release(member) | fx.SendCut(member) | fx.SendShutdown(member):
            return f"{type(effect).__name__} {_name(member)}"
        case _:
            return f"{type(effect).__name__} {getattr(effect, 'step', '')}{getattr(effect, 'text', '')}"


def _name(member: Member) -> str:
    return f"{member.learner_id}/{member.generation:x}"


def _floats(data: Any) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.float32)


def _bytes(values: torch.Tensor) -> memoryview:
    return values.numpy().data.cast("B")
