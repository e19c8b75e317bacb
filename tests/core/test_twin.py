"""K, grace and attempts against a dumb twin, on random histories.

The twin keeps no state but the list of what happened. After every event it works out from the whole list what the
present attempt has come to, by the letter of the rules, and that must be what the coordinator says.
One fragment and no pipeline, so that there is one round at a time; everything else is random.
"""

from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from syncer.core import effects as fx
from syncer.core.events import BeatArrived, Member
from tests.support.coordinator_desk import Desk, syncer_policy

LEARNERS, TIMEOUT_S = 4, 10

MOVES = st.one_of(
    st.tuples(st.just("join"), st.integers(0, LEARNERS - 1)),
    st.tuples(st.just("leave"), st.integers(0, LEARNERS - 1)),
    st.tuples(st.just("leave old"), st.integers(0, LEARNERS - 1)),
    st.tuples(st.just("push"), st.integers(0, LEARNERS - 1), st.sampled_from([0, 0, 0, 0, -1, 1]), st.integers(0, 3)),
    st.tuples(st.just("push old"), st.integers(0, LEARNERS - 1)),
    st.tuples(st.just("future base"), st.integers(0, LEARNERS - 1)),
    st.tuples(st.just("beat"), st.integers(0, LEARNERS - 1), st.integers(0, 4)),
    st.tuples(st.just("wait"), st.sampled_from([0.25, 0.5, 1.0, 3.0, float(TIMEOUT_S)])),
)


@dataclass
class Attempt:
    """What the twin remembers of the attempt under way: when, whom, and what happened since."""

    number: int
    launched: float
    captured: list[Member]
    k: int
    answers: list[tuple[float, Member, float]] = field(default_factory=list)
    lost: list[tuple[float, Member]] = field(default_factory=list)
    window: float | None = None  # decided once, at the K-th answer

    def verdict(self, now: float) -> str:
        """pulling, waiting (grace), committed or expired, as of ``now``."""
        if len(self.answers) >= self.k:
            kth = self.answers[self.k - 1][0]
            times = [t for t, *_ in self.answers + self.lost if t >= kth] + [kth]
            complete = [t for t in times if not self.awaited(t)]
            if complete or (self.window is not None and now >= kth + self.window):
                return "committed"
            return "waiting"
        moments = [t for t, *_ in self.answers + self.lost]
        hopeless = [t for t in moments if len([a for a in self.answers if a[0] <= t]) + len(self.awaited(t)) < self.k]
        return "expired" if hopeless or now >= self.launched + TIMEOUT_S else "pulling"

    def awaited(self, at: float) -> list[Member]:
        gone = [m for t, m in self.lost if t <= at] + [m for t, m, _ in self.answers if t <= at]
        return [m for m in self.captured if m not in gone]


class Twin:
    """Plays one coordinator's rounds from a log of events."""

    def __init__(self, desk: Desk, quorum: int, grace_ms: int) -> None:
        self.quorum, self.grace_s = quorum, grace_ms / 1000
        self.desk, self.step = desk, 1
        self.reports: dict[Member, list[tuple[float, int]]] = {}
        self.quorum_times: list[float] = []
        self.attempt: Attempt | None = None

    def launch(self, now: float, members: list[Member]) -> None:
        number = self.attempt.number + 1 if self.attempt is not None else 1
        self.attempt = Attempt(number, now, members, min(self.quorum, len(members)))

    def settle(self, now: float, members: list[Member]) -> None:
        """Follow the verdict as far as it goes; ``now`` may be the moment of a deadline."""
        if self.attempt is None or self.attempt.verdict(now) == "committed":
            self.step += self.attempt is not None
            self.attempt = None
            if members:
                self.launch(now, members)
        elif self.attempt.verdict(now) == "expired" and members:
            self.launch(now, members)

    def route(self, member: Member, attempt: int, base: int) -> str | None:
        present = self.attempt
        if present is None or present.verdict(self.desk.now) == "expired" or attempt != present.number:
            return "out_of_round"
        if member not in present.captured:
            return "unexpected_member"
        if base > self.step - 1:
            return "future_base"
        return "duplicate" if member in [m for _, m, _ in present.answers] else None

    def accept(self, member: Member, weight: float, now: float) -> None:
        assert self.attempt is not None
        self.attempt.answers.append((now, member, weight))
        if len(self.attempt.answers) == self.attempt.k:
            self.quorum_times.append(now - self.attempt.launched)
            self.attempt.window = self.window()

    def window(self) -> float:
        assert self.attempt is not None
        steps = [fold(samples) for m in self.attempt.captured if (samples := self.samples(m))]
        if not steps or sum(weight for *_, weight in self.attempt.answers) == 0:
            return self.grace_s
        raw = 0.8 * (2.0 * max(steps) - fold(self.quorum_times) - self.desk.sync_s * (self.step > 1))
        return min(max(raw, 0.0), self.grace_s)

    def samples(self, member: Member) -> list[float]:
        """Seconds per step between successive reports that grew."""
        grown: list[tuple[float, int]] = []
        for now, step in self.reports.get(member, []):
            if not grown or step > grown[-1][1]:
                grown.append((now, step))
        return [(t1 - t0) / (s1 - s0) for (t0, s0), (t1, s1) in pairwise(grown)]


def fold(samples: list[float]) -> float:
    return reduce(lambda old, new: 0.5 * new + 0.5 * old, samples)


