"""The door: listener, first frames, connection groups.

A thin shell. It accepts sockets, reads one first frame from each, hands HELLOs to the actor and does with them what
the actor says; groups hand their messages on as events, tensors decoded on the reader threads. It decides nothing
about who may enter (``core/admission``) or what an answer is worth (``core/rounds``).

    threads   one listener; one per socket whose first frame is awaited, at most max_pending_handshakes;
              one janitor for what time alone ends; two per socket of a group (transport)
    bounded   handshakes: the oldest silent socket makes room; data sockets that are early: ``_MAX_EARLY``; events per
              group: a reader whose group has too many unhandled ones waits, and with it that peer's socket;
              HELLOs by their bytes, long ones read one at a time and none longer than the session's once it has one;
              descriptors: the last ``_SPARE_DESCRIPTORS`` are for files, never for a stranger's socket

Source: v4 §Frames (the first frame is HELLO or DATA_HELLO, capped), v4 §Streams and chunks (sockets attach to the
group of their generation), v4 §Versions and admission (ERROR and close); rulings §1.4, §1.8, §6.8.
"""

from __future__ import annotations

import itertools
import logging
import socket
import ssl
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Lock, Semaphore, Thread

import torch

from syncer.config.policy import SecurityPolicy, SyncerPolicy
from syncer.core import events as ev
from syncer.core.events import Member
from syncer.core.rate_limiter import RateLimiter, remark
from syncer.descriptors import max_descriptors
from syncer.reception import Decoding, Post, Reception
from yeto_torch.wire.buffers import Spare
from yeto_torch.wire.constants import Direction, MessageType
from yeto_torch.wire.errors import LocalError, PeerError, RunError
from yeto_torch.wire.frames import Frame
from yeto_torch.wire.layout import WireLayout
from yeto_torch.wire.limits import FirstFrameLimits, GroupLimits
from yeto_torch.wire.messages import DataHello, Hello, Message, decode, decode_hello
from yeto_torch.wire.transport.group import Closed, Group
from yeto_torch.wire.transport.sockets import Socket, read_first_frame, refuse
from yeto_torch.wire.transport.tls import NotTlsError, TlsError, TlsFileError, TlsSocket, server_context

log = logging.getLogger("syncer")

_EARLY_S = 10.0  # how long a data socket may wait for its group's HELLO
_MAX_EARLY = 1024
_MAX_TICKETS = 1024  # HELLOs whose socket waits for the actor's word
_MAX_REFUSALS = 256  # sockets being told why at once
_SHORT_HELLO_BYTES = 64 * 1024  # always legal; longer ones are read one at a time
_MAX_LONG_HELLOS = 4  # read or waiting to be read
_MAX_TICKET_BYTES = 4 * 1024 * 1024  # of the HELLOs behind all tickets but one
_HELLO_REST_BYTES = 256  # at least what a HELLO has beside its layout
_SPARE_DESCRIPTORS = 64
_REFUSAL_LINES = 64  # a minute


@dataclass(slots=True)
class _Admitted:
    """A live group and what the janitor must know about it."""

    group: Group
    beats: bool = False  # it has sent heartbeats, so silence means something


