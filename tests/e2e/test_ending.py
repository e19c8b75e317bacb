"""How a run ends as its learners and its files see it: the frozen cut, the marker, a restart at the last step, signals,
a disk that refuses, a lost SVD child.

Source: v4 §Final cut; rulings §6.10, §6.11, §6.12, §8.
"""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.support.saved_parameters import saved_step
from tests.support.scripted_learner import ScriptedLearner, random_values
from tests.support.waiting import until
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.messages import BcastFragment, FinalAck, PullReq, encode
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

LAYOUT = Layout((Fragment(MergeMode.AVG, (Tensor("a", (40,)),)), Fragment(MergeMode.RDA, (Tensor("b", (6, 7)),))))
MATRIX = Layout((Fragment(MergeMode.ISO, (Tensor("m", (6, 6)),)),))
KEYS = ("schedule.sync_interval_steps=0", "schedule.pipeline=1", "schedule.grace_ms=0")


def delta(peer, pull):
    return random_values(peer.layout, 100 * pull.step + peer.learner_id, 0.1)[pull.fragment]


def rounds(peers, first, last):
    for step in range(first, last + 1):
        for peer in peers:
            peer.answer(pull := peer.pull(step=step), delta(peer, pull))


@pytest.fixture
def trained(processes):
    """A fleet of scripted learners that has committed all its steps but the last."""

    def start(*overrides, learners=2, total_steps=3, layout=LAYOUT, upto=None):
        syncer = processes.syncer(*KEYS, *overrides, learners=learners, total_steps=total_steps)
        peers = [ScriptedLearner(syncer.address, i, layout) for i in range(learners)]
        peers[0].init(random_values(layout, 1))
        rounds(peers, 1, total_steps - 1 if upto is None else upto)
        return syncer, peers

    return start


def marker(syncer):
    return syncer.checkpoint.with_name(syncer.checkpoint.name + ".final")


def test_the_cut_goes_to_the_next_generation_and_the_marker_waits_for_the_last_acknowledgement(trained):
    syncer, (zero, one) = trained("checkpoint.mark_final=true")
    rounds((zero, one), 3, 3)
    manifest, finals = zero.cut()
    one.cut()
    zero.raw(b"".join(encode(FinalAck(3))))
    zero.close()  # its acknowledgement counts
    one.close()  # there was none
    again = ScriptedLearner(syncer.address, 1, LAYOUT)
    assert again.cut()[0] == manifest
    assert [value.tobytes() for value in again.cut()[1]] == [value.tobytes() for value in finals]
    assert not marker(syncer).exists()
    assert saved_step(syncer.checkpoint) == 3
    stranger = ScriptedLearner(syncer.address, 1, LAYOUT, contract=bytes(32))
    assert "another run" in stranger.wait_closed().peer_error
    again.ack(3)
    again.wait_closed()
    assert again.released
    assert syncer.wait() == 0
    assert marker(syncer).read_bytes() == b"YETO_FINAL_V1\nglobal_step=3\n"


def test_a_learner_that_was_not_there_at_the_freeze_is_refused(trained):
    syncer, (zero, one, two) = trained("schedule.quorum=2", learners=3)
    two.close()
    until(lambda: syncer.events("leave"), "learner 2 is gone")
    rounds((zero, one), 3, 3)
    zero.cut()
    late = ScriptedLearner(syncer.address, 2, LAYOUT)
    assert "the run is ending" in late.wait_closed().peer_error
    for peer in (zero, one):
        peer.ack(3)
    assert syncer.wait() == 0


def test_an_acknowledgement_before_the_cut_ends_that_connection_and_counts_for_nothing(trained):
    syncer, (zero, one) = trained("final.ack_timeout_s=1", "checkpoint.mark_final=true")
    for peer in (zero, one):
        peer.pull(step=3)
    one.ack(3)
    assert "FINAL_ACK before the run has ended" in one.wait_closed().peer_error
    one = ScriptedLearner(syncer.address, 1, LAYOUT)
    one.next(BcastFragment)
    zero.answer(pull := zero.pull(step=3, attempt=2), delta(zero, pull))  # alone: learner 1 left the first attempt
    zero.cut()
    zero.ack(3)
    assert syncer.wait() == 1
    assert "not acknowledged within 1 s by learners 1" in zero.wait_closed().peer_error
    assert not zero.released
    assert not marker(syncer).exists()


def test_a_restart_at_the_last_step_delivers_the_same_cut(trained, processes):
    syncer, (zero, one) = trained("checkpoint.mark_final=true")
    rounds((zero, one), 3, 3)
    _, finals = zero.cut()
    syncer.kill()
    syncer = processes.syncer(*KEYS, "checkpoint.resume=true", "checkpoint.mark_final=true", learners=2, total_steps=3)
    peers = [ScriptedLearner(syncer.address, i, LAYOUT) for i in range(2)]
    for peer in peers:
        assert [value.tobytes() for value in peer.cut()[1]] == [value.tobytes() for value in finals]
        assert not peer.has(PullReq)
        peer.ack(3)
    assert syncer.wait() == 0
    assert marker(syncer).exists()


