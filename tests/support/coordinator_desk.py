"""Short ways to say what a test means: policies, HELLOs, answers, and a coordinator whose orders are carried out.

``Desk`` stands where the actor stands: it keeps the time, does what the effects oblige the actor to do (report merges
and syncs back) and keeps everything that was ordered, so that a test reads as a conversation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from syncer.config.keys import MergeConfig, OuterConfig, SyncerConfig, validate
from syncer.config.policy import (
    CheckpointPolicy,
    IsoBackend,
    OuterPolicy,
    SchedulePolicy,
    SessionPolicy,
    SvdPolicy,
    SyncerPolicy,
)
from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.admission import ResumePoint
from syncer.core.coordinator import Coordinator
from syncer.core.events import Member
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout
from yeto_torch.wire.messages import Hello

PROFILE = b"\x0a" * 32
FINGERPRINT = b"\x11" * 32
CONTRACT = b"\x22" * 32


def layout_of(*numels: int, mode: MergeMode = MergeMode.AVG) -> WireLayout:
    """One fragment of one tensor per number."""
    return WireLayout(tuple(WireFragment(mode, (numel,)) for numel in numels))


DEFAULTS = validate(SyncerConfig(3, 100, merge=MergeConfig("none"), outer=OuterConfig(0.7, 0.5)))


def schedule_policy(**changes: Any) -> SchedulePolicy:
    """As fast as answers come, a short deadline, a grace window of one second."""
    base: dict[str, Any] = {"quorum": 2, "quorum_timeout_s": 10, "sync_interval_steps": 0.0}
    return replace(DEFAULTS.schedule, **{**base, **changes})


def session_policy(**changes: Any) -> SessionPolicy:
    """The defaults but for ``changes``."""
    return replace(DEFAULTS.session, **changes)


def svd_policy(**changes: Any) -> SvdPolicy:
    """The defaults but for ``changes``."""
    return replace(DEFAULTS.svd, **changes)


def outer_policy(lr: tuple[tuple[int, float], ...] = ((1, 0.7),), momentum: float = 0.5) -> OuterPolicy:
    """Without a guard."""
    return OuterPolicy(lr, momentum, "off")


def syncer_policy(
    learners: int = 2,
    total_steps: int = 100,
    *,
    ack_timeout_s: int = 30,
    every: int = 8,
    path: str | None = None,
    mark_final: bool = False,
    session: SessionPolicy | None = None,
    iso_backend: IsoBackend = IsoBackend.SCALAR,
    outer: OuterPolicy | None = None,
    correction: bool = False,
    max_norm_ratio: float | None = None,
    **schedule: Any,
) -> SyncerPolicy:
    """A whole policy; what is not named here goes to ``schedule_policy``."""
    if "quorum" not in schedule:
        schedule["quorum"] = learners // 2 + 1
    return replace(
        DEFAULTS,
        learners=learners,
        total_steps=total_steps,
        schedule=schedule_policy(**schedule),
        merge=replace(
            DEFAULTS.merge,
            delta_correction="heloco" if correction else "none",
            iso_backend=iso_backend,
            device="cpu",
            max_norm_ratio=max_norm_ratio,
        ),
        outer=outer or outer_policy(),
        checkpoint=CheckpointPolicy(None if path is None else Path(path), every, "auto", mark_final),
        final=replace(DEFAULTS.final, ack_timeout_s=ack_timeout_s),
        session=session or session_policy(),
    )


def hello(learner_id: int, generation: int = 1, layout: WireLayout | None = None, **changes: Any) -> Hello:
    """A HELLO of the test session; ``changes`` name fields of Hello."""
    fields: dict[str, Any] = {
        "learner_id": learner_id,
        "generation": generation,
        "dtype": WireDType.F32,
        "layout": layout or layout_of(4, 4),
        "fingerprint": FINGERPRINT,
        "contract": CONTRACT,
        "profile": None,
        "num_streams": 0,
    }
    return Hello(**{**fields, **changes})


def answer(
    member: Member,
    step: int,
    *,
    fragment: int = 0,
    attempt: int = 1,
    base_version: int = 0,
    local_step: int = 1,
    c_steps: int = 1,
    c_tokens: int = 10,
    gradient: object = None,
    weight: float | None = None,
    norm: float = 0.0,
) -> ev.PushArrived:
    """An answer as the door hands it on; its weight follows from its counters."""
    weight = c_tokens**2 / c_steps if weight is None else weight
    return ev.PushArrived(
        member, fragment, step, attempt, base_version, local_step, c_steps, c_tokens, weight, 16, gradient, norm
    )


class Desk:
    """A coordinator, its clock, and everything it has ordered.

    Attributes:
        now: seconds; moved by ``wait`` and ``at``.
        orders: every effect so far.
        new: the effects of the last call alone.
        drains: a pool is drained at once; otherwise the test reports it.
    """

    def __init__(
        self, policy: SyncerPolicy, *, fragments: int = 2, resumed: ResumePoint | None = None, merges: bool = True
    ) -> None:
        self.policy, self.layout = policy, layout_of(*[4] * fragments)
        self.coordinator = Coordinator(policy, PROFILE, resumed)
        self.now = 0.0
        self.orders: list[fx.Effect] = []
        self.new: list[fx.Effect] = []
        self.members: dict[int, Member] = {}
        self.sync_s = 0.0
        self.drains = True
        self._merges = merges
        self._tickets = 0

    # Time

    def wait(self, seconds: float) -> list[fx.Effect]:
        """Nothing happens for so long, but for what time decides on the way."""
        end, found = self.now + seconds, []
        while (due := self.coordinator.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            found += self._tick()
        self.now = end
        found += self._tick()
        self.new = found
        return found

    def tick(self) -> list[fx.Effect]:
        """The inbox is drained: what is due now."""
        self.new = self._tick()
        return self.new

    def _tick(self) -> list[fx.Effect]:
        return self._carry_out(self.coordinator.on_time(self.now))

    # Events

    def tell(self, event: ev.Event, *, tick: bool = True) -> list[fx.Effect]:
        """One event now, and what follows from it; with ``tick`` the inbox is empty behind it."""
        found = self._carry_out(self.coordinator.handle(event, self.now))
        if tick:
            found += self._tick()
        self.new = found
        return found

    def _carry_out(self, effects: Iterable[fx.Effect]) -> list[fx.Effect]:
        found, own = list(effects), deque(self._own_events(effects))
        while own:
            more = self.coordinator.handle(own.popleft(), self.now)
            found += more
            own.extend(self._own_events(more))
        self.orders += found
        return found

    def _own_events(self, effects: Iterable[fx.Effect]) -> list[ev.Event]:
        """What the actor itself must report once these are done."""
        events: list[ev.Event] = []
        for effect in effects:
            if isinstance(effect, fx.Drain) and self.drains:
                events.append(ev.Drained())
            elif isinstance(effect, fx.Merge) and self._merges:
                events.append(ev.MergeDone(effect.step))
            elif isinstance(effect, fx.Broadcast) and effect.version > 0 and self._merges:
                events.append(ev.RoundSynced(effect.version, self.sync_s))
        return events

    # Learners

    def join(self, learner_id: int, generation: int = 1, *, tick: bool = True, **changes: Any) -> Member:
        """A learner says HELLO; returns who it is, admitted or not."""
        self._tickets += 1
        said = hello(learner_id, generation, self.layout, **changes)
        self.tell(ev.HelloArrived(self._tickets, said), tick=tick)
        member = Member(learner_id, generation)
        if any(isinstance(e, fx.Admit) and e.ticket == self._tickets for e in self.new):
            self.members[learner_id] = member
        return member

    def init(self) -> None:
        """Learner 0 sends the starting values of every fragment."""
        for fragment in range(len(self.layout)):
            self.tell(ev.InitArrived(self.members[0], fragment, f"start of {fragment}"))

    def leave(self, learner: int | Member, *, tick: bool = True) -> list[fx.Effect]:
        """A group is gone: the current one of a learner, or a named one."""
        member = learner if isinstance(learner, Member) else self.members.pop(learner)
        return self.tell(ev.GroupLost(member, "the peer closed"), tick=tick)

    def assemble(self) -> Desk:
        """Everybody joins in generation 1 and learner 0 initialises: the run starts."""
        for learner_id in range(self.policy.learners):
            self.join(learner_id)
        if self.coordinator.committed == 0:
            self.init()
        return self

    def push(self, learner: int | Member, step: int, *, tick: bool = True, **fields: Any) -> list[fx.Effect]:
        """A learner answers the round's present attempt, unless ``fields`` say otherwise."""
        member = learner if isinstance(learner, Member) else self.members[learner]
        fields.setdefault("fragment", (step - 1) % len(self.layout))
        fields.setdefault("attempt", self.attempt(step))
        return self.tell(answer(member, step, **fields), tick=tick)

    def ack(self, learner: int | Member, step: int | None = None) -> list[fx.Effect]:
        """A learner acknowledges the final cut."""
        member = learner if isinstance(learner, Member) else self.members[learner]
        return self.tell(ev.AckArrived(member, self.policy.total_steps if step is None else step))

    # What was ordered

    def all(self, kind: type[Any]) -> list[Any]:
        """Every effect of one kind so far."""
        return [effect for effect in self.orders if isinstance(effect, kind)]

    def latest(self, kind: type[Any]) -> list[Any]:
        """The effects of one kind in the last call."""
        return [effect for effect in self.new if isinstance(effect, kind)]

    def attempt(self, step: int) -> int:
        """The newest attempt of a round, 1 if it was never launched."""
        return max((pull.attempt for pull in self.all(fx.SendPull) if pull.step == step), default=1)

    def pulled(self, step: int, attempt: int = 1) -> list[Member]:
        """Whom an attempt asked."""
        return [p.member for p in self.all(fx.SendPull) if (p.step, p.attempt) == (step, attempt)]

    def line(self, step: int) -> dict[str, Any]:
        """The newest merge line of a step."""
        return dict([record.line for record in self.all(fx.Record) if record.step == step][-1])

    def notes(self, event: str) -> list[dict[str, Any]]:
        """The tape's event lines of one name."""
        return [dict(note.fields) for note in self.all(fx.Note) if note.event == event]

    @property
    def finish(self) -> fx.Finish | None:
        """How the run ended, if it has."""
        return next(iter(self.all(fx.Finish)), None)
