"""One frozen dataclass per message; exact encode and decode.

Decides what the bytes of each payload mean, and refuses any payload that is not exactly one message. It does
not know how long a payload may be in this session (``limits``), nor how it was sliced (``chunks``).

Tensor bytes are never copied here: ``encode`` returns the head and the caller's buffer as separate parts, and
``decode`` returns views into the received payload.

Source: v4 §Messages (all fourteen; revision 1 of the final ones); rulings §1.2, §2.1, §2.2, §2.9.

* pure
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, fields
from typing import ClassVar

from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.constants import (
    BULK_TYPES,
    ERROR_LIMIT_BYTES,
    FINALIZATION_REVISION,
    HASH_BYTES,
    HEADER,
    MAGIC,
    MAX_STREAMS,
    PROTOCOL_VERSION,
    MessageType,
    WireDType,
)
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.layout import WireLayout

_HELLO = struct.Struct("<HIQBI")
_DATA_HELLO = struct.Struct("<HIQH")
_MANIFEST = struct.Struct("<HQI")
_ACK = struct.Struct("<HQ")
_MAC_DOMAIN = b"yeto-hello-mac-v1\0"


@dataclass(frozen=True, slots=True)
class _Plain:
    """A message whose fields, but for tensor bytes, are numbers packed as they stand."""

    FORMAT: ClassVar[struct.Struct]

    def payload(self) -> bytes:
        """All but tensor bytes."""
        names = [entry.name for entry in fields(self) if entry.name != "data"]
        return self.FORMAT.pack(*[getattr(self, name) for name in names])


@dataclass(frozen=True, slots=True)
class Hello:
    """A learner opens a connection group: who it is, what it trains, how many data streams will follow."""

    TYPE: ClassVar = MessageType.HELLO
    learner_id: int
    generation: int
    dtype: WireDType
    layout: WireLayout
    fingerprint: bytes
    contract: bytes
    profile: bytes | None
    num_streams: int

    def payload(self) -> bytes:
        head = _HELLO.pack(PROTOCOL_VERSION, self.learner_id, self.generation, self.dtype, len(self.layout))
        tail = self.fingerprint + self.contract + (self.profile or b"") + struct.pack("<H", self.num_streams)
        return head + self.layout.encoded + tail


@dataclass(frozen=True, slots=True)
class DataHello:
    """A data socket joins the group that already said HELLO."""

    TYPE: ClassVar = MessageType.DATA_HELLO
    learner_id: int
    generation: int
    stream_index: int

    def payload(self) -> bytes:
        return _DATA_HELLO.pack(PROTOCOL_VERSION, self.learner_id, self.generation, self.stream_index)


@dataclass(frozen=True, slots=True)
class InitParams(_Plain):
    """Starting values of one fragment, in the bulk dtype; learner 0 only."""

    TYPE: ClassVar = MessageType.INIT_PARAMS
    FORMAT: ClassVar = struct.Struct("<I")
    fragment: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class PullReq(_Plain):
    """Round ``step`` asks for this learner's delta of one fragment."""

    TYPE: ClassVar = MessageType.PULL_REQ
    FORMAT: ClassVar = struct.Struct("<IQI")
    fragment: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class PushFragment(_Plain):
    """A learner's answer: local minus raw anchor, in the session dtype, and the counters since that anchor."""

    TYPE: ClassVar = MessageType.PUSH_FRAGMENT
    FORMAT: ClassVar = struct.Struct("<IIQIQQIQ")
    learner_id: int
    fragment: int
    step: int
    attempt: int
    base_version: int
    local_step: int
    c_steps: int
    c_tokens: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class BcastFragment(_Plain):
    """The global fragment after round ``version``, in the bulk dtype."""

    TYPE: ClassVar = MessageType.BCAST_FRAGMENT
    FORMAT: ClassVar = struct.Struct("<IQ")
    fragment: int
    version: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class FinalFragment(_Plain):
    """The authoritative fragment of the final cut, always f32."""

    TYPE: ClassVar = MessageType.FINAL_FRAGMENT
    FORMAT: ClassVar = struct.Struct("<IQ")
    fragment: int
    version: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class Heartbeat(_Plain):
    """Sign of life and the learner's local step."""

    TYPE: ClassVar = MessageType.HEARTBEAT
    FORMAT: ClassVar = struct.Struct("<IQ")
    learner_id: int
    local_step: int


@dataclass(frozen=True, slots=True)
class Shutdown(_Plain):
    """Sent only to a generation whose final acknowledgement was accepted."""

    TYPE: ClassVar = MessageType.SHUTDOWN
    FORMAT: ClassVar = struct.Struct("<")


@dataclass(frozen=True, slots=True)
class Error:
    """The syncer's last word to a peer for which a retry cannot help."""

    TYPE: ClassVar = MessageType.ERROR
    text: str

    def payload(self) -> bytes:
        raw = self.text.encode("utf-8", "replace")
        return raw[:ERROR_LIMIT_BYTES].decode("utf-8", "ignore").encode()