@dataclass(slots=True)
class _Early:
    """A data socket that came before its group's HELLO."""

    member: Member
    sock: Socket
    index: int
    until: float


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A socket that has said a well-formed HELLO, and how many bytes that took."""

    member: Member
    sock: Socket
    nbytes: int


class Server:
    """Accepts learners for one syncer process.

    Decoded gradients go to ``device``; ``post`` is called from many threads.

    Raises RunError when TLS is configured and its files have changed since they were checked.
    """

    def __init__(self, policy: SyncerPolicy, device: torch.device, post: Post) -> None:
        self._policy, self._device, self._post = policy, device, post
        self._decoding = Decoding(post)
        self._spare = Spare(policy.schedule.pipeline * policy.learners)  # the answers of the rounds in flight
        self._tls = _tls(policy.security)
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._silent: OrderedDict[int, socket.socket] = OrderedDict()  # first frame awaited, oldest first
        self._tickets: dict[int, _Ticket] = {}  # HELLO said, the actor's word awaited
        self._groups: dict[Member, _Admitted] = {}
        self._newest: dict[int, Member] = {}  # the last generation admitted per learner
        self._moved_before = (0, 0)  # (received, sent) by groups that are gone
        self._early: OrderedDict[int, _Early] = OrderedDict()
        self._numbers = itertools.count(1)
        self._refusals = Semaphore(self._at_most(_MAX_REFUSALS))
        self._refusal_lines = RateLimiter(_REFUSAL_LINES)
        self._first_limits = FirstFrameLimits()
        self._layout: WireLayout | None = None  # of the session
        self._long_hellos, self._reading_long = Semaphore(_MAX_LONG_HELLOS), Lock()
        self._listener: socket.socket | None = None
        self._closing = False

    # ------------------------------------------------------------------ opening and closing

    def listen(self) -> str:
        """Bind and start accepting; returns ``host:port`` as it really is. Raises RunError when it cannot be bound."""
        listen = self._policy.listen
        try:
            infos = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self._listener = socket.create_server(infos[0][4][:2], family=infos[0][0], backlog=256)
        except OSError as error:
            raise RunError(
                f"cannot listen on {listen.host}:{listen.port}: {error.strerror or error}; choose another listen.host "
                f"or listen.port (0 = any free port), or stop the process that holds it"
            ) from error
        host, port = self._listener.getsockname()[:2]
        Thread(target=self._accept, args=(self._listener,), name="listener", daemon=True).start()
        Thread(target=self._janitor, name="janitor", daemon=True).start()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self, error: str | None = None, linger_s: float = 0.0) -> None:
        """Stop listening and end every group: with ERROR, after flushing for ``linger_s``, or at once."""
        with self._lock:
            self._closing = True
            groups = [entry.group for entry in self._groups.values()]
            sockets = (ticket.sock for ticket in self._tickets.values())
            waiting = [*self._silent.values(), *sockets, *(early.sock for early in self._early.values())]
            self._changed.notify_all()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for sock in waiting:
            _shut(sock)
        for group in groups:
            group.close(error, linger_s)
        deadline = time.monotonic() + linger_s + 1.0
        for group in groups:
            group.join(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------ what the actor orders

    def admit(self, ticket: int, member: Member, hello: Hello) -> None:
        """The socket behind ``ticket`` becomes a group and starts to read."""
        if self._layout is None:  # the first one fixes it for good
            longest = len(hello.layout.encoded) + _HELLO_REST_BYTES
            self._layout, self._first_limits = hello.layout, FirstFrameLimits(max(_SHORT_HELLO_BYTES, longest))
        limits = GroupLimits(hello.layout, hello.dtype, Direction.TO_SYNCER, self._policy.schedule.pipeline)
        reception = Reception(
            self._policy, self._device, self._post, self._decoding, member, hello, self._on_first_beat
        )
        with self._lock:
            sock = self._tickets.pop(ticket).sock
            group = Group(
                sock,
                limits,
                hello.num_streams,
                on_message=reception.take,
                on_closed=lambda closed: self._on_closed(member, closed),
                write_timeout_s=self._policy.session.write_timeout_s,
                spare=self._spare,
                name=f"learner-{member.learner_id}",
            )
            self._groups[member] = _Admitted(group)
            self._newest[member.learner_id] = member
            numbers = [number for number, entry in self._early.items() if entry.member == member]
            early = [self._early.pop(number) for number in numbers]
            self._changed.notify_all()
        try:
            group.start()
        except RuntimeError as error:  # not one thread is to be had: the learner dials again
            for entry in early:
                entry.sock.close()
            self._on_closed(member, Closed(f"no thread for {group.name}: {error}"))
            return
        for entry in early:
            self._attach(group, entry.index, entry.sock)

    def refuse(self, ticket: int, text: str) -> None:
        """ERROR to the socket behind ``ticket``."""
        with self._lock:
            sock = self._tickets.pop(ticket).sock
            self._changed.notify_all()  # its data sockets wait in vain
        self._refuse_later(sock, text)

    def send(self, member: Member, message: Message) -> None:
        """Queue a message to a group; never blocks. A group that is gone meanwhile drops it."""
        with self._lock:
            entry = self._groups.get(member)
        if entry is not None:
            entry.group.send(message)

    def expel(self, member: Member, text: str | None) -> None:
        """Close a group, with ERROR when there is a text."""
        with self._lock:
            entry = self._groups.get(member)
        if entry is not None:
            entry.group.close(text)

    def settled_until(self, now: float) -> float:
        """``now``, or the earlier time at which a tensor arrived that is still being decoded."""
        return self._decoding.settled_until(now)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """(received, sent) by all groups so far; never shrinks."""
        with self._lock:
            received, sent = self._moved_before
            groups = [entry.group for entry in self._groups.values()]
            return received + sum(g.bytes_received for g in groups), sent + sum(g.bytes_sent for g in groups)

    # ------------------------------------------------------------------ first frames

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closing or listener.fileno() < 0:
                    return
                self._complain("accept failed", error)  # out of descriptors: wait for the janitor or a leaver
                time.sleep(0.1)
                continue
            # Descriptors are dealt from the lowest: a checkpoint must still find one.
            if sock.fileno() >= max_descriptors() - _SPARE_DESCRIPTORS:
                sock.close()
                continue
            with self._lock:
                number = next(self._numbers)
                self._silent[number] = sock
                crowded_out = None
                if len(self._silent) > self._at_most(self._policy.session.max_pending_handshakes):
                    _, crowded_out = self._silent.popitem(last=False)
            if crowded_out is not None:
                _shut(crowded_out)
            try:
                Thread(target=self._first_frame, args=(number, sock), name=f"handshake-{number}", daemon=True).start()
            except RuntimeError as error:
                self._complain("no thread for a new connection", error)
                self._claim(number)
                sock.close()

    def _first_frame(self, number: int, tcp: socket.socket) -> None:
        """Shake hands if TLS is configured, and read one frame, both within ``session.handshake_timeout_s``."""
        sock: Socket = tcp
        deadline = time.monotonic() + self._policy.session.handshake_timeout_s
        try:
            if self._tls is not None:
                sock = TlsSocket(tcp, self._tls, server_side=True)
                sock.handshake(deadline - time.monotonic())
            frame = read_first_frame(sock, deadline - time.monotonic(), self._first_limits)
            now = time.monotonic()
            if not self._claim(number):
                sock.close()
            elif frame.kind is MessageType.HELLO:
                self._hello(number, sock, frame, now)
            else:
                self._data_hello(sock, frame, now)
        except MemoryError:
            self._claim(number)
            sock.close()
        except PeerError as violation:
            self._turn_away(number, sock, str(violation), str(violation))
        except NotTlsError as error:
            self._turn_away(
                number, tcp, str(error), "this syncer speaks TLS only: give the learner tls= or YETO_TLS_CA"
            )
        except TlsError as error:
            self._turn_away(number, tcp, str(error), None)  # the alert has said it
        except OSError:
            self._claim(number)
            sock.close()

    def _turn_away(self, number: int, sock: Socket, reason: str, told: str | None) -> None:
        self._claim(number)
        self._complain("refused a connection", reason)
        self._refuse_later(sock, told)

    def _complain(self, what: str, reason: object) -> None:
        """One line about a stranger, or none if they have had enough of them."""
        with self._lock:
            kept_back = self._refusal_lines.take(time.monotonic())
        if kept_back is not None:
            log.warning("%s: %s%s", what, reason, remark(kept_back))

    def _claim(self, number: int) -> bool:
        """Take the socket off the list of silent ones; False when it was crowded out meanwhile."""
        with self._lock:
            return self._silent.pop(number, None) is not None and not self._closing

    def _hello(self, number: int, sock: Socket, frame: Frame, now: float) -> None:
        nbytes = len(frame.payload)
        hello = self._read_hello(frame.payload)
        if hello is None:
            sock.close()
            return
        with self._lock:
            waiting = sum(ticket.nbytes for ticket in self._tickets.values())
            too_long = waiting > 0 and waiting + nbytes > _MAX_TICKET_BYTES
            full = too_long or len(self._tickets) >= self._at_most(_MAX_TICKETS)
            if not full:
                self._tickets[number] = _Ticket(Member(hello.learner_id, hello.generation), sock, nbytes)
        if full:
            sock.close()
        else:
            self._post(ev.HelloArrived(number, hello), now, None)

    def _read_hello(self, payload: memoryview) -> Hello | None:
        """Decoded; None when too many long ones are being read already. Raises PeerError.

        Reading 16 MiB of layout takes seconds and 15 times its bytes, and anybody may send it.
        """
        learners, key = self._policy.learners, self._policy.security.hmac_key
        if len(payload) <= _SHORT_HELLO_BYTES:
            return decode_hello(payload, learners, key, self._layout)
        if not self._long_hellos.acquire(blocking=False):
            return None
        try:
            with self._reading_long:
                return decode_hello(payload, learners, key, self._layout)
        finally:
            self._long_hellos.release()

    def _data_hello(self, sock: Socket, frame: Frame, now: float) -> None:
        hello = decode(frame.kind, frame.payload)
        assert isinstance(hello, DataHello)
        member = Member(hello.learner_id, hello.generation)
        crowded_out = None
        with self._lock:
            entry, newest = self._groups.get(member), self._newest.get(member.learner_id)
            too_late = newest == member if entry is None else newest != member  # its group is dead, or superseded
            if entry is None and not too_late:
                early = _Early(member, sock, hello.stream_index, now + _EARLY_S)
                self._early[next(self._numbers)] = early
                if len(self._early) > self._at_most(_MAX_EARLY):
                    _, crowded_out = self._early.popitem(last=False)
                self._changed.notify_all()
        if too_late:
            sock.close()
        elif entry is not None:
            self._attach(entry.group, hello.stream_index, sock)
        if crowded_out is not None:
            crowded_out.sock.close()

    def _attach(self, group: Group, index: int, sock: Socket) -> None:
        try:
            group.attach(index, sock)
        except PeerError as violation:
            self._refuse_later(sock, str(violation))
        except LocalError:  # the group died meanwhile
            sock.close()

    def _refuse_later(self, sock: Socket, text: str | None) -> None:
        """Say why and close, on a thread of its own: a peer that does not read must not hold the actor."""
        if not self._refusals.acquire(blocking=False):
            sock.close()
            return

        def say() -> None:
            try:
                refuse(sock, text)
            finally:
                self._refusals.release()

        try:
            Thread(target=say, name="refusal", daemon=True).start()
        except RuntimeError:  # no thread to be had: a bare close, and the learner dials again
            self._refusals.release()
            sock.close()

    @staticmethod
    def _at_most(sockets: int) -> int:
        """A number of sockets that strangers may hold, less where descriptors are few."""
        return min(sockets, max_descriptors() // 4)

    # ------------------------------------------------------------------ the end of a group

    def _on_closed(self, member: Member, closed: Closed) -> None:
        with self._lock:
            entry = self._groups.pop(member, None)
            if entry is not None:
                received, sent = self._moved_before
                self._moved_before = received + entry.group.bytes_received, sent + entry.group.bytes_sent
        violated = closed.violation.kind if closed.violation is not None else None
        self._post(ev.GroupLost(member, closed.reason, violated), time.monotonic(), None)

    def _janitor(self) -> None:
        """Ends what only time ends: groups gone silent, data sockets whose group never came."""
        idle_s = self._policy.session.idle_timeout_s
        while True:
            with self._lock:
                if self._closing:
                    return
                now = time.monotonic()
                asked = {ticket.member for ticket in self._tickets.values()}  # not yet decided on
                waiting = {n: entry.until for n, entry in self._early.items() if entry.member not in asked}
                late = [number for number, until in waiting.items() if until <= now]
                overdue = [self._early.pop(number).sock for number in late]
                deadlines = [until for until in waiting.values() if until > now]
                idle = []
                for entry in self._groups.values():
                    if entry.beats and not entry.group.closed:
                        until = entry.group.last_received_at + idle_s
                        (idle.append(entry.group) if until <= now else deadlines.append(until))
                if not overdue and not idle:
                    self._changed.wait(min(deadlines) - now if deadlines else None)
            for sock in overdue:
                sock.close()
            for group in idle:
                group.close(reason=f"no byte came for session.idle_timeout_s={idle_s:g} s")

    def _on_first_beat(self, member: Member) -> None:
        with self._lock:
            entry = self._groups.get(member)
            if entry is not None:
                entry.beats = True
                self._changed.notify_all()


def _tls(security: SecurityPolicy) -> ssl.SSLContext | None:
    if security.tls_cert is None or security.tls_key is None:
        return None
    try:
        return server_context(security.tls_cert, security.tls_key, security.tls_client_ca)
    except TlsFileError as error:
        raise RunError(f"TLS: {error}") from error


def _shut(sock: Socket) -> None:
    """Wake whoever reads from a socket; its owner closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
