"""The largest legal payload of each type, before and after HELLO.

Asked by the frame reader before it allocates anything. Decides lengths and directions only; whether the named
fragment has exactly that length is checked after parsing (``exact_data_bytes``).

Source: v4 §Frames (limits follow from the negotiated layout and dtype); rulings §1.2, §1.5, §1.7.

* pure
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from yeto_torch.wire.constants import (
    BULK_TYPES,
    CHUNK_ENVELOPE_BYTES,
    ERROR_LIMIT_BYTES,
    FIRST_FRAME_LIMIT_BYTES,
    HEADER_BYTES,
    MAX_LEARNER_PARTIALS,
    SLICE_BYTES,
    Direction,
    MessageType,
    WireDType,
)
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.layout import WireLayout
from yeto_torch.wire.messages import FIXED_BYTES, BulkMessage, PushFragment


class Limits(Protocol):
    """What a FrameReader asks before it accepts a header."""

    def max_payload(self, kind: MessageType) -> int:
        """The largest legal payload in bytes; raises PeerError when the type is not legal here."""
        ...


@dataclass(frozen=True, slots=True)
class FirstFrameLimits:
    """A fresh socket may say HELLO or DATA_HELLO and nothing else."""

    hello_bytes: int = FIRST_FRAME_LIMIT_BYTES  # the longest HELLO; less once the session's layout is known

    def max_payload(self, kind: MessageType) -> int:
        if kind is MessageType.HELLO:
            return self.hello_bytes
        if kind is MessageType.DATA_HELLO:
            return FIXED_BYTES[kind]
        raise PeerError(f"{kind.name} as a first frame: it must be HELLO or DATA_HELLO")


class GroupLimits:
    """Limits of one connection group, derived from the layout and dtype its HELLO fixed.

    Args:
        layout, dtype: as negotiated.
        inbound: the direction of the frames that will be read.
        pipeline: rounds in flight at the syncer; widens what one learner's partial messages may reserve.

    Attributes:
        max_inner: bytes of the largest inner frame (header included) that CHUNKs may carry.
        max_partials: partial messages open at once.
        max_reserved_bytes: bytes that all partial messages together may reserve.
    """

    def __init__(self, layout: WireLayout, dtype: WireDType, inbound: Direction, pipeline: int = 1) -> None:
        self.layout, self.dtype, self.inbound = layout, dtype, inbound
        bulk, final = layout.max_nbytes(dtype.bulk), layout.max_nbytes(WireDType.F32)
        if inbound is Direction.TO_SYNCER:
            variable = {
                MessageType.INIT_PARAMS: bulk,
                MessageType.PUSH_FRAGMENT: layout.max_nbytes(dtype),
                MessageType.HEARTBEAT: 0,
                MessageType.FINAL_ACK: 0,
                MessageType.BUDGET_DONE: 0,
            }
        else:
            variable = {
                MessageType.PULL_REQ: 0,
                MessageType.BCAST_FRAGMENT: bulk,
                MessageType.FINAL_FRAGMENT: final,
                MessageType.FINAL_MANIFEST: 8 * len(layout),
                MessageType.SHUTDOWN: 0,
            }
        self._table = {kind: FIXED_BYTES[kind] + more for kind, more in variable.items()}
        self.max_inner = HEADER_BYTES + max(self._table[kind] for kind in variable if kind in BULK_TYPES)
        if inbound is Direction.TO_SYNCER:
            self.max_partials = MAX_LEARNER_PARTIALS
            bulk_total = sum(layout.nbytes(f, dtype.bulk) for f in range(len(layout)))
            self.max_reserved_bytes = bulk_total + 2 * pipeline * self.max_inner
        else:
            # A reconnect broadcasts every fragment at once, and the final cut may meet that broadcast.
            self.max_partials = 2 * len(layout) + 64
            self.max_reserved_bytes = self.max_partials * self.max_inner
            self._table[MessageType.ERROR] = ERROR_LIMIT_BYTES
        self._table[MessageType.CHUNK] = CHUNK_ENVELOPE_BYTES + SLICE_BYTES

    def max_payload(self, kind: MessageType) -> int:
        try:
            return self._table[kind]
        except KeyError:
            raise PeerError(f"{kind.name} is not legal {self.inbound.name.lower().replace('_', ' ')}") from None

    def check_bulk(self, message: BulkMessage) -> None:
        """The named fragment exists and the tensor bytes are exactly its length. Raises PeerError."""
        name = message.TYPE.name
        if message.fragment >= len(self.layout):
            raise PeerError(f"{name} names fragment {message.fragment}, the layout has {len(self.layout)}")
        expected = self.layout.nbytes(message.fragment, self._dtype_of(message))
        if len(message.data) != expected:
            raise PeerError(
                f"{name} of fragment {message.fragment} carries {len(message.data)} tensor bytes, expected {expected}"
            )

    def _dtype_of(self, message: BulkMessage) -> WireDType:
        if message.TYPE is MessageType.FINAL_FRAGMENT:
            return WireDType.F32
        return self.dtype if isinstance(message, PushFragment) else self.dtype.bulk
