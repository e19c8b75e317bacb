"""A learner whose every word is scripted by a test, over real sockets, built on the treaty and the transport.

It remembers what it was told (``next`` hands out each message once) and adopts broadcasts as the law says: the newest
version of a fragment is the anchor. What several peers of one run send and see goes into one ``Journal``, from which a
replay or a comparison is made. Every wait has a deadline.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from yeto_torch.wire import messages
from yeto_torch.wire.codec import encode
from yeto_torch.wire.constants import Direction, WireDType
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import encode as frame
from yeto_torch.wire.model_layout import Layout
from yeto_torch.wire.transport.group import Closed, Group
from yeto_torch.wire.transport.sockets import send_parts

WAIT_S = 60.0
M = TypeVar("M", bound=messages.Message)
Delta = Callable[["ScriptedLearner", messages.PullReq], "np.ndarray"]


class Journal:
    """What the peers of one run sent and saw.

    Attributes:
        pushes: by (learner id, generation, step, attempt).
        broadcasts: bytes by (fragment, version); two receivers that see different bytes fail the test.
        epoch: part of every key of ``broadcasts``; a test raises it when the syncer may be set back.
        on_broadcast: called with every BCAST, on the reader thread that brought it.
        faults: what was wrong; ``check`` raises them in the test's own thread.
    """

    def __init__(self, on_broadcast: Callable[[messages.BcastFragment], None] = lambda _: None) -> None:
        self.pushes: dict[tuple[int, int, int, int], messages.PushFragment] = {}
        self.broadcasts: dict[tuple[int, int, int], bytes] = {}
        self.epoch = 0
        self.on_broadcast = on_broadcast
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def sent(self, generation: int, push: messages.PushFragment) -> None:
        with self._lock:
            self.pushes[push.learner_id, generation, push.step, push.attempt] = push

    def saw(self, message: messages.BcastFragment) -> None:
        with self._lock:
            key, data = (self.epoch, message.fragment, message.version), bytes(message.data)
            if self.broadcasts.setdefault(key, data) != data:
                self.faults.append(f"fragment {message.fragment}, version {message.version}: two different broadcasts")
        self.on_broadcast(message)

    def check(self) -> None:
        assert not self.faults, self.faults


class ScriptedLearner:
    """One connection group of a scripted learner; the constructor has said HELLO and attached all data streams.

    Args:
        address: ``host:port``.
        layout: of the model.
        dtype: ``f32``, ``bf16`` or ``q4``.
        streams: data sockets that HELLO declares; ``attached``: how many are attached, default all.
        contract: default: the fingerprint.
        generation: default: a fresh one.
        receive_buffer: SO_RCVBUF of the sockets, to be a slow reader.
    """

    def __init__(
        self,
        address: str,
        learner_id: int,
        layout: Layout,
        *,
        dtype: str = "f32",
        streams: int = 0,
        contract: bytes | None = None,
        generation: int | None = None,
        journal: Journal | None = None,
        receive_buffer: int | None = None,
        attached: int | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._endpoint, self._receive_buffer = (host, int(port)), receive_buffer
        self.learner_id, self.layout = learner_id, layout
        self.generation = generation or secrets.randbelow(2**63) + 1
        self.dtype = WireDType[dtype.upper()]
        self.journal = journal or Journal()
        self.local_step = 0
        self.anchors: dict[int, messages.BcastFragment] = {}
        self.seen: list[messages.Message] = []
        self.closed: Closed | None = None
        self._taken: set[int] = set()
        self._delta: Delta | None = None
        self._open_pulls: list[messages.PullReq] = []
        self._changed = threading.Condition()
        hello = messages.Hello(
            learner_id,
            self.generation,
            self.dtype,
            layout.wire,
            layout.fingerprint,
            layout.fingerprint if contract is None else contract,
            None,
            streams,
        )
        self.control = self._open(hello)
        self.group = Group(
            self.control,
            GroupLimits(layout.wire, self.dtype, Direction.TO_LEARNER),
            streams,
            on_message=self._received,
            on_closed=self._lost,
            name=f"peer {learner_id}",
        )
        self.group.start()
        for index in range(streams if attached is None else attached):
            self.group.attach(index, self._open(messages.DataHello(learner_id, self.generation, index)))

    def _open(self, first: messages.Hello | messages.DataHello) -> socket.socket:
        sock = socket.socket()
        if self._receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        sock.settimeout(WAIT_S)
        try:
            sock.connect(self._endpoint)
            send_parts(sock, frame(first), WAIT_S)
        except OSError:
            sock.close()
            raise
        return sock

    # ------------------------------------------------------------------------------------------ what it says

    def send(self, message: messages.Message) -> None:
        assert self.group.send(message), f"peer {self.learner_id} is closed: {self.closed}"

    def init(self, values: list[np.ndarray]) -> None:
        """INIT of every fragment: [numel] f32 each."""
        for fragment, value in enumerate(values):
            self.send(messages.InitParams(fragment, encode(torch.from_numpy(value), self.dtype.bulk)))

    def answer(
        self,
        pull: messages.PullReq,
        delta: np.ndarray,
        *,
        base: int | None = None,
        local_step: int | None = None,
        c_steps: int = 1,
        c_tokens: int = 10,
    ) -> messages.PushFragment:
        """PUSH for ``pull``: ``delta`` is [numel] f32, local minus anchor. Returns once its bytes have left.

        A serving peer does not wait: there a newer answer of the fragment may replace one that has not left.
        """
        self.local_step = self.local_step + 1 if local_step is None else local_step
        push = messages.PushFragment(
            self.learner_id,
            pull.fragment,
            pull.step,
            pull.attempt,
            self.anchors[pull.fragment].version if base is None else base,
            self.local_step,
            c_steps,
            c_tokens,
            bytes(encode(torch.from_numpy(delta), self.dtype)),
        )
        self.journal.sent(self.generation, push)
        if self._delta is not None:
            self.group.send(push)
            return push
        left = threading.Event()
        assert self.group.send(push, left.set), f"peer {self.learner_id} is closed: {self.closed}"
        assert left.wait(WAIT_S), f"peer {self.learner_id} could not send within {WAIT_S:g} s"
        return push

    def serve(self, delta: Delta) -> None:
        """From now on answer every pull by itself, as soon as its fragment has an anchor; acknowledge the final cut."""
        with self._changed:
            self._delta = delta
            self._open_pulls += [
                m for i, m in enumerate(self.seen) if isinstance(m, messages.PullReq) and i not in self._taken
            ]
            self._work()

    def heartbeat(self) -> None:
        self.send(messages.Heartbeat(self.learner_id, self.local_step))

    def ack(self, step: int) -> None:
        self.send(messages.FinalAck(step))

    def raw(self, data: bytes) -> None:
        """Bytes on the control socket, past the group: only while nothing else is being sent."""
        send_parts(self.control, [data], WAIT_S)

    def close(self, *, flush: bool = False) -> None:
        """The connection is lost; with ``flush`` only behind all that was said."""
        self.group.close(linger_s=5.0 if flush else 0.0)
        assert self.group.join(WAIT_S)

    # ------------------------------------------------------------------------------------------ what it was told

    def next(self, kind: type[M], timeout_s: float = WAIT_S, **fields: int) -> M:
        """The first message of that kind with those fields that no call returned yet."""

        def search() -> int | None:
            for index, message in enumerate(self.seen):
                if index in self._taken or not isinstance(message, kind):
                    continue
                if all(getattr(message, name) == value for name, value in fields.items()):
                    return index
            return None

        with self._changed:
            self._changed.wait_for(lambda: search() is not None or self.closed is not None, timeout_s)
            index = search()
            last = [(type(m).__name__, getattr(m, "step", getattr(m, "version", None))) for m in self.seen[-20:]]
            assert index is not None, (
                f"peer {self.learner_id} saw no {kind.__name__} {fields} within {timeout_s:g} s; "
                f"closed: {self.closed}; its last messages: {last}"
            )
            self._taken.add(index)
            return self.seen[index]  # type: ignore[return-value]

    def pull(self, timeout_s: float = WAIT_S, **fields: int) -> messages.PullReq:
        """The next PULL_REQ whose fragment has an anchor by now."""
        pull = self.next(messages.PullReq, timeout_s, **fields)
        self.wait(lambda: pull.fragment in self.anchors, f"an anchor of fragment {pull.fragment}", timeout_s)
        return pull

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Until something this peer is told makes ``condition`` true."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), (
                f"peer {self.learner_id}, not within {timeout_s:g} s: {what}; closed: {self.closed}"
            )

    def cut(self, timeout_s: float = WAIT_S) -> tuple[messages.FinalManifest, list[np.ndarray]]:
        """The whole final cut: its manifest, and the fragments as [numel] f32."""
        self.wait(lambda: self._cut() is not None, "the whole final cut", timeout_s)
        manifest = self._cut()
        assert manifest is not None
        finals = self._finals()
        return manifest, [np.frombuffer(finals[f].data, "<f4") for f in range(len(self.layout))]

    def wait_closed(self, timeout_s: float = WAIT_S) -> Closed:
        self.wait(lambda: self.closed is not None, "the end of the connection", timeout_s)
        assert self.closed is not None
        return self.closed

    def has(self, kind: type[messages.Message]) -> bool:
        """Was such a message seen so far?"""
        with self._changed:
            return any(isinstance(message, kind) for message in self.seen)

    @property
    def released(self) -> bool:
        return self.has(messages.Shutdown)

    def _finals(self) -> dict[int, messages.FinalFragment]:
        return {m.fragment: m for m in self.seen if isinstance(m, messages.FinalFragment)}

    def _cut(self) -> messages.FinalManifest | None:
        manifest = next((m for m in self.seen if isinstance(m, messages.FinalManifest)), None)
        finals = self._finals()
        if manifest is None or len(finals) < len(self.layout):
            return None
        return manifest if all(finals[f].version == v for f, v in enumerate(manifest.versions)) else None

    # ------------------------------------------------------------------------------------------ the group's threads

    def _received(self, message: messages.Message, _now: float) -> None:
        if isinstance(message, messages.BcastFragment):
            self.journal.saw(message)
        with self._changed:
            self.seen.append(message)
            if isinstance(message, messages.BcastFragment):
                anchor = self.anchors.get(message.fragment)
                if anchor is None or message.version > anchor.version:
                    self.anchors[message.fragment] = message
            elif isinstance(message, messages.PullReq) and self._delta is not None:
                self._open_pulls.append(message)
            self._work()
            self._changed.notify_all()

    def _work(self) -> None:
        """What a serving peer does by itself."""
        if self._delta is None or self.closed is not None or self.group.closed:
            return
        for pull in [p for p in self._open_pulls if p.fragment in self.anchors]:
            self._open_pulls.remove(pull)
            self.answer(pull, self._delta(self, pull))
        manifest = self._cut()
        if manifest is not None and not self.group.closed:
            self.group.send(messages.FinalAck(manifest.step))

    def _lost(self, closed: Closed) -> None:
        with self._changed:
            self.closed = closed
            self._changed.notify_all()


def random_values(layout: Layout, seed: int, scale: float = 1.0) -> list[np.ndarray]:
    """[numel] f32 of every fragment."""
    generator = np.random.default_rng(seed)
    return [(scale * generator.standard_normal(fragment.numel)).astype(np.float32) for fragment in layout.fragments]
