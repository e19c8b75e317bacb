"""One table of what a hostile peer may say to a syncer, and what must come of it.

Every entry is run against the pure machines (``test_hostile_machines.py``) and against a living syncer that honest
learners keep using (``tests/e2e/test_hostile.py``). Bytes are built with struct alone, as a stranger would.

    stage  first    a fresh socket says this
           group    learner 2 has joined with a fresh generation and says this on its sockets (0 = control)
    ends   ERROR    an ERROR frame whose text matches, then the end
           CLOSED   the end without a word
           ALIVE    the connection lives on; what it said was ignored, rejected or lawful
           WAITS    the socket is let wait, for a limited time
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from tests.support.wire_by_hand import chunk, frame
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout

LEARNERS, STRANGER = 3, 2  # learners 0 and 1 are honest
PIPELINE = 1
LAYOUT = WireLayout((WireFragment(MergeMode.AVG, (3,)), WireFragment(MergeMode.RDA, (39_000, 1_000))))
FINGERPRINT, CONTRACT = b"\x11" * 32, b"\x22" * 32
SLICE = 4 * 1024 * 1024
TOP = 2**64 - 1


class Ends(Enum):
    ERROR = auto()
    CLOSED = auto()
    ALIVE = auto()
    WAITS = auto()


@dataclass(frozen=True)
class Scene:
    """What a stranger knows when it speaks.

    Attributes:
        dtype: of the session.
        streams: data streams of its own group, where it has one.
        generation: its own.
        honest: the generation of learner 0's living connection.
        superseded, dead: earlier generations of the stranger, one still connected and one gone.
        pull: (fragment, step, attempt) that it was asked for, where the attack needs one.
    """

    dtype: WireDType = WireDType.F32
    streams: int = 0
    generation: int = 77
    honest: int = 1
    superseded: int = 5
    dead: int = 6
    pull: tuple[int, int, int] = (0, 1, 1)


Said = list[tuple[int, bytes]]  # (stream, bytes) in order


@dataclass(frozen=True)
class Attack:
    """One entry; see the top of this file. ``says`` gives the bytes of each socket, or of the one fresh socket."""

    name: str
    stage: str
    says: Callable[[Scene], Said]
    ends: Ends
    text: str = ""  # a pattern, where it ends in ERROR
    streams: int = 0  # data streams that its group declares and attaches
    asked: bool = False  # it is a member of the round under way
    rejected: str = ""  # the reason under which the tape counts it
    dtypes: tuple[WireDType, ...] = (WireDType.F32,)
    pure: bool = True  # the machines alone can tell
    needs: str = ""  # first: a group of its own (own), one superseded, one dead
    resets: bool = False  # the socket is closed right behind the bytes, with a reset

    def __str__(self) -> str:
        return self.name


# ------------------------------------------------------------------------------------------------------ builders


def hello(
    scene: Scene | None = None,
    *,
    version: int = 4,
    learner: int = STRANGER,
    generation: int | None = None,
    dtype: int | None = None,
    count: int | None = None,
    layout: bytes | None = None,
    fingerprint: bytes = FINGERPRINT,
    contract: bytes = CONTRACT,
    profile: bytes = b"",
    streams: int | None = None,
    tail: bytes = b"",
) -> bytes:
    """The payload of a HELLO of the session, but for what is named."""
    scene = scene or Scene()
    described = LAYOUT.encoded if layout is None else layout
    return (
        struct.pack(
            "<HIQBI",
            version,
            learner,
            scene.generation if generation is None else generation,
            scene.dtype if dtype is None else dtype,
            len(LAYOUT) if count is None else count,
        )
        + described
        + fingerprint
        + contract
        + profile
        + struct.pack("<H", scene.streams if streams is None else streams)
        + tail
    )


def data_hello(generation: int, index: int, *, version: int = 4, learner: int = STRANGER) -> bytes:
    return frame(8, struct.pack("<HIQH", version, learner, generation, index))


def zeros(scene: Scene, fragment: int, *, bulk: bool = False) -> bytes:
    """Tensor bytes of a fragment, as lawful as can be."""
    return bytes(LAYOUT.nbytes(fragment, scene.dtype.bulk if bulk else scene.dtype))


def push(
    scene: Scene,
    *,
    learner: int = STRANGER,
    fragment: int | None = None,
    step: int | None = None,
    attempt: int | None = None,
    base: int = 0,
    local_step: int = 1,
    c_steps: int = 1,
    c_tokens: int = 10,
    data: bytes | None = None,
) -> bytes:
    """The payload of an answer to the scene's pull, but for what is named."""
    asked = scene.pull
    fragment = asked[0] if fragment is None else fragment
    head = struct.pack(
        "<IIQIQQIQ",
        learner,
        fragment,
        asked[1] if step is None else step,
        asked[2] if attempt is None else attempt,
        base,
        local_step,
        c_steps,
        c_tokens,
    )
    return head + (zeros(scene, fragment) if data is None else data)


