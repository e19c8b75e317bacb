"""One learner of the planned fleet: steps that pass by the clock, anchors that are version numbers.

As the real one it acts at the end of a step: broadcasts first, then answers; what was learnt between an answer and the
broadcast it leads to is overwritten. It must not know the syncer's decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from syncer.core import events as ev
from syncer.plan.agenda import Agenda
from syncer.plan.network import Pipe, Transfer, framed_bytes
from syncer.plan.situation import Settings, Situation
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.layout import WireLayout

_PUSH_HEAD = 48
_BEAT_S = 5.0
_F32 = 4


@dataclass(slots=True)
class _Slot:
    """One fragment: its anchor's version, the local step when it was adopted, what waits for the next boundary."""

    anchor: int | None = None
    steps_then: int = 0
    queued: int | None = None
    pull: tuple[int, int] | None = None  # (step, attempt)


class SimulatedLearner:
    """A learner from its start to its end; after a failure another one takes its id.

    Args:
        post: hands an event to the syncer.
        up: the pipes its messages pass: its own line, and the syncer's.
        phase: 0 to 1; which part of a step lies before its first one. No two machines begin together.
    """

    def __init__(
        self,
        agenda: Agenda,
        situation: Situation,
        settings: Settings,
        layout: WireLayout,
        member: ev.Member,
        up: tuple[Pipe, ...],
        phase: float,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._agenda, self._situation, self._settings, self._layout = agenda, situation, settings, layout
        self.member, self._up, self._phase, self._post = member, up, phase, post
        self.step_s = situation.step_s / situation.speed(member.learner_id)
        self._slots = [_Slot() for _ in range(len(layout))]
        self._origin: float | None = None  # when its first step began, moved on by what it has stalled
        self._boundary_due = False
        self.is_dead = False
        self.stalled_s = 0.0
        agenda.after(_BEAT_S, self._beat)

    @property
    def steps(self) -> int:
        """Local steps made by now."""
        if self._origin is None:
            return 0
        return max(0, int((self._agenda.now - self._origin) / self.step_s + 1e-9))

    def pulled(self, fragment: int, step: int, attempt: int) -> None:
        """PULL_REQ has arrived."""
        slot = self._slots[fragment]
        if not self.is_dead and (slot.pull is None or (step, attempt) > slot.pull):
            slot.pull = (step, attempt)
            self._ask_for_boundary()

    def received(self, fragment: int, version: int) -> None:
        """A broadcast has arrived."""
        if self.is_dead:
            return
        slot = self._slots[fragment]
        slot.queued = version if slot.queued is None else max(version, slot.queued)
        if self._origin is None:  # the constructor waits for every first anchor
            self._adopt(0)
            if all(slot.anchor is not None for slot in self._slots):
                self._origin = self._agenda.now + self._phase * self.step_s
        self._ask_for_boundary()

    def _ask_for_boundary(self) -> None:
        is_wanted = any(slot.pull is not None or slot.queued is not None for slot in self._slots)
        if is_wanted and not self._boundary_due and self._origin is not None:
            self._boundary_due = True
            self._agenda.at(self._origin + (self.steps + 1) * self.step_s, self._boundary)

    def _boundary(self) -> None:
        self._boundary_due = False
        if self.is_dead or self._origin is None:
            return
        steps = self.steps
        work = self._adopt(steps) + self._answer(steps)
        stall_s = work / self._situation.exchange_rate
        self._origin += stall_s
        self.stalled_s += stall_s
        self._ask_for_boundary()

    def _adopt(self, steps: int) -> int:
        """Returns the f32 bytes it takes."""
        work = 0
        for fragment, slot in enumerate(self._slots):
            if slot.queued is not None and (slot.anchor is None or slot.queued > slot.anchor):
                slot.anchor, slot.steps_then = slot.queued, steps
                work += _F32 * self._layout.numels[fragment]
            slot.queued = None
        return work

    def _answer(self, steps: int) -> int:
        work = 0
        for fragment, slot in enumerate(self._slots):
            made = steps - slot.steps_then
            if slot.pull is None or slot.anchor is None or made < 1:
                continue
            step, attempt = slot.pull
            slot.pull = None
            nbytes = self._layout.nbytes(fragment, self._settings.wire_dtype)
            push = ev.PushArrived(
                self.member, fragment, step, attempt, slot.anchor, steps, made, made, float(made), nbytes, None
            )
            values = _F32 * self._layout.numels[fragment]
            work += values
            is_packed = self._settings.wire_dtype is WireDType.Q4
            self._agenda.after(values / self._situation.encode_rate if is_packed else 0.0, self._send, push)
        return work

    def _send(self, push: ev.PushArrived) -> None:
        if not self.is_dead:
            nbytes = framed_bytes(_PUSH_HEAD + push.nbytes)
            Transfer(self._agenda, nbytes, self._up, self._situation.latency_s, lambda: self._arrived(push))

    def _arrived(self, event: ev.Event) -> None:
        if not self.is_dead:
            self._post(event)

    def _beat(self) -> None:
        if not self.is_dead:
            self._agenda.after(self._situation.latency_s, self._arrived, ev.BeatArrived(self.member, self.steps))
            self._agenda.after(_BEAT_S, self._beat)
