"""A fleet in lockstep on one thread, made of the product's own parts.

Decides only who acts when: the session decides what a learner adopts and answers, ``Exchange`` reads and writes
parameters, the wire's codec rounds, the syncer's functions merge, ``GlobalState`` makes the outer step. It must not
know tasks, losses or arms. Time is counted in ticks, one local step of a learner of speed 1 each:

    before the tick   broadcasts that have arrived are queued; if a round is due, its pull arrives
    the tick          every member makes a local step; at its boundary it adopts what is queued, then answers the pull
    behind the tick   once all members have answered, the round is merged and its broadcast leaves

So a broadcast is adopted one step after the answers it is made of, and that step's progress on the fragment is
overwritten: of H steps H - 1 are merged. Round t works on fragment (t - 1) mod F; rounds are H / F ticks apart.
That real processes do the same, bit for bit, is shown by tests/experiments/test_real_lockstep.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from experiments.codecs import answer_dtype, bulk_of, encode_answer
from experiments.configs import Fleet
from experiments.merging import aligned_gain, decoded, outer_gradient, outer_step
from syncer.merge.intake import learner_weight
from syncer.plan.network import framed_bytes
from syncer.state import GlobalState
from yeto_torch.fragments import bind, collect
from yeto_torch.learner.effects import Adopt, Respond
from yeto_torch.learner.exchange import Exchange
from yeto_torch.learner.session import Session
from yeto_torch.wire.codec import decode, encode
from yeto_torch.wire.messages import BcastFragment, PullReq
from yeto_torch.wire.model_layout import Layout

PUSH_HEAD, BCAST_HEAD = 48, 12  # bytes of a message before its tensor


@dataclass(frozen=True, slots=True)
class Answer:
    """A learner's progress on one fragment since its anchor, as it travels."""

    c_steps: int
    c_tokens: int
    data: memoryview


