"""The pieces for a single socket: connect, first frame, refusal, and one socket of a group with its counters.

It moves bytes between sockets and lent buffers, reads the clock, and turns every failure into an OSError with a
reason. It must not know what the frames mean or that a socket belongs to a group.

Waits end on bytes, on a deadline, or on ``shutdown`` from another thread; nothing polls at intervals.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.frames import Frame, FrameReader
from yeto_torch.wire.limits import FirstFrameLimits
from yeto_torch.wire.messages import Error, encode
from yeto_torch.wire.transport.tls import RECORD_START, ClientTls, TlsError, TlsSocket

Socket = socket.socket | TlsSocket

clock = time.monotonic  # seconds; every time in this package is of this clock

REFUSAL_S = 2.0  # to get an ERROR to a peer before its socket is closed
_DRAIN_BYTES = 64 * 1024 * 1024  # what a closing socket reads and throws away at most
_SCRATCH_BYTES = 32 * 1024
_MAX_PARTS = 16  # parts per system call; a slice has at most three

_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 15, 5, 6
_ACK_TIMEOUT_S = 60.0


def tune(sock: Socket, write_timeout_s: float = _ACK_TIMEOUT_S) -> None:
    """Set the options of a connected socket: no Nagle delay; a vanished host is noticed in about a minute.

    Keepalive alone does not run while sent bytes wait for their acknowledgement, hence the second limit. It stays
    above ``write_timeout_s``: a peer that is alive and does not read is the writer's to judge.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    options = [
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", _KEEPALIVE_PROBES),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", int(1000 * (max(write_timeout_s, _ACK_TIMEOUT_S) + 5))),
    ]
    for level, name, value in options:
        if hasattr(socket, name):  # not every system has every option
            with suppress(OSError):  # the peer may be gone already; reading will say so
                sock.setsockopt(level, getattr(socket, name), value)


def dial(host: str, port: int, timeout_s: float, tls: ClientTls | None = None) -> Socket:
    """A connected, tuned TCP socket, or ConnectionError saying what was tried; TlsError when TLS itself failed."""
    deadline = clock() + timeout_s
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectionError(f"cannot reach {host}:{port}: the name does not resolve ({why(error)})") from error
    tried: list[str] = []
    for number, (family, kind, proto, _, address) in enumerate(addresses):
        left = deadline - clock()
        if left <= 0:
            break
        sock = socket.socket(family, kind, proto)
        try:
            sock.settimeout(left / (len(addresses) - number))  # a dead address leaves time for the others
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():  # nobody listens, and the kernel met itself on a free port
                raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
            sock.settimeout(None)
            tune(sock)
            return sock if tls is None else tls.connect(sock, max(0.0, deadline - clock()))
        except TlsError as error:
            sock.close()
            raise TlsError(f"cannot reach {host}:{port} securely: {error}") from error
        except OSError as error:
            sock.close()
            tried.append(f"{address[0]}: {why(error)}")
    raise ConnectionError(f"cannot reach {host}:{port} within {timeout_s:g} s ({'; '.join(tried) or 'no time left'})")


def why(error: OSError) -> str:
    """The words of an OSError without its number."""
    if isinstance(error, TimeoutError) and not error.strerror:
        return str(error) or "timed out"
    return error.strerror.lower() if error.strerror else str(error) or type(error).__name__.lower()


def read_first_frame(sock: Socket, timeout_s: float, limits: FirstFrameLimits | None = None) -> Frame:
    """The HELLO or DATA_HELLO a fresh socket must begin with; not one byte behind it is read from the stream.

    The whole frame has ``timeout_s`` together, however it trickles in. Raises PeerError on a violation, TimeoutError
    and ConnectionError when it does not come.
    """
    deadline = clock() + timeout_s
    reader = FrameReader(limits or FirstFrameLimits())
    head = reader.buffer()
    try:
        while True:
            left = deadline - clock()
            if left <= 0:
                raise TimeoutError(f"no whole first frame within {timeout_s:g} s")
            sock.settimeout(left)
            count = sock.recv_into(reader.buffer())
            if count == 0:
                raise ConnectionResetError("closed before its first frame was whole")
            frame = reader.received(count)
            if frame is not None:
                return frame
    except TimeoutError as error:
        raise TimeoutError(f"no whole first frame within {timeout_s:g} s") from error
    except PeerError as error:
        if bytes(head[: len(RECORD_START)]) == RECORD_START:
            raise PeerError("the peer speaks TLS, but this port does not") from error
        raise
    finally:
        with suppress(OSError):
            sock.settimeout(None)