def late(scene: Scene, fragment: int = 1) -> bytes:
    """A whole inner frame that is lawful and belongs to no round."""
    return frame(4, push(scene, fragment=fragment, step=10**9))


def spoilt(scene: Scene, value: float) -> bytes:
    """f32 or bf16 tensor bytes of the pulled fragment, zeros but for the last value."""
    data = bytearray(zeros(scene, scene.pull[0]))
    raw = struct.pack("<f", value)
    raw = raw if scene.dtype is WireDType.F32 else raw[2:]
    data[-len(raw) :] = raw
    return bytes(data)


def scaled(scene: Scene, scale: float) -> bytes:
    """q4 bytes of the pulled fragment whose first block has this scale."""
    data = bytearray(zeros(scene, scene.pull[0]))
    data[:4] = struct.pack("<f", scale)
    return bytes(data)


def beat(learner: int = STRANGER, local_step: int = 1) -> bytes:
    return frame(6, struct.pack("<IQ", learner, local_step))


# ------------------------------------------------------------------------------------------------------ fresh sockets


def _first(name: str, raw: bytes | Callable[[Scene], bytes], ends: Ends, text: str = "", **more: object) -> Attack:
    says = (lambda scene: [(0, raw(scene))]) if callable(raw) else (lambda _: [(0, raw)])
    return Attack(name, "first", says, ends, text, **more)  # type: ignore[arg-type]


def _hello(name: str, text: str, **wrong: object) -> Attack:
    return _first(f"HELLO: {name}", lambda scene: frame(1, hello(scene, **wrong)), Ends.ERROR, text)  # type: ignore[arg-type]


def _layout(name: str, layout: bytes, text: str, count: int = 1) -> Attack:
    return _hello(f"layout, {name}", text, layout=layout, count=count)


def _one(mode: int, tensors: int, *numbers: int) -> bytes:
    return struct.pack("<BI", mode, tensors) + struct.pack(f"<{len(numbers)}Q", *numbers)


def _framing() -> Iterator[Attack]:
    for bit in (0, 9, 18, 31):
        yield _first(f"magic with bit {bit} flipped", frame(1, magic=0xD170C0DE ^ 1 << bit), Ends.ERROR, "magic")
    yield _first("magic in the other byte order", frame(1, magic=0xDEC070D1), Ends.ERROR, "magic")
    yield _first("a web browser", b"GET / HTTP/1.1\r\nHost: syncer\r\n\r\n", Ends.ERROR, "magic")
    yield _first("a TLS client", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32), Ends.ERROR, "TLS|magic")
    for kind in (0, 15, 128, 255):
        yield _first(f"type {kind}", frame(kind), Ends.ERROR, "unknown")
    for kind in (2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14):
        yield _first(f"type {kind} first", frame(kind, bytes(8)), Ends.ERROR, "first frame")
    for length in (16 * 2**20 + 1, 2**31, 2**32, 2**63, TOP):
        yield _first(f"HELLO that claims {length} bytes", frame(1, length=length), Ends.ERROR, "at most")
    for length in (17, 2**32 + 16, TOP):
        yield _first(f"DATA_HELLO that claims {length} bytes", frame(8, length=length), Ends.ERROR, "at most 16")
    yield _first("nothing at all", b"", Ends.WAITS)
    yield _first("a long HELLO that does not come", frame(1, length=64 * 2**10), Ends.WAITS)
    yield _first("half a header, then a reset", frame(1)[:7], Ends.CLOSED, resets=True)
    yield _first("half a HELLO, then a reset", lambda s: frame(1, hello(s))[:60], Ends.CLOSED, resets=True)
    for cut in range(1, len(frame(1, hello()))):
        yield _first(f"a HELLO that stops at byte {cut}", lambda s, c=cut: frame(1, hello(s))[:c], Ends.WAITS)


