"""The learner's connection: dial, redial with a fresh generation, heartbeat, and everything that is sent.

A thin shell around ``session``: it owns the lock, hands messages from the reader threads to the session, and does on
its own thread what the training thread must never wait for: connecting, encoding, queueing. It must not decide what
is adopted or answered, and it never touches a parameter.

    training thread | submit (one waiting push per fragment, the newest wins), wait, close
    reader threads  | session.received, then wake whoever is concerned; no tensor work
    link thread     | connect -> serve until the group is lost -> pause -> connect ...
                    | serve: acknowledgement, budget report, INIT, pushes as the group takes them, heartbeat

Source: v4 §Streams and chunks (DATA_HELLO on each further socket), v4 §Generations (each redial is a fresh one);
rulings §5.6, §5.8, §5.9, §5.14.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, Lock, Thread, current_thread

from torch import Tensor

from yeto_torch.learner.effects import Respond
from yeto_torch.learner.redial import Redial
from yeto_torch.learner.session import Session
from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.codec import encode as encode_tensor
from yeto_torch.wire.errors import ConnectionLostError, LocalError, PeerError, RunError
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import (
    BcastFragment,
    BudgetDone,
    DataHello,
    FinalAck,
    Heartbeat,
    Hello,
    InitParams,
    Message,
    PushFragment,
    encode,
)
from yeto_torch.wire.transport.group import Closed, Group
from yeto_torch.wire.transport.sockets import Socket, dial, send_parts
from yeto_torch.wire.transport.tls import ClientTls, TlsError

log = logging.getLogger("yeto_torch")

HEARTBEAT_S = 5.0
DIAL_TIMEOUT_S = 10.0
LAST_WORD_S = 0.5
RELEASE_S = 5.0  # how long a finished learner waits for SHUTDOWN
# For the threads of a closed connection to end, which takes milliseconds. They are waited for because one that lets go
# of a tensor while the interpreter goes down aborts the process.
THREADS_S = 5.0
_CLOSED_HERE = "closed here"  # the reason of a group that we closed

clock = time.monotonic


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A push on its way: the answer, and its delta as [numel] f32, or bf16 if it travels so; None stands for zeros."""

    respond: Respond
    delta: Tensor | None


@dataclass(slots=True)
class Traffic:
    """What has moved so far."""

    bytes_sent: int = 0
    bytes_received: int = 0
    pushes: int = 0
    groups: int = 0

    def add(self, group: Group | None) -> Traffic:
        """Count in what ``group`` has moved."""
        if group is not None:
            self.bytes_sent += group.bytes_sent
            self.bytes_received += group.bytes_received
        return self


