"""A hostile syncer against a real learner: every violation ends the connection, raises once in the training loop, and
leaves the parameters alone; nothing hangs and nothing grows.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.joined_learner import await_session, heard, join, model_of, started, zero_gradients
from tests.support.scripted_syncer import ScriptedGroup, ScriptedSyncer
from tests.support.wire_by_hand import chunk, frame
from yeto_torch import PeerError, RefusedError, YetoOuterOptimizer

TOP = 2**64 - 1
SLICE = 4 * 1024 * 1024
F, NUMEL = 2, 4  # fragments of four values each, in f32
ONES = struct.pack("<4f", 1, 1, 1, 1)
TWOS = struct.pack("<4f", 2, 2, 2, 2)


def bcast(fragment: int = 0, version: int = 5, data: bytes = TWOS) -> bytes:
    return frame(5, struct.pack("<IQ", fragment, version) + data)


def final(fragment: int = 0, version: int = 5, data: bytes = TWOS) -> bytes:
    return frame(13, struct.pack("<IQ", fragment, version) + data)


def manifest(*versions: int, revision: int = 1, step: int = 6, count: int | None = None) -> bytes:
    named = len(versions) if count is None else count
    return frame(11, struct.pack("<HQI", revision, step, named) + struct.pack(f"<{len(versions)}Q", *versions))


def pull(fragment: int = 0, step: int = 1, attempt: int = 1) -> bytes:
    return frame(3, struct.pack("<IQI", fragment, step, attempt))


@dataclass(frozen=True)
class Violation:
    name: str
    said: bytes
    text: str  # a pattern of what the training loop is told

    def __str__(self) -> str:
        return self.name


def violations() -> Iterator[Violation]:
    """One entry per thing that no honest syncer says after the first broadcasts."""
    yield Violation("magic", frame(3, magic=0xDEADBEEF), "magic")
    yield Violation("noise", b"\xff" * 64, "magic")
    yield from (Violation(f"type {kind}", frame(kind), "unknown") for kind in (0, 15, 255))
    yield from (Violation(f"type {k}, a learner's", frame(k, bytes(8)), "not legal") for k in (1, 2, 4, 6, 8, 12, 14))
    yield from (Violation(f"PULL of {n} bytes", frame(3, bytes(n)), "PULL_REQ") for n in (0, 15, 17))
    yield Violation("PULL of step 0", pull(step=0), "count from 1")
    yield Violation("PULL of attempt 0", pull(attempt=0), "count from 1")
    yield from (Violation(f"PULL of fragment {f}", pull(f), f"fragment {f}") for f in (F, 2**32 - 1))
    yield from (Violation(f"BCAST of {n} bytes", frame(5, bytes(n)), "BCAST") for n in (0, 11, 12, 27))
    yield from (Violation(f"BCAST that claims {n}", frame(5, length=n), "at most") for n in (29, 2**40, TOP))
    yield from (Violation(f"BCAST of fragment {f}", bcast(f), f"fragment {f}") for f in (F, 2**32 - 1))
    yield Violation("BCAST of one version in two ways", bcast(0, 5) + bcast(0, 5, ONES), "different bytes")
    for value in (float("nan"), float("inf"), float("-inf"), 2.0**101, -3.0e38):
        data = struct.pack("<4f", 1, 2, 3, value)
        yield Violation(f"BCAST with {value}", bcast(0, 5, data), "finite|2.100")
        yield Violation(f"a final cut with {value}", final(0, 5) + final(1, 6, data) + manifest(5, 6), "finite|2.100")
    yield Violation("SHUTDOWN", frame(7), "SHUTDOWN")
    yield Violation("SHUTDOWN with a byte", frame(7, b"x"), "SHUTDOWN")
    yield from (Violation(f"manifest of revision {r}", manifest(5, 6, revision=r), "revision") for r in (0, 2, 65535))
    yield Violation("manifest of one fragment", manifest(5), "1 fragments")
    yield Violation("manifest of three fragments", manifest(5, 6, 7), "FINAL_MANIFEST")
    yield Violation("manifest of 2^32 - 1 fragments", manifest(5, 6, count=2**32 - 1), "FINAL_MANIFEST")
    yield Violation("manifest cut short", manifest(5, count=2), "FINAL_MANIFEST")
    yield Violation("manifest of no length", frame(11), "FINAL_MANIFEST")
    yield Violation("two manifests", manifest(5, 6) + manifest(5, 6, step=7), "differs")
    yield from (Violation(f"FINAL of fragment {f}", final(f), f"fragment {f}") for f in (F, 2**32 - 1))
    yield Violation("FINAL of another length", final(0, 5, TWOS[:-4]), "tensor bytes")
    yield Violation("FINAL beyond the manifest", manifest(5, 6) + final(0, 9), "version 9")
    yield Violation("FINAL of one version in two ways", final(0, 5) + final(0, 5, ONES), "different bytes")
    yield Violation("ERROR that is no text", frame(10, b"\xff\xfe"), "UTF-8")
    yield Violation("ERROR beyond its limit", frame(10, length=65_537), "at most 65536")
    yield Violation("empty CHUNK", frame(9, bytes(24)), "carries nothing")
    yield Violation("CHUNK beyond 4 MiB", frame(9, length=24 + SLICE + 1), "at most")
    for total in (0, 12, 10_000, TOP):
        yield Violation(f"CHUNK of a message of {total} bytes", chunk(0, total, 0, b"x"), "legal are")
    yield Violation("CHUNK past the end", chunk(0, 41, 40, b"xx"), "past")
    yield Violation("CHUNK twice", chunk(0, 41, 0, b"xx") * 2, "overlap")
    yield Violation("CHUNK of another total", chunk(0, 41, 0, b"x") + chunk(0, 40, 1, b"x"), "says its message")
    many = 2 * F + 65
    yield Violation("too many messages begun", b"".join(chunk(i, 13, 0, b"x") for i in range(many)), "partial messages")
    for name, inner in (("PULL", pull()), ("SHUTDOWN", frame(7)), ("CHUNK", chunk(1, 13, 0, b"x"))):
        yield Violation(f"CHUNK that holds {name}", chunk(9, len(inner), 0, inner), "only bulk")
    yield Violation("CHUNK that holds an INIT", chunk(9, 33, 0, frame(2, bytes(20))), "not legal")
    yield Violation("CHUNK that holds another length", chunk(9, 41, 0, frame(5, bytes(28), length=27)), "says 27")


def trained(syncer: ScriptedSyncer, model: torch.nn.Module) -> tuple[YetoOuterOptimizer, ScriptedGroup]:
    """A learner with the first weights of both fragments, ones, adopted."""
    optimizer, group = started(syncer, model, [torch.ones(NUMEL)] * F, fragments=F)
    assert bytes_of(model) == ONES * F
    return optimizer, group


def small() -> torch.nn.Module:
    return model_of(a=torch.zeros(NUMEL), b=torch.zeros(NUMEL))


def step(optimizer: YetoOuterOptimizer, model: torch.nn.Module) -> None:
    """An inner step that changes nothing by itself."""
    zero_gradients(model)
    optimizer.step()


def raised_by_a_step(optimizer: YetoOuterOptimizer, model: torch.nn.Module) -> str:
    """What a step raises as soon as the learner has heard it; a broadcast in front of it may be adopted first."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            step(optimizer, model)
        except PeerError as error:
            return str(error)
        time.sleep(0.001)  # a step takes its time
    raise AssertionError("nothing was raised")