def _hellos() -> Iterator[Attack]:
    whole = hello()
    for cut in (0, 1, 2, 6, 14, 15, 18, 19, 20, 24, 40, len(whole) - 66, len(whole) - 34, len(whole) - 1):
        yield _first(f"HELLO of {cut} bytes", lambda s, c=cut: frame(1, hello(s)[:c]), Ends.ERROR, "HELLO|version")
    for version in (0, 3, 5, 0x0400, 65535):
        yield _hello(f"version {version}", f"version {version}", version=version)
    for learner in (LEARNERS, 2**31, 2**32 - 1):
        yield _hello(f"learner {learner}", f"learner id {learner}", learner=learner)
    yield _hello("generation 0", "generation 0", generation=0)
    for dtype in (0, 4, 255):
        yield _hello(f"dtype {dtype}", f"dtype {dtype}", dtype=dtype)
    yield _hello("another dtype", "wire dtype", dtype=WireDType.BF16)
    for count in (0, 3, 10_000, 2**32 - 1):
        yield _hello(f"{count} fragments", "HELLO", count=count)
    yield _hello("one fragment less than it describes", "HELLO", count=1)
    for mode in (3, 255):
        yield _layout(f"mode {mode}", _one(mode, 1, 4), "merge mode")
    for tensors in (0, 2, 2**31, 2**32 - 1):
        yield _layout(f"{tensors} tensors", _one(0, tensors, 4), "HELLO")
    yield _layout("a tensor of 0 values", _one(0, 1, 0), "0 values")
    yield _layout("values beyond 64 bits", _one(0, 2, TOP, 1), "overflow")
    yield _layout("values beyond 64 bits in two fragments", _one(0, 1, TOP) + _one(1, 1, TOP), "overflow", count=2)
    yield _layout("as many values as 64 bits can name", _one(0, 1, TOP), "another model")
    yield _layout("an iso tensor without rows", _one(2, 1, 4, 0, 4), "matrix")
    yield _layout("an iso tensor without columns", _one(2, 1, 4, 4, 0), "matrix")
    yield _layout("an iso tensor of another size", _one(2, 1, 4, 2, 3), "matrix")
    yield _layout("an iso tensor that fits modulo 2^64", _one(2, 1, 4, 3, 0xAAAAAAAAAAAAAAAC), "matrix")
    yield _layout("an iso tensor whose rows are cut off", _one(2, 1, 4, 2), "HELLO")
    for tail in (1, 2, 16, 31, 33, 64):
        yield _hello(f"{tail} bytes too many", "HELLO", tail=bytes(tail))
    for streams in (257, 65535):
        yield _hello(f"{streams} data streams", "data streams", streams=streams)
    yield _hello("a profile of another syncer", "profile", profile=b"\x33" * 32)
    yield _hello("another contract", "another run", contract=b"\x44" * 32)
    yield _hello("another fingerprint", "another model", fingerprint=b"\x55" * 32)
    yield _hello("another model", "another model", layout=_one(0, 1, 3) + _one(1, 1, 40_000), count=2)
    yield _hello("a huge other model", "another model|at most", layout=_one(0, 1, 7) * 20_000, count=20_000)
    yield _first(
        "HELLO: signed for a syncer without a key",
        lambda s: frame(1, hello(s) + hmac.digest(b"k", b"yeto-hello-mac-v1\0" + hello(s), hashlib.sha256)),
        Ends.ERROR,
        "key",
    )
    yield _first(
        "HELLO: the living generation of learner 0, replayed",
        lambda s: frame(1, hello(s, learner=0, generation=s.honest)),
        Ends.ERROR,
        "fresh generation",
    )
    yield _first(
        "HELLO: an old generation, replayed",
        lambda s: frame(1, hello(s, generation=s.dead)),
        Ends.ERROR,
        "fresh generation",
        needs="dead",
    )


