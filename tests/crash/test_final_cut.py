"""The end of a run under faults: who must acknowledge what, on which connection, and what a missing word means.

Source: v4 §Final cut (membership); rulings §5.10, §6.10.
"""

import struct
import time

import numpy as np
import pytest

from tests.support.real_learners import Learner, same_weights, training, wait_all
from tests.support.relay import CutError, Proxy
from tests.support.saved_parameters import final_state, saved, saved_step
from tests.support.scripted_learner import ScriptedLearner, random_values
from tests.support.toy_model import toy
from tests.support.waiting import until
from yeto_torch.fragments import build_layout
from yeto_torch.wire.constants import MessageType
from yeto_torch.wire.messages import FinalFragment, FinalManifest, PullReq
from yeto_torch.wire.model_layout import contract_hash

RUN_ID = "the end"
LAYOUT = build_layout([(name, tuple(p.shape)) for name, p in toy(0).named_parameters()], fragments=3)
CONTRACT = contract_hash(LAYOUT.fingerprint, RUN_ID)
LEARNER = {"run_id": RUN_ID, "fragments": 3, "wire_dtype": "f32"}


@pytest.fixture
def begun(processes):
    """Starts a syncer with scripted learners 0, 1, ... that will answer; and one more place for a real learner."""

    def begin(*overrides, scripted, learners, total_steps=3):
        syncer = processes.syncer(
            "schedule.sync_interval_steps=0", "schedule.grace_ms=1000", "schedule.pipeline=1",
            "checkpoint.mark_final=true", "checkpoint.every=1", "checkpoint.resume=auto", *overrides,
            learners=learners, total_steps=total_steps,
        )  # fmt: skip
        peers = [join(syncer, i) for i in range(scripted)]
        peers[0].init(random_values(LAYOUT, 1))
        return syncer, peers

    return begin


def join(syncer, learner_id, **options):
    return ScriptedLearner(syncer.address, learner_id, LAYOUT, contract=CONTRACT, **options)


def rounds(peers, first, last):
    for step in range(first, last + 1):
        for peer in peers:
            pull = peer.pull(step=step)
            peer.answer(pull, random_values(LAYOUT, step, 0.1)[pull.fragment])


def marked(syncer):
    path = syncer.folder / "checkpoint.final"
    return path.read_text() if path.exists() else None


def test_a_reconnect_during_delivery_and_acknowledgements_that_do_not_count(begun):
    syncer, peers = begun("final.ack_timeout_s=30", scripted=4, learners=4)
    zero, one, two, three = peers
    rounds(peers, 1, 2)
    for peer in peers:
        peer.pull(step=3)
    # before the end: an ACK is a violation; a connection that is superseded will not be served the cut
    one.ack(3)
    assert "before the run has ended" in one.wait_closed().peer_error
    newer = join(syncer, 2)
    until(lambda: len(syncer.events("join")) == 5, "the newer connection")
    one = join(syncer, 1)
    until(lambda: len(syncer.events("join")) == 6, "learner 1 is back")
    for peer in (zero, two, three):
        peer.answer(PullReq(2, 3, 1), random_values(LAYOUT, 3, 0.1)[2])

    cuts = [zero.cut(), one.cut(), three.cut()]
    two.ack(3)  # it has never been sent the cut
    assert "before the final cut was sent on this connection" in two.wait_closed().peer_error
    assert not two.has(FinalManifest)
    three.ack(2)
    assert "FINAL_ACK of step 2: the final step is 3" in three.wait_closed().peer_error
    zero.ack(3)
    zero.close(flush=True)  # an accepted ACK is never erased
    one.close()  # gone in the middle of it: the whole cut comes again
    one, three = join(syncer, 1), join(syncer, 3)
    cuts += [one.cut(), three.cut(), newer.cut()]
    stranger = join(syncer, 0)  # it has acknowledged: it may come and see the cut, but nobody waits for it
    cuts.append(stranger.cut())
    for peer in (one, newer):
        peer.ack(3)
    assert marked(syncer) is None
    assert syncer.code is None
    three.ack(3)
    assert syncer.wait() == 0, syncer.told()
    for peer in (one, newer, three):
        peer.wait_closed()
        assert peer.released
    stranger.wait_closed()
    assert not stranger.released  # SHUTDOWN goes to who has acknowledged
    assert marked(syncer) == "YETO_FINAL_V1\nglobal_step=3\n"
    assert {manifest for manifest, _ in cuts} == {FinalManifest(3, (1, 2, 3))}
    assert same_weights(*(values for _, values in cuts), saved(syncer.checkpoint))
    assert len([m for m in one.seen if isinstance(m, FinalFragment)]) == 3
    assert syncer.events("final")[0]["expected"] == [0, 1, 2, 3]


