"""Merges under way, with the pool's real child."""

from __future__ import annotations

import queue
import time

import pytest
import torch

from syncer.config.policy import IsoBackend
from syncer.core import effects as fx
from syncer.core.events import Member
from syncer.merge.iso import flatten_spectrum
from syncer.merger import MergerEvent, PoolDrained, merger_for
from tests.support.coordinator_desk import answer, syncer_policy
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.errors import StateError
from yeto_torch.wire.layout import WireFragment, WireLayout

WAIT_S = 120.0
LAYOUT = WireLayout((WireFragment(MergeMode.ISO, (12, 6), ((3, 4), (2, 3))), WireFragment(MergeMode.AVG, (5,))))


class Work:
    """A merger and what its pool has said; the test plays the actor."""

    def __init__(self, backend: IsoBackend) -> None:
        self.events: queue.SimpleQueue[MergerEvent] = queue.SimpleQueue()
        self.merger = merger_for(syncer_policy(1, iso_backend=backend), LAYOUT, self.events.put)

    def start(self, step: int, fragment: int, *gradients: torch.Tensor) -> bool:
        answers = tuple(answer(Member(i, 1), step, gradient=gradient) for i, gradient in enumerate(gradients))
        merge = fx.Merge(step, fragment, answers, tuple(a.weight for a in answers))
        return self.merger.start(merge, torch.zeros(LAYOUT.numels[fragment]))

    def until_merged(self) -> int:
        while (step := self.merger.delivered(self.events.get(timeout=WAIT_S))) is None:
            pass
        return step


@pytest.fixture(params=list(IsoBackend), ids=lambda backend: backend.key)
def work(request):
    work = Work(request.param)
    yield work
    work.merger.close()


def test_a_round_is_merged_in_process_or_by_the_pool_and_its_time_is_all_it_took(work):
    torch.manual_seed(1)
    gradients = [torch.randn(18) for _ in range(2)]
    mean = (gradients[0] + gradients[1]) / 2
    begun_at = time.monotonic()
    if not work.start(1, 0, *gradients):
        assert work.start(2, 1, torch.ones(5)), "meanwhile another round goes on"
        assert work.merger.finished(2).norm == pytest.approx(5**0.5)
        last = [work.events.get(timeout=WAIT_S) for _ in LAYOUT.fragments[0].numels]
        came_at = time.monotonic()
        assert [work.merger.delivered(event) for event in last] == [None, 1]
        assert work.merger.finished(1).seconds >= 0.9 * (came_at - begun_at), "the child's work is the round's"
    merged = work.merger.finished(1)
    want = torch.cat(
        [flatten_spectrum(mean[:12].view(3, 4)).flatten(), flatten_spectrum(mean[12:].view(2, 3)).flatten()]
    )
    torch.testing.assert_close(merged.gradient, want, rtol=1e-5, atol=1e-6)
    assert merged.norm == pytest.approx(float(want.norm()), rel=1e-5)
    assert merged.seconds <= time.monotonic() - begun_at
    assert work.merger.forget(1) is merged
    assert work.merger.forget(1) is None


def test_a_drain_delivers_what_was_begun_and_ends_the_children(work):
    pending = not work.start(1, 0, torch.ones(18))
    assert work.merger.drain() is not pending
    if pending:
        assert work.until_merged() == 1
        assert isinstance(work.events.get(timeout=WAIT_S), PoolDrained)
    work.merger.check()


def test_a_poisoned_pool_says_the_same_sentence_for_ever():
    work = Work(IsoBackend.TORCH_SVD)
    work.merger.close()
    with pytest.raises(StateError, match="the exact-SVD pool was closed"):
        work.merger.check()
    with pytest.raises(StateError, match="the exact-SVD pool was closed"):
        work.start(1, 0, torch.ones(18))


def test_what_the_learners_say_of_each_other_is_measured_on_their_answers_and_the_finished_merge(work):
    torch.manual_seed(2)
    gradients = [torch.randn(18) for _ in range(2)]
    begun = work.start(1, 0, *gradients)
    assert begun or work.until_merged() == 1
    merged = work.merger.finished(1)
    found, mean = merged.alignment, (gradients[0] + gradients[1]) / 2
    assert found.along == pytest.approx(float(merged.gradient @ mean / (mean @ mean)), rel=1e-5)
    lengths = (gradients[0].norm() + gradients[1].norm()) / 2
    assert found.agreement == pytest.approx(float(mean.norm() / lengths), rel=1e-5)
    assert (found.carried, found.lag) == (0.0, None)
    assert work.start(2, 1, torch.zeros(5))
    assert work.merger.finished(2).alignment is None