def test_a_run_that_goes_on_beyond_a_marked_end_is_not_marked_meanwhile(trained, processes):
    syncer, peers = trained("checkpoint.mark_final=true")
    rounds(peers, 3, 3)
    for peer in peers:
        peer.cut()
        peer.ack(3)
    assert syncer.wait() == 0
    assert marker(syncer).exists()
    syncer = processes.syncer(*KEYS, "checkpoint.resume=true", "checkpoint.mark_final=true", learners=2, total_steps=4)
    assert not marker(syncer).exists()
    peers = [ScriptedLearner(syncer.address, i, LAYOUT) for i in range(2)]
    rounds(peers, 4, 4)
    for peer in peers:
        peer.cut()
        peer.ack(4)
    assert syncer.wait() == 0
    assert marker(syncer).read_bytes() == b"YETO_FINAL_V1\nglobal_step=4\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_acknowledgements_are_awaited_leaves_the_last_step_unmarked(trained, number):
    syncer, (zero, one) = trained("checkpoint.mark_final=true")
    rounds((zero, one), 3, 3)
    zero.cut()
    syncer.signal(number)
    assert syncer.wait() == 130
    assert saved_step(syncer.checkpoint) == 3
    assert not marker(syncer).exists()
    assert zero.wait_closed().peer_error is None, "a restart can take it up"
    assert syncer.events("end")[-1]["code"] == 130


def test_a_signal_before_anybody_came_leaves_no_checkpoint(processes):
    syncer = processes.syncer(*KEYS, learners=2, total_steps=3)
    syncer.signal(signal.SIGTERM)
    assert syncer.wait() == 130
    assert not syncer.checkpoint.exists()


def test_two_signals_at_once_end_it_whoever_of_the_threads_gets_them(trained):
    syncer, _ = trained()
    syncer.signal(signal.SIGINT)
    syncer.signal(signal.SIGTERM)
    assert syncer.wait(20) == 130


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_nothing_newer_is_seen(trained):
    syncer, (zero, one) = trained("checkpoint.every=1", total_steps=9, upto=2)
    zero.next(BcastFragment, version=2)
    syncer.checkpoint.unlink()
    syncer.checkpoint.mkdir()  # a file cannot replace a folder
    for peer in (zero, one):
        peer.answer(pull := peer.pull(step=3), delta(peer, pull))
    assert syncer.wait() == 1
    assert "cannot be written" in syncer.lines[-1]
    assert zero.wait_closed().peer_error is None, "the disk can be mended and the run resumed"
    assert not [m for m in zero.seen if isinstance(m, BcastFragment) and m.version > 2]


def children_of(pid):
    return [int(p) for file in Path(f"/proc/{pid}/task").glob("*/children") for p in file.read_text().split()]


def test_a_lost_svd_child_ends_the_run_and_publishes_nothing_more(trained):
    syncer, peers = trained("checkpoint.every=1", "svd.devices=[cpu]", total_steps=9, layout=MATRIX, upto=2)
    peers[0].next(BcastFragment, version=2)
    (child,) = children_of(syncer.pid)
    os.kill(child, signal.SIGKILL)
    assert syncer.wait() == 1
    assert "exact-SVD pool failed" in syncer.lines[-1]
    assert saved_step(syncer.checkpoint) == 2
    assert peers[0].wait_closed().peer_error is None


def test_a_run_of_matrices_drains_its_pool_and_completes(trained):
    syncer, peers = trained("svd.devices=[cpu]", "schedule.pipeline=1", layout=MATRIX)
    children = children_of(syncer.pid)
    rounds(peers, 3, 3)
    _, finals = peers[0].cut()
    assert np.isfinite(finals[0]).all()
    for peer in peers:
        peer.cut()
        peer.ack(3)
    assert syncer.wait() == 0
    assert len(children) == 1
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_one_learner_one_fragment_one_step(processes):
    layout = Layout((Fragment(MergeMode.AVG, (Tensor("a", ()),)),))
    syncer = processes.syncer("schedule.quorum=1", "schedule.pipeline=5", learners=1, total_steps=1)
    peer = ScriptedLearner(syncer.address, 0, layout)
    peer.init([np.array([2.0], np.float32)])
    peer.answer(peer.pull(step=1), np.array([1.0], np.float32))
    manifest, _ = peer.cut()
    assert manifest.versions == (1,)
    assert not [m for m in peer.seen if isinstance(m, BcastFragment) and m.version], "the cut follows at once"
    peer.ack(1)
    assert syncer.wait() == 0