class Game:
    """Desk and twin side by side."""

    def __init__(self, quorum: int, grace_ms: int, sync_s: float) -> None:
        policy = syncer_policy(
            LEARNERS, 10_000, quorum=quorum, grace_ms=grace_ms, quorum_timeout_s=TIMEOUT_S, pipeline=1
        )
        self.desk = Desk(policy, fragments=1).assemble()
        self.desk.sync_s = sync_s
        self.generation = 1
        self.old: dict[int, list[Member]] = {i: [] for i in range(LEARNERS)}
        self.local_step = dict.fromkeys(range(LEARNERS), 0)
        self.twin = Twin(self.desk, quorum, grace_ms)
        self.twin.settle(0.0, self.members)

    @property
    def members(self) -> list[Member]:
        return sorted(self.desk.members.values())

    def play(self, move: tuple) -> None:
        name, who, *rest = move
        if name == "wait":
            self.wait(who)
        elif name == "join":
            if who in self.desk.members:
                self.old[who].append(self.desk.members[who])
            self.generation += 1
            self.desk.join(who, self.generation)
            for released in self.desk.latest(fx.Release):
                self.lose(released.member, who)
        elif name == "leave" and who in self.desk.members:
            self.lose(self.desk.members[who], who)
        elif name == "leave old" and self.old[who]:
            self.lose(self.old[who][0], who)
        elif name == "push" and who in self.desk.members:
            self.push(self.desk.members[who], rest[0], 0, rest[1])
        elif name == "push old" and self.old[who]:
            self.push(self.old[who][-1], 0, 0, 1)
        elif name == "future base" and who in self.desk.members:
            self.push(self.desk.members[who], 0, 1, 1)
        elif name == "beat" and who in self.desk.members:
            self.report(self.desk.members[who], rest[0])
            self.desk.tell(BeatArrived(self.desk.members[who], self.local_step[who]))
        self.twin.settle(self.desk.now, self.members)

    def lose(self, member: Member, who: int) -> None:
        if self.desk.members.get(who) == member:
            del self.desk.members[who]
        else:
            self.old[who].remove(member)
        if self.twin.attempt is not None:
            self.twin.attempt.lost.append((self.desk.now, member))
        self.desk.leave(member)
        self.twin.reports.pop(member, None)

    def report(self, member: Member, steps: int) -> None:
        self.local_step[member.learner_id] += steps
        self.twin.reports.setdefault(member, []).append((self.desk.now, self.local_step[member.learner_id]))

    def push(self, member: Member, attempt_offset: int, base_offset: int, tokens: int) -> None:
        twin = self.twin
        attempt = (twin.attempt.number if twin.attempt is not None else 1) + attempt_offset
        base = twin.step - 1 + base_offset
        expected = twin.route(member, attempt, base)
        if expected is None:
            self.report(member, 1)
            twin.accept(member, float(tokens**2), self.desk.now)
        self.desk.push(
            member,
            twin.step,
            attempt=attempt,
            base_version=base,
            local_step=self.local_step[member.learner_id],
            c_tokens=tokens,
        )
        got = [note.fields["reason"].replace(" ", "_") for note in self.desk.latest(fx.Note) if note.event == "reject"]
        assert got == ([] if expected is None else [expected])

    def wait(self, seconds: float) -> None:
        """Time passes; the twin follows at each moment at which the coordinator wants to act."""
        desk, end = self.desk, self.desk.now + seconds
        while (due := desk.coordinator.next_deadline()) is not None and due <= end:
            self.step_to(due)
        self.step_to(end)

    def step_to(self, moment: float) -> None:
        before = self.twin.attempt.verdict(moment - 1e-6) if self.twin.attempt is not None else ""
        assert before in ("", "pulling", "waiting", "expired"), "the coordinator slept through a decision"
        self.desk.now = max(self.desk.now, moment)
        self.desk.tick()
        self.twin.settle(self.desk.now, self.members)

    def check(self) -> None:
        desk, twin = self.desk, self.twin
        assert desk.coordinator.committed == twin.step - 1
        assert [c.step for c in desk.all(fx.Commit)] == list(range(1, twin.step))
        if twin.attempt is None:
            assert not desk.pulled(twin.step)
        else:
            assert desk.attempt(twin.step) == twin.attempt.number
            assert desk.pulled(twin.step, twin.attempt.number) == twin.attempt.captured
            assert not desk.pulled(twin.step, twin.attempt.number + 1)


@settings(max_examples=150)
@given(
    st.integers(1, LEARNERS),
    st.sampled_from([0, 500, 2000]),
    st.sampled_from([0.0, 0.25]),
    st.lists(MOVES, min_size=10, max_size=60),
)
def test_k_grace_and_attempts_equal_the_twin(quorum, grace_ms, sync_s, moves):
    game = Game(quorum, grace_ms, sync_s)
    game.check()
    for move in moves:
        game.play(move)
        game.check()


@settings(max_examples=60)
@given(st.integers(1, LEARNERS), st.lists(MOVES, max_size=40))
def test_merge_lines_say_what_the_twin_saw(quorum, moves):
    game = Game(quorum, 500, 0.0)
    for move in moves:
        present = game.twin.attempt
        step = game.twin.step
        game.play(move)
        if game.twin.step == step + 1 and present is not None:
            line = game.desk.line(step)
            answered = sorted(m for _, m, _ in present.answers)
            assert line["attempt"] == present.number
            assert line["quorum"] == present.k
            assert [(m["id"], m["generation"]) for m in line["expected_members"]] == [
                (m.learner_id, m.generation) for m in present.captured
            ]
            assert [(m["id"], m["generation"]) for m in line["responded_members"]] == [
                (m.learner_id, m.generation) for m in answered
            ]
            assert line["missed_grace"] == [m.learner_id for m in present.captured if m not in answered]
            assert line["quorum_ms"] == 1000 * (present.answers[present.k - 1][0] - present.launched)
            armed = len(present.answers) < len(present.captured) or line["grace_ms"] is not None
            if armed and line["grace_ms"] is not None:
                assert line["grace_ms"] == 1000 * present.window
