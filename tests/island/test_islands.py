"""Learners of several ranks against a real syncer: all ranks of all learners end as one."""

import re

import pytest

from tests.island.support import results, start_island
from tests.support.files import final_state, saved
from tests.support.learners import same_weights

KEYS = ["preset=direct", "schedule.sync_interval_steps=0", "schedule.quorum=2", "schedule.grace_ms=100"]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_every_rank_ends_with_exactly_the_syncers_parameters(processes, wrap):
    syncer = processes.syncer(*KEYS, learners=2, total_steps=24)
    ranks = [rank for learner in (0, 1) for rank in start_island(processes, syncer.address, learner, wrap=wrap)]
    assert syncer.wait() == 0, syncer.told()
    assert [rank.wait() for rank in ranks] == [0] * 4, "".join(rank.told() for rank in ranks)
    expected = final_state(syncer.folder / "model.safetensors")
    assert same_weights(*results(processes), expected, saved(syncer.checkpoint))
    starts = {re.search(r"weights (\w+)", rank.text)[1] for rank in ranks}
    assert len(starts) == 1  # the fleet's weights, on every rank, when the constructor returned
    for line in syncer.merges():
        for responder in line["responders"]:
            assert responder["c_tokens"] == 3 * responder["c_steps"]  # 1 on rank 0, 2 on rank 1