def test_a_learner_whose_acknowledgement_is_lost_says_it_again(begun):
    syncer, (zero,) = begun(scripted=1, learners=2)
    lost = []

    def lose_the_first_ack(pipe, up, data):
        if up and struct.pack("<IB", 0xD170C0DE, MessageType.FINAL_ACK) in data and not lost:
            lost.append(pipe)
            raise CutError
        return data

    with Proxy(syncer.address) as proxy:
        proxy.rule = lose_the_first_ack
        learner = Learner(proxy.address, 1, **LEARNER)
        with training(learner):
            rounds([zero], 1, 3)
            _, values = zero.cut()
            zero.ack(3)
            (ours,) = wait_all([learner])
    assert syncer.wait() == 0, syncer.told()
    assert len(lost) == 1
    assert learner.optimizer.stats.reconnects == 1
    assert same_weights(ours, values, saved(syncer.checkpoint))
    assert marked(syncer) == "YETO_FINAL_V1\nglobal_step=3\n"
    assert "all learners acknowledged final cut" in syncer.text


def test_a_learner_gone_for_good_ends_the_run_unmarked_and_the_finished_run_can_be_resumed(begun, processes):
    syncer, (zero, one) = begun("final.ack_timeout_s=1", scripted=2, learners=2)
    rounds([zero, one], 1, 2)
    for peer in (zero, one):
        peer.answer(peer.pull(step=3), random_values(LAYOUT, 3, 0.1)[2])
    _, values = zero.cut()
    one.close()
    zero.ack(3)
    told_at = time.monotonic()
    assert syncer.wait() == 1
    assert time.monotonic() - told_at < 5
    assert "by learners 1:" in syncer.lines[-1]
    assert marked(syncer) is None
    assert saved_step(syncer.checkpoint) == 3
    assert same_weights(values, saved(syncer.checkpoint), final_state(syncer.folder / "model.safetensors"))

    keys = ("checkpoint.mark_final=true", "checkpoint.resume=auto")
    again = processes.syncer(*keys, learners=2, total_steps=3)
    zero = join(again, 0)
    learner = Learner(again.address, 1, **LEARNER)  # with weights of its own, and nothing to train any more
    with training(learner):
        manifest, once_more = zero.cut()
        assert (manifest.step, manifest.versions) == (3, (1, 2, 3))
        zero.ack(3)
        (ours,) = wait_all([learner])
    assert again.wait() == 0, again.told()
    assert same_weights(ours, once_more, values, saved(again.checkpoint))
    assert marked(again) == "YETO_FINAL_V1\nglobal_step=3\n"
    assert [line["step"] for line in again.merges()] == [1, 2, 3]

    beyond = processes.syncer(*keys, learners=2, total_steps=2, listening=False)
    assert beyond.wait() == 1
    assert "step 3" in beyond.lines[-1]
    assert marked(again) is not None

    further = processes.syncer(*keys, "schedule.start_grace_s=0", learners=2, total_steps=4)
    assert marked(further) is None  # the run is not complete any more
    peers = [join(further, 0), join(further, 1)]
    for peer in peers:
        peer.answer(peer.pull(step=4), np.zeros(LAYOUT.fragments[0].numel, np.float32))
    for peer in peers:
        peer.cut()
        peer.ack(4)
    assert further.wait() == 0
    assert marked(further) == "YETO_FINAL_V1\nglobal_step=4\n"
