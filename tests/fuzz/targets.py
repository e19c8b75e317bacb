"""What may be done to us with arbitrary bytes, as functions of bytes, and what must hold whatever they are.

A target never raises on its own account: the errors that its room promises are part of the deal, anything else that
comes out (another exception, a broken promise) is a find. The same functions are driven by coverage (``run.py``), by
hypothesis and by the kept corpus (``test_corpus.py``).
"""

from __future__ import annotations

import atexit
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from syncer.checkpoint.files import marker_path, read_marker
from syncer.checkpoint.format import parse, write_parts
from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.tape import Tape, merges, read_tape
from tests.support.checkpoint_bytes import content
from tests.support.coordinator_desk import Desk, syncer_policy
from tests.support.wire_by_hand import at_boundary
from yeto_torch.learner.effects import Adopt, Install
from yeto_torch.learner.session import Session
from yeto_torch.wire import codec
from yeto_torch.wire.chunks import Reassembler
from yeto_torch.wire.constants import MAX_MAGNITUDE, Direction, MergeMode, MessageType, WireDType
from yeto_torch.wire.errors import PeerError, StateError
from yeto_torch.wire.frames import Frame, FrameReader, SliceTable
from yeto_torch.wire.limits import FirstFrameLimits, GroupLimits
from yeto_torch.wire.messages import (
    BcastFragment,
    FinalFragment,
    Hello,
    InitParams,
    PushFragment,
    decode,
    decode_hello,
    encode,
)
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