def bytes_of(model: torch.nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def threads_end(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("violation", list(violations()), ids=str)
def test_a_violation_raises_once_and_leaves_the_parameters_alone(violation):
    before = set(threading.enumerate())
    with ScriptedSyncer() as syncer:
        model = small()
        optimizer, group = trained(syncer, model)
        group.raw(violation.said)
        told = raised_by_a_step(optimizer, model)
        assert re.search(violation.text, told), told
        assert "\n" not in told
        assert len(told) < 500
        assert bytes_of(model) in (ONES * F, TWOS + ONES)
        assert violation.said.count(TWOS) or bytes_of(model) == ONES * F
        group.wait_closed()  # the learner has hung up
        began = time.monotonic()
        optimizer.close()
        assert time.monotonic() - began < 5
        assert len(syncer.groups) == 1, "a violation is not dialled again"
    threads_end(before)


def test_an_error_of_the_syncer_is_told_in_its_own_words(syncer):
    model = small()
    optimizer, group = trained(syncer, model)
    group.raw(frame(10, b"no place for you"))
    await_session(optimizer, lambda session: session.failure is not None)
    with pytest.raises(RefusedError, match="no place for you"):
        step(optimizer, model)
    assert bytes_of(model) == ONES * F
    optimizer.close()


@pytest.mark.parametrize("said", [b"", bcast()[:7], bcast()[:30], chunk(0, 41, 0, b"x" * 20)], ids=len)
def test_half_a_word_holds_nobody_up(syncer, said):
    model = small()
    optimizer, group = trained(syncer, model)
    group.raw(said)
    for _ in range(20):
        step(optimizer, model)
    assert bytes_of(model) == ONES * F
    began = time.monotonic()
    optimizer.close()
    assert time.monotonic() - began < 5


def resident() -> int:
    """Bytes of this process in memory."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(text.partition("VmRSS:")[2].split()[0])


def test_broadcasts_and_pulls_without_end_are_not_kept(syncer):
    numel = 250_000
    model = model_of(a=torch.zeros(numel), b=torch.zeros(numel))
    optimizer, group = started(syncer, model, [torch.ones(numel)] * F, fragments=F)
    before = resident()
    for version in range(1, 301):  # 300 MB while the training thread is busy elsewhere
        group.raw(bcast(0, version, bytes(4 * numel)))
        group.raw(pull(0, version) * 100)
    heard(optimizer, f0=(0, 300))
    assert resident() - before < 64 << 20
    step(optimizer, model)
    assert optimizer.stats.versions[0] == 300
    optimizer.close()


def test_finals_without_end_are_not_kept(syncer):
    numel = 250_000
    model = model_of(a=torch.zeros(numel), b=torch.zeros(numel))
    optimizer, group = started(syncer, model, [torch.ones(numel)] * F, fragments=F)
    before = resident()
    for version in range(1, 301):
        group.raw(final(0, version, bytes(4 * numel)))
    group.raw(pull(1, 9))
    await_session(optimizer, lambda session: session._slots[1].pull is not None)
    assert resident() - before < 64 << 20
    optimizer.close()


Say = Callable[[ScriptedGroup], None]


@pytest.mark.parametrize(
    "say",
    [
        lambda group: group.raw(frame(77)),
        lambda group: group.raw(frame(10, b"go away")),
        lambda group: group.raw(frame(7)),
    ],
    ids=["violation", "error", "shutdown"],
)
def test_a_learner_that_waits_for_the_start_is_told_at_once(syncer, say: Say):
    told: list[BaseException] = []

    def construct() -> None:
        try:
            join(syncer, small(), fragments=F, wait_for_start=True)
        except (PeerError, RefusedError) as error:
            told.append(error)

    waiting = threading.Thread(target=construct)
    waiting.start()
    say(syncer.group(0))
    waiting.join(15)
    assert not waiting.is_alive()
    assert len(told) == 1


def test_a_learner_in_finish_is_told_at_once(syncer):
    model = small()
    optimizer, group = trained(syncer, model)
    told: list[BaseException] = []

    def end() -> None:
        try:
            optimizer.finish()
        except PeerError as error:
            told.append(error)

    waiting = threading.Thread(target=end)
    waiting.start()
    group.raw(frame(77))
    waiting.join(15)
    assert not waiting.is_alive()
    assert "unknown" in str(told[0])
    assert bytes_of(model) == ONES * F
    optimizer.close()