class Link:
    """One learner's way to the syncer, over all its connections.

    Args:
        session: the machine; use it only under ``lock``.
        address: host and port.
        hello: its generation is replaced by a fresh one each time.
        limits: what may come in.
        mac_key: signs HELLO.
        max_reconnects: redials since the last broadcast before giving up; None = never.
        tls: how to secure every socket; None = not at all.

    Attributes:
        lock: guards the session and everything here that more than one thread uses.
        local_step: written by the training thread, read by the heartbeat.
    """

    def __init__(
        self,
        session: Session,
        address: tuple[str, int],
        hello: Hello,
        limits: GroupLimits,
        mac_key: bytes | None = None,
        max_reconnects: int | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self.session = session
        self.lock = Lock()
        self.local_step = 0
        self._attention = Condition(self.lock)  # the training thread waits here
        self._work = Condition(self.lock)  # the link thread waits here
        self._address, self._hello, self._limits, self._mac_key = address, hello, limits, mac_key
        self._tls = tls
        self._inits: dict[int, Buffer] = {}
        self._redial = Redial(max_reconnects)
        self._group: Group | None = None
        self._lost = self._stopping = False
        self._outbox: dict[int, Outgoing] = {}
        self._on_their_way: set[int] = set()  # fragments whose earlier push the group still has
        self._reported_on: int | None = None  # the generation the budget report was queued on
        self._traffic = Traffic()
        self._process = os.getpid()
        self._at_exit: Callable[[], None] = self.close
        self._thread = Thread(target=self._run, name="yeto-link", daemon=True)

    # ------------------------------------------------------------------------------------------ the owner's calls

    def start(self, at_exit: Callable[[], None], inits: Mapping[int, Buffer]) -> None:
        """Begin to dial; ``at_exit`` is called if the process exits before ``close``.

        ``inits``: encoded starting values per fragment, on learner 0; dropped as the fragments are seen.
        """
        self._inits = dict(inits)
        self._at_exit = atexit.register(at_exit)
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
            self._attention.wait_for(
                lambda: ready() or session.over or (session.attention and session.news), max(0.0, timeout_s)
            )
            return ready()

    def waiting_for(self) -> str:
        """What the session waits for, in words, with the last cause if there is no connection. Under the lock."""
        text, cause = self.session.waiting_for(), self._redial.cause
        return f"{text} ({cause})" if self.session.generation is None and cause else text

    @property
    def traffic(self) -> Traffic:
        """Totals of all connections. Under the lock."""
        return replace(self._traffic).add(self._group)

    def close(self) -> None:
        """Leave: a learner that holds the final cut first waits up to 5 s for SHUTDOWN, any other goes at once."""
        if not self.is_ours:
            return
        session = self.session
        with self.lock:
            if session.is_installed:
                self._attention.wait_for(lambda: session.over, RELEASE_S)
                if not session.over:
                    log.warning("no SHUTDOWN within %g s of the final acknowledgement; leaving", RELEASE_S)
            self._stopping = True
            session.leave()
            group = self._retire()
            self._wake()
            dialling = self._traffic.groups == 0
        if group is not None:
            group.close()
            group.join(THREADS_S)
        if self._thread.is_alive() and self._thread is not current_thread():
            self._thread.join(1.0 if dialling else THREADS_S)  # it is a daemon, and ends when its dialling does
        atexit.unregister(self._at_exit)

    @property
    def is_ours(self) -> bool:
        """False in a forked child: it shares the sockets, and only its parent may end them."""
        return os.getpid() == self._process

    def abandon(self) -> None:
        """Leave as ``close`` does, without waiting: for a finalizer, which may run while any thread holds the lock."""
        if self.is_ours:
            Thread(target=self.close, name="yeto-leave", daemon=True).start()

    # ------------------------------------------------------------------------------------------ link thread

    def _run(self) -> None:
        try:
            while self._may_go_on():
                group = self._connect()
                if group is not None:
                    self._serve(group)
                    self._leave_group(group)
                self._pause()
        except Exception as error:
            log.exception("the link to the syncer failed")
            with self.lock:  # the training thread must not wait for a dead link
                self.session.fail(RunError(f"the link to the syncer failed: {error!r}"))
        finally:
            with self.lock:
                warning = self.session.warning
                self._attention.notify_all()
            if warning is not None:
                log.warning("%s", warning)

    def _may_go_on(self) -> bool:
        with self.lock:
            if self._stopping or self.session.over:
                return False
            if self._redial.exhausted:
                self.session.fail(
                    ConnectionLostError(f"gave up reconnecting (max_reconnects); the last cause: {self._redial.cause}")
                )
                return False
            return True

    def _connect(self) -> Group | None:
        """One attempt at a whole connection group; None when the control stream failed."""
        generation = secrets.randbelow(2**64 - 1) + 1
        hello = replace(self._hello, generation=generation)
        try:
            control = self._open(encode(hello, self._mac_key))
        except OSError as error:
            self._note(str(error))
            with self.lock:
                self._give_up_on(error)
            return None
        group = Group(
            control,
            self._limits,
            hello.num_streams,
            on_message=partial(self._received, generation),
            on_closed=partial(self._closed, generation),
            name=f"learner {hello.learner_id}",
        )
        with self.lock:
            self._outbox.clear()
            self._on_their_way.clear()
            self.session.attached(generation)
            self._group, self._lost = group, False
            self._traffic.groups += 1
        group.start()
        self._attach_data_streams(group, hello)
        return group

    def _attach_data_streams(self, group: Group, hello: Hello) -> None:
        try:
            for index in range(hello.num_streams):
                data = self._open(encode(DataHello(hello.learner_id, hello.generation, index)))
                try:
                    group.attach(index, data)
                except LocalError:  # the group was lost meanwhile, which its own callback reports
                    data.close()
                    return
        except OSError as error:
            with self.lock:  # if the syncer is turning us away, its reason is on the control stream
                self._work.wait_for(lambda: self._lost or self._stopping, LAST_WORD_S)
            if not group.closed:
                self._note(str(error))
            group.close()

    def _open(self, first_frame: Sequence[Buffer]) -> Socket:
        """A connected socket that has said its first frame. Raises OSError."""
        sock = dial(*self._address, DIAL_TIMEOUT_S, self._tls)
        try:
            if self._stopping:  # a HELLO would supersede whoever has taken our place, for good
                raise ConnectionAbortedError(_CLOSED_HERE)
            send_parts(sock, first_frame, DIAL_TIMEOUT_S)
        except OSError:
            sock.close()
            raise
        return sock

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
                self._send_control(group)
                outgoing = self._next_push()
            if outgoing is not None:
                self._push(group, outgoing)
                outgoing = None  # its delta is as large as a fragment, and the next one may be long in coming
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
            or (session.budget_due is not None and self._reported_on != session.generation)
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
        if steps is not None and self._reported_on != generation:
            self._reported_on = generation
            group.send(BudgetDone(steps), self._budget_left)

    def _push(self, group: Group, outgoing: Outgoing) -> None:
        respond, fragment = outgoing.respond, outgoing.respond.pull.fragment
        delta, dtype = outgoing.delta, self._hello.dtype
        zeros = self._hello.layout.nbytes(fragment, dtype)  # zero bytes are zeros in every dtype
        push = PushFragment(
            self._hello.learner_id,
            fragment,
            respond.pull.step,
            respond.pull.attempt,
            respond.base_version,
            respond.local_step,
            respond.c_steps,
            respond.c_tokens,
            bytes(zeros) if delta is None else encode_tensor(delta, dtype),
        )
        if group.send(push, partial(self._push_left, respond.generation, fragment)):
            with self.lock:
                self._traffic.pushes += 1

    def _leave_group(self, group: Group) -> None:
        group.close()
        with self.lock:
            self.session.detached()
            self._outbox.clear()
            self._retire()
        group.join(THREADS_S)

    def _retire(self) -> Group | None:
        """Count the group's bytes for good and let go of it. Under the lock."""
        group, self._group = self._group, None
        self._traffic.add(group)
        return group

    def _pause(self) -> None:
        with self.lock:
            self._work.wait_for(lambda: self._stopping or self.session.over, self._redial.next_pause_s())

    def _note(self, cause: str) -> None:
        """Remember why there is no connection, and say it now and then."""
        with self.lock:
            complain = self._redial.failed(cause, clock()) and not self._stopping
        if complain:
            log.warning("no connection to the syncer: %s; trying again", cause)

    def _give_up_on(self, error: OSError | None) -> None:
        """TLS that fails before the syncer was ever heard is a mistake in the configuration; later it may pass."""
        if isinstance(error, TlsError) and len(self.session.unseen) == len(self._hello.layout):
            self.session.fail(ConnectionLostError(f"{error}; see tls= and YETO_TLS_CA, YETO_TLS_CERT, YETO_TLS_KEY"))

    # ------------------------------------------------------------------------------------------ the group's threads

    def _received(self, generation: int, message: Message, _now: float) -> None:
        with self.lock:
            if generation != self.session.generation:
                return
            self.session.received(message)
            if isinstance(message, BcastFragment):
                self._inits.pop(message.fragment, None)
                self._redial.succeeded()
            self._wake()

    def _closed(self, generation: int, closed: Closed) -> None:
        with self.lock:
            if generation != self.session.generation:
                return
            lost = closed.reason != _CLOSED_HERE and not self.session.over
            if closed.peer_error is not None:
                self.session.refused(closed.peer_error)
            elif closed.violation is not None:
                self.session.fail(PeerError(f"the syncer broke the protocol: {closed.violation}"))
            elif lost:
                self._redial.cause = closed.reason
                log.warning("lost the connection to the syncer: %s; training goes on", closed.reason)
                self._give_up_on(closed.error)
            self.session.detached()
            self._lost = True
            self._wake()

    def _ack_left(self, generation: int) -> None:
        with self.lock:
            self.session.ack_sent(generation)
            self._wake()

    def _budget_left(self) -> None:
        with self.lock:
            self.session.is_budget_sent = True
            self._wake()

    def _push_left(self, generation: int, fragment: int) -> None:
        with self.lock:
            if generation == self.session.generation:
                self._on_their_way.discard(fragment)
                self._work.notify()

    def _wake(self) -> None:
        self._work.notify()
        self._attention.notify_all()