class Learner:
    """A model, its optimizer, and the learner's side of the protocol without a network.

    Args:
        train: makes one local step of all of ``inner`` on ``model`` and returns its tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Sequence[torch.optim.Optimizer],
        layout: Layout,
        wire: str,
        train: Callable[[nn.Module, Sequence[torch.optim.Optimizer]], int],
    ) -> None:
        self._model, self._inner, self._wire, self._train = model, inner, wire, train
        self._exchange = Exchange(layout, bind(layout, collect(inner, model)), bulk_of(wire), 0.0)
        self._session = Session(len(layout))
        self._session.attached(1)
        self._steps = self._tokens = 0

    def hear(self, message: BcastFragment | PullReq) -> None:
        self._session.received(message)

    def adopt(self) -> None:
        """What the constructor does: take the first anchors."""
        self._boundary()

    def step(self) -> Answer | None:
        """One local step and its boundary; the answer, if a pull was waiting."""
        self._tokens += self._train(self._model, self._inner)
        self._steps += 1
        return self._boundary()

    def _boundary(self) -> Answer | None:
        answer = None
        for effect in self._session.boundary(self._steps, self._tokens):
            match effect:
                case Adopt(fragment, _, data, write):
                    self._exchange.adopt(fragment, data, write)
                case Respond(pull, _, _, anchor):
                    delta = self._exchange.delta(pull.fragment, anchor)
                    answer = Answer(effect.c_steps, effect.c_tokens, encode_answer(delta, self._wire))
        return answer


@dataclass(slots=True)
class Round:
    """The round in flight: whose answers it waits for, and those it has."""

    step: int
    fragment: int
    missing: set[int]
    answers: dict[int, Answer] = field(default_factory=dict)


class World:
    """Syncer, learners and the time between them.

    Args:
        start: learner 0's parameters, [numel] f32 per fragment; the fleet begins with what the wire makes of them.
        make: makes the learner of an id, at the start and when it comes back; its model's parameters are replaced by
            the fleet's.

    Attributes:
        now: ticks that are over.
        gains: per fragment the aligned gain of each merge so far.
        nbytes: on the wire by now, of all learners, framing included.
    """

    def __init__(self, fleet: Fleet, layout: Layout, start: Sequence[Tensor], make: Callable[[int], Learner]) -> None:
        self._fleet, self._layout, self._make = fleet, layout, make
        self.state = GlobalState(layout.wire, torch.device("cpu"))
        bulk = bulk_of(fleet.wire)
        for fragment, values in enumerate(start):  # they come from learner 0, by the wire
            self.state.initialize(fragment, decode(encode(values, bulk), values.numel(), bulk))
        self.now = self.nbytes = 0
        self.gains: list[list[float]] = [[] for _ in range(len(layout))]
        self._next_launch = fleet.steps_per_round
        self._round: Round | None = None
        self._post: list[tuple[int, int, BcastFragment]] = []  # (tick of arrival, learner, message)
        self._members: dict[int, Learner] = {}
        for learner in range(fleet.learners):
            self._join(learner)

    def tick(self) -> None:
        """One tick; see the top of this file."""
        self.now += 1
        self._come_and_go()
        self._deliver()
        if self._round is None and self.now >= self._next_launch:
            self._launch()
        for learner in self.active(self.now):
            answer = self._members[learner].step()
            if answer is not None and self._round is not None:
                self._round.answers[learner] = answer
                self._round.missing.discard(learner)
        if self._round is not None and not self._round.missing:
            self._merge(self._round)
            self._round = None

    def active(self, tick: int) -> list[int]:
        """The learners that end a local step in ``tick``, in the order in which they take their samples."""
        speeds = self._fleet.speeds or (1.0,) * self._fleet.learners
        return [
            i for i, v in enumerate(speeds) if i in self._members and math.floor(v * tick) > math.floor(v * (tick - 1))
        ]

    def final(self) -> list[Tensor]:
        """The final cut: [numel] f32 per fragment, the live tensors."""
        return [self.state.params(fragment) for fragment in range(len(self._layout))]

    def _join(self, learner: int) -> None:
        member = self._members[learner] = self._make(learner)
        for fragment in range(len(self._layout)):
            member.hear(self._broadcast(fragment))
        member.adopt()

    def _come_and_go(self) -> None:
        for learner, first, back in self._fleet.absences:
            if self.now == first:
                del self._members[learner]
                self._post = [entry for entry in self._post if entry[1] != learner]
                if self._round is not None:
                    self._round.missing.discard(learner)
                    self._round.answers.pop(learner, None)
            elif self.now == back:
                self._join(learner)

    def _deliver(self) -> None:
        for _, learner, message in [entry for entry in self._post if entry[0] <= self.now]:
            self._members[learner].hear(message)
        self._post = [entry for entry in self._post if entry[0] > self.now]

    def _launch(self) -> None:
        step = self.state.step + 1
        fragment = (step - 1) % len(self._layout)
        self._round = Round(step, fragment, set(self._members))
        self._next_launch = self.now + self._fleet.steps_per_round
        for member in self._members.values():
            member.hear(PullReq(fragment, step, 1))

    def _merge(self, answered: Round) -> None:
        fragment, answers = answered.fragment, [answered.answers[i] for i in sorted(answered.answers)]
        if not answers:
            raise RuntimeError(f"round {answered.step}: all its members left before they answered")
        layout = self._layout.wire.fragments[fragment]
        gradients = decoded(self._fleet, layout, [answer.data for answer in answers])
        weights = [learner_weight(answer.c_tokens, answer.c_steps) for answer in answers]
        momentum = self.state.momentum(fragment)
        merged = outer_gradient(self._fleet, layout, gradients, weights, momentum)
        lr, mu = outer_step(self._fleet, layout.mode, gradients, weights, momentum, merged)
        before = self.state.params(fragment).clone()
        self.state.commit(answered.step, fragment, merged, lr, mu)
        self.gains[fragment].append(aligned_gain(self.state.params(fragment) - before, gradients, weights))
        self.nbytes += sum(framed_bytes(PUSH_HEAD + answer.data.nbytes) for answer in answers)
        self._send(fragment)

    def _send(self, fragment: int) -> None:
        message = self._broadcast(fragment)
        delays = self._fleet.delays or (0,) * self._fleet.learners
        for learner in self._members:
            self.nbytes += framed_bytes(BCAST_HEAD + memoryview(message.data).nbytes)
            self._post.append((self.now + 1 + delays[learner], learner, message))

    def _broadcast(self, fragment: int) -> BcastFragment:
        data = self.state.broadcast_bytes(fragment, answer_dtype(self._fleet.wire))
        return BcastFragment(fragment, self.state.versions[fragment], data)