def _data_hellos() -> Iterator[Attack]:
    for version in (0, 3, 5, 65535):
        yield _first(
            f"DATA_HELLO: version {version}", lambda _, v=version: data_hello(1, 0, version=v), Ends.ERROR, "version"
        )
    for size in (0, 1, 2, 15):
        yield _first(f"DATA_HELLO of {size} bytes", frame(8, data_hello(9, 0)[13:][:size]), Ends.ERROR, "16|version")
    yield _first("DATA_HELLO: nobody's generation", lambda _: data_hello(2**63 + 9, 0), Ends.WAITS)
    yield _first("DATA_HELLO: nobody's learner", lambda _: data_hello(1, 0, learner=2**32 - 1), Ends.WAITS)
    yield _first("DATA_HELLO: a dead group", lambda s: data_hello(s.dead, 0), Ends.CLOSED, needs="dead", pure=False)
    yield _first(
        "DATA_HELLO: a superseded group",
        lambda s: data_hello(s.superseded, 0),
        Ends.CLOSED,
        needs="superseded",
        pure=False,
    )
    for index in (2, 256, 65535):
        yield _first(
            f"DATA_HELLO: stream {index} of 2",
            lambda s, i=index: data_hello(s.generation, i),
            Ends.ERROR,
            "declared 2",
            needs="own",
        )
    yield _first(
        "DATA_HELLO: a stream that is there", lambda s: data_hello(s.generation, 0), Ends.ERROR, "already", needs="own"
    )
    yield _first(
        "DATA_HELLO: into the group of learner 0", lambda s: data_hello(s.honest, 0, learner=0), Ends.ERROR, "declared"
    )


# ------------------------------------------------------------------------------------------------------ inside a group


def _group(
    name: str, says: Callable[[Scene], bytes | Said], text: str = "", ends: Ends = Ends.ERROR, **more: object
) -> Attack:
    def told(scene: Scene) -> Said:
        said = says(scene)
        return [(0, said)] if isinstance(said, bytes) else said

    return Attack(name, "group", told, ends, text, **more)  # type: ignore[arg-type]