@dataclass(frozen=True, slots=True)
class FinalManifest:
    """Which step ended the run and the exact version of every fragment in the cut: v4's "expected versions"."""

    TYPE: ClassVar = MessageType.FINAL_MANIFEST
    step: int
    versions: tuple[int, ...]

    def payload(self) -> bytes:
        head = _MANIFEST.pack(FINALIZATION_REVISION, self.step, len(self.versions))
        return head + struct.pack(f"<{len(self.versions)}Q", *self.versions)


@dataclass(frozen=True, slots=True)
class FinalAck:
    """The learner has installed the cut of ``step``."""

    TYPE: ClassVar = MessageType.FINAL_ACK
    step: int

    def payload(self) -> bytes:
        return _ACK.pack(FINALIZATION_REVISION, self.step)


@dataclass(frozen=True, slots=True)
class BudgetDone(_Plain):
    """Learner-budget benchmark: this learner made exactly ``steps`` local steps and has stopped."""

    TYPE: ClassVar = MessageType.BUDGET_DONE
    FORMAT: ClassVar = struct.Struct("<Q")
    steps: int


BulkMessage = InitParams | PushFragment | BcastFragment | FinalFragment
ControlMessage = Hello | DataHello | PullReq | Heartbeat | Shutdown | Error | FinalManifest | FinalAck | BudgetDone
Message = BulkMessage | ControlMessage

_PLAIN: dict[MessageType, type[BulkMessage | PullReq | Heartbeat | Shutdown | BudgetDone]] = {
    message.TYPE: message
    for message in (InitParams, PushFragment, BcastFragment, FinalFragment, PullReq, Heartbeat, Shutdown, BudgetDone)
}
FIXED_BYTES = {kind: message.FORMAT.size for kind, message in _PLAIN.items()} | {
    MessageType.DATA_HELLO: _DATA_HELLO.size,
    MessageType.FINAL_MANIFEST: _MANIFEST.size,
    MessageType.FINAL_ACK: _ACK.size,
}
"""Bytes of a payload but for what follows: tensor bytes, or a manifest's versions."""


def encode(message: Message, mac_key: bytes | None = None) -> tuple[Buffer, ...]:
    """The complete frame as parts to be sent in order; a bulk message's tensor bytes are its own part, not copied.

    ``mac_key`` signs a HELLO (SHA-256 HMAC over all payload bytes before it) and is ignored for other types.
    """
    if isinstance(message, (InitParams, PushFragment, BcastFragment, FinalFragment)):
        head = message.payload()
        data = memoryview(message.data).cast("B")
        return (HEADER.pack(MAGIC, message.TYPE, len(head) + len(data)) + head, data)
    payload = message.payload()
    if mac_key is not None and isinstance(message, Hello):
        payload += _hello_mac(mac_key, payload)
    return (HEADER.pack(MAGIC, message.TYPE, len(payload)) + payload,)


def decode(kind: MessageType, payload: memoryview) -> Message:
    """Exactly one message from a whole payload; tensor bytes stay views. HELLO has ``decode_hello``.

    Raises PeerError when the payload is not exactly one message of this type.
    """
    match kind:
        case MessageType.ERROR:
            return _error(payload)
        case MessageType.FINAL_MANIFEST:
            return _manifest(payload)
        case MessageType.FINAL_ACK:
            _exactly(kind, payload, _ACK.size)
            revision, step = _ACK.unpack(payload)
            _revision(kind, revision)
            return FinalAck(step)
        case MessageType.DATA_HELLO:
            return _data_hello(payload)
        case MessageType.HELLO:
            return decode_hello(payload)
        case MessageType.CHUNK:
            raise PeerError(f"{kind.name} is not a message")
        case _:
            return _plain(kind, payload)