LAYOUT = Layout(
    (
        Fragment(MergeMode.AVG, (Tensor("a", (2, 2)),)),
        Fragment(MergeMode.RDA, (Tensor("b", (3,)), Tensor("c", ()))),
        Fragment(MergeMode.ISO, (Tensor("d", (2, 3)),)),
    )
)
KEY = b"a key"
_UP, _DOWN = Direction.TO_SYNCER, Direction.TO_LEARNER
_SCRATCH = Path(tempfile.mkdtemp(prefix="yeto-fuzz-"))
atexit.register(shutil.rmtree, _SCRATCH, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------- the wire


def _table(limits: GroupLimits) -> Reassembler:
    return Reassembler(limits.max_inner, limits.max_partials, limits.max_reserved_bytes)


def _read(reader: FrameReader, data: bytes, pieces: Callable[[int], int]) -> tuple[list[tuple[int, bytes]], str]:
    """Frames until the bytes or the reader's patience end, and why they ended."""
    frames: list[tuple[int, bytes]] = []
    at = turn = 0
    while at < len(data):
        view = reader.buffer()
        assert len(view) > 0
        count = min(len(view), len(data) - at, max(1, pieces(turn)))
        view[:count] = data[at : at + count]
        at, turn = at + count, turn + 1
        try:
            frame = reader.received(count)
        except PeerError as violation:
            return frames, str(violation)
        if frame is not None:
            frames.append((frame.kind, bytes(frame.payload)))
    return frames, "" if at_boundary(reader) else "cut"


def frames(data: bytes) -> None:
    """A socket's bytes: the same frames and the same end, in whatever pieces they come."""
    if len(data) < 2:
        return
    choice, stride = data[0] % 3, 1 + data[1] % 61
    group = GroupLimits(LAYOUT.wire, WireDType(1 + data[0] // 3 % 3), _UP if choice == 1 else _DOWN, 2)
    outcomes = []
    for pieces in (lambda _: 1, lambda _: 1 << 30, lambda turn: stride + turn % 5):
        reader = FrameReader(FirstFrameLimits()) if choice == 0 else FrameReader(group, _table(group))
        outcomes.append(_read(reader, data[2:], pieces))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    limits = FirstFrameLimits() if choice == 0 else group
    for kind, payload in outcomes[0][0]:
        assert len(payload) <= limits.max_payload(MessageType(kind))
        assert kind != MessageType.CHUNK


class _Twin:
    """Reassembly done the slow way: one set of taken offsets per message."""

    def __init__(self, max_inner: int, max_partials: int, max_reserved: int) -> None:
        self.limits = max_inner, max_partials, max_reserved
        self.open: dict[int, tuple[int, set[int], int]] = {}

    def takes(self, msg_id: int, total: int, offset: int, size: int) -> bool:
        max_inner, max_partials, max_reserved = self.limits
        if size < 1 or not 13 <= total <= max_inner or offset + size > total:
            return False
        if msg_id not in self.open:
            reserved = sum(total for total, _, _ in self.open.values())
            if len(self.open) >= max_partials or reserved + total > max_reserved:
                return False
            self.open[msg_id] = total, set(), 0
        known, taken, received = self.open[msg_id]
        wanted = set(range(offset, offset + size))
        if known != total or taken & wanted:
            return False
        self.open[msg_id] = total, taken | wanted, received
        return True

    def commits(self, msg_id: int, size: int) -> bool:
        total, taken, received = self.open[msg_id]
        self.open[msg_id] = total, taken, received + size
        if received + size == total:
            del self.open[msg_id]
            return True
        return False


def reassembly(data: bytes) -> None:
    """Reserve and commit in any order: what the slow twin takes is taken, and no more memory than allowed is held."""
    table, twin = Reassembler(64, 3, 120), _Twin(64, 3, 120)
    lent: list[tuple[int, int, int, memoryview]] = []
    for at in range(0, len(data) - 3, 4):
        op, total, offset, size = data[at : at + 4]
        if op & 0x80 and lent:
            msg_id, offset, size, view = lent.pop(op % len(lent))
            view[:] = bytes((msg_id + offset + i) % 256 for i in range(size))
            whole = table.commit(msg_id, size)
            assert (whole is not None) == twin.commits(msg_id, size)
            if whole is not None:
                assert bytes(whole) == bytes((msg_id + i) % 256 for i in range(len(whole)))
            continue
        msg_id, total = op % 5, total if total % 16 else total << 56
        try:
            view = table.reserve(msg_id, total, offset, size)
        except PeerError:
            assert not twin.takes(msg_id, total, offset, size)
            return
        assert twin.takes(msg_id, total, offset, size)
        assert len(view) == size
        lent.append((msg_id, offset, size, view))
        assert table.reserved_bytes <= 120
        assert len(table) <= 3


def hello(data: bytes) -> None:
    """A payload that is accepted as HELLO is exactly the bytes that this HELLO encodes to."""
    payload = memoryview(data)
    with suppress(PeerError):
        said = decode_hello(payload, 4)
        assert said.payload() == data
        assert said.learner_id < 4
        assert said.generation > 0
        assert all(numel > 0 for numel in said.layout.numels)
        GroupLimits(said.layout, said.dtype, _UP, 64)
        GroupLimits(said.layout, said.dtype, _DOWN)
        signed = encode(said, KEY)[0][13:]
        assert decode_hello(memoryview(signed), 4, KEY) == said
    with suppress(PeerError):
        decode_hello(payload, 4, b"a key nobody signs with")
        raise AssertionError("a HELLO that nobody signed was accepted")
    with suppress(PeerError):
        assert data == encode(decode_hello(payload, 4, KEY), KEY)[0][13:]
    with suppress(PeerError):
        assert decode(MessageType.DATA_HELLO, payload).payload() == data


def messages(data: bytes) -> None:
    """A payload that is accepted as a message is exactly the bytes that this message encodes to."""
    if not data:
        return
    try:
        kind = MessageType(data[0] % 16)
    except ValueError:
        return
    payload = memoryview(data)[1:]
    try:
        message = decode(kind, payload)
    except PeerError:
        return
    assert b"".join(bytes(part) for part in encode(message)) == struct.pack("<IBQ", 0xD170C0DE, kind, len(payload)) + (
        bytes(payload)
    )
    if isinstance(message, InitParams | PushFragment | BcastFragment | FinalFragment):
        for dtype in WireDType:
            limits = GroupLimits(LAYOUT.wire, dtype, _UP)
            try:
                limits.check_bulk(message)
            except PeerError:
                continue
            assert message.fragment < len(LAYOUT)


def tensors(data: bytes) -> None:
    """Tensor bytes: refused, or every value finite and at most 2^100, and what the formula on the page says."""
    if not data:
        return
    dtype, raw = WireDType(1 + data[0] % 3), data[1:]
    numel = {WireDType.F32: len(raw) // 4, WireDType.BF16: len(raw) // 2, WireDType.Q4: len(raw) // 132 * 256}[dtype]
    if dtype is WireDType.Q4 and numel:
        numel -= data[0] // 3
    try:
        values = codec.decode(raw, numel, dtype)
    except PeerError:
        expected = _formula(raw, numel, dtype)
        assert expected is None or not all(abs(value) <= MAX_MAGNITUDE for value in expected)
        if dtype is not WireDType.Q4 and expected is not None:
            _refused(raw, numel, dtype)
        return
    assert values.tolist() == _formula(raw, numel, dtype)
    assert codec.is_bounded(values)
    assert torch.equal(codec.decode(raw, numel, dtype, negate=True), -values)
    again = codec.decode(codec.encode(values, dtype), numel, dtype)
    assert codec.is_bounded(again)
    if dtype is not WireDType.Q4:
        codec.check_bounded(codec.as_tensor(raw, numel, dtype))
        assert torch.equal(again, values)


def _refused(raw: bytes, numel: int, dtype: WireDType) -> None:
    with suppress(PeerError):
        codec.check_bounded(codec.as_tensor(raw, numel, dtype))
        raise AssertionError("the learner would adopt what the syncer refuses")


def _formula(raw: bytes, numel: int, dtype: WireDType) -> list[float] | None:
    """The values, one by one in Python; None for a wrong length, or a q4 scale no value may be made with."""
    if len(raw) != dtype.nbytes(numel):
        return None
    if dtype is WireDType.F32:
        return list(struct.unpack(f"<{numel}f", raw))
    if dtype is WireDType.BF16:
        return [struct.unpack("<f", b"\0\0" + raw[2 * i : 2 * i + 2])[0] for i in range(numel)]
    out: list[float] = []
    for start in range(0, len(raw), 132):
        (scale,) = struct.unpack_from("<f", raw, start)
        if not (0 <= scale <= MAX_MAGNITUDE):
            return None
        for byte in raw[start + 4 : start + 132]:
            for nibble in (byte & 15, byte >> 4):
                level = nibble & 7
                size = (
                    np.float32(scale) * np.float32(2.0 ** (level - 7)) if level else np.float32(0) * np.float32(scale)
                )
                out.append(float(-size if nibble & 8 else size))
    return out[:numel]


# ------------------------------------------------------------------------------------------------------ the machines


def session(data: bytes) -> None:
    """A syncer's bytes to a learner: adopted, dropped, or one violation, with bounded memory and no false end."""
    if not data:
        return
    limits = GroupLimits(LAYOUT.wire, WireDType.F32, _DOWN)
    table: SliceTable = _table(limits)
    reader = FrameReader(limits, table)
    learner = Session(len(LAYOUT))
    learner.attached(1)
    at, steps = 1, 0
    while at < len(data):
        view = reader.buffer()
        count = min(len(view), len(data) - at)
        view[:count] = data[at : at + count]
        at += count
        try:
            frame = reader.received(count)
            if frame is not None:
                _to_session(learner, limits, frame)
        except PeerError:
            return
        if frame is not None and data[0] & 1:
            steps += 1
            for effect in learner.boundary(steps, 10 * steps):
                if isinstance(effect, Install):
                    learner.installed(effect.manifest)
                    learner.ack_started()
                elif isinstance(effect, Adopt):
                    assert len(effect.data) == LAYOUT.wire.nbytes(effect.fragment, WireDType.F32)
        assert not learner.finished or learner.is_installed


def _to_session(learner: Session, limits: GroupLimits, frame: Frame) -> None:
    message = decode(frame.kind, frame.payload)
    if isinstance(message, InitParams | PushFragment | BcastFragment | FinalFragment):
        limits.check_bulk(message)
    if frame.kind is MessageType.ERROR:
        learner.refused(message.text)
    else:
        learner.received(message)


def coordinator(data: bytes) -> None:
    """Learners that say anything at any time: steps are committed one by one, and nothing but a rule ends the run."""
    desk = Desk(syncer_policy(3, 6, quorum=2, quorum_timeout_s=5, ack_timeout_s=5))
    generation, committed = 1, 0
    for at in range(0, len(data) - 1, 2):
        op, value = data[at], data[at + 1]
        learner = value % 3
        member = desk.members.get(learner)
        if op % 8 == 0:
            desk.wait(value / 32)
        elif op % 8 == 1:
            generation += 1
            desk.join(learner, generation if op & 8 else 1 + value % 4, contract=b"\x22" * 32 if op & 16 else b"x" * 32)
        elif member is None:
            continue
        elif op % 8 == 2:
            desk.leave(learner)
        elif op % 8 == 3:
            desk.tell(ev.InitArrived(member, value % 2, "values"))
        elif op % 8 == 4:
            desk.tell(ev.BeatArrived(member, (value << 56) >> (op % 60)))
        elif op % 8 == 5:
            desk.ack(member, value % 8)
        elif op % 8 == 6:
            desk.tell(ev.BudgetReported(member, value))
        else:
            base = (2**64 - 1) if op & 8 else 0
            desk.push(member, 1 + value % 7, base_version=base, local_step=value << 50, c_tokens=2**64 - 1)
        commits = [effect.step for effect in desk.all(fx.Commit)]
        assert commits == list(range(1, len(commits) + 1))
        assert len(commits) >= committed
        committed = len(commits)
        if desk.finish is not None:
            assert desk.finish.code in (0, 1)
            return


# --------------------------------------------------------------------------------------------------------- the files


def checkpoint(data: bytes) -> None:
    """Bytes read as a checkpoint: refused, or exactly the checkpoint they are; never more memory than bytes."""
    reader, at = parse(len(data)), 0
    try:
        while True:
            view = next(reader)
            assert view.nbytes <= len(data) - at
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
    except StateError:
        return
    except StopIteration as done:
        snapshot = done.value
    assert at == len(data)
    for record in snapshot.fragments:
        assert all(math.isfinite(value) for value in struct.unpack(f"<{record.numel}f", record.params))
    if snapshot.version == 3 and snapshot.contract is not None:
        assert b"".join(bytes(part) for part in write_parts(snapshot)) == data
    content(snapshot)


def _scratch(name: str, data: bytes) -> Path:
    path = _SCRATCH / name
    path.write_bytes(data)
    return path


def tape(data: bytes) -> None:
    """A file read, opened and continued as a tape: whole lines stay, a torn one goes, a stranger is left alone."""
    path = _scratch("tape.jsonl", data)
    with suppress(StateError):
        for entry in read_tape(path):
            assert isinstance(entry, dict)
    with suppress(StateError):
        merges(path)
    try:
        writer = Tape(path, clock=lambda: 1.5)
    except StateError:
        assert path.read_bytes() == data
        return
    kept = path.read_bytes()
    assert data.startswith(kept)
    assert not kept or kept.endswith(b"\n")
    writer.event("start", step=3)
    writer.close()
    assert list(read_tape(path))[-1] == {"time": 1.5, "event": "start", "step": 3}


def layout(data: bytes) -> None:
    """A file read as a layout: refused in one sentence, or a layout that is written and read back the same."""
    path = _scratch("layout.json", data)
    try:
        found = Layout.load(path)
    except StateError as error:
        said = str(error)
        assert "\n" not in said
        assert len(said) < 500
        return
    assert decode_hello(memoryview(_hello_of(found).payload())).layout == found.wire
    found.save(path)
    assert Layout.load(path) == found


def _hello_of(found: Layout) -> Hello:
    return Hello(0, 1, WireDType.F32, found.wire, found.fingerprint, found.fingerprint, None, 0)


def fingerprinted(data: bytes) -> None:
    """The same with the fingerprint mended, so that what lies behind it is reached."""
    try:
        document = json.loads(data)
        document["format"] = "yeto-layout-v1"
    except (ValueError, TypeError, RecursionError):
        return
    path = _scratch("layout.json", json.dumps(document).encode())
    with suppress(StateError):
        Layout.load(path)
        return
    try:
        Layout.load(path)
    except StateError as error:
        said = str(error)
    if "is not that of its tensors" in said:
        document["fingerprint"] = said.rpartition(" ")[2]
        layout(json.dumps(document).encode())


def marker(data: bytes) -> None:
    """A file read as the final marker: the step it names, or a refusal."""
    path = _scratch("checkpoint.final", data).with_suffix("")
    with suppress(StateError):
        step = read_marker(path)
        assert data == f"YETO_FINAL_V1\nglobal_step={step}\n".encode()
        assert marker_path(path).name == "checkpoint.final"


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        frames,
        reassembly,
        hello,
        messages,
        tensors,
        session,
        coordinator,
        checkpoint,
        tape,
        layout,
        fingerprinted,
        marker,
    )
}