def _after_hello() -> Iterator[Attack]:
    yield _group("garbage after HELLO", lambda _: b"\xff" * 64, "magic")
    yield _group("HELLO twice", lambda s: frame(1, hello(s)), "not legal")
    yield _group("DATA_HELLO on the control stream", lambda s: data_hello(s.generation, 0), "not legal")
    for kind in (3, 5, 7, 10, 11, 13):
        yield _group(f"type {kind}, which only a syncer says", lambda _, k=kind: frame(k, bytes(16)), "not legal")
    for kind in (0, 15, 255):
        yield _group(f"type {kind} in a group", lambda _, k=kind: frame(k), "unknown")
    for size in (0, 11, 13, TOP):
        yield _group(
            f"HEARTBEAT of {size} bytes",
            lambda _, n=size: frame(6, bytes(min(n, 13)), length=n),
            "HEARTBEAT",
        )
    yield _group("HEARTBEAT of learner 0", lambda _: beat(0), "HEARTBEAT of learner 0")
    yield _group("HEARTBEAT: the clock of steps runs backwards", lambda _: beat(2, TOP) + beat(2, 0), ends=Ends.ALIVE)
    yield _group("a flood of heartbeats", lambda _: beat() * 5_000, ends=Ends.ALIVE)
    yield _group("BUDGET_DONE without a budget", lambda _: frame(14, struct.pack("<Q", 5)), "budget")
    for size in (0, 7, 9):
        yield _group(f"BUDGET_DONE of {size} bytes", lambda _, n=size: frame(14, bytes(n)), "BUDGET_DONE")
    yield _group("FINAL_ACK before the end", lambda _: frame(12, struct.pack("<HQ", 1, 10**6)), "FINAL_ACK")
    for revision in (0, 2, 65535):
        yield _group(
            f"FINAL_ACK of revision {revision}",
            lambda _, r=revision: frame(12, struct.pack("<HQ", r, 1)),
            f"revision {revision}",
        )
    for size in (0, 9, 11):
        yield _group(f"FINAL_ACK of {size} bytes", lambda _, n=size: frame(12, bytes(n)), "FINAL_ACK")
    for name, raw in (("HEARTBEAT", beat()), ("FINAL_ACK", frame(12, struct.pack("<HQ", 1, 1)))):
        yield _group(f"{name} on a data stream", lambda _, r=raw: [(1, r)], "stream 0", streams=1, pure=False)
    yield _group("half a frame, and then nothing", lambda s: late(s)[:1000], ends=Ends.ALIVE)


def _inits() -> Iterator[Attack]:
    yield _group(
        "INIT of learner 2", lambda s: frame(2, struct.pack("<I", 0) + zeros(s, 0, bulk=True)), "only learner 0"
    )
    for size in (0, 3):
        yield _group(f"INIT of {size} bytes", lambda _, n=size: frame(2, bytes(n)), "INIT_PARAMS")
    yield _group("INIT longer than any fragment", lambda _: frame(2, length=4 + 4 * 40_000 + 1), "at most")
    for fragment in (2, 2**32 - 1):
        yield _group(
            f"INIT of fragment {fragment}", lambda _, f=fragment: frame(2, struct.pack("<I", f) + bytes(12)), "fragment"
        )
    for size in (0, 11, 13, 160_000):
        yield _group(
            f"INIT of fragment 0 with {size} tensor bytes",
            lambda _, n=size: frame(2, struct.pack("<I", 0) + bytes(n)),
            "tensor bytes",
        )


