"""What a group says, as events for the actor: checked, decoded on the group's own reader threads, and held back.

Decides only what no honest peer would send. It must not know rounds, sockets or other groups. A reader whose group has
too many unhandled events waits, and with it that peer's socket: this is what bounds the inbox.

Source: v4 §Versions and admission (the learner id in PUSH and HEARTBEAT must match the group's),
v4 §Deltas and staleness (negated exactly once, at decode), v4 §Frames (bounds); rulings §3.2, §3.3, §6.6.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from threading import Lock, Semaphore

import torch

from syncer.config.policy import SyncerPolicy
from syncer.core import events as ev
from syncer.core.events import Member
from syncer.merge.blocks import norm
from syncer.merge.intake import decode_gradient, learner_weight
from yeto_torch.wire import codec
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.messages import BudgetDone, FinalAck, Heartbeat, Hello, InitParams, Message, PushFragment

_MAX_EVENTS = 64  # unhandled events of one group
_SHORT = 1 << 18  # values

Post = Callable[[ev.Event, float, Callable[[], None] | None], None]
"""Hands the actor (event, arrival in monotonic seconds, what to call once it is handled); does not block."""


class Decoding:
    """Tensors between their last byte and their event, over all groups: time must not pass them."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._lock = Lock()
        self._short = Lock()
        self._numbers = itertools.count()
        self._arrivals: dict[int, float] = {}

    def settled_until(self, now: float) -> float:
        """The time up to which whatever arrived has become an event: ``now``, or earlier while one is decoded."""
        with self._lock:
            return min((now, *self._arrivals.values()))

    def post(self, decode_event: Callable[[], ev.Event], now: float, numel: int, handled: Callable[[], None]) -> None:
        """Decode ``numel`` values that arrived at ``now`` and post it; at no moment it is neither under way nor posted.

        Short tensors are decoded one after the other: many threads at it would only take the interpreter from each
        other, and with 64 learners that cost more than the decoding.
        """
        event = None
        with self._lock:
            number = next(self._numbers)
            self._arrivals[number] = now
        try:
            with self._short if numel <= _SHORT else nullcontext():
                event = decode_event()
        finally:
            with self._lock:
                del self._arrivals[number]
                if event is not None:
                    self._post(event, now, handled)


class Reception:
    """One group's inbound side.

    Args:
        policy: the pipeline bounds the tensors that wait; ``merge.max_norm_ratio`` asks for norms.
        device: where decoded gradients go.
        post, decoding: through which events, and tensors, go to the actor.
        on_first_beat: called once, when the group proves that it sends heartbeats.
    """

    def __init__(
        self,
        policy: SyncerPolicy,
        device: torch.device,
        post: Post,
        decoding: Decoding,
        member: Member,
        hello: Hello,
        on_first_beat: Callable[[Member], None],
    ) -> None:
        self._device, self._post, self._decoding = device, post, decoding
        self._member, self._hello = member, hello
        self._wants_norms = policy.merge.max_norm_ratio is not None
        self._on_first_beat = on_first_beat
        self._beats = False
        self._events = Semaphore(_MAX_EVENTS)
        self._tensors = Semaphore(2 * policy.schedule.pipeline + 2)  # decoded fragments that wait for the actor

    def take(self, message: Message, now: float) -> None:
        """One message. Raises PeerError for what no honest peer sends."""
        match message:
            case PushFragment():
                self._bulk(lambda: self._push(message), now, message.fragment)
            case InitParams():
                self._bulk(lambda: self._init(message), now, message.fragment)
            case Heartbeat():
                self._check_id(message.learner_id, "HEARTBEAT")
                if not self._beats:
                    self._beats = True
                    self._on_first_beat(self._member)
                self._hand_on(ev.BeatArrived(self._member, message.local_step), now)
            case FinalAck():
                self._hand_on(ev.AckArrived(self._member, message.step), now)
            case BudgetDone():
                self._hand_on(ev.BudgetReported(self._member, message.steps), now)
            case _:
                raise PeerError(f"{message.TYPE.name} is not for the syncer")

    def _bulk(self, decode_event: Callable[[], ev.Event], now: float, fragment: int) -> None:
        self._tensors.acquire()
        try:
            self._decoding.post(decode_event, now, self._hello.layout.numels[fragment], self._tensors.release)
        except PeerError:
            self._tensors.release()
            raise

    def _hand_on(self, event: ev.Event, now: float) -> None:
        self._events.acquire()
        self._post(event, now, self._events.release)

    def _init(self, message: InitParams) -> ev.Event:
        if self._member.learner_id != 0:
            raise PeerError("INIT_PARAMS: only learner 0 may initialise")
        numel = self._hello.layout.numels[message.fragment]
        return ev.InitArrived(self._member, message.fragment, codec.decode(message.data, numel, self._hello.dtype.bulk))

    def _push(self, push: PushFragment) -> ev.Event:
        self._check_id(push.learner_id, "PUSH_FRAGMENT")
        numel = self._hello.layout.numels[push.fragment]
        gradient = decode_gradient(push.data, numel, self._hello.dtype, self._device)
        return ev.PushArrived(
            self._member,
            push.fragment,
            push.step,
            push.attempt,
            push.base_version,
            push.local_step,
            push.c_steps,
            push.c_tokens,
            learner_weight(push.c_tokens, push.c_steps),
            len(push.data),
            gradient,
            norm(gradient) if self._wants_norms else 0.0,
        )

    def _check_id(self, learner_id: int, name: str) -> None:
        if learner_id != self._member.learner_id:
            raise PeerError(f"{name} of learner {learner_id} on the connection of learner {self._member.learner_id}")
