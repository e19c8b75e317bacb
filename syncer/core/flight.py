"""Rounds in flight: launched, answered, settled, merged, committed in order.

Decides what the members at hand mean for the rounds under way; it composes schedule, rounds, pace, ledger and
rejections. Who is a member, when training starts and how it ends is ``lifecycle``'s.

    launch   expired rounds first, with a new attempt; then new rounds while window and throttle allow
    settle   K answers -> grace window, or closed; K out of reach or the deadline -> expired
    merged   every round that is ready and next in order: Commit, Record, SaveCheckpoint (if due), Broadcast

Source: v4 §Rounds (members captured at launch), v4 §Quorum and grace (below K all partial responses are discarded),
v4 §Scheduler (state changes only at the next step in order), v4 §Checkpoints (durable before its broadcast);
rulings §6.2, §6.5, §6.7, §6.13.
"""

from __future__ import annotations

from syncer.config.policy import SyncerPolicy
from syncer.core import effects as fx
from syncer.core.events import Member, PushArrived
from syncer.core.ledger import Ledger
from syncer.core.outliers import find_outliers
from syncer.core.pace import Pace
from syncer.core.rate_limiter import RateLimiter, remark
from syncer.core.record import merge_line
from syncer.core.rejections import Rejections
from syncer.core.rounds import Rejection, Round, RoundState
from syncer.core.schedule import Schedule

Effects = list[fx.Effect]
_RETRIES = 256  # told per minute


class Flight:
    """All rounds of one session, from the step ``committed`` on; every method returns what must be done, in order."""

    def __init__(
        self, policy: SyncerPolicy, fragments: int, committed: int, ledger: Ledger, rejections: Rejections
    ) -> None:
        self._policy, self._ledger, self._rejections = policy, ledger, rejections
        self._retries = RateLimiter(_RETRIES)
        self.pace = Pace(policy.schedule)
        self.schedule = Schedule(policy.schedule, fragments, policy.total_steps, committed, self.pace)

    def launch(self, members: tuple[Member, ...], now: float) -> Effects:
        """Start what may start with the members connected now; never an empty round."""
        effects: Effects = []
        if not members:
            return effects
        for round_ in self.schedule:
            if round_.state is RoundState.EXPIRED:
                effects += self._start_attempt(round_, members, now)
        while (at := self.schedule.earliest_launch()) is not None and at <= now:
            effects += self._start_attempt(self.schedule.open_next(members, now), members, now)
        return effects

    def _start_attempt(self, round_: Round, members: tuple[Member, ...], now: float) -> Effects:
        round_.launch(members, self._policy.schedule.quorum, now)
        return [fx.SendPull(m, round_.fragment, round_.step, round_.attempt) for m in round_.members]

    def answer(self, push: PushArrived, now: float) -> Effects:
        """Route one answer of a live member; it is accepted, or counted and told as rejected."""
        round_ = self.schedule.rounds.get(push.step)
        if round_ is None:
            return self._reject(push, Rejection.OUT_OF_ROUND, now)
        if (rejection := round_.offer(push, now)) is not None:
            return self._reject(push, rejection, now)
        self.pace.observe_step(push.member, push.local_step, now)
        if round_.quorum_s is not None and round_.at_quorum:
            self.pace.observe_quorum(round_.quorum_s)
        return []

    def _reject(self, push: PushArrived, rejection: Rejection, now: float) -> Effects:
        self._rejections.count(rejection.value)
        return self._refused(push.member, push.step, push.attempt, rejection.value.replace("_", " "), now)

    def settle(self, now: float) -> Effects:
        """Close or expire what answers, losses or the time have decided."""
        effects: Effects = []
        for round_ in self.schedule:
            was_open, answers = round_.is_open, len(round_.responses)
            round_.settle(now)
            if round_.at_quorum:
                round_.arm_grace(self._grace_s(round_), now)
                round_.settle(now)
            if round_.state is RoundState.CLOSED:
                effects += self._merge(round_, now)
            elif was_open and round_.state is RoundState.EXPIRED:
                effects += self._expired(round_, answers, now)
        return effects

    def _expired(self, round_: Round, answers: int, now: float) -> Effects:
        """Told on the tape and in the log, unless a learner that comes and goes makes it happen all the time."""
        kept_back = self._retries.take(now)
        if kept_back is None:
            return []
        text = f"round {round_.step} attempt {round_.attempt} expired: {answers} of {round_.quorum} answered"
        fields = {"step": round_.step, "attempt": round_.attempt, "quorum": round_.quorum, "answered": answers}
        fields |= {"left_out": kept_back} if kept_back else {}
        captured = [m.learner_id for m in round_.members]
        return [fx.Note("retry", {**fields, "expected": captured}), fx.Say(text + remark(kept_back), warning=True)]

    def _grace_s(self, round_: Round) -> float:
        """Learners whose data has ended (weight 0) must not crowd out one that still trains: wait for it in full."""
        if round_.weight <= 0:
            return self._policy.schedule.grace_ms / 1000
        return self.pace.grace_s(round_.members)

    def _merge(self, round_: Round, now: float) -> Effects:
        round_.state = RoundState.MERGING
        ratio = self._policy.merge.max_norm_ratio
        round_.outliers = find_outliers(round_.ordered_responses, ratio)
        effects: Effects = []
        for outlier in round_.outliers:
            reason = f"norm {outlier.norm:.3g} exceeds {ratio:g} times the round's median, {outlier.median:.3g}"
            effects += self._refused(outlier.member, round_.step, round_.attempt, reason, now)
        responses = round_.merged_responses
        return [*effects, fx.Merge(round_.step, round_.fragment, responses, tuple(r.weight for r in responses))]

    def _refused(self, member: Member, step: int, attempt: int, reason: str, now: float) -> Effects:
        return self._rejections.lines(now, "push", member.learner_id, reason, step=step, attempt=attempt)

    def merged(self, step: int, audience: tuple[Member, ...]) -> Effects:
        """The gradient of a round is ready: commit it, and what waited for it, and broadcast to ``audience``.

        The last round is not broadcast: the final cut follows. A round that was cancelled meanwhile is forgotten.
        """
        effects: Effects = []
        if step in self.schedule.rounds:
            self.schedule.rounds[step].state = RoundState.READY
        while (round_ := self.schedule.pop_ready()) is not None:
            for response in round_.merged_responses:
                self._ledger.add(response)
            for _ in round_.outliers:
                self._rejections.count("norm")
            line = merge_line(round_, self._rejections.take_counts())
            effects += [fx.Commit(round_.step, round_.fragment), fx.Record(round_.step, round_.launched_at, line)]
            if not self.schedule.complete:
                if self._policy.checkpoint.periodic and round_.step % self._policy.checkpoint.every == 0:
                    effects.append(fx.SaveCheckpoint(round_.step, self._ledger.rows()))
                effects.append(fx.Broadcast(round_.fragment, round_.step, audience))
        return effects

    def lose(self, member: Member) -> None:
        """A group is gone; answers it gave stay."""
        self.pace.forget(member)
        for round_ in self.schedule:
            round_.lose(member)

    def next_deadline(self, *, may_launch: bool) -> float | None:
        """When time alone changes a round, or a launch becomes possible."""
        times = [round_.due for round_ in self.schedule]
        if may_launch:
            times.append(self.schedule.earliest_launch())
        return min((t for t in times if t is not None), default=None)

    def waiting_for(self) -> str:
        """What keeps the rounds, in one sentence."""
        clauses = [round_.waiting_for() for round_ in self.schedule]
        return "; ".join(clauses) or f"step {self.schedule.committed}: throttled until the next launch"
