"""The wire written a second time, with struct alone: frames as bytes, and one table of every message as bytes."""

import itertools
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from yeto_torch.wire import messages
from yeto_torch.wire.constants import HEADER_BYTES, Direction, MergeMode, MessageType, WireDType
from yeto_torch.wire.frames import FrameReader
from yeto_torch.wire.layout import WireFragment, WireLayout
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

GOLDEN = json.loads((Path(__file__).parent.parent / "vectors" / "wire.json").read_text(encoding="utf-8"))

LAYOUT_G = Layout(
    (
        Fragment(MergeMode.AVG, (Tensor("emb.weight", (2, 2)),)),
        Fragment(MergeMode.RDA, (Tensor("l0.w", (3,)), Tensor("l0.b", (1,)))),
        Fragment(MergeMode.ISO, (Tensor("l1.w", (2, 3)),)),
    )
)
HELLO_G = messages.Hello(
    learner_id=1,
    generation=0x0102030405060708,
    dtype=WireDType.BF16,
    layout=LAYOUT_G.wire,
    fingerprint=LAYOUT_G.fingerprint,
    contract=LAYOUT_G.fingerprint,
    profile=None,
    num_streams=4,
)


def golden(name: str) -> bytes:
    return bytes.fromhex(GOLDEN[name]["hex"])


def frame(kind: int, payload: bytes = b"", *, magic: int = 0xD170C0DE, length: int | None = None) -> bytes:
    return struct.pack("<IBQ", magic, kind, len(payload) if length is None else length) + payload


def chunk(msg_id: int, total: int, offset: int, data: bytes) -> bytes:
    return frame(9, struct.pack("<QQQ", msg_id, total, offset) + data)


def chunks(inner: bytes, msg_id: int, cuts: list[int]) -> list[bytes]:
    """CHUNK frames of a complete inner frame, cut at the given places."""
    edges = [0, *sorted(cuts), len(inner)]
    return [
        chunk(msg_id, len(inner), start, inner[start:end]) for start, end in itertools.pairwise(edges) if end > start
    ]


def plain_layout(*numels: int) -> WireLayout:
    return WireLayout(tuple(WireFragment(MergeMode.AVG, (numel,)) for numel in numels))


def limits_to(
    direction: Direction, layout: WireLayout = LAYOUT_G.wire, dtype: WireDType = WireDType.F32
) -> GroupLimits:
    return GroupLimits(layout, dtype, direction, pipeline=2)


@dataclass(frozen=True)
class Case:
    """One message and its frame, byte for byte. ``ways``: the directions in which a group may receive it."""

    message: messages.Message
    raw: bytes
    ways: tuple[Direction, ...]

    def __str__(self) -> str:
        return MessageType(self.message.TYPE).name


_UP, _DOWN = (Direction.TO_SYNCER,), (Direction.TO_LEARNER,)
_FOUR = bytes(range(16))  # fragment 0 or 1 of layout G in f32

CASES = [
    Case(HELLO_G, frame(1, golden("hello_g")), ()),
    Case(messages.DataHello(1, 0x0102030405060708, 3), golden("data_hello_frame"), ()),
    Case(messages.InitParams(1, _FOUR), frame(2, struct.pack("<I", 1) + _FOUR), _UP),
    Case(messages.PullReq(2, 7, 1), golden("pull_frame"), _DOWN),
    Case(messages.PushFragment(1, 2, 7, 1, 4, 42, 24, 4096, bytes(24)), frame(4, golden("push_head") + bytes(24)), _UP),
    Case(messages.BcastFragment(0, 3, _FOUR), frame(5, struct.pack("<IQ", 0, 3) + _FOUR), _DOWN),
    Case(messages.Heartbeat(1, 2**63), frame(6, struct.pack("<IQ", 1, 2**63)), _UP),
    Case(messages.Shutdown(), golden("shutdown_frame"), _DOWN),
    Case(messages.Error("grüezi"), frame(10, "grüezi".encode()), _DOWN),
    Case(messages.Error(""), frame(10), _DOWN),
    Case(messages.FinalManifest(17, (15, 16, 17)), frame(11, golden("manifest")), _DOWN),
    Case(messages.FinalAck(17), frame(12, struct.pack("<HQ", 1, 17)), _UP),
    Case(messages.FinalFragment(1, 16, _FOUR), frame(13, struct.pack("<IQ", 1, 16) + _FOUR), _DOWN),
    Case(messages.BudgetDone(48), frame(14, struct.pack("<Q", 48)), _UP),
]


def at_boundary(reader: FrameReader) -> bool:
    """Is it between frames, so that an end of the stream here cuts nothing in half?"""
    return reader._target is reader._head and len(reader.buffer()) == HEADER_BYTES


def same(left: messages.Message, right: messages.Message) -> bool:
    """Equal in type, fields and tensor bytes, whatever holds the bytes."""
    if type(left) is not type(right):
        return False
    return all(
        bytes(getattr(left, name)) == bytes(getattr(right, name))
        if name == "data"
        else getattr(left, name) == getattr(right, name)
        for name in left.__dataclass_fields__
    )