def _pushes() -> Iterator[Attack]:
    for size in (0, 47):
        yield _group(f"PUSH of {size} bytes", lambda s, n=size: frame(4, push(s)[:n]), "PUSH_FRAGMENT")
    yield _group("PUSH longer than any fragment", lambda _: frame(4, length=48 + 4 * 40_000 + 1), "at most")
    yield _group("PUSH that claims 2^63 bytes", lambda _: frame(4, length=2**63), "at most")
    for fragment in (2, 2**31, 2**32 - 1):
        yield _group(
            f"PUSH of fragment {fragment}",
            lambda s, f=fragment: frame(4, push(s, fragment=f, data=bytes(12))),
            "fragment",
        )
    for change in (-4, -1, 1, 4):
        yield _group(
            f"PUSH with {change:+} tensor bytes",
            lambda s, c=change: frame(4, push(s, fragment=0, data=bytes(12 + c))),
            "tensor bytes",
        )
    yield _group(
        "PUSH of fragment 0 with the bytes of fragment 1",
        lambda s: frame(4, push(s, fragment=0, data=zeros(s, 1))),
        "tensor bytes",
    )
    yield _group("PUSH of attempt 0", lambda s: frame(4, push(s, attempt=0)), "attempt 0")
    yield _group("PUSH without a local step", lambda s: frame(4, push(s, c_steps=0)), "c_steps 0")
    for learner in (0, 1, 2**32 - 1):
        yield _group(f"PUSH of learner {learner}", lambda s, i=learner: frame(4, push(s, learner=i)), "of learner")
    plain = (WireDType.F32, WireDType.BF16)
    inf = float("inf")
    for value in (float("nan"), inf, -inf, 2.0**100 * (1 + 2**-7), -(2.0**101), 3.0e38):
        yield _group(
            f"PUSH with the value {value}",
            lambda s, v=value: frame(4, push(s, data=spoilt(s, v))),
            "finite|2.100",
            asked=True,
            dtypes=plain,
        )
    for scale in (float("nan"), inf, -inf, -1.0, -1e-45, 2.0**100 * (1 + 2**-23), 3.0e38):
        yield _group(
            f"PUSH with the q4 scale {scale}",
            lambda s, v=scale: frame(4, push(s, data=scaled(s, v))),
            "scale",
            asked=True,
            dtypes=(WireDType.Q4,),
        )
    everyone = tuple(WireDType)
    yield _group("PUSH of no round", late, ends=Ends.ALIVE, rejected="out_of_round", dtypes=everyone)
    for step in (0, TOP):
        yield _group(
            f"PUSH of step {step}",
            lambda s, t=step: frame(4, push(s, step=t)),
            ends=Ends.ALIVE,
            rejected="out_of_round",
        )
    yield _group(
        "PUSH of a later attempt",
        lambda s: frame(4, push(s, attempt=2**32 - 1)),
        ends=Ends.ALIVE,
        asked=True,
        rejected="out_of_round",
    )
    yield _group(
        "PUSH of the other fragment",
        lambda s: frame(4, push(s, fragment=1 - s.pull[0])),
        ends=Ends.ALIVE,
        asked=True,
        rejected="out_of_round",
    )
    for base in (10**9, TOP):
        yield _group(
            f"PUSH on base {base}",
            lambda s, b=base: frame(4, push(s, base=b)),
            ends=Ends.ALIVE,
            asked=True,
            rejected="future_base",
        )
    yield _group(
        "PUSH twice",
        lambda s: frame(4, push(s)) * 2,
        ends=Ends.ALIVE,
        asked=True,
        rejected="duplicate",
        dtypes=everyone,
    )
    yield _group("PUSH unasked", lambda s: frame(4, push(s)), ends=Ends.ALIVE, rejected="unexpected_member")
    yield _group(
        "PUSH with every counter at its top",
        lambda s: frame(4, push(s, local_step=TOP, c_steps=2**32 - 1, c_tokens=TOP)),
        ends=Ends.ALIVE,
        asked=True,
    )
    yield _group(
        "PUSH of values that only just may be",
        lambda s: frame(4, push(s, c_tokens=TOP, data=spoilt(s, 2.0**100))),
        ends=Ends.ALIVE,
        asked=True,
        dtypes=plain,
    )
    yield _group(
        "PUSH again and again",
        lambda s: frame(4, push(s, fragment=0, step=10**9)) * 2_000,
        ends=Ends.ALIVE,
        rejected="out_of_round",
    )


def _sliced(scene: Scene, edges: list[int], order: list[int], msg_id: int = 0) -> bytes:
    """The late answer in slices [edges[i], edges[i + 1]), sent in this order."""
    inner = late(scene)
    cuts = list(itertools.pairwise(edges))
    return b"".join(chunk(msg_id, len(inner), cuts[i][0], inner[cuts[i][0] : cuts[i][1]]) for i in order)


