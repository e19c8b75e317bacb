"""Rounds per second with many scripted learners against 2, with as many bytes per round whatever their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

from benchmarks.harness import Figure, Size, Target, alternate, ratios
from benchmarks.model import millions
from benchmarks.peers import Fleet
from benchmarks.stage import Launch, Stage, launch
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout

FRAGMENTS = 8
DTYPE = WireDType.BF16


def measure(size: Size, start: Launch = launch) -> Iterator[Figure]:
    """All fleets stand ready at once and take turns; those that do not have theirs keep silent."""
    values = size.of(32_000_000, 4_000_000, 64_000)  # answered per round by all together: half a million by each of 64
    counts = size.of((2, 8, 32, 64), (2, 8, 32, 64), (2, 4))
    rounds = size.of(24, 8, 4)
    with Stage(start) as stage, ExitStack() as fleets:
        sides = []
        for learners, syncer in [(learners, stage.syncer(learners)) for learners in counts]:
            layout = _layout(values // learners)
            fleet = fleets.enter_context(closing(Fleet(syncer.address, learners, layout, DTYPE)))
            sides.append(lambda fleet=fleet: fleet.rounds(rounds))
        times = alternate(size.runs, *sides)
    for learners, seconds in zip(counts[1:], times[1:], strict=True):
        yield Figure(
            f"rounds per second, {learners} learners, {millions(values)} values per round",
            f"{counts[0]} learners",
            "x",
            Target(0.7, 0.9, more_is_better=True),
            ratios(times[0], seconds),
            f"{1 / min(seconds):.3g} against {1 / min(times[0]):.3g} rounds/s at best",
        )


def _layout(numel: int) -> WireLayout:
    part = max(1, numel // 3)
    return WireLayout((WireFragment(MergeMode.RDA, (part, part, part)),) * FRAGMENTS)
