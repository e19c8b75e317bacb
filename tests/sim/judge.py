"""What must hold after every happening, whatever goes wrong.

The judge keeps books of its own from what it sees at the doors of the machines, and never asks a machine. It knows
the rules in their plainest form: who is here, whom an attempt asked, what was sent to whom, what the disk would hold
after a power cut, and what the parameters must be if the tape is replayed from the bytes the learners really sent.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import torch

from syncer.checkpoint.format import Snapshot
from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.events import Member
from syncer.merge.merge import merge_fragment
from syncer.state import GlobalState
from tests.sim.disk import CHECKPOINT, MARKER, SimDisk
from tests.sim.scenario import Scenario
from tests.sim.world import SafetyError, World
from tests.support.checkpoint_bytes import parse_bytes
from yeto_torch.wire import codec
from yeto_torch.wire.messages import PushFragment

Bits = tuple[int, bytes, bytes]  # version, parameters, momentum of one fragment
Key = tuple[Member, int, int]  # an answer: who, step, attempt
Ledger = dict[int, tuple[int, int, int]]  # merges, steps, tokens of each learner


@dataclass
class Attempt:
    """One launch of a round: whom it asked, when, and the valid answers that were handed to the coordinator."""

    number: int
    members: list[Member]
    launched_at: float
    answers: dict[Member, PushFragment] = field(default_factory=dict)
    expired: bool = False


@dataclass
class Round:
    """A round in flight as the judge sees it."""

    step: int
    fragment: int
    base_version: int
    attempts: list[Attempt] = field(default_factory=list)
    merged: fx.Merge | None = None


class Judge:
    """Raises SafetyError at the first broken promise."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self._world, self._scenario, self._policy = world, scenario, scenario.policy
        self._wire = scenario.layout.wire
        self._fragments = len(scenario.layout)
        # over the whole life of the run
        self.pushes: set[Key] = set()  # honest answers
        self.silly: set[tuple[int, int, int]] = set()  # (learner id, step, attempt) of answers that should not count
        self.states: dict[int, list[Bits]] = {}  # by step, the present lineage
        self.ledgers: dict[int, Ledger] = {0: {}}
        self.durable: int | None = None  # the newest step whose checkpoint was reported written
        self.ended_well = False
        self.left_alone: set[int] = set()  # learners that sent their ACK and waited for SHUTDOWN as long as they must
        self._forget_process()

    def _forget_process(self) -> None:
        """What a syncer process knows dies with it."""
        self.current: dict[int, Member] = {}
        self.live: set[Member] = set()
        self.initial: dict[int, bytes] = {}
        self.committed = 0
        self.rounds: dict[int, Round] = {}
        self.bytes_of: dict[tuple[int, int], bytes] = {}  # (fragment, version) -> what was broadcast
        self.heard: defaultdict[Member, list[tuple[int, int]]] = defaultdict(list)  # (fragment, version) sent to it
        self.cut: dict[Member, int] = {}
        self._chain: list[str] = []  # effects of the commit under way
        self._owed: set[tuple[Member, int]] = set()  # broadcasts a joiner must get
        self.expected: list[int] = []  # at the freeze
        self.acked: dict[int, Member] = {}  # whose acknowledgement came first
        self.ackers: set[Member] = set()
        self.marked = self.cutting = False
        self.decided_at = self._world.now  # the time the coordinator was told
        self._inbox: deque[tuple[Any, float]] = deque()
        self._said: dict[int, PushFragment] = {}

    def claim(self, holds: bool, sentence: str) -> None:
        """Something that must be so."""
        if not holds:
            raise SafetyError(sentence)

    # ------------------------------------------------------------------ the syncer process

    def started(self, resumed: Snapshot | None, inbox: deque[tuple[Any, float]]) -> None:
        """A process begins, from a checkpoint or from nothing."""
        self._forget_process()
        self._inbox = inbox
        if resumed is None:
            self.claim(self.durable is None, f"a fresh start although step {self.durable} was durable")
            self.states = {}
            return
        step = resumed.step
        self.claim(self.durable is None or step >= self.durable, f"resumed at {step}, step {self.durable} was durable")
        self.claim(step in self.states, f"resumed at step {step}, which was never committed")
        found = [(f.version, bytes(f.params), bytes(f.momentum)) for f in resumed.fragments]
        self.claim(found == self.states[step], f"the checkpoint of step {step} is not the state of step {step}")
        self.states = {t: state for t, state in self.states.items() if t <= step}
        self.committed, self.durable = step, step

    def handling(self, event: ev.Event, stamp: float) -> None:
        """The coordinator is about to be told."""
        self.decided_at = stamp
        match event:
            case ev.GroupLost(member):
                self._gone(member)
            case ev.PushArrived():
                self._answered(event, self._said.pop(id(event)), stamp)
            case ev.AckArrived(member, step):
                if member in self.live and self.cut.get(member) == step:
                    self.acked.setdefault(member.learner_id, member)
                    self.ackers.add(member)

    def _gone(self, member: Member) -> None:
        self.live.discard(member)
        self.cut.pop(member, None)
        if self.current.get(member.learner_id) == member:
            del self.current[member.learner_id]
        self._owed = {owed for owed in self._owed if owed[0] != member}

    def heard_at_the_door(self, event: ev.PushArrived, push: PushFragment) -> None:
        """An answer has arrived as these bytes."""
        self._said[id(event)] = push

    def _answered(self, push: ev.PushArrived, said: PushFragment, stamp: float) -> None:
        """The first valid answer of a member counts, whatever comes later."""
        round_ = self.rounds.get(push.step)
        if push.member not in self.live or round_ is None:
            return
        attempt = round_.attempts[-1]
        in_time = stamp < attempt.launched_at + self._policy.schedule.quorum_timeout_s
        asked = push.attempt == attempt.number and push.member in attempt.members and push.fragment == round_.fragment
        at_quorum = len(attempt.answers) >= min(self._policy.schedule.quorum, len(attempt.members))
        valid = asked and (in_time or at_quorum) and not attempt.expired and push.base_version <= round_.base_version
        if valid and round_.merged is None:
            attempt.answers.setdefault(push.member, said)

    def ordered(self, effect: fx.Effect, disk: SimDisk) -> None:  # noqa: C901 - one flat table of promises
        """The coordinator orders something; it has not been done yet."""
        match effect:
            case fx.Admit(_, member):
                self._joined(member)
            case fx.Expel(member, text):
                raise SafetyError(f"{member} is honest and was expelled: {text}")
            case fx.RefuseHello(_, text):
                self.claim("the run is ending" in text, f"an honest HELLO was refused: {text}")
            case fx.SendPull():
                self._pulled(effect)
            case fx.Merge():
                self._merge(effect)
            case fx.Note("retry", fields):
                self._expired(int(fields["step"]), int(fields["attempt"]))
            case fx.Note("reject", fields) if fields["what"] == "push":
                is_silly = (fields["id"], fields["step"], fields["attempt"]) in self.silly
                ordinary = fields["reason"] in ("out of round", "duplicate")
                self.claim(ordinary or is_silly, f"an honest answer was: {fields}")
            case fx.Broadcast():
                self._broadcast(effect, disk)
            case fx.Drain():
                self.cutting = True
            case fx.WriteFinal(step):
                self.cutting = False
                self.claim(step == self._policy.total_steps == self.committed, f"final cut of step {step}")
                self._step_of_commit("WriteFinal")
            case fx.SaveCheckpoint(step):
                self.claim(step == self.committed, f"a checkpoint of step {step} at step {self.committed}")
                self._step_of_commit("SaveCheckpoint")
            case fx.SendCut(member, step, versions):
                self._cut_ordered(member, step, versions, disk)
            case fx.WriteMarker(step):
                self._may_mark(step, disk)
            case fx.SendShutdown(member):
                self._may_shut_down(member)
            case fx.Finish(0):
                self._may_end()

    # Membership

    def _joined(self, member: Member) -> None:
        self.claim(member not in self.live, f"{member} was admitted twice")
        self.live.add(member)
        self.current[member.learner_id] = member
        ready = range(self._fragments) if self.states else self.initial
        self._owed |= {(member, fragment) for fragment in ready}

    def settled(self) -> None:
        """All effects of one event are done: a joiner has been sent every fragment, unless a cut is prepared."""
        self.claim(self.cutting or not self._owed, f"a joiner was not sent all fragments: {sorted(self._owed)}")
        for round_ in self.rounds.values():
            attempt = round_.attempts[-1]
            if round_.merged is None and not attempt.expired and not self._reachable(attempt):
                raise SafetyError(f"round {round_.step} attempt {attempt.number} goes on although K is out of reach")

    # Rounds

    def _pulled(self, pull: fx.SendPull) -> None:
        self.claim(self.current.get(pull.member.learner_id) == pull.member, f"PULL to {pull.member}, not current")
        told = [version for fragment, version in self.heard[pull.member] if fragment == pull.fragment]
        self.claim(bool(told), f"PULL of fragment {pull.fragment} to {pull.member} before any broadcast of it")
        round_ = self.rounds.setdefault(pull.step, Round(pull.step, pull.fragment, self._version(pull.fragment)))
        self._check_window(pull)
        newest = round_.attempts[-1].number if round_.attempts else 0
        if pull.attempt != newest:
            self.claim(pull.attempt == newest + 1, f"round {pull.step}: attempt {pull.attempt} follows {newest}")
            self.claim(round_.merged is None, f"round {pull.step} was merged and is launched again")
            if round_.attempts:
                old = round_.attempts[-1]
                k = min(self._policy.schedule.quorum, len(old.members))
                self.claim(len(old.answers) < k, f"round {pull.step} attempt {newest} had K and was launched again")
            round_.attempts.append(Attempt(pull.attempt, [], self.decided_at))
        attempt = round_.attempts[-1]
        self.claim(pull.member not in attempt.members, f"round {pull.step}: {pull.member} was asked twice")
        attempt.members.append(pull.member)

    def _check_window(self, pull: fx.SendPull) -> None:
        in_flight = sorted(self.rounds)
        window = min(self._policy.schedule.pipeline, self._fragments)
        self.claim(pull.fragment == (pull.step - 1) % self._fragments, f"round {pull.step} on fragment {pull.fragment}")
        self.claim(
            in_flight == list(range(self.committed + 1, self.committed + 1 + len(in_flight))),
            f"rounds {in_flight} in flight at step {self.committed}",
        )
        self.claim(len(in_flight) <= window, f"rounds {in_flight} in flight, the window is {window}")

    def _reachable(self, attempt: Attempt) -> bool:
        """Can it still come to K answers?"""
        k = min(self._policy.schedule.quorum, len(attempt.members))
        return len({m for m in attempt.members if m in self.live} | set(attempt.answers)) >= k

    def deadline_of(self, step: int, attempt: int) -> float | None:
        """When this attempt expires, if it is the one under way."""
        round_ = self.rounds.get(step)
        if round_ is None or round_.attempts[-1].number != attempt:
            return None
        return round_.attempts[-1].launched_at + self._policy.schedule.quorum_timeout_s

    def _expired(self, step: int, number: int) -> None:
        attempt = self.rounds[step].attempts[-1]
        self.claim(attempt.number == number, f"round {step}: attempt {number} expired, {attempt.number} runs")
        attempt.expired = True
        if not self._reachable(attempt):
            return
        deadline = attempt.launched_at + self._policy.schedule.quorum_timeout_s
        k = min(self._policy.schedule.quorum, len(attempt.members))
        self.claim(self.decided_at >= deadline, f"round {step} attempt {number} expired at {self.decided_at:.6f}")
        punctual = {
            event.member
            for event, stamp in self._inbox
            if isinstance(event, ev.PushArrived) and (event.step, event.attempt) == (step, number) and stamp < deadline
        }
        reached = punctual & set(attempt.members) | set(attempt.answers)
        self.claim(len(reached) < k, f"round {step} attempt {number} expired while a punctual answer waits: {punctual}")

    def _merge(self, merge: fx.Merge) -> None:
        round_ = self.rounds[merge.step]
        attempt, name = round_.attempts[-1], f"round {merge.step} attempt {round_.attempts[-1].number}"
        self.claim(round_.merged is None, f"{name} is merged twice")
        round_.merged = merge
        members = [response.member for response in merge.responses]
        self.claim(len(set(members)) == len(members), f"{name} counts a member twice: {members}")
        self.claim(set(members) <= set(attempt.members), f"{name} counts {members}, it asked {attempt.members}")
        k = min(self._policy.schedule.quorum, len(attempt.members))
        self.claim(len(members) >= k, f"{name} is merged with {len(members)} answers, K is {k}")
        for response, weight in zip(merge.responses, merge.weights, strict=True):
            sent = attempt.answers.get(response.member)
            self.claim(response.attempt == attempt.number, f"{name} counts an answer to attempt {response.attempt}")
            self.claim(sent is not None, f"{name} counts an answer of {response.member} that must not count")
            assert sent is not None
            self.claim(response.base_version <= round_.base_version, f"{name} counts a base from the future")
            self.claim(weight == sent.c_tokens**2 / sent.c_steps, f"{name}: weight {weight} of {response.member}")

    # Commits

    def _step_of_commit(self, effect: str) -> None:
        if self._chain:
            self._chain.append(effect)

    def committed_now(self, step: int, fragment: int, state: GlobalState) -> None:
        """The state has taken an outer step."""
        self.claim(step == self.committed + 1, f"commit of step {step} behind step {self.committed}")
        self.claim(self._chain == [], f"commit of step {step} while another is under way: {self._chain}")
        self.committed = step
        self._chain = ["Commit"]
        self._check_replay(step, fragment, state)

    def _check_replay(self, step: int, fragment: int, state: GlobalState) -> None:
        """The state must equal, bit for bit, a replay of the round from the bytes that the learners sent."""
        round_ = self.rounds[step]
        assert round_.merged is not None
        answers = round_.attempts[-1].answers
        sent = [answers[member] for member in sorted(r.member for r in round_.merged.responses)]
        numel, dtype = self._wire.numels[fragment], self._scenario.dtype
        deltas = [codec.decode(push.data, numel, dtype) for push in sent]
        twin = self._revive(self.states[step - 1])
        gradient = merge_fragment(
            self._wire.fragments[fragment],
            [-delta for delta in deltas],
            [push.c_tokens**2 / push.c_steps for push in sent],
            twin.momentum(fragment),
            correction=self._policy.merge.delta_correction == "heloco",
        )[0]
        twin.step = step - 1
        twin.commit(step, fragment, gradient, self._policy.outer.lr_at(step), self._policy.outer.momentum)
        self.states[step] = bits(twin)
        self.ledgers[step] = dict(self.ledgers[step - 1])
        for push in sent:
            merges, steps, tokens = self.ledgers[step].get(push.learner_id, (0, 0, 0))
            self.ledgers[step][push.learner_id] = (merges + 1, steps + push.c_steps, tokens + push.c_tokens)
        self.claim(bits(state) == self.states[step], f"the state of step {step} is not the replay of its answers")

    def _revive(self, saved: list[Bits]) -> GlobalState:
        state = GlobalState(self._wire, torch.device("cpu"))
        for fragment, (version, params, momentum) in enumerate(saved):
            state.restore(fragment, version, _floats(params), _floats(momentum))
        return state

    def recorded(self, step: int, line: dict[str, Any]) -> None:
        """A merge line is on the tape."""
        self.claim(self._chain == ["Commit"] and step == self.committed, f"line of step {step} behind {self._chain}")
        self._chain.append("Record")
        round_ = self.rounds.pop(step)
        attempt = round_.attempts[-1]
        assert round_.merged is not None
        answered = [{"id": r.member.learner_id, "generation": r.member.generation} for r in round_.merged.responses]
        asked = [{"id": m.learner_id, "generation": m.generation} for m in sorted(attempt.members)]
        told = (line["step"], line["attempt"], line["expected_members"], line["responded_members"])
        self.claim(told == (step, attempt.number, asked, answered), f"the line of step {step} says {told}")
        self.claim(line["launch_base_version"] == round_.base_version, f"the line of step {step}: base")
        if step == self._policy.total_steps:
            self._chain = []

    def saved(self, step: int, disk: SimDisk) -> None:
        """A checkpoint was reported written."""
        rows = parse_bytes(disk.files[CHECKPOINT]).ledger
        told = {row.learner: (row.merges, row.steps, row.tokens) for row in rows}
        self.claim(told == self.ledgers[step], f"the ledger of step {step} says {told}, it is {self.ledgers[step]}")
        self.claim(disk.oldest_step() == step, f"the checkpoint of step {step} could still be lost")
        self.durable = step

    def _broadcast(self, broadcast: fx.Broadcast, disk: SimDisk) -> None:
        fragment, version = broadcast.fragment, broadcast.version
        self.claim(version == self._version(fragment), f"fragment {fragment} is broadcast at version {version}")
        for member in broadcast.members:
            known = self.current.get(member.learner_id) == member
            self.claim(known, f"a broadcast to {member}, which is not current")
        if self._policy.checkpoint.every == 1:
            oldest = disk.oldest_step()
            if version or self.states:  # a state that is not whole yet cannot be saved
                self.claim(oldest is not None and oldest >= version, f"version {version} is visible, durable {oldest}")
        if self._chain:
            self._end_of_commit(broadcast)

    def _end_of_commit(self, broadcast: fx.Broadcast) -> None:
        every = self._policy.checkpoint.every
        due = ["SaveCheckpoint"] if every and self.committed % every == 0 else []
        expected = ["Commit", "Record", *due]
        self.claim(self._chain == expected, f"step {self.committed}: {self._chain} before its broadcast")
        self.claim(
            sorted(broadcast.members) == sorted(self.current.values()),
            f"step {self.committed} is broadcast to {broadcast.members}, current are {self.current}",
        )
        self._chain = []

    def broadcast_sent(self, fragment: int, version: int, data: bytes, members: tuple[Member, ...]) -> None:
        """Bytes of a fragment are on their way to these."""
        known = self.bytes_of.setdefault((fragment, version), data)
        self.claim(known == data, f"version {version} of fragment {fragment} was broadcast with other bytes")
        for member in members:
            self.heard[member].append((fragment, version))
            self._owed.discard((member, fragment))

    def initialized(self, fragment: int, state: GlobalState) -> None:
        """Learner 0's first values are in the state."""
        self.claim(fragment not in self.initial, f"fragment {fragment} was initialised twice")
        self.initial[fragment] = bytes(state.params(fragment).numpy().tobytes())
        if len(self.initial) == self._fragments:
            self.states[0] = bits(state)

    def _version(self, fragment: int) -> int:
        """The last step so far that worked on this fragment."""
        return max((t for t in range(1, self.committed + 1) if (t - 1) % self._fragments == fragment), default=0)

    # The end

    def _cut_ordered(self, member: Member, step: int, versions: tuple[int, ...], disk: SimDisk) -> None:
        self.claim(self.current.get(member.learner_id) == member, f"the final cut to {member}, which is not current")
        self.claim(step == self._policy.total_steps == self.committed, f"a final cut of step {step}")
        self.claim(versions == tuple(self._version(f) for f in range(self._fragments)), f"a cut of {versions}")
        self.claim(disk.oldest_step() == step, "the final cut is sent before its checkpoint is durable")
        if not self.expected:
            self.expected = sorted(self.current)
        self.claim(member.learner_id in self.expected, f"the cut to {member}, which was not there at the freeze")
        self.cut[member] = step

    def explained(self, text: str) -> None:
        """The coordinator says what it waits for."""
        self.claim(bool(text) and not text.endswith((" ", "learner", "learners")), f"waiting_for says {text!r}")
        if text.startswith("final cut"):
            named = [int(word) for word in re.findall(r"\d+", text)]
            self.claim(named == self._missing(), f"it says {text!r}, missing are {self._missing()}")

    def _missing(self) -> list[int]:
        return [learner_id for learner_id in self.expected if learner_id not in self.acked]

    def _may_mark(self, step: int, disk: SimDisk) -> None:
        self.claim(not self._missing(), f"marked although the ACK of learners {self._missing()} is missing")
        self.claim(disk.oldest_step() == step == self._policy.total_steps, f"marked at step {step}")
        self.marked = True

    def _may_shut_down(self, member: Member) -> None:
        self.claim(not self._missing(), f"SHUTDOWN although the ACK of learners {self._missing()} is missing")
        self.claim(self.marked or not self._policy.checkpoint.mark_final, "SHUTDOWN before the marker")
        self.claim(member in self.live, f"SHUTDOWN to {member}, which is gone")
        self.claim(member in self.ackers, f"SHUTDOWN to {member}, whose ACK was not accepted")

    def _may_end(self) -> None:
        self.claim(bool(self.expected) and not self._missing(), f"the end without the ACK of {self._missing()}")
        self.ended_well = True

    def at_the_end(self, disk: SimDisk) -> None:
        """The run is over and everybody has gone home."""
        if self.ended_well:
            total = self._policy.total_steps
            self.claim(disk.oldest_step() == total, f"the checkpoint at the end is not of step {total}")
            marked = disk.files.get(MARKER)
            expected = f"YETO_FINAL_V1\nglobal_step={total}\n".encode() if self._policy.checkpoint.mark_final else None
            self.claim(marked == expected, f"the marker at the end is {marked!r}")

    def failed(self, finish: fx.Finish) -> None:
        """The process ends with code 1: was it right?"""
        if "No space left" in finish.text or "no learner was connected at the final cut" in finish.text:
            return
        missing = ", ".join(map(str, self._missing()))
        excused = {self._scenario.never_back} | self.left_alone
        self.claim(
            set(self._missing()) <= excused and f"by learners {missing}:" in finish.text,
            f"the run failed: {finish.text}",
        )

    # ------------------------------------------------------------------ learners

    def adopting(self, member: Member, fragment: int, version: int, data: bytes, before: int | None) -> None:
        """A learner takes a broadcast over. ``before``: what it adopted last on this connection."""
        self.claim(
            before is None or version > before, f"{member} adopts {version} of fragment {fragment} after {before}"
        )
        if member in self.heard:  # else the process that sent it is gone
            self.claim((fragment, version) in self.heard[member], f"{member} adopts what it was not sent")
            self.claim(self.bytes_of[fragment, version] == data, f"{member} adopts other bytes of {fragment}")

    def pushed(self, member: Member, push: PushFragment) -> None:
        """A learner sends an answer."""
        key = (member, push.step, push.attempt)
        self.claim(key not in self.pushes, f"{member} answers round {push.step} attempt {push.attempt} twice")
        self.pushes.add(key)

    def final_bytes(self) -> list[bytes]:
        """The authoritative parameters of every fragment."""
        return [params for _, params, _ in self.states[self._policy.total_steps]]


def bits(state: GlobalState) -> list[Bits]:
    """A whole state as bytes."""
    return [
        (version, state.params(f).numpy().tobytes(), state.momentum(f).numpy().tobytes())
        for f, version in enumerate(state.versions)
    ]


def _floats(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)