def _chunks() -> Iterator[Attack]:
    total = 13 + 48 + 160_000
    for size in (0, 1, 23, 24):
        yield _group(f"CHUNK of {size} bytes", lambda _, n=size: frame(9, bytes(n)), "carries nothing")
    for length in (24 + SLICE + 1, 2**32, TOP):
        yield _group(f"CHUNK that claims {length} bytes", lambda _, n=length: frame(9, length=n), "at most")
    for wrong in (0, 12, total + 1, 2**32, TOP):
        yield _group(f"CHUNK of a message of {wrong} bytes", lambda _, n=wrong: chunk(0, n, 0, b"x"), "legal are")
    for offset in (total, total - 1, 2**32, TOP):
        yield _group(f"CHUNK at {offset}", lambda _, o=offset: chunk(0, total, o, b"xx"), "past")
    edges = [0, 1000, 2000, total]
    yield _group("CHUNK twice", lambda s: _sliced(s, edges, [0, 0]), "overlap")
    yield _group("CHUNK twice, out of order", lambda s: _sliced(s, edges, [1, 0, 1]), "overlap")
    for start, size in ((999, 2), (1999, 2), (1200, 10), (900, 1200), (1000, 1)):
        yield _group(
            f"CHUNK [{start}, {start + size}) over [1000, 2000)",
            lambda s, o=start, n=size: _sliced(s, edges, [1]) + chunk(0, total, o, bytes(n)),
            "overlap",
        )
    yield _group(
        "CHUNK over bytes that another socket is sending",
        lambda _: [(1, chunk(0, total, 0, bytes(5000))[:100]), (0, chunk(0, total, 4000, b"x"))],
        "overlap",
        streams=1,
    )
    for other in (total - 1, total + 1, 13):
        yield _group(
            f"CHUNK whose message is of {other} bytes now",
            lambda s, n=other: _sliced(s, edges, [1]) + chunk(0, n, 0, b"x"),
            "legal are|says its message",
        )
    # An honest learner with a stalled stream does these two as well: it may dial again.
    yield _group("65 messages begun", lambda _: b"".join(chunk(i, 13, 0, b"x") for i in range(65)), ends=Ends.CLOSED)
    yield _group(
        "more bytes reserved than all fragments have",
        lambda _: b"".join(chunk(i, total, 0, b"x") for i in range(4)),
        ends=Ends.CLOSED,
    )
    yield _group(
        "65,537 ranges",
        lambda _: b"".join(chunk(0, total, 2 * i, b"x") for i in range(65_537)),
        "disjoint",
    )
    for name, inner, text in (
        ("a wrong magic", frame(4, magic=1), "magic"),
        ("an unknown type", frame(77), "unknown"),
        ("a HEARTBEAT", beat(), "only bulk"),
        ("a FINAL_ACK", frame(12, struct.pack("<HQ", 1, 1)), "only bulk"),
        ("a CHUNK", chunk(1, 13, 0, b"x"), "only bulk"),
        ("a HELLO", frame(1, hello()), "not legal"),
        ("a BCAST", frame(5, bytes(24)), "not legal"),
        ("a longer message", frame(4, bytes(60), length=61), "says 61"),
        ("a shorter message", frame(4, bytes(60), length=59), "says 59"),
        ("an absurdly long message", frame(4, bytes(60), length=TOP), "at most"),
        ("an empty INIT", frame(2), "INIT_PARAMS"),
    ):
        yield _group(f"CHUNK that holds {name}", lambda _, i=inner: chunk(9, len(i), 0, i), text)
    yield _group(
        "a message in 1-byte slices",
        lambda s: b"".join(chunk(3, 73, i, late(s, 0)[i : i + 1]) for i in reversed(range(73))),
        ends=Ends.ALIVE,
        rejected="out_of_round",
    )
    yield _group(
        "slices in any order over all sockets",
        lambda s: [(i % 3, _sliced(s, [*range(0, total, 4000), total], [i])) for i in reversed(range(41))],
        ends=Ends.ALIVE,
        rejected="out_of_round",
        streams=2,
    )
    yield _group(
        "one message id twice, one after the other",
        lambda s: _sliced(s, [0, total], [0]) * 2,
        ends=Ends.ALIVE,
        rejected="out_of_round",
    )


ATTACKS = [
    *_framing(),
    *_hellos(),
    *_data_hellos(),
    *_after_hello(),
    *_inits(),
    *_pushes(),
    *_chunks(),
]


def attacks(stage: str, dtype: WireDType = WireDType.F32) -> list[Attack]:
    """The entries of one stage that a session of this dtype can be shown."""
    return [attack for attack in ATTACKS if attack.stage == stage and dtype in attack.dtypes]