def send_parts(sock: Socket, parts: Sequence[Buffer], timeout_s: float) -> None:
    """Hand one frame to the kernel, for sockets that are in no group yet. Raises OSError."""
    Stream(0, sock).write(parts, timeout_s)


def refuse(sock: Socket, text: str | None) -> None:
    """Send ERROR and close, so that the text arrives although the peer may still be sending. At most about 2 s.

    Without a text what was sent before is given the time to arrive.
    """
    deadline = clock() + REFUSAL_S
    with suppress(OSError):
        if text is not None:
            send_parts(sock, encode(Error(text)), REFUSAL_S)
        linger(sock, deadline)
    sock.close()


def linger(sock: Socket, deadline: float) -> None:
    """Say that nothing more follows, then read and drop until the peer closes or ``deadline`` passes.

    Closing a socket that holds unread bytes would send a reset, and that destroys what the peer has not read yet.
    """
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        tcp = sock.tcp if isinstance(sock, TlsSocket) else sock  # what is dropped need not be decrypted
        poller = select.poll()
        poller.register(tcp, select.POLLIN)
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        drained = 0
        while drained < _DRAIN_BYTES and (left := deadline - clock()) > 0 and poller.poll(1000 * left):
            try:
                count = tcp.recv_into(scratch, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:  # another thread was faster
                continue
            if count == 0:
                return
            drained += count


def _views(parts: Sequence[Buffer]) -> list[memoryview]:
    return [view for part in parts if (view := memoryview(part).cast("B"))]


class Stream:
    """One connected socket and its counters. One thread may read and another write.

    Attributes:
        index: 0 for the control stream, i + 1 for data stream i.
        bytes_sent, bytes_received: of everything, envelopes included; what TLS adds is not counted.
        last_received_at: monotonic seconds.
    """

    def __init__(self, index: int, sock: Socket) -> None:
        self.index, self._sock = index, sock
        self.bytes_sent = self.bytes_received = 0
        self.last_received_at = clock()
        sock.settimeout(None)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def __str__(self) -> str:
        return f"data stream {self.index - 1}" if self.index else "the control stream"

    def frames(self, reader: FrameReader) -> Iterator[tuple[Frame, float]]:
        """Every frame with the time its last byte arrived, until the peer closes. Raises OSError and PeerError."""
        while count := self._sock.recv_into(reader.buffer()):
            self.bytes_received += count
            self.last_received_at = now = clock()
            frame = reader.received(count)
            if frame is not None:
                yield frame, now
                del frame  # it is the receiver's alone, and the next one may be long in coming

    def discard(self) -> None:
        """Read and drop until the peer closes or the socket is shut down."""
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        drained = 0
        while drained < _DRAIN_BYTES and (count := self._sock.recv_into(scratch)):
            drained += count

    def write(self, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Hand all parts to the kernel, nothing joined, and nothing copied but by TLS.

        Raises TimeoutError when not a single byte was accepted for ``timeout_s``, another OSError when the socket
        is lost.
        """
        views = _views(parts)
        deadline = clock() + timeout_s
        while views:
            if self._write_some(views):
                deadline = clock() + timeout_s
                continue
            left = deadline - clock()
            if left <= 0:
                raise TimeoutError(f"not a byte was accepted for {timeout_s:g} s")
            self._writable.poll(1000 * left)

    def write_now(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Hand over what the kernel takes of ``parts`` without waiting; the rest comes back. Raises OSError."""
        views = _views(parts)
        while views and self._write_some(views):
            pass
        return views

    def _write_some(self, views: list[memoryview]) -> bool:
        """The only call that writes to a socket; what it took is cut off. False when the kernel has no room."""
        try:
            count = self._sock.sendmsg(views[:_MAX_PARTS], (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        self.bytes_sent += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
        return True

    def linger(self, deadline: float) -> None:
        linger(self._sock, deadline)

    def shutdown(self) -> None:
        """End both directions; threads that wait on the socket wake up. From any thread."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back. Only when no thread uses it any more."""
        self._sock.close()
