"""Merge and outer step, against moving the fewest bytes they must move at the speed of a copy.

The fewest: parameters and momentum are read and written once (4 passes over n f32 values); ``avg`` reads each of K
gradients once, ``rda`` twice, because its factors need every norm; the correction reads the momentum once more. The
tape's norm and every intermediate result are ours to avoid. A copy moves 2 passes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Figure, Size, Target, alternate, both, ratios, seconds
from benchmarks.model import millions
from benchmarks.stage import Launch, launch
from syncer.merge.merge import merge_fragment
from syncer.merge.nesterov import Bounds, nesterov_step
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.layout import WireFragment

TARGET = Target(0.4, 0.7, more_is_better=True)
TENSORS = 24
CASES = (("avg", False, 2), ("avg", False, 8), ("rda", False, 2), ("rda", False, 8), ("rda", True, 2))


def fewest_passes(mode: str, correction: bool, members: int) -> int:
    """Passes over n f32 values that no implementation can do without."""
    return members * (2 if mode == "rda" else 1) + 4 + correction


class Round:
    """One fragment's answers, and the state they go into."""

    def __init__(self, numel: int, members: int, device: str = "cpu") -> None:
        part = max(1, numel // TENSORS)
        self.numels = (part,) * TENSORS
        generator = torch.Generator().manual_seed(2)
        direction = torch.randn(sum(self.numels), generator=generator).mul_(1e-3)
        # as in training: answers that mostly agree with each other and with where the fleet is going
        self.gradients = [
            torch.randn(len(direction), generator=generator).mul_(5e-4).add_(direction).to(device)
            for _ in range(members)
        ]
        self.weights = [float(100 + member) for member in range(members)]
        self.bounds = Bounds()
        self.params, self.momentum = torch.zeros_like(self.gradients[0]), direction.clone().to(device)

    def step(self, mode: str, correction: bool) -> None:
        """What the syncer does for a round: merge, the tape's norm, the outer step."""
        fragment = WireFragment(MergeMode[mode.upper()], self.numels)
        merged, norm = merge_fragment(fragment, self.gradients, self.weights, self.momentum, correction=correction)
        nesterov_step(self.params, self.momentum, merged, 0.7, 0.5, self.bounds, norm)


def measure(size: Size, _start: Launch = launch) -> Iterator[Figure]:
    numel = size.of(25_000_000, 4_000_000, 48_000)
    for mode, correction, members in CASES:
        work = Round(numel, members)
        other = torch.empty_like(work.params)
        copy = seconds(lambda source=work.params, target=other: target.copy_(source))
        ours, theirs = alternate(
            size.runs, seconds(lambda work=work, mode=mode, turn=correction: work.step(mode, turn)), copy
        )
        passes = fewest_passes(mode, correction, members)
        least = [passes / 2 * copied for copied in theirs]
        yield Figure(
            f"merge + outer step, {mode}{' corrected' if correction else ''}, K = {members}, {millions(numel)}",
            f"{passes} passes at copy speed",
            "x",
            TARGET,
            ratios(least, ours),
            both(ours, least),
        )
