"""From the first HELLO to the end: joins, starts, loses, cuts and finishes one session.

Composes admission, roster, assembly, the rounds in flight, the cut-off and finalization. ``handle(event, now)`` takes
one event at its arrival time and settles what it decides; ``on_time(now)`` fires what time decides and is the only
place where rounds are launched. The actor calls ``on_time`` with the time up to which it has handled all that arrived,
so an answer that came in time is never made late by work that came before it.

    ASSEMBLING --all fragments initialised, all learners here--> RUNNING --t = total committed--> CUTTING
    ASSEMBLING, RUNNING --learner budget: a report from every learner--> CUTTING --pool drained, cut-off written--> DONE
    CUTTING --pool drained, membership frozen--> FINALIZING --every expected ACK--> DONE
    any --a failure or an interrupt--> FAILED

It must not know sockets, tensors, files or clocks: gradients are opaque, time is an argument, work is an Effect.

Source: v4 §Scheduler, v4 §Generations (every initialised fragment to a new generation: ``_greet``),
v4 §Budget (the first report closes issuance; a resumed syncer broadcasts its checkpoint state: ``_start``, ``_greet``),
v4 §Final cut (ids of the live groups are frozen after the last commit: ``_freeze``); rulings §6.1, §6.9, §6.10, §6.12,
§6.14.
"""

from __future__ import annotations

from enum import Enum, auto

from syncer.config.policy import WARNED_DRIVE, SyncerPolicy
from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.admission import Admission, ResumePoint
from syncer.core.assembly import Assembly
from syncer.core.cutoff import Cutoff
from syncer.core.drive import DriveWatch
from syncer.core.events import Member
from syncer.core.finalization import Finalization
from syncer.core.flight import Flight
from syncer.core.ledger import Ledger
from syncer.core.rate_limiter import RateLimiter
from syncer.core.rejections import Rejections
from syncer.core.roster import Roster
from yeto_torch.wire.constants import MessageType

_COMINGS = 256  # joins and leaves told per minute, four per learner if that is more: nobody fills the tape or the log


class Phase(Enum):
    ASSEMBLING = auto()
    RUNNING = auto()
    CUTTING = auto()
    FINALIZING = auto()
    DONE = auto()
    FAILED = auto()


