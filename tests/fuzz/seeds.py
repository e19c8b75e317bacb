"""Lawful inputs of every target, from which the search starts: without them it would have to invent a fingerprint."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tests.fuzz.targets import LAYOUT
from tests.support.checkpoint_bytes import V1, V2, V3, V3_BARE
from tests.support.wire_by_hand import CASES, HELLO_G, chunks
from yeto_torch.wire.constants import Direction
from yeto_torch.wire.messages import encode

_CORPUS = Path(__file__).parent / "corpus"


def seeds() -> dict[str, list[bytes]]:
    """Target -> inputs."""
    up = [case.raw for case in CASES if Direction.TO_SYNCER in case.ways]
    down = [case.raw for case in CASES if Direction.TO_LEARNER in case.ways]
    first = [case.raw for case in CASES if not case.ways]
    sliced = [b"".join(chunks(raw, 7, [5, 13, 40])) for raw in (*up, *down) if len(raw) > 40]
    first_word = encode(HELLO_G)[0][13:]
    tape = [
        b'{"time":1.5,"event":"start","step":0}\n',
        b'{"time":1,"event":"start","step":0}\n{"time":2,"step":1}\n{"time":3,"event":"start","step":0}\n{"tim',
    ]
    f32 = struct.pack("<4f", 1.5, -2, 0, 2.0**100)
    q4 = struct.pack("<f", 2.0) + bytes(range(128))
    return {
        "frames": [
            *(b"\0\0" + raw for raw in first),
            *(b"\1\1" + raw for raw in [*up, *sliced]),
            *(b"\2\2" + raw for raw in [*down, *sliced]),
        ],
        "reassembly": [
            bytes((0, 20, 0, 20, 0x80, 0, 0, 0)),
            bytes((0, 20, 0, 5, 0, 20, 9, 11, 0, 20, 5, 4, 0x81, 0, 0, 0)),
        ],
        "hello": [first_word, first_word + bytes(32), encode(HELLO_G, b"a key")[0][13:], CASES[1].raw[13:]],
        "messages": [raw[4:5] + raw[13:] for raw in [*up, *down, *first]],
        "tensors": [b"\0" + f32, b"\1" + f32, b"\2" + q4, b"\5" + q4 + q4],
        "session": [b"\1" + b"".join(down), *(b"\1" + raw for raw in [*down, *sliced])],
        "coordinator": [bytes((1, 0, 1, 1, 1, 2, 3, 0, 3, 1, 7, 0, 7, 42, 7, 1, 2, 1, 1, 1, 0, 255))],
        "checkpoint": [V1, V2, V3, V3_BARE, V3_BARE + b"\x11" * 32],
        "tape": tape,
        "layout": [_layout()],
        "fingerprinted": [_layout()],
        "marker": [b"YETO_FINAL_V1\nglobal_step=17\n", b"YETO_FINAL_V1\nglobal_step=0\n"],
    }


def _layout() -> bytes:
    fragments = [
        {"merge": f.mode.name.lower(), "tensors": [{"name": t.name, "shape": list(t.shape)} for t in f.tensors]}
        for f in LAYOUT.fragments
    ]
    document = {"format": "yeto-layout-v1", "fingerprint": LAYOUT.fingerprint.hex(), "fragments": fragments}
    return json.dumps(document).encode()


def kept(target: str) -> list[bytes]:
    """What earlier searches found worth keeping: one input a line, in hex."""
    path = _CORPUS / f"{target}.hex"
    return [bytes.fromhex(line) for line in path.read_text(encoding="ascii").split()] if path.exists() else []


def keep(target: str, inputs: list[bytes]) -> None:
    """Replace what is kept of ``target``."""
    _CORPUS.mkdir(exist_ok=True)
    lines = [data.hex() for data in sorted(set(inputs) - {b""}, key=lambda data: (len(data), data))]
    (_CORPUS / f"{target}.hex").write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
