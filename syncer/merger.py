"""Merges under way: each round's gradient from Merge to Commit, in process or through the SVD pool.

A thin shell between the actor, the mathematics and the pool; it decides nothing. Averages, corrections and norms are
computed on the actor's thread at once; with ``merge.iso_backend=torch-svd`` the matrices of an iso fragment then go to
the pool's children, and the round is done when the last one is back. Other rounds go on meanwhile.

Once the pool is poisoned every call raises StateError with its one message, so that nothing is published any more.

Source: v4 §Merging (signed outer gradients in, one out),
v4 §SVD pool (drained before a checkpoint; a poisoned worker prevents it); rulings §4, §8.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import cast

import torch

from syncer.config.policy import DRIVE_LIMIT, IsoBackend, SyncerPolicy
from syncer.core import effects as fx
from syncer.merge.blocks import norm
from syncer.merge.gain import Alignment, MeanAnswer, mean_answer
from syncer.merge.iso import Spectrum
from syncer.merge.merge import merge_fragment
from syncer.merge_words import correction_of, spectrum_of
from syncer.svd.pool import Delivered, Poisoned, PoolEvent, SvdPool
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.errors import LocalError, StateError
from yeto_torch.wire.layout import WireLayout


@dataclass(frozen=True, slots=True)
class PoolDrained:
    """Everything the pool had admitted is delivered."""


MergerEvent = PoolEvent | PoolDrained


@dataclass(slots=True, eq=False)
class Merged:
    """One round's merged signed outer gradient and what the work took, the pool's included, in seconds.

    ``alignment`` is None where the answers have no mean direction; ``momentum`` is the coefficient of its commit.
    """

    step: int
    gradient: torch.Tensor
    answers: MeanAnswer | None
    started_at: float
    seconds: float = 0.0
    pending: int = 0  # matrices still with the pool
    norm: float = 0.0
    alignment: Alignment | None = None
    momentum: float = 0.0

    def finish(self) -> None:
        """The gradient is complete."""
        if self.answers is not None:
            self.alignment, self.answers = self.answers.against(self.gradient), None
        self.seconds = time.monotonic() - self.started_at


class Merger:
    """All merges of one session, each done when ``start`` returns."""

    def __init__(self, policy: SyncerPolicy, layout: WireLayout) -> None:
        self._policy, self._layout = policy, layout
        self._merged: dict[int, Merged] = {}

    def start(self, effect: fx.Merge, momentum: torch.Tensor) -> bool:
        """Begin the merge of one round; True when it is done already. Raises RunError, and StateError on poison."""
        self._merge(effect, momentum, spectrum_of(self._policy.merge.iso_scale.name.lower())).finish()
        return True

    def _merge(self, effect: fx.Merge, momentum: torch.Tensor, spectrum: Spectrum) -> Merged:
        started_at = time.monotonic()
        gradients = [cast(torch.Tensor, response.gradient) for response in effect.responses]
        answers = mean_answer(gradients, effect.weights, momentum)
        gradient, norm = merge_fragment(
            self._layout.fragments[effect.fragment],
            gradients,
            effect.weights,
            momentum,
            correction=correction_of(self._policy.merge.delta_correction, self._policy.outer.momentum),
            spectrum=spectrum,
        )
        merged = self._merged[effect.step] = Merged(effect.step, gradient, answers, started_at, norm=norm)
        return merged

    def finished(self, step: int) -> Merged:
        """The merge of a round that is done, to be committed."""
        return self._merged[step]

    def forget(self, step: int) -> Merged | None:
        """A committed round is broadcast: its gradient goes. None for a version that was broadcast before."""
        return self._merged.pop(step, None)

    def delivered(self, event: MergerEvent) -> int | None:
        """The pool has spoken; the step whose merge that completed. Raises StateError when the pool is poisoned."""
        raise LocalError(f"{event} without a pool")

    def drain(self) -> bool:
        """Let the pool finish what it has admitted; True when nothing is to be awaited, else PoolDrained follows."""
        return True

    def check(self) -> None:
        """Raises StateError when the pool is poisoned: no checkpoint may be published then."""

    def close(self) -> None:
        """Kill the children."""


class PooledMerger(Merger):
    """Iso fragments go through the pool's children, which are started at once and call ``post`` from its threads."""

    def __init__(self, policy: SyncerPolicy, layout: WireLayout, post: Callable[[MergerEvent], None]) -> None:
        super().__init__(policy, layout)
        self._post = post
        self._jobs: dict[int, tuple[Merged, torch.Tensor]] = {}  # job -> its round, and where its matrix belongs
        self._numbers = itertools.count(1)
        self._pool = SvdPool(policy.svd, post)

    def start(self, effect: fx.Merge, momentum: torch.Tensor) -> bool:
        fragment = self._layout.fragments[effect.fragment]
        if fragment.mode is not MergeMode.ISO:
            return super().start(effect, momentum)
        merged, end = self._merge(effect, momentum, _unchanged), 0
        for numel, dims in zip(fragment.numels, fragment.dims, strict=True):
            place = merged.gradient[end : end + numel].view(dims)
            end += numel
            job = next(self._numbers)
            self._jobs[job] = (merged, place)
            merged.pending += 1
            self._pool.submit(job, place, self._policy.merge.iso_scale)
        return False

    def delivered(self, event: MergerEvent) -> int | None:
        match event:
            case Poisoned(reason):
                raise StateError(reason)
            case Delivered(job, matrix):
                merged, place = self._jobs.pop(job)
                place.copy_(matrix)
                merged.pending -= 1
                if merged.pending == 0:
                    merged.norm = norm(merged.gradient)
                    merged.finish()
                    return merged.step
        return None

    def drain(self) -> bool:
        Thread(target=self._drain, name="svd-drain", daemon=True).start()
        return False

    def _drain(self) -> None:
        with suppress(StateError):  # Poisoned was reported already
            self._pool.drain()
            self._post(PoolDrained())

    def check(self) -> None:
        if (poison := self._pool.poison) is not None:
            raise StateError(poison)

    def close(self) -> None:
        self._pool.close()


def merger_for(policy: SyncerPolicy, layout: WireLayout, post: Callable[[MergerEvent], None]) -> Merger:
    """The session's merger; children are started only if it has an iso fragment and they are to flatten it."""
    iso = any(fragment.mode is MergeMode.ISO for fragment in layout.fragments)
    if iso and policy.merge.iso_backend is IsoBackend.TORCH_SVD:
        return PooledMerger(policy, layout, post)
    return Merger(policy, layout)


def outer_momentum(guard: str, found: Alignment | None, lr: float, mu: float) -> float:
    """The momentum coefficient of a commit under ``outer.guard``: ``mu`` itself unless it says ``cap``."""
    return found.capped(lr, mu, DRIVE_LIMIT) if guard == "cap" and found is not None else mu


def _unchanged(matrix: torch.Tensor) -> torch.Tensor:
    """The average itself: its spectrum is the pool's to flatten."""
    return matrix