class Lifecycle:
    """All decisions of one session. What has decided about its first HELLO decides about the later ones."""

    def __init__(
        self,
        policy: SyncerPolicy,
        fragments: int,
        admission: Admission,
        rejections: Rejections,
        resumed: ResumePoint | None,
    ) -> None:
        self._policy, self._admission, self._rejections = policy, admission, rejections
        self._roster = Roster()
        self._ledger = Ledger(resumed.ledger if resumed else ())
        self._flight = Flight(policy, fragments, resumed.step if resumed else 0, self._ledger, rejections)
        complete = self._flight.schedule.complete
        self._assembly = Assembly(policy, fragments, resumed=resumed is not None, complete=complete)
        self._final = Finalization(policy.total_steps, policy.final.ack_timeout_s)
        self._comings = RateLimiter(max(_COMINGS, 4 * policy.learners))
        budget = policy.budget_learner_steps
        self._cutoff = Cutoff(budget, policy.learners, policy.schedule.quorum_timeout_s) if budget is not None else None
        self._drive = DriveWatch(WARNED_DRIVE, is_capped=policy.outer.guard == "cap")
        self._ungreeted: set[Member] = set()  # joined while the cut was prepared
        self._effects: list[fx.Effect] = []
        self.phase = Phase.ASSEMBLING

    # ------------------------------------------------------------------ what happens

    def open(self, hello: ev.HelloArrived, now: float) -> list[fx.Effect]:
        """The first HELLO has been admitted: its learner joins."""
        self._join(hello, now, opens=True)
        return self._take()

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Settle one event that arrived at ``now``; returns what must be done, in order."""
        if self.phase not in (Phase.DONE, Phase.FAILED):
            # The actor's own work ends long after the answers that waited meanwhile arrived: it moves no deadline.
            from_outside = not isinstance(event, ev.MergeDone | ev.StepMeasured | ev.RoundSynced | ev.Drained)
            if from_outside:
                self._settle(now)
            self._dispatch(event, now)
            if from_outside:
                self._settle(now)
        return self._take()

    def on_time(self, now: float) -> list[fx.Effect]:
        """Fire what is due by ``now``, then launch what may be launched."""
        match self.phase:
            case Phase.ASSEMBLING:
                self._assemble(now)
            case Phase.RUNNING:
                self._settle(now)
            case Phase.FINALIZING:
                self._check_acks(now)
        self._check_losses(now)
        self._check_reports(now)
        if self.phase is Phase.RUNNING and not self._issuance_closed:
            self._do(*self._flight.launch(self._roster.current, now))
        return self._take()

    def next_deadline(self) -> float | None:
        """When ``on_time`` must be called next if nothing happens; None = not before an event."""
        times: list[float | None] = []
        report_at = self._cutoff.deadline if self._cutoff is not None else None
        match self.phase:
            case Phase.ASSEMBLING:
                times = [self._assembly.start_at, self._loss_at(), report_at]
            case Phase.RUNNING:
                may_launch = bool(self._roster.current) and not self._issuance_closed
                times = [self._loss_at(), report_at, self._flight.next_deadline(may_launch=may_launch)]
            case Phase.FINALIZING:
                times = [self._final.deadline]
        return min((t for t in times if t is not None), default=None)

    def waiting_for(self) -> str:
        """Why nothing moves, in one sentence for the operator."""
        match self.phase:
            case Phase.ASSEMBLING:
                return self._assembly.waiting_for(self._roster.current)
            case Phase.RUNNING:
                if self._cutoff is not None and self._cutoff.closed:
                    return f"cut-off: budget reports missing from learners {', '.join(map(str, self._cutoff.missing))}"
                if not self._roster.current:
                    return f"step {self.committed}: no learner is connected"
                return self._flight.waiting_for()
            case Phase.CUTTING:
                return f"step {self.committed}: the SVD pool to finish"
            case Phase.FINALIZING:
                missing = ", ".join(map(str, self._final.missing))
                return f"final cut: acknowledgement missing from learners {missing}"
            case _:
                return "nothing: the run is over"

    @property
    def connected(self) -> tuple[int, ...]:
        """Ids of the learners that are here, ascending."""
        return tuple(member.learner_id for member in self._roster.current)

    @property
    def committed(self) -> int:
        """Global step t: rounds committed."""
        return self._flight.schedule.committed

    # ------------------------------------------------------------------ plumbing

    def _take(self) -> list[fx.Effect]:
        out, self._effects = self._effects, []
        return out

    def _do(self, *effects: fx.Effect) -> None:
        self._effects.extend(effects)

    def _settle(self, now: float) -> None:
        if self.phase is Phase.RUNNING:
            self._do(*self._flight.settle(now))

    @property
    def _issuance_closed(self) -> bool:
        return self._cutoff is not None and self._cutoff.closed

    def _dispatch(self, event: ev.Event, now: float) -> None:  # noqa: C901 - one flat table of events
        match event:
            case ev.HelloArrived():
                self._on_hello(event, now)
            case ev.InitArrived():
                self._on_init(event, now)
            case ev.PushArrived(member):
                if self._roster.is_live(member):
                    self._do(*self._flight.answer(event, now))
            case ev.BeatArrived(member, local_step):
                if self._roster.is_live(member):
                    self._flight.pace.observe_step(member, local_step, now)
            case ev.MergeDone(step):
                self._do(*self._flight.merged(step, self._roster.current))
                if self._flight.schedule.complete:
                    self._begin_cut()
            case ev.StepMeasured(fragment, driven, lr, momentum):
                if (text := self._drive.committed(fragment, driven, lr, momentum)) is not None:
                    self._do(fx.Say(text, warning=True))
            case ev.RoundSynced(_, seconds):
                self._flight.pace.observe_sync(seconds)
            case ev.AckArrived():
                self._on_ack(event, now)
            case ev.BudgetReported():
                self._on_budget(event, now)
            case ev.Drained():
                self._cut()
            case ev.GroupLost(member, reason, violated):
                self._on_lost(member, reason, now)
                if self._cutoff is not None and violated is MessageType.BUDGET_DONE:
                    self._fail(f"the experiment is void: {member} sent a malformed budget report ({reason})")
            case ev.Interrupted():
                self._on_interrupt()

    # ------------------------------------------------------------------ joining and leaving

    def _on_hello(self, event: ev.HelloArrived, now: float) -> None:
        refusal = self._final.refusal(event.hello.learner_id) or self._admission.decide(event.hello)
        if refusal is None:
            self._join(event, now)
        else:
            self._do(*self._rejections.hello(event, refusal, now))

    def _join(self, event: ev.HelloArrived, now: float, *, opens: bool = False) -> None:
        member = Member(event.hello.learner_id, event.hello.generation)
        replaced = self._roster.current_of(member.learner_id)
        crowded_out = self._roster.join(member)
        self._do(fx.Admit(event.ticket, member, event.hello, opens))
        self._do(*(fx.Release(old) for old in crowded_out))
        fields = {"id": member.learner_id, "generation": member.generation}
        text = f"{member} joined"
        if replaced is not None:
            text += (
                f" in place of generation {replaced.generation:016x}, which is still connected: every learner needs "
                "a learner_id of its own, unless it is dialling again"
            )
        self._do(*self._comings.tell("join", fields, text, now))
        self._greet(member, now)

    def _greet(self, member: Member, now: float) -> None:
        """A new generation gets every initialised fragment at once, and the cut when the run is ending."""
        fragments = self._assembly.initialized
        if self.phase is Phase.ASSEMBLING:
            if self._assemble(now):  # it was the last one awaited, and the start sent it everything
                return
            fragments = self._assembly.greet(member)
        elif self.phase is Phase.CUTTING:  # the last step is not durable yet
            self._ungreeted.add(member)
            return
        self._send_fragments(member, fragments)
        if self.phase is Phase.FINALIZING:
            self._send_cut(member)

    def _send_fragments(self, member: Member, fragments: tuple[int, ...]) -> None:
        versions = self._flight.schedule.versions
        self._do(*(fx.Broadcast(f, versions[f], (member,)) for f in fragments))

    def _expel(self, member: Member, violation: str, now: float) -> None:
        """Nothing later from this group is used, not even what already waits in the inbox."""
        if self._roster.is_live(member):
            self._do(fx.Expel(member, violation))
            self._on_lost(member, violation, now)

    def _on_lost(self, member: Member, reason: str, now: float) -> None:
        if not self._roster.is_live(member):
            return
        fields = {"id": member.learner_id, "generation": member.generation, "reason": reason}
        self._do(*self._comings.tell("leave", fields, f"{member} left: {reason}", now))
        self._roster.leave(member, now)
        self._flight.lose(member)
        if self.phase is Phase.ASSEMBLING:
            self._assembly.forget(member)
            self._assemble(now)
        self._final.lost(member)

    # ------------------------------------------------------------------ assembling

    def _on_init(self, event: ev.InitArrived, now: float) -> None:
        if event.member.learner_id != 0:
            self._expel(event.member, "INIT_PARAMS: only learner 0 may initialise", now)
        elif self._roster.is_live(event.member) and self._assembly.initialize(event.fragment):
            self._do(fx.Initialize(event.fragment, event.values))
            if self._policy.checkpoint.periodic and self._cutoff is None:  # a cut-off process cannot be resumed
                self._save()  # before it is broadcast: learner 0 never sends again what it has seen broadcast
            self._cut_off()
            self._assemble(now)

    def _assemble(self, now: float) -> bool:
        """Start if nothing is missing any more; True when that happened."""
        if self.phase is not Phase.ASSEMBLING or not self._assembly.may_start(len(self._roster.current), now):
            return False
        for fragment, version in enumerate(self._flight.schedule.versions):
            if owed := self._assembly.owed(fragment, self._roster.current):
                self._do(fx.Broadcast(fragment, version, owed))
        self.phase = Phase.RUNNING
        self._do(fx.Say(f"training starts at step {self.committed} with {len(self._roster.current)} learners"))
        if self._flight.schedule.complete:
            self._begin_cut()
        return True

    # ------------------------------------------------------------------ the learner budget

    def _on_budget(self, event: ev.BudgetReported, now: float) -> None:
        member = event.member
        if not self._roster.is_live(member):
            return
        if self._cutoff is None:
            self._expel(member, "BUDGET_DONE, but this syncer runs no learner budget", now)
            return
        was_closed = self._cutoff.closed
        if (void := self._cutoff.report(member.learner_id, event.steps, now)) is not None:
            self._fail(f"the experiment is void: {void}")
            return
        if not was_closed:
            cancelled = self._flight.schedule.cancel()
            self._do(
                fx.Note("cutoff", {"step": self.committed, "first": member.learner_id, "cancelled": list(cancelled)}),
                fx.Say(f"cut-off at step {self.committed}: {member} has used up its budget"),
            )
        self._cut_off()

    def _cut_off(self) -> None:
        """Close the process once everybody has reported and there is a whole state to publish."""
        before_the_cut = self.phase in (Phase.ASSEMBLING, Phase.RUNNING)
        if before_the_cut and self._cutoff is not None and self._cutoff.complete and self._assembly.all_initialized:
            self._begin_cut()

    def _check_reports(self, now: float) -> None:
        late = self._cutoff.overdue(now) if self._cutoff is not None else None
        if late is not None and self.phase in (Phase.ASSEMBLING, Phase.RUNNING):
            self._fail(f"the experiment is void: {late}")

    # ------------------------------------------------------------------ the end

    def _begin_cut(self) -> None:
        """No round is in flight any more; once the pool is drained the state may be published."""
        if self._cutoff is not None and not self._cutoff.complete:
            self._fail(
                f"the experiment is void: all {self._policy.total_steps} outer steps were made before a learner used "
                f"up its budget of {self._policy.budget_learner_steps} local steps"
            )
            return
        self.phase = Phase.CUTTING
        self._do(fx.Drain())

    def _cut(self) -> None:
        if self.phase is not Phase.CUTTING:
            return
        if self._cutoff is None:
            self._freeze()
            return
        self._save()
        self._do(fx.Say("learner-budget cutoff checkpoint written"))
        self._end_well()

    def _freeze(self) -> None:
        step, members = self.committed, self._roster.current
        self.phase = Phase.FINALIZING
        self._final.freeze(m.learner_id for m in members)
        self._do(fx.Say(f"training complete after {step} outer steps"), fx.WriteFinal(step, self._ledger.rows()))
        self._do(fx.Note("final", {"step": step, "expected": [m.learner_id for m in members]}))
        if not members:
            self._fail(f"no learner was connected at the final cut of step {step}: its state is written, unmarked")
        for member in members:
            if member in self._ungreeted:
                self._send_fragments(member, self._assembly.initialized)
            self._send_cut(member)

    def _send_cut(self, member: Member) -> None:
        self._final.queued(member)
        self._do(fx.SendCut(member, self.committed, self._flight.schedule.versions))

    def _on_ack(self, event: ev.AckArrived, now: float) -> None:
        if not self._roster.is_live(event.member):
            return
        if (violation := self._final.acknowledge(event.member, event.step)) is not None:
            self._expel(event.member, violation, now)
        elif self._final.complete:
            self._complete()

    def _complete(self) -> None:
        self._do(fx.Say("all learners acknowledged final cut"))
        if self._policy.checkpoint.mark_final:
            self._do(fx.WriteMarker(self.committed))
        self._do(*(fx.SendShutdown(m) for m in self._final.acked_members if self._roster.is_live(m)))
        self._end_well()

    def _end_well(self) -> None:
        self.phase = Phase.DONE
        self._do(fx.Note("end", {"step": self.committed, "code": 0}), fx.Finish(0))

    def _check_acks(self, now: float) -> None:
        if self._final.overdue(now):
            missing = ", ".join(map(str, self._final.missing))
            self._fail(
                f"final cut not acknowledged within {self._policy.final.ack_timeout_s} s by learners {missing}: the "
                f"checkpoint of step {self.committed} is written, unmarked"
            )

    def _loss_at(self) -> float | None:
        """When the learner that has been away longest is given up."""
        absent = self._roster.longest_absent()
        if self._policy.schedule.on_loss == "continue" or absent is None:
            return None
        return absent[1] + self._policy.schedule.loss_after_s

    def _check_losses(self, now: float) -> None:
        at, absent = self._loss_at(), self._roster.longest_absent()
        if self.phase in (Phase.ASSEMBLING, Phase.RUNNING) and at is not None and absent is not None and now >= at:
            self._save()
            self._fail(
                f"learner {absent[0]} has been away for {self._policy.schedule.loss_after_s:g} s and "
                f"schedule.on_loss=stop: the run ends at step {self.committed}"
            )

    def _on_interrupt(self) -> None:
        if self.phase is not Phase.FINALIZING:  # there the checkpoint is rewritten already
            self._save()
        self.phase = Phase.FAILED
        self._do(*interrupted(self.committed))

    def _save(self) -> None:
        """Make the last contiguous commit durable, once there is a whole state."""
        if self._policy.checkpoint.path is not None and self._assembly.all_initialized:
            self._do(fx.SaveCheckpoint(self.committed, self._ledger.rows()))

    def _fail(self, text: str) -> None:
        if self.phase in (Phase.DONE, Phase.FAILED):
            return
        self.phase = Phase.FAILED
        self._do(fx.Note("end", {"step": self.committed, "code": 1, "reason": text}), fx.Finish(1, text, terminal=True))


def interrupted(step: int) -> list[fx.Effect]:
    """How an interrupt ends the run."""
    text = f"interrupted at step {step}"
    return [fx.Note("end", {"step": step, "code": 130, "reason": text}), fx.Finish(130, text)]
