"""The learner's connection: dial, redial with a fresh generation, heartbeat, and everything that is sent.

A thin shell around ``session``: it owns the lock, hands messages from the reader threads to the session, and does on
its own thread what the training thread must never wait for: connecting, encoding, queueing. It must not decide what
is adopted or answered, and it never touches a parameter.

    training thread | submit (one waiting push per fragment, the newest wins), wait
    reader threads  | session.received, then wake whoever is concerned; no tensor work
    link thread     | connect -> serve until the group is lost -> back off -> connect ...
                    | serve: acknowledgement, budget report, INIT, pushes as the group takes them, heartbeat

Source: protocol v4, connection group; rulings on redial, INIT, heartbeat and dialling.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, Lock, Thread, current_thread

from torch import Tensor

from yeto_torch.protocol.codec import encode as encode_tensor
from yeto_torch.protocol.errors import ConnectionLostError, LocalError, PeerError, RunError
from yeto_torch.protocol.limits import GroupLimits
from yeto_torch.protocol.messages import (
    BcastFragment,
    BudgetDone,
    Buffer,
    DataHello,
    FinalAck,
    Heartbeat,
    Hello,
    InitParams,
    Message,
    PushFragment,
    encode,
)
from yeto_torch.session import Respond, Session
from yeto_torch.transport.group import Closed, Group
from yeto_torch.transport.sockets import dial, send_parts

_log = logging.getLogger("yeto_torch")

HEARTBEAT_S = 5.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 30.0
DIAL_TIMEOUT_S = 10.0
COMPLAIN_EVERY_S = 10.0
RELEASE_S = 5.0  # how long a finished learner waits for SHUTDOWN
_CLOSED_HERE = "closed here"  # the reason of a group that we closed

clock = time.monotonic


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A push on its way: the answer, and its delta as [numel] f32; None stands for zeros."""

    respond: Respond
    delta: Tensor | None


@dataclass(slots=True)
class _Traffic:
    """What the groups that are gone have moved, and what counts for the statistics."""

    bytes_sent: int = 0
    bytes_received: int = 0
    pushes: int = 0
    groups: int = 0


