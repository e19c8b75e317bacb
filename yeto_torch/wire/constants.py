"""Numbers of wire protocol v4 that both peers share.

Source: v4 §Frames (magic, 4 MiB), v4 §Messages (numbers of types and dtypes); the limits stand in docs/limits.md.

* pure
"""

from __future__ import annotations

import struct
from enum import IntEnum

MAGIC = 0xD170C0DE
PROTOCOL_VERSION = 4
FINALIZATION_REVISION = 1

HEADER = struct.Struct("<IBQ")  # magic:u32 | type:u8 | len:u64
HEADER_BYTES = HEADER.size
CHUNK_ENVELOPE = struct.Struct("<QQQ")  # msg_id:u64 | total_len:u64 | offset:u64
CHUNK_ENVELOPE_BYTES = CHUNK_ENVELOPE.size
SLICE_BYTES = 4 * 1024 * 1024  # the largest tensor part of one CHUNK
FIRST_FRAME_LIMIT_BYTES = 16 * 1024 * 1024  # HELLO is layout metadata, never tensors
ERROR_LIMIT_BYTES = 65_536
MAX_STREAMS = 256
HASH_BYTES = 32

MAX_LEARNER_PARTIALS = 64  # partial messages one learner may have open at the syncer
MAX_INTERVALS = 65_536  # disjoint received ranges a group may have open: memory stays bounded under tiny chunks
MAX_MAGNITUDE = 2.0**100  # larger values could overflow a merge: a peer may not send them

Q4_BLOCK = 256
Q4_BLOCK_BYTES = 132  # f32 scale + 128 bytes of packed nibbles

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1


class MessageType(IntEnum):
    """The fourteen frame types."""

    HELLO = 1
    INIT_PARAMS = 2
    PULL_REQ = 3
    PUSH_FRAGMENT = 4
    BCAST_FRAGMENT = 5
    HEARTBEAT = 6
    SHUTDOWN = 7
    DATA_HELLO = 8
    CHUNK = 9
    ERROR = 10
    FINAL_MANIFEST = 11
    FINAL_ACK = 12
    FINAL_FRAGMENT = 13
    BUDGET_DONE = 14


BULK_TYPES = frozenset(
    {MessageType.INIT_PARAMS, MessageType.PUSH_FRAGMENT, MessageType.BCAST_FRAGMENT, MessageType.FINAL_FRAGMENT}
)


class WireDType(IntEnum):
    """The session dtype a HELLO fixes."""

    F32 = 1
    BF16 = 2
    Q4 = 3

    @property
    def bulk(self) -> WireDType:
        """The dtype of INIT and BCAST: bf16 under q4, else the session dtype itself."""
        return WireDType.BF16 if self is WireDType.Q4 else self

    def nbytes(self, numel: int) -> int:
        """Bytes of ``numel`` values of one fragment in this dtype."""
        if self is WireDType.F32:
            return 4 * numel
        if self is WireDType.BF16:
            return 2 * numel
        return Q4_BLOCK_BYTES * -(-numel // Q4_BLOCK)


class MergeMode(IntEnum):
    """How the tensors of a fragment are merged."""

    AVG = 0
    RDA = 1
    ISO = 2


class Direction(IntEnum):
    """Which way a frame travels; some types are legal one way only."""

    TO_SYNCER = 0
    TO_LEARNER = 1
