"""Learners of several ranks against a real syncer: all ranks of all learners end as one."""

import re
from pathlib import Path

import pytest

from tests.ranks.support import results, start_island
from tests.support.real_learners import same_weights
from tests.support.saved_parameters import final_state, saved

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


@pytest.mark.slow
def test_a_mesh_of_replicas_of_shards_and_a_blend(processes):
    """Four ranks, two by two; bf16 on the wire, and part of the local value kept."""
    keys = ["preset=balanced", "schedule.sync_interval_steps=0", "schedule.quorum=1", "schedule.grace_ms=100"]
    syncer = processes.syncer(*keys, learners=1, total_steps=24)
    optimizer = {"wire_dtype": "bf16", "merge_alpha": 0.3}
    ranks = start_island(processes, syncer.address, ranks=4, wrap="hsdp", optimizer=optimizer)
    assert syncer.wait() == 0, syncer.told()
    assert [rank.wait() for rank in ranks] == [0] * 4, "".join(rank.told() for rank in ranks)
    assert same_weights(*results(processes, learners=1, ranks=4), final_state(syncer.folder / "model.safetensors"))
    shards = [[line for line in rank.lines if line.startswith("step ")] for rank in ranks]
    assert shards[0] == shards[2]  # replicas of one shard, at every step that brought something
    assert shards[1] == shards[3]
    assert shards[0] != shards[1]


def test_an_evaluation_does_not_hide_what_is_written_behind_it(processes, tmp_path):
    script = str(Path(__file__).with_name("evaluation.py"))
    child = processes.start("evaluation", [script, str(tmp_path / "rendezvous")])
    assert child.wait() == 0, child.told()
    assert "True True False" in child.lines  # the zeros are seen
    assert "False True True" in child.lines  # torch would show the old values: else this care could go