class Link:
    """One learner's way to the syncer, over all its connections.

    Args:
        session: the machine; use it only under ``lock``.
        address: host and port.
        hello: generation 0 stands for "a fresh one each time".
        limits: what may come in.
        inits: encoded starting values per fragment, on learner 0; dropped as the fragments are seen.
        mac_key: signs HELLO.
        max_reconnects: redials since the last broadcast before giving up; None = never.
    """

    def __init__(
        self,
        session: Session,
        address: tuple[str, int],
        hello: Hello,
        limits: GroupLimits,
        inits: Mapping[int, Buffer],
        mac_key: bytes | None = None,
        max_reconnects: int | None = None,
    ) -> None:
        self.session = session
        self.lock = Lock()
        self._attention = Condition(self.lock)  # the training thread waits here
        self._work = Condition(self.lock)  # the link thread waits here
        self._address, self._hello, self._limits = address, hello, limits
        self._inits = dict(inits)
        self._mac_key, self._max_reconnects = mac_key, max_reconnects
        self._group: Group | None = None
        self._lost = False
        self._stopping = False
        self._outbox: dict[int, Outgoing] = {}
        self._on_their_way: set[int] = set()  # fragments whose earlier push the group still has
        self._budget_on: int | None = None  # the generation the budget report was queued on
        self._redials = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._last_cause = ""
        self._complained_at: float | None = None
        self._traffic = _Traffic()
        self._process = os.getpid()
        self.local_step = 0  # written by the training thread, read by the heartbeat
        self._thread = Thread(target=self._run, name="yeto-link", daemon=True)

    # ------------------------------------------------------------------------------------------ the owner's calls

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def submit(self, outgoing: Outgoing) -> None:
        """Hand over an answer; it replaces one of the same fragment that still waits. Never blocks on the network."""
        with self.lock:
            if outgoing.respond.generation == self.session.generation:
                self._outbox[outgoing.respond.pull.fragment] = outgoing
                self._work.notify()

    def nudge(self) -> None:
        """Something became due (an acknowledgement, a budget report)."""
        with self.lock:
            self._work.notify()

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Block the calling thread until ``ready()`` (called under the lock) or the session needs it; is it ready?"""
        session = self.session
        with self.lock:
            self._attention.wait_for(lambda: ready() or (session.attention and session.news), max(0.0, timeout_s))
            return ready()

    def waiting_for(self) -> str:
        """What the session waits for, in words, with the last cause if there is no connection. Under the lock."""
        text = self.session.waiting_for()
        return f"{text} ({self._last_cause})" if self.session.generation is None and self._last_cause else text

    def close(self) -> None:
        """Leave: a learner that holds the final cut first waits up to 5 s for SHUTDOWN, any other goes at once."""
        if os.getpid() != self._process:
            return  # a forked child shares the sockets; only the parent may end them
        session = self.session
        with self.lock:
            if session.is_installed:
                self._attention.wait_for(lambda: session.over, RELEASE_S)
                if not session.over:
                    _log.warning("no SHUTDOWN within %g s of the final acknowledgement; leaving", RELEASE_S)
            self._stopping = True
            session.leave()
            group, self._group = self._group, None
            self._retire(group)
            self._wake()
        if group is not None:
            group.close()
        if self._thread.is_alive() and self._thread is not current_thread():
            self._thread.join(1.0)  # it may be dialling; it is a daemon and ends with that

    @property
    def traffic(self) -> _Traffic:
        """Totals of all connections. Under the lock."""
        total = replace(self._traffic)
        if self._group is not None:
            total.bytes_sent += self._group.bytes_sent
            total.bytes_received += self._group.bytes_received
        return total

    # ------------------------------------------------------------------------------------------ link thread

    def _run(self) -> None:
        try:
            while self._may_go_on():
                group = self._connect()
                if group is not None:
                    self._serve(group)
                    self._leave_group(group)
                self._back_off()
        except Exception as error:  # nothing may leave the training thread waiting for a dead link
            _log.exception("the link to the syncer failed")
            with self.lock:
                self.session.fail(RunError(f"the link to the syncer failed: {error!r}"))
        finally:
            with self.lock:
                self._attention.notify_all()

    def _may_go_on(self) -> bool:
        with self.lock:
            if self._stopping or self.session.over:
                return False
            if self._max_reconnects is not None and self._redials > self._max_reconnects:
                self.session.fail(
                    ConnectionLostError(
                        f"gave up after {self._max_reconnects} reconnects (max_reconnects): {self._last_cause}"
                    )
                )
                return False
            return True

    def _connect(self) -> Group | None:
        """One attempt at a whole connection group; None when it failed."""
        host, port = self._address
        generation = self._fresh_generation()
        hello = replace(self._hello, generation=generation)
        try:
            control = _open(host, port, encode(hello, self._mac_key))
        except OSError as error:
            self._note(str(error))
            return None
        with self.lock:
            self._lost = False
            self._outbox.clear()
            self._on_their_way.clear()
            self.session.attached(generation)
            self._traffic.groups += 1
        group = Group(
            control,
            self._limits,
            hello.num_streams,
            on_message=partial(self._received, generation),
            on_closed=partial(self._closed, generation),
            name=f"learner {hello.learner_id}",
        )
        with self.lock:
            self._group = group
            if self._stopping:
                self._lost = True
        group.start()
        try:
            for index in range(hello.num_streams):
                data = _open(host, port, encode(DataHello(hello.learner_id, generation, index)))
                try:
                    group.attach(index, data)
                except LocalError:  # it was lost meanwhile, which its own callback reports
                    data.close()
                    break
        except OSError as error:
            if not group.closed:
                self._note(str(error))
            group.close()
        return group

    def _fresh_generation(self) -> int:
        return secrets.randbelow(2**64 - 1) + 1

    def _serve(self, group: Group) -> None:
        """Send what becomes due until the group is lost."""
        next_heartbeat = clock() + HEARTBEAT_S
        with self.lock:
            for fragment in sorted(self.session.unseen & self._inits.keys()):
                group.send(InitParams(fragment, self._inits[fragment]))
        while True:
            with self.lock:
                self._work.wait_for(self._has_work, max(0.0, next_heartbeat - clock()))
                if self._lost or self._stopping or self.session.over:
                    return
                outgoing = self._next_push()
                self._send_control(group)
            if outgoing is not None:
                self._push(group, outgoing)
            if clock() >= next_heartbeat:
                group.send(Heartbeat(self._hello.learner_id, self.local_step))
                next_heartbeat = clock() + HEARTBEAT_S

    def _has_work(self) -> bool:
        session = self.session
        return (
            self._lost
            or self._stopping
            or session.over
            or session.ack_due is not None
            or (session.budget_due is not None and not self._budget_queued())
            or any(fragment not in self._on_their_way for fragment in self._outbox)
        )

    def _next_push(self) -> Outgoing | None:
        for fragment in self._outbox:
            if fragment not in self._on_their_way:
                self._on_their_way.add(fragment)
                return self._outbox.pop(fragment)
        return None

    def _send_control(self, group: Group) -> None:
        """Acknowledgement and budget report, under the lock: queueing never blocks."""
        session, generation = self.session, self.session.generation
        if generation is None:
            return
        step = session.ack_due
        if step is not None:
            session.ack_started()
            group.send(FinalAck(step), partial(self._ack_left, generation))
        steps = session.budget_due
        if steps is not None and not self._budget_queued():
            self._budget_on = generation
            group.send(BudgetDone(steps), self._budget_left)

    def _budget_queued(self) -> bool:
        return self._budget_on is not None and self._budget_on == self.session.generation

    def _push(self, group: Group, outgoing: Outgoing) -> None:
        respond, fragment = outgoing.respond, outgoing.respond.pull.fragment
        dtype = self._hello.dtype
        data: Buffer
        if outgoing.delta is None:
            data = bytes(self._hello.layout.nbytes(fragment, dtype))  # zero bytes are zeros in every dtype
        else:
            data = encode_tensor(outgoing.delta, dtype)
        push = PushFragment(
            self._hello.learner_id,
            fragment,
            respond.pull.step,
            respond.pull.attempt,
            respond.base_version,
            respond.local_step,
            respond.c_steps,
            respond.c_tokens,
            data,
        )
        if group.send(push, partial(self._push_left, respond.generation, fragment)):
            with self.lock:
                self._traffic.pushes += 1

    def _leave_group(self, group: Group) -> None:
        group.close()
        with self.lock:
            self.session.detached()
            self._outbox.clear()
            if self._group is group:
                self._group = None
                self._retire(group)

    def _retire(self, group: Group | None) -> None:
        if group is not None:
            self._traffic.bytes_sent += group.bytes_sent
            self._traffic.bytes_received += group.bytes_received

    def _back_off(self) -> None:
        with self.lock:
            if self._stopping or self.session.over:
                return
            pause_s = min(LAST_BACKOFF_S, self._backoff_s * random.uniform(1.0, 1.5))
            self._backoff_s = min(LAST_BACKOFF_S, 2 * self._backoff_s)
            self._redials += 1
            self._work.wait_for(lambda: self._stopping or self.session.over, pause_s)

    def _note(self, cause: str) -> None:
        """Remember why there is no connection; say it at once, then every 10 s."""
        with self.lock:
            self._last_cause = cause
        now = clock()
        if self._complained_at is None or now - self._complained_at >= COMPLAIN_EVERY_S:
            self._complained_at = now
            _log.warning("no connection to the syncer: %s; trying again", cause)

    # ------------------------------------------------------------------------------------------ the group's threads

    def _received(self, generation: int, message: Message, _now: float) -> None:
        with self.lock:
            if generation != self.session.generation:
                return
            self.session.received(message)
            if isinstance(message, BcastFragment):
                self._inits.pop(message.fragment, None)
                self._redials, self._backoff_s, self._complained_at = 0, FIRST_BACKOFF_S, None
            self._wake()

    def _closed(self, generation: int, closed: Closed) -> None:
        with self.lock:
            if generation != self.session.generation:
                return
            if closed.peer_error is not None:
                self.session.refused(closed.peer_error)
            elif closed.violation is not None:
                self.session.fail(PeerError(f"the syncer broke the protocol: {closed.violation}"))
            elif closed.reason != _CLOSED_HERE and not self.session.over:
                self._last_cause = closed.reason
                _log.warning("lost the connection to the syncer: %s; training goes on", closed.reason)
            self.session.detached()
            self._lost = True
            self._wake()

    def _ack_left(self, generation: int) -> None:
        with self.lock:
            self.session.ack_sent(generation)
            self._wake()

    def _budget_left(self) -> None:
        with self.lock:
            self.session.budget_sent()
            self._wake()

    def _push_left(self, generation: int, fragment: int) -> None:
        with self.lock:
            if generation == self.session.generation:
                self._on_their_way.discard(fragment)
                self._work.notify()

    def _wake(self) -> None:
        self._work.notify()
        self._attention.notify_all()


def _open(host: str, port: int, first_frame: Sequence[Buffer]) -> socket.socket:
    """A connected socket that has said its first frame. Raises OSError."""
    sock = dial(host, port, DIAL_TIMEOUT_S)
    try:
        send_parts(sock, first_frame, DIAL_TIMEOUT_S)
    except OSError:
        sock.close()
        raise
    return sock