def decode_hello(
    payload: memoryview, learners: int | None = None, mac_key: bytes | None = None, known: WireLayout | None = None
) -> Hello:
    """HELLO, checked in the order of the rulings: mac, version, learner id, generation, dtype, layout, hashes, streams.

    Args:
        payload: the whole payload.
        learners: ids must lie below it; None = do not check.
        mac_key: when given, the last 32 bytes must be the right HMAC (compared in constant time).
        known: the session's layout; a HELLO that repeats it shares it.
    Raises:
        PeerError: one sentence, meant to be sent back as ERROR.
    """
    if mac_key is not None:
        payload = _strip_mac(payload, mac_key)
    if len(payload) < 2:
        raise PeerError("HELLO is truncated")
    _check_version(struct.unpack_from("<H", payload)[0])
    _at_least(MessageType.HELLO, payload, _HELLO.size)
    _, learner_id, generation, dtype, fragments = _HELLO.unpack_from(payload)
    if learners is not None and learner_id >= learners:
        raise PeerError(f"learner id {learner_id} is not one of 0 to {learners - 1} (the syncer's learners={learners})")
    if generation == 0:
        raise PeerError("connection generation 0: it must be nonzero")
    if dtype not in (1, 2, 3):
        raise PeerError(f"dtype {dtype} is not 1 (f32), 2 (bf16) or 3 (q4)")
    layout, at = WireLayout.decode(payload, _HELLO.size, fragments, known)
    left = len(payload) - at - 2 * HASH_BYTES
    # A mac where none is expected looks like a profile, or like trailing bytes behind one.
    hint = " (does the learner sign with hmac_key while this syncer has no key?)" if left >= 2 + HASH_BYTES else ""
    if left not in (2, 2 + HASH_BYTES):
        raise PeerError(f"HELLO: {left} bytes after the contract, expected 2 or {2 + HASH_BYTES}{hint}")
    hashes = [bytes(payload[at + i * HASH_BYTES : at + (i + 1) * HASH_BYTES]) for i in range(3 if left > 2 else 2)]
    (num_streams,) = struct.unpack_from("<H", payload, len(payload) - 2)
    if num_streams > MAX_STREAMS:
        raise PeerError(f"{num_streams} data streams, at most {MAX_STREAMS} are allowed{hint}")
    profile = hashes[2] if left > 2 else None
    return Hello(learner_id, generation, WireDType(dtype), layout, hashes[0], hashes[1], profile, num_streams)


def _hello_mac(key: bytes, payload: Buffer) -> bytes:
    digest = hmac.new(key, _MAC_DOMAIN, hashlib.sha256)
    digest.update(payload)
    return digest.digest()


def _strip_mac(payload: memoryview, key: bytes) -> memoryview:
    body, mac = payload[:-HASH_BYTES], payload[-HASH_BYTES:]
    if len(payload) < HASH_BYTES or not hmac.compare_digest(_hello_mac(key, body), mac):
        raise PeerError("HELLO is not signed with this syncer's key: give the learner the same hmac_key")
    return body


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise PeerError(f"protocol version {version}: this peer speaks version {PROTOCOL_VERSION} only")


def _data_hello(payload: memoryview) -> DataHello:
    if len(payload) >= 2:
        _check_version(struct.unpack_from("<H", payload)[0])
    _exactly(MessageType.DATA_HELLO, payload, _DATA_HELLO.size)
    _, learner_id, generation, index = _DATA_HELLO.unpack(payload)
    return DataHello(learner_id, generation, index)


def _plain(kind: MessageType, payload: memoryview) -> Message:
    form, size = _PLAIN[kind], FIXED_BYTES[kind]
    check = _at_least if kind in BULK_TYPES else _exactly
    check(kind, payload, size)
    values = list(form.FORMAT.unpack_from(payload))
    if kind in BULK_TYPES:
        values.append(payload[size:])
    message = form(*values)
    if isinstance(message, PullReq) and (message.step == 0 or message.attempt == 0):
        raise PeerError(f"PULL_REQ of step {message.step}, attempt {message.attempt}: both count from 1")
    if isinstance(message, PushFragment) and message.attempt == 0:
        raise PeerError("PUSH_FRAGMENT of attempt 0: attempts count from 1")
    if isinstance(message, PushFragment) and message.c_steps == 0:
        raise PeerError("PUSH_FRAGMENT with c_steps 0: at least one local step must lie behind it")
    return message


def _error(payload: memoryview) -> Error:
    if len(payload) > ERROR_LIMIT_BYTES:
        raise PeerError(f"ERROR of {len(payload)} bytes, at most {ERROR_LIMIT_BYTES}")
    try:
        return Error(str(payload, "utf-8"))
    except UnicodeDecodeError as error:
        raise PeerError(f"ERROR text is not UTF-8: {error.reason}") from error


def _manifest(payload: memoryview) -> FinalManifest:
    kind = MessageType.FINAL_MANIFEST
    _at_least(kind, payload, _MANIFEST.size)
    revision, step, fragments = _MANIFEST.unpack_from(payload)
    _revision(kind, revision)
    _exactly(kind, payload, _MANIFEST.size + 8 * fragments)
    return FinalManifest(step, struct.unpack_from(f"<{fragments}Q", payload, _MANIFEST.size))


def _revision(kind: MessageType, revision: int) -> None:
    if revision != FINALIZATION_REVISION:
        raise PeerError(f"{kind.name} of revision {revision}, this peer speaks {FINALIZATION_REVISION}")


def _exactly(kind: MessageType, payload: memoryview, size: int) -> None:
    if len(payload) != size:
        raise PeerError(f"{kind.name} of {len(payload)} bytes, expected {size}", kind)


def _at_least(kind: MessageType, payload: memoryview, size: int) -> None:
    if len(payload) < size:
        raise PeerError(f"{kind.name} of {len(payload)} bytes, expected at least {size}", kind)


def is_bulk(message: Message) -> bool:
    """Does this message travel striped over the data streams?"""
    return message.TYPE in BULK_TYPES
