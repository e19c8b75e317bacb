"""Processes die for real: SIGKILL of either rank of a learner and of the syncer; who is left ends soon or goes on."""

import signal

from tests.ranks.support import raised, results, start_island
from tests.support.real_learners import same_weights
from tests.support.saved_parameters import final_state
from tests.support.waiting import until

KEYS = ["preset=direct", "schedule.sync_interval_steps=0", "schedule.min_round_interval_ms=30"]
KEYS += ["schedule.grace_ms=300", "schedule.quorum=2"]


def test_a_learner_that_lost_a_rank_is_gone_whole_and_comes_back_whole(processes):
    total = 200
    syncer = processes.syncer(*KEYS, learners=2, total_steps=total)

    def commits():
        return len(syncer.merges())

    def here(learner):
        return [line for line in syncer.events("join") if line["id"] == learner]

    learners = [start_island(processes, syncer.address, i, wrap="plain") for i in (0, 1)]
    until(lambda: commits() >= 10, "rounds together")
    for learner, rank in ((0, 0), (1, 1)):
        victim, other = learners[learner][rank], learners[learner][1 - rank]
        victim.signal(signal.SIGKILL)
        assert other.wait() == 1, other.told()
        other.wait_for("^raised RankLostError: a rank of this learner has failed")
        assert victim.wait() == -signal.SIGKILL
        until(lambda learner=learner: [e for e in syncer.events("leave") if e["id"] == learner], "it is gone")
        before = commits()
        until(lambda before=before: commits() >= before + 5, "the other one goes on alone")
        learners[learner] = start_island(processes, syncer.address, learner, wrap="plain", seed=7)
        until(lambda learner=learner: len(here(learner)) == 2, "it is back")
        before = commits()
        assert before + 5 < total
        until(lambda before=before: commits() >= before + 5, "rounds together again")
    assert syncer.wait() == 0, syncer.told()
    ranks = [rank for learner in learners for rank in learner]
    assert [rank.wait() for rank in ranks] == [0] * 4, "".join(rank.told() for rank in ranks)
    assert same_weights(*results(processes), final_state(syncer.folder / "model.safetensors"))


def test_a_syncer_that_is_killed_and_started_again_goes_on_with_every_rank(processes):
    options = ["checkpoint.every=1", "checkpoint.resume=auto", "schedule.quorum=1", *KEYS[:-1]]
    syncer = processes.syncer(*options, learners=1, total_steps=60)
    ranks = start_island(processes, syncer.address, wrap="ddp")
    until(lambda: len(syncer.merges()) >= 10, "rounds")
    syncer.kill()
    port = int(syncer.address.rpartition(":")[2])
    ranks[0].wait_for("lost the connection to the syncer")
    again = processes.syncer(*options, learners=1, total_steps=60, port=port)
    assert again.wait() == 0, again.told()
    assert [rank.wait() for rank in ranks] == [0, 0], "".join(rank.told() for rank in ranks)
    assert same_weights(*results(processes, learners=1), final_state(syncer.folder / "model.safetensors"))


def test_a_syncer_that_is_killed_for_good_ends_every_rank(processes):
    syncer = processes.syncer("schedule.quorum=1", *KEYS[:-1], learners=1, total_steps=10_000)
    optimizer = {"max_reconnects": 1}
    ranks = start_island(processes, syncer.address, wrap="fsdp", optimizer=optimizer)
    until(lambda: len(syncer.merges()) >= 5, "rounds")
    syncer.kill()
    errors = raised(ranks)
    assert errors[0].startswith("ConnectionLostError: gave up reconnecting (max_reconnects)")
    assert errors[0] == errors[1]
