"""What keeps a learner of several ranks from starting is said on every rank, before anything is sent."""

import pytest

from tests.ranks.support import raised, start_island
from tests.support.scripted_syncer import ScriptedSyncer

GROUP = "process_group=dist.group.WORLD"


@pytest.fixture
def syncer():
    with ScriptedSyncer() as syncer:
        yield syncer
        assert syncer.groups == []


def test_ranks_of_different_models(processes, syncer):
    sentence = (
        "ValueError: named_parameters: rank 1 of this learner has parameter 'embed.bias' of shape (32,), rank 0 of "
        "shape (24,): all ranks must train one model"
    )
    assert raised(start_island(processes, syncer.address, wrap="plain", widths=[24, 32])) == [sentence] * 2


def test_a_wrong_argument_of_one_rank(processes, syncer):
    environments = ({}, {"YETO_LEARNERS": "0"})
    own, told = reversed(raised(start_island(processes, syncer.address, wrap="plain", environments=environments)))
    assert own == "ValueError: learner_id=0: must be 0 to -1 (YETO_LEARNERS=0)"
    assert told == own.replace("ValueError: ", "ValueError: rank 1 of this learner cannot start: ")


def test_a_rank_that_is_switched_off(processes, syncer):
    environments = ({}, {"YETO_DISABLE": "1"})
    errors = raised(start_island(processes, syncer.address, wrap="plain", environments=environments))
    sentence = "YETO_DISABLE is set on ranks [1] of this learner only: set it on all of them or none"
    assert errors == [f"ValueError: {sentence}"] * 2


def test_a_learner_that_is_switched_off_trains_alone(processes, syncer):
    environments = ({"YETO_DISABLE": "1"},) * 2
    ranks = start_island(processes, syncer.address, wrap="ddp", steps=3, environments=environments)
    assert [rank.wait() for rank in ranks] == [0, 0], "".join(rank.told() for rank in ranks)
    assert all(rank.wait_for("^finished at 0 after 3 steps") for rank in ranks)


@pytest.mark.parametrize(
    ("wrap", "sentence"),
    [
        ("ddp", "process_group: not given, but the model is wrapped in DistributedDataParallel"),
        ("fsdp", "process_group: not given, but parameter 'embed.weight' is a DTensor"),
    ],
)
def test_a_wrapped_model_without_its_process_group(processes, syncer, wrap, sentence):
    for error in raised(start_island(processes, syncer.address, wrap=wrap, grouped=False)):
        assert error.startswith(f"ValueError: {sentence}; ")
        assert error.endswith(f"{GROUP})")


def test_the_older_fsdp(processes, syncer):
    for error in raised(start_island(processes, syncer.address, wrap="fsdp1")):
        assert error.startswith("ValueError: named_parameters: the model is wrapped in FullyShardedDataParallel")
        assert "torch.distributed.fsdp.fully_shard" in error


def test_what_is_no_process_group():
    import torch

    from yeto_torch import YetoOuterOptimizer

    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="process_group=7: must be a process group this rank is a member of"):
        YetoOuterOptimizer(inner, model, "127.0.0.1:1", 0, process_group=7)
