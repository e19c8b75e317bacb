"""One question to whatever listens: a HELLO that every syncer must refuse, and what came back.

It decides what is asked and how an answer reads. The HELLO names generation 0 and learner id 2^32 - 1: by the protocol
no syncer may admit either, so nothing is joined, pinned or put on a tape; the syncer logs one refused connection. It
checks key, version and id in that order, so the sentence it refuses with tells how far we got. It must not know which
questions are asked, nor the cures.
"""

from __future__ import annotations

import re
import socket
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum, auto

from yeto_torch.wire.constants import ERROR_LIMIT_BYTES, HASH_BYTES, U32_MAX, MergeMode, MessageType, WireDType
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.frames import Frame, FrameReader
from yeto_torch.wire.layout import WireFragment, WireLayout
from yeto_torch.wire.messages import Error, Hello, decode, encode
from yeto_torch.wire.transport.sockets import Socket, clock, dial, send_parts, why
from yeto_torch.wire.transport.tls import ClientTls, TlsError

PATIENCE_S = 10.0
_ANSWER_S = 5.0
_AFTER_GOODBYE_S = 2.0
LISTENER = "yeto_torch.doctor --listen"  # how the other end of a measurement begins every refusal
STRANGER_ID = U32_MAX  # no syncer has so many learners
LONG_HELLO_BYTES = 60_000  # legal before and during any session


class Said(Enum):
    """What an answer means."""

    SYNCER = auto()  # refused for the id alone: it speaks our version, and takes our key if it has one
    LISTENER = auto()  # the other end of a measurement
    WRONG_KEY = auto()
    WRONG_VERSION = auto()
    TLS_WANTED = auto()
    TLS_FAILED = auto()
    STRANGE = auto()  # not a syncer
    SILENT = auto()  # nothing came, or the connection was closed


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, in its words, and after how many seconds; ``learners`` if a syncer told its number."""

    said: Said
    text: str
    reply_s: float = 0.0
    learners: int | None = None


def ask(address: tuple[str, int], tls: ClientTls | None, key: bytes | None, *, long: bool = False) -> Answer:
    """Say the HELLO, signed with ``key`` if there is one, and read the refusal. ``long``: of 60,000 bytes.

    Without a connection, or where it ends without a word, the answer is SILENT.
    """
    tensors = LONG_HELLO_BYTES // 8 if long else 1
    layout = WireLayout((WireFragment(MergeMode.AVG, (1,) * tensors),))
    hello = Hello(STRANGER_ID, 0, WireDType.BF16, layout, bytes(HASH_BYTES), bytes(HASH_BYTES), None, 0)
    try:
        with closing(dial(*address, PATIENCE_S, tls)) as sock:
            started = clock()
            send_parts(sock, encode(hello, key), PATIENCE_S)
            return replace(_read(sock), reply_s=clock() - started)
    except TlsError as error:
        return Answer(Said.TLS_FAILED, str(error))
    except OSError as error:
        return Answer(Said.SILENT, why(error))


class _ErrorOnly:
    """All that may answer such a HELLO."""

    def max_payload(self, kind: MessageType) -> int:
        if kind is MessageType.ERROR:
            return ERROR_LIMIT_BYTES
        raise PeerError(f"it sent {kind.name}, where only ERROR may come")


def _read(sock: Socket) -> Answer:
    reader = FrameReader(_ErrorOnly())
    head = reader.buffer()
    try:
        frame = _first_frame(sock, reader, _ANSWER_S)
        if frame is None:  # some servers answer only when nothing more can come
            sock.shutdown(socket.SHUT_WR)
            frame = _first_frame(sock, reader, _AFTER_GOODBYE_S)
        message = None if frame is None else decode(frame.kind, frame.payload)
    except PeerError as violation:
        seen = bytes(head).rstrip(b"\0")
        return Answer(Said.STRANGE, f"it answers {seen!r} ({violation})")
    if isinstance(message, Error):  # the reader lets nothing else through
        return _understood(message.text)
    return Answer(Said.SILENT, f"nothing came within {_ANSWER_S:g} s")


def _first_frame(sock: Socket, reader: FrameReader, timeout_s: float) -> Frame | None:
    """None when nothing came in time. Raises PeerError, and ConnectionError when the peer closes."""
    deadline = clock() + timeout_s
    while (left := deadline - clock()) > 0:
        sock.settimeout(left)
        try:
            count = sock.recv_into(reader.buffer())
        except TimeoutError:
            return None
        if count == 0:
            raise ConnectionResetError("it closed the connection without a word")
        frame = reader.received(count)
        if frame is not None:
            return frame
    return None


def _understood(text: str) -> Answer:
    if "not signed with this syncer's key" in text:
        return Answer(Said.WRONG_KEY, text)
    if "TLS only" in text:
        return Answer(Said.TLS_WANTED, text)
    if text.startswith(LISTENER):
        return Answer(Said.LISTENER, text)
    if "version" in text:
        return Answer(Said.WRONG_VERSION, text)
    found = re.search(r"is not one of 0 to (\d{1,10})\b", text)
    return Answer(Said.SYNCER, text, learners=int(found[1]) + 1 if found else None)
