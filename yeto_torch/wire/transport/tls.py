"""TLS 1.3 over one connected TCP socket, with the few calls that ``sockets`` makes on a plain one.

It encrypts, decrypts and says in one sentence why a handshake failed. Python's own SSLSocket must not be read and
written by two threads at once; here the TLS state lies between two memory buffers behind a lock, and every wait is on
the TCP socket, outside of it. It must not know frames, learners or which side is the syncer.

    plain in    recv_into  <- decrypt <- ``_incoming`` <- TCP
    plain out   sendmsg    -> encrypt -> ``_outgoing`` -> ``_unsent`` -> TCP

``fileno`` is the TCP socket's. Bytes that are decrypted already do not make it readable: read first, then poll.
An end without TLS's own goodbye is an end like any other, for no message of ours is complete by ending the stream.

Source: rulings §2.9; RFC 8446
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import cast

clock = time.monotonic

RECORD_START = b"\x16\x03"  # how every TLS connection begins: a handshake record
_FIRST_RECORDS = (0x15, 0x16)  # alert, handshake
_RECEIVE_BYTES = 128 * 1024
_ENCRYPT_BYTES = 128 * 1024  # plain bytes per system call; ciphertext that waits is bounded by it
_GOODBYE_S = 1.0  # for the alert that says why a handshake failed


class TlsError(ConnectionError):
    """TLS itself failed: the other side speaks something else, or one certificate was not accepted."""


class NotTlsError(TlsError):
    """What came is no TLS at all."""


class TlsFileError(ValueError):
    """A file is not what TLS needs. ``which`` is ``cert``, ``key`` or ``ca``; ``legal`` what it must be."""

    def __init__(self, which: str, path: Path, legal: str) -> None:
        super().__init__(f"{which} {path}: must be {legal}")
        self.which, self.legal = which, legal


def server_context(cert: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """For the side that listens; clients must show a certificate of ``client_ca`` if it is given.

    Raises TlsFileError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes a session: a connection lives as long as its learner
    _load_own(context, cert, key)
    if client_ca is not None:
        _load_authority(context, "ca", client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """For the side that dials; ``ca`` None trusts the system's authorities. Raises TlsFileError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies certificate and host name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if ca is None:
        context.load_default_certs()
    else:
        _load_authority(context, "ca", ca)
    if cert is not None and key is not None:
        _load_own(context, cert, key)
    return context


def _load_own(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    _load_authority(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "cert", cert)  # whose fault is it: first the certificate
    _check_readable("key", key)
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # never ask on the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsFileError("key", key, "the private key of the certificate, but it is another one's") from error
        raise TlsFileError("key", key, "a private key in PEM format, without a passphrase") from error


def _load_authority(context: ssl.SSLContext, which: str, path: Path) -> None:
    _check_readable(which, path)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise TlsFileError(which, path, "a file with a certificate in PEM format") from error


def _check_readable(which: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise TlsFileError(which, path, f"a readable file ({error.strerror})") from error


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How to dial with TLS: the server's certificate must name ``server_hostname``, a host name or an address.

    Raises ValueError when that is neither.
    """

    context: ssl.SSLContext
    server_hostname: str

    def __post_init__(self) -> None:
        try:
            self.context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=self.server_hostname)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.server_hostname!r} is no host name ({error})") from error

    def connect(self, sock: socket.socket, timeout_s: float) -> TlsSocket:
        """Shake hands on a connected socket. Raises TlsError, and OSError when the connection fails."""
        secured = TlsSocket(sock, self.context, server_hostname=self.server_hostname)
        secured.handshake(timeout_s)
        return secured


