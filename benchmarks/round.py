"""A whole round of every parameter with two learners, from PULL to the last broadcast taken over, against three rivals.

The same tensors on the same machine, two learner processes on each side, our syncer a third one. Ours: F rounds in the
default layout, two in flight, both learners answering every one; the time from one broadcast of the last fragment to
the next, at the slower learner, so that the flow is always full. A rival: from when the later process begins to when
the later one has its result. Neither side computes anything in between.

    gloo      one all-reduce (sum) of one f32 tensor, torch.distributed; nothing else: no outer step, no fault tolerance
    torchft   DiLoCo.step with sync_every = 1: quorum, f32 all-reduce per tensor over gloo, vote, Nesterov outer step
    hivemind  averager in 8 bits both ways; from the trigger on, when the group has been found already

And a limit, against gloo: the f32 bytes of such a round alone, over raw sockets (rivals/star.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, Size, Target, alternate, both, not_measured, ratios
from benchmarks.model import Matrices, millions
from benchmarks.stage import ROOT, Launch, Stage, Worker, launch

LEARNERS = 2
FRAGMENTS = 8
RIVALS = (
    ("bf16", "torchft 0.2.0 DiLoCo sync", "torchft_diloco", Target(0.6, 0.3)),
    ("f32", "gloo all-reduce, f32", "gloo", Target(2, 1.2)),
    ("q4", "hivemind 1.1.12, 8 bits", "hivemind_averager", Target(0.3, 0.15)),
)


def measure(size: Size, start: Launch = launch) -> Iterator[Figure]:
    """Rivals without an interpreter of theirs (``make bench-rivals``) are told of, and left out; quickly, all such."""
    wanted = size.of(100_000_000, 10_000_000, 100_000)
    numel = Matrices(wanted).numel if size is Size.TINY else wanted
    for wire, against, rival, target in RIVALS:
        name = f"whole round, {millions(numel)}, 2 learners, {wire}"
        python = _interpreter(rival)
        if python is not None and (size is Size.QUICK or not python.exists()):
            yield not_measured(name, against, "make bench" if size is Size.QUICK else "make bench-rivals", target)
            continue
        with Stage(start) as stage:
            workers = _rivals(stage, numel, rival, python)
            ours = _ours(stage, numel, wire, size.of(3, 4, 1))
            theirs = _theirs(workers)
            mine, others = alternate(size.of(5, 3, 2), ours, theirs)
        yield Figure(name, against, "x", target, ratios(mine, others), both(mine, others))
        if rival == "gloo" and size is not Size.QUICK:
            yield _bytes_alone(numel, against, size, start)


def _bytes_alone(numel: int, against: str, size: Size, start: Launch) -> Figure:
    with Stage(start) as stage:
        star = _theirs(_rivals(stage, numel, "star", None, LEARNERS + 1))
        gloo = _theirs(_rivals(stage, numel, "gloo", None))
        alone, others = alternate(size.of(5, 3, 2), star, gloo)
    name = f"the bytes of that round alone, {millions(numel)}, raw sockets"
    return Figure(name, against, "x", None, ratios(alone, others), both(alone, others))


def _interpreter(rival: str) -> Path | None:
    """The rival's own; None if it is ours."""
    if rival == "gloo":
        return None
    return ROOT / f".venv-rivals-{rival.partition('_')[0]}" / "bin" / "python"


def _ours(stage: Stage, numel: int, wire: str, cycles: int) -> Callable[[], float]:
    """Seconds per cycle of all fragments, whenever it is called."""
    syncer = stage.syncer(LEARNERS)
    learners = [
        stage.worker("benchmarks.learner", numel=numel, syncer=syncer.address, learner_id=index, wire_dtype=wire)
        for index in range(LEARNERS)
    ]
    for learner in learners:
        learner.ready()

    def cycle() -> float:
        taken = _ask_all(learners, "cycles", count=cycles)
        ends = [max(times[version] for times in taken) for version in sorted(taken[0], key=int)]
        return (ends[-1] - ends[0]) / cycles

    return cycle


def _rivals(stage: Stage, numel: int, rival: str, python: Path | None, world: int = LEARNERS) -> list[Worker]:
    """All ranks of the rival, starting."""
    path = None if python is None else os.fspath(python)
    folder = os.fspath(stage.folder)
    return [
        stage.worker(f"benchmarks.rivals.{rival}", path, numel=numel, rank=rank, world=world, folder=folder)
        for rank in range(world)
    ]


def _theirs(workers: list[Worker]) -> Callable[[], float]:
    """Seconds of one sync of the rival, whenever it is called."""
    meeting = workers[0].ready()  # where the others find the first, if they must be told
    for worker in workers[1:]:
        worker.ready()
    _ask_all(workers, "meet", at=meeting)

    def sync() -> float:
        _ask_all(workers, "prepare")
        spans = _ask_all(workers, "sync")
        return max(end for _, end in spans) - max(begin for begin, _ in spans)

    return sync


def _ask_all(workers: list[Worker], question: str, **details: Any) -> list[Any]:
    for worker in workers:
        worker.tell(question, **details)
    return [worker.answer() for worker in workers]
