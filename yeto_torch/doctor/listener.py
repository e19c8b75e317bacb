"""``doctor --listen``: the measured end, on the machine and port where the syncer will be, before the run.

It answers every HELLO but a measurement's with a refusal that names itself, so that a learner that comes too early is
told, and measures for one caller at a time. It checks the key as a syncer does. Every wait and count that a peer can
cause has an end: sockets without a first frame, the length of a HELLO, the seconds of a direction and of it all.
"""

from __future__ import annotations

import logging
import socket
import ssl
from contextlib import suppress
from threading import Condition, Semaphore, Thread, Timer

from yeto_torch.doctor.meter import DOWN, UP
from yeto_torch.doctor.probe import LISTENER, PATIENCE_S, STRANGER_ID
from yeto_torch.doctor.pump import DTYPE, MESSAGE_BYTES, Pump, layout_for
from yeto_torch.wire.constants import MAX_STREAMS, Direction, MessageType
from yeto_torch.wire.errors import LocalError, PeerError
from yeto_torch.wire.limits import FirstFrameLimits, GroupLimits
from yeto_torch.wire.messages import (
    BcastFragment,
    DataHello,
    Heartbeat,
    Hello,
    Message,
    PullReq,
    PushFragment,
    decode,
    decode_hello,
)
from yeto_torch.wire.transport.group import Closed, Group
from yeto_torch.wire.transport.sockets import Socket, clock, read_first_frame, refuse, tune
from yeto_torch.wire.transport.tls import NotTlsError, TlsSocket

log = logging.getLogger("yeto_torch")

_HELLO_BYTES = 64 * 1024
_MAX_SOCKETS = 64 + MAX_STREAMS  # whose first frame is awaited
_LONGEST_S = 30.0  # of one direction
_SLOW_S = 60.0
_ALL_S = 2 * _LONGEST_S + 4 * _SLOW_S  # of a measurement; whoever stays longer keeps others out


class Listener:
    """Listens at once. Raises OSError when it cannot.

    Args:
        host, port: where; port 0 = any free one.
        key: HELLOs must be signed with it.
        tls: a server's context.

    Attributes:
        address: ``host:port`` as it really is.
    """

    def __init__(self, host: str, port: int, key: bytes | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._key, self._tls = key, tls
        self._slots = Semaphore(_MAX_SOCKETS)
        self._changed = Condition()
        self._current: _Measured | None = None
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._socket = socket.create_server(where[:2], family=family, backlog=64)
        name, real = self._socket.getsockname()[:2]
        self.address = f"[{name}]:{real}" if ":" in name else f"{name}:{real}"

    def serve(self) -> None:
        """Until ``close``."""
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                sock.close()
                continue
            Thread(target=self._greet, args=(sock,), name="doctor-first-frame", daemon=True).start()

    def close(self) -> None:
        """Stop, and end a measurement that is under way."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._changed:
            current = self._current
        if current is not None:
            current.group.close()
            current.group.join(PATIENCE_S)

    def _greet(self, tcp: socket.socket) -> None:
        sock: Socket = tcp
        deadline = clock() + PATIENCE_S
        try:
            tune(tcp)
            if self._tls is not None:
                sock = TlsSocket(tcp, self._tls, server_side=True)
                sock.handshake(PATIENCE_S)
            frame = read_first_frame(sock, max(0.0, deadline - clock()), FirstFrameLimits(_HELLO_BYTES))
            if frame.kind is MessageType.HELLO:
                self._hello(sock, frame.payload)
            elif isinstance(message := decode(frame.kind, frame.payload), DataHello):
                self._data_hello(sock, message, deadline)
        except NotTlsError:
            refuse(tcp, f"{LISTENER} speaks TLS only: give the learner tls= or YETO_TLS_CA")
        except PeerError as violation:
            refuse(sock, f"{LISTENER}: {violation}")
        except OSError:
            sock.close()
        finally:
            self._slots.release()

    def _hello(self, sock: Socket, payload: memoryview) -> None:
        hello = decode_hello(payload, None, self._key)
        if hello.learner_id != STRANGER_ID or hello.layout != layout_for(hello.num_streams) or hello.dtype is not DTYPE:
            raise PeerError("no syncer is here, only the other end of a measurement")
        with self._changed:
            if self._current is not None and not self._current.group.closed:
                raise PeerError("another measurement is under way")
            current = self._current = _Measured(sock, hello)
            self._changed.notify_all()
        current.start()

    def _data_hello(self, sock: Socket, message: DataHello, deadline: float) -> None:
        def come() -> _Measured | None:
            current = self._current
            return current if current is not None and current.generation == message.generation else None

        with self._changed:
            measured = self._changed.wait_for(come, max(0.0, deadline - clock()))
        if measured is None:
            raise PeerError("a data stream of no measurement")
        try:
            measured.group.attach(message.stream_index, sock)
        except LocalError:
            sock.close()


class _Measured:
    """One caller."""

    def __init__(self, sock: Socket, hello: Hello) -> None:
        self.generation = hello.generation
        self._fragments = len(hello.layout)
        self._counting = Condition()
        self._received, self._began, self._ended = 0, 0.0, 0.0
        self._pumping = False
        limits = GroupLimits(hello.layout, DTYPE, Direction.TO_SYNCER)
        self.group = Group(
            sock, limits, hello.num_streams, on_message=self._on_message, on_closed=self._on_closed, name="measured"
        )
        self._limit = Timer(_ALL_S, self.group.close, kwargs={"reason": f"it was not done within {_ALL_S:g} s"})
        self._limit.daemon = True

    def start(self) -> None:
        self.group.start()
        self._limit.start()

    def _on_message(self, message: Message, now: float) -> None:
        if isinstance(message, PushFragment):
            with self._counting:
                self._began = self._began or now
                self._received, self._ended = self._received + len(message.data), now
                # A newer count takes the place of one that still waits, so every one carries the sum.
                self.group.send(PullReq(UP, self._received, 1))
        elif isinstance(message, Heartbeat):
            with self._counting:
                if self._pumping:
                    raise PeerError("it is being measured already")
                self._pumping = True
            seconds = min(message.local_step / 1000, _LONGEST_S)
            Thread(target=self._pump, args=(seconds,), name="doctor-pump", daemon=True).start()
        else:
            raise PeerError(f"{message.TYPE.name} has no place in a measurement")

    def _pump(self, seconds: float) -> None:
        values = bytes(MESSAGE_BYTES)
        pump = Pump(self.group, lambda fragment: BcastFragment(fragment, 1, values), self._fragments, seconds)
        with suppress(TimeoutError):
            self.group.send(PullReq(DOWN, pump.wait(seconds + _SLOW_S), 1))

    def _on_closed(self, closed: Closed) -> None:
        self._limit.cancel()
        megabytes, seconds = self._received / 1e6, max(self._ended - self._began, 1e-9)
        log.info("measured: %.1f MB came, %.1f MB/s (%s)", megabytes, megabytes / seconds, closed.reason)