class TlsSocket:
    """A TCP socket that speaks TLS. One thread may read and another write; ``shutdown`` comes from any.

    ``tcp`` is connected, and owned from here on. ``server_hostname``: what the server's certificate must name.
    """

    def __init__(
        self, tcp: socket.socket, context: ssl.SSLContext, *, server_side: bool = False, server_hostname: str = ""
    ) -> None:
        self.tcp = tcp
        tcp.settimeout(None)  # every call on it is MSG_DONTWAIT, every wait a poll
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side, None if server_side else server_hostname
        )
        self._lock = Lock()  # the TLS object and both of its buffers
        self._feeding = Lock()  # received bytes go in as they came
        self._readable = select.poll()
        self._readable.register(tcp, select.POLLIN)
        self._timeout_s: float | None = None
        self._failure: TlsError | None = None
        self._unsent = memoryview(b"")  # ciphertext the kernel has not taken yet, and the plain bytes it stands for
        self._accepted = 0

    # ------------------------------------------------------------------------------------------ handshake

    def handshake(self, timeout_s: float) -> None:
        """Shake hands, all of it within ``timeout_s``.

        Raises NotTlsError, TlsError, TimeoutError, and ConnectionError when the peer closes meanwhile.
        """
        deadline = clock() + timeout_s
        begun = False
        while not self._shake(deadline):
            data = self._receive(deadline, f"no TLS handshake within {timeout_s:g} s")
            if not data:
                raise ConnectionResetError("closed during the TLS handshake")
            if not begun and data[0] not in _FIRST_RECORDS:
                raise NotTlsError("TLS: the other side does not speak it")
            begun = True

    def _shake(self, deadline: float) -> bool:
        try:
            with self._lock:
                self._tls.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        except ssl.SSLError as error:
            with suppress(OSError):  # the alert, so that the other side learns it too
                self._flush(min(deadline, clock() + _GOODBYE_S))
            raise TlsError(_sentence(error)) from error
        self._flush(deadline)
        return done

    def _flush(self, deadline: float) -> None:
        """Hand over what the handshake wants to say."""
        writable = select.poll()
        writable.register(self.tcp, select.POLLOUT)
        with self._lock:
            data = memoryview(self._outgoing.read())
        while data:
            try:
                data = data[self.tcp.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if not writable.poll(_milliseconds(deadline)):
                    raise TimeoutError("no TLS handshake in time") from None

    # ------------------------------------------------------------------------------------------ reading

    def recv_into(self, buffer: bytearray | memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """As of a socket: at least one byte into ``buffer``, 0 at the end; waits unless ``flags`` say MSG_DONTWAIT.

        Raises TlsError when what came cannot be right, or the peer said why it ends.
        """
        view = memoryview(buffer)
        view = view[:nbytes] if nbytes else view
        deadline = None if self._timeout_s is None else clock() + self._timeout_s
        while (count := self._decrypt(view)) is None:
            if flags & socket.MSG_DONTWAIT:
                if self._feed() is None:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            else:
                self._receive(deadline, "timed out")
        return count

    def _decrypt(self, view: memoryview) -> int | None:
        """Fill ``view`` from what has been received; None when more must come first."""
        filled = 0
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                while filled < len(view):
                    count = cast(int, self._tls.read(len(view) - filled, view[filled:]))  # with a buffer: how many
                    if not count:
                        return filled
                    filled += count
            except ssl.SSLWantReadError:
                return filled or None
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return filled
            except ssl.SSLError as error:
                self._failure = TlsError(_sentence(error))
                if not filled:
                    raise self._failure from error
        return filled

    def _receive(self, deadline: float | None, late: str) -> bytes:
        """Wait for bytes from the network and feed them; empty at the end. Raises TimeoutError saying ``late``."""
        while (data := self._feed()) is None:
            if not self._readable.poll(None if deadline is None else _milliseconds(deadline)):
                raise TimeoutError(late)
        return data

    def _feed(self) -> bytes | None:
        """Whatever the kernel has, up to a limit; None if that is nothing."""
        with self._feeding:
            try:
                data = self.tcp.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            with self._lock:
                if data:
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            return data

    # ------------------------------------------------------------------------------------------ writing

    def sendmsg(self, views: Sequence[memoryview], _ancdata: Sequence[object] = (), flags: int = 0) -> int:
        """How many bytes of ``views``, in order, the kernel now has; it never waits.

        0 means that it took a part of their ciphertext; BlockingIOError that it took nothing. In both cases the same
        bytes must be passed again.
        """
        if not self._unsent:
            self._accepted, self._unsent = self._encrypt(views)
        sent = self.tcp.send(self._unsent, flags | socket.MSG_DONTWAIT)
        self._unsent = self._unsent[sent:]
        return 0 if self._unsent else self._accepted

    def _encrypt(self, views: Sequence[memoryview]) -> tuple[int, memoryview]:
        count = 0
        with self._lock:
            try:
                for view in views:
                    part = view[: _ENCRYPT_BYTES - count]
                    if not part:
                        break
                    count += self._tls.write(part)  # all of it: the buffer behind it has no end
            except ssl.SSLError as error:
                raise TlsError(_sentence(error)) from error
            # What reading wanted to say (a new key) lies in front, as it must.
            return count, memoryview(self._outgoing.read())

    # ------------------------------------------------------------------------------------------ as of a socket

    @property
    def family(self) -> int:
        return self.tcp.family

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.tcp.setsockopt(level, name, value)

    def fileno(self) -> int:
        return self.tcp.fileno()

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def settimeout(self, timeout_s: float | None) -> None:
        """For ``recv_into``; None waits for ever."""
        self._timeout_s = timeout_s

    def shutdown(self, how: int) -> None:
        """End one direction or both; with SHUT_WR alone TLS says goodbye first, if nothing is half-sent."""
        if how == socket.SHUT_WR and not self._unsent:
            with self._lock:
                with suppress(ssl.SSLError):  # it would also like to hear the other side's
                    self._tls.unwrap()
                goodbye = self._outgoing.read()
            with suppress(OSError):
                self.tcp.send(goodbye, socket.MSG_DONTWAIT)
        self.tcp.shutdown(how)

    def close(self) -> None:
        self.tcp.close()


def _milliseconds(deadline: float) -> float:
    return max(0.0, 1000 * (deadline - clock()))


def _sentence(error: ssl.SSLError) -> str:
    """What failed, in words; begins with ``TLS:``."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: the other side's certificate is not accepted: {error.verify_message}"
    reason = error.reason or str(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "TLS: the other side shows no client certificate, which is required here"
    if "ALERT_CERTIFICATE_REQUIRED" in reason:
        return "TLS: the other side requires a client certificate"
    _, alert, said = reason.partition("ALERT_")
    words = (said or reason).lower().replace("_", " ")
    if alert and ("CERTIFICATE" in said or said == "UNKNOWN_CA"):
        return f"TLS: the other side does not accept our certificate ({words})"
    if "PROTOCOL" in reason or "VERSION" in reason:
        return f"TLS: both sides must speak version 1.3 ({words})"
    return f"TLS: {words}"
