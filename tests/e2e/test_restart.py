"""A syncer that died is started again: the same state, the same run, and no endless wait for who does not return.

Source: v4 §Checkpoints; rulings §6.1, §6.11.
"""

import signal
import time

import numpy as np
import pytest

from tests.support.saved_parameters import saved, saved_step
from tests.support.scripted_learner import Journal, ScriptedLearner, random_values
from tests.support.waiting import until
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.messages import BcastFragment
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

LAYOUT = Layout((Fragment(MergeMode.AVG, (Tensor("a", (40,)),)), Fragment(MergeMode.RDA, (Tensor("b", (6, 7)),))))
KEYS = ("schedule.sync_interval_steps=0", "schedule.pipeline=1", "schedule.grace_ms=0", "checkpoint.resume=auto")
SLACK_S = 10.0


def rounds(peers, first, last):
    for step in range(first, last + 1):
        for peer in peers:
            pull = peer.pull(step=step)
            peer.answer(pull, random_values(LAYOUT, 10 * step + peer.learner_id, 0.1)[pull.fragment])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_restarted_syncer_serves_the_same_state_and_waits_no_longer_than_it_was_told(processes, number):
    journal = Journal()
    every = 1 if number == signal.SIGKILL else 100  # a signal that can be heeded saves the state by itself
    syncer = processes.syncer(*KEYS, f"checkpoint.every={every}", learners=2, total_steps=50)
    peers = [ScriptedLearner(syncer.address, i, LAYOUT, journal=journal) for i in range(2)]
    peers[0].init(random_values(LAYOUT, 1))
    rounds(peers, 1, 5)
    last = [peers[0].next(BcastFragment, fragment=f, version=v) for f, v in ((0, 5), (1, 4))]
    syncer.signal(number)
    assert syncer.wait() == (-number if number == signal.SIGKILL else 130)
    for peer in peers:
        peer.wait_closed()
    assert saved_step(syncer.checkpoint) == 5
    assert [value.tobytes() for value in saved(syncer.checkpoint)] == [bytes(message.data) for message in last]

    again = processes.syncer(
        *KEYS,
        "schedule.quorum=1",
        "schedule.start_grace_s=1",
        "schedule.on_loss=stop",
        "schedule.loss_after_s=1.5",
        f"checkpoint.every={every}",
        learners=2,
        total_steps=50,
    )
    back = ScriptedLearner(again.address, 0, LAYOUT, journal=journal)  # compares equal versions byte by byte
    joined_at = time.monotonic()
    assert {back.next(BcastFragment).version, back.next(BcastFragment).version} == {5, 4}
    back.pull(step=6)
    assert 0.9 < time.monotonic() - joined_at < 1 + SLACK_S  # schedule.start_grace_s
    back.close()
    lost_at = time.monotonic()
    assert again.wait() == 1  # schedule.loss_after_s, and nothing lost by it
    assert 1.4 < time.monotonic() - lost_at < 1.5 + SLACK_S
    assert "learner 0 has been away for 1.5 s and schedule.on_loss=stop: the run ends at step 5" in again.lines[-1]
    assert [value.tobytes() for value in saved(syncer.checkpoint)] == [bytes(message.data) for message in last]
    assert [line["step"] for line in again.events("start")] == [0, 5]
    journal.check()


def test_an_interrupted_run_goes_on_and_another_run_does_not_continue_it(processes):
    syncer = processes.syncer(*KEYS, "checkpoint.every=1", learners=1, total_steps=4)
    first = ScriptedLearner(syncer.address, 0, LAYOUT, contract=b"\1" * 32)
    first.init(random_values(LAYOUT, 1))
    rounds([first], 1, 2)
    first.next(BcastFragment, version=2)
    syncer.signal(signal.SIGINT)
    assert syncer.wait() == 130
    assert "Traceback" not in syncer.text
    assert saved_step(syncer.checkpoint) == 2

    again = processes.syncer(*KEYS, "checkpoint.every=1", learners=1, total_steps=4)
    stranger = ScriptedLearner(again.address, 0, LAYOUT, contract=b"\2" * 32)
    assert "contract" in stranger.wait_closed().peer_error
    back = ScriptedLearner(again.address, 0, LAYOUT, contract=b"\1" * 32)  # the stranger has pinned nothing
    rounds([back], 3, 4)
    manifest, finals = back.cut()
    assert (manifest.step, manifest.versions) == (4, (3, 4))
    back.ack(4)
    assert again.wait() == 0
    assert all(np.array_equal(one, other) for one, other in zip(finals, saved(again.checkpoint), strict=True))
    until(lambda: len(again.events("start")) == 2, "both starts on one tape")
    assert [line["step"] for line in again.merges()] == [1, 2, 3, 4]
