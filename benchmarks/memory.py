"""Peak memory of a syncer and of a learner beyond its model, against the bytes they have to hold. Linux only.

Every process is fresh, and what it had before the session began (interpreter, torch, the learner's model) is not
counted. With n values, fragments of W bytes in the bulk dtype and L bytes in f32, K learners, p rounds in flight:

    syncer   8 n, and per round in flight: K answers (W as bytes; decoded W with compiled kernels, else L), a merged
             gradient (L), a broadcast (W)
    learner  the anchors, n values in the bulk dtype, and two fragments in f32
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from benchmarks import proc
from benchmarks.harness import Figure, Size, Target, not_measured
from benchmarks.model import Matrices, millions
from benchmarks.peers import Fleet
from benchmarks.stage import Launch, Stage, launch
from syncer.merge import kernels
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout

FRAGMENTS = 8
LEARNERS = 2
PIPELINE = 2
TENSORS = 3  # per fragment
TARGET = Target(1.25, 1.1)
DTYPE = WireDType.BF16


def measure(size: Size, start: Launch = launch) -> Iterator[Figure]:
    if not proc.AVAILABLE:
        yield not_measured("peak memory", "the bytes to be held", "only Linux tells the peak of a process", TARGET)
        return
    for measured in (_syncer, _learner):
        yield from measured(size, start)


def _syncer(size: Size, start: Launch) -> Iterator[Figure]:
    part = max(1, size.of(300_000_000, 40_000_000, 240_000) // (FRAGMENTS * TENSORS))
    layout = WireLayout((WireFragment(MergeMode.RDA, (part,) * TENSORS),) * FRAGMENTS)
    numel = sum(layout.numels)
    wire, decoded = layout.nbytes(0, DTYPE), layout.nbytes(0, WireDType.F32)
    answer = wire + (decoded if kernels.compiled is None else wire)
    must = 8 * numel + PIPELINE * (LEARNERS * answer + decoded + wire)
    with Stage(start) as stage:
        syncer = stage.syncer(LEARNERS, schedule__pipeline=PIPELINE)
        address = syncer.address
        before = proc.resident(syncer.pid)  # now that it listens
        with closing(Fleet(address, LEARNERS, layout, DTYPE)) as fleet:
            fleet.rounds(2 * FRAGMENTS)
        extra = proc.peak(syncer.pid) - before
    yield Figure(
        f"syncer peak memory, {millions(numel)}, {LEARNERS} learners, pipeline {PIPELINE}",
        "8 bytes per parameter + rounds in flight",
        "x",
        TARGET,
        (extra / must,),
        f"{_mib(extra)} against {_mib(must)}; {extra / numel:.3g} bytes per parameter",
    )


def _learner(size: Size, start: Launch) -> Iterator[Figure]:
    """Learner 0, which has most to hold: it also sends the starting values."""
    numel = size.of(100_000_000, 20_000_000, 240_000)
    numel = Matrices(numel).numel if size is Size.TINY else numel
    must = DTYPE.nbytes(numel) + 2 * 4 * numel // FRAGMENTS
    with Stage(start) as stage:
        syncer = stage.syncer(1)
        learner = stage.worker(
            "benchmarks.learner", numel=numel, syncer=syncer.address, learner_id=0, wire_dtype="bf16"
        )
        learner.ready()
        learner.ask("cycles", count=2)
        memory = learner.ask("memory")
    for when in ("training", "starting"):
        yield Figure(
            f"learner memory beyond its model, {millions(numel)}, bf16, {when}",
            "an anchor in bf16 + two f32 fragments",
            "x",
            TARGET,
            (memory[when] / must,),
            f"{_mib(memory[when])} against {_mib(must)}; {memory[when] / (4 * numel):.2g} x the f32 model",
        )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.4g} MiB"
