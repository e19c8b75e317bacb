"""Real learners in one fleet: odd models, lost connections, slow links, clean goodbyes.

Source: yeto_torch/wire/README.md; v4 §Generations; rulings §5.9, §6.8.
"""

import itertools

import pytest
import torch
from torch import nn

from tests.support.real_learners import Learner, same_weights, training, wait_all
from tests.support.relay import Proxy
from tests.support.saved_parameters import final_state, saved
from tests.support.toy_model import toy
from tests.support.waiting import until
from yeto_torch.wire.messages import BcastFragment, FinalFragment, InitParams, PushFragment

AT_ONCE_S = 1.5  # far below the limits, which are a minute here; a redial alone takes more than a second


class PartlyFrozen(nn.Module):
    """8,000 trainable numbers of 1,008,000, and 400 of them under two names."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(1000, 1000, bias=False).requires_grad_(requires_grad=False)
        self.encoder = nn.Linear(20, 20, bias=False)
        self.adapter = nn.Linear(380, 20, bias=False)
        self.decoder = nn.Linear(20, 20, bias=False)
        self.decoder.weight = self.encoder.weight


class Deep(nn.Module):
    """22 small layers that share a fragment, and one tensor larger than a chunk."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(5 + i, 7) for i in range(22))
        self.table = nn.Parameter(torch.randn(1_111_111))


def towards_own_goal(model, learner_id, number):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach() - (learner_id + 1) / number


def test_only_what_is_trained_travels_and_a_tied_weight_once(processes):
    syncer = processes.syncer("schedule.sync_interval_steps=0", learners=1, total_steps=3)
    with Proxy(syncer.address) as proxy:
        model = PartlyFrozen(1)
        frozen = model.body.weight.clone()
        learner = Learner(
            proxy.address, 0, model=model, gradients=towards_own_goal, fragments=1, wire_dtype="f32", streams=2
        )
        with training(learner):
            wait_all([learner])
        assert syncer.wait() == 0
        up = [message for _, message in proxy.messages(up=True)]
        down = [message for _, message in proxy.messages(up=False)]
        moved = sum(len(pipe.up) + len(pipe.down) for pipe in proxy.pipes)
    tensor_bytes = {"up": 0, "down": 0}
    for way, messages in (("up", up), ("down", down)):
        for message in messages:
            if isinstance(message, InitParams | PushFragment | BcastFragment | FinalFragment):
                assert len(message.data) == 4 * 8000
                tensor_bytes[way] += len(message.data)
    assert tensor_bytes == {"up": 4 * 32_000, "down": 3 * 32_000 + 32_000}  # INIT, 3 PUSH; 3 BCAST, the final cut
    assert moved < sum(tensor_bytes.values()) + 4096
    assert torch.equal(model.body.weight, frozen)
    assert model.decoder.weight is model.encoder.weight


def test_every_tensor_of_a_fragment_is_applied_on_every_learner(processes):
    syncer = processes.syncer("schedule.sync_interval_steps=0", "schedule.pipeline=2", learners=2, total_steps=6)
    models = [Deep(seed) for seed in (1, 2)]
    start = [parameter.detach().clone() for parameter in models[0].parameters()]
    learners = [
        Learner(
            syncer.address, i, model=model, gradients=towards_own_goal, fragments=2, wire_dtype="f32", streams=3,
            pace_s=0.01,
        )
        for i, model in enumerate(models)
    ]  # fmt: skip
    with training(*learners):
        results = wait_all(learners)
    assert syncer.wait() == 0
    assert [len(fragment.tensors) for fragment in learners[0].optimizer.layout.fragments] == [1, 44]
    assert same_weights(*results, final_state(syncer.folder / "model.safetensors"), saved(syncer.checkpoint))
    for first, one, other in zip(start, models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, first)
    common = learners[0].merged.keys() & learners[1].merged.keys()
    assert len(common) >= 3
    assert all(learners[0].merged[key] == learners[1].merged[key] for key in common)


def test_one_learner_loses_its_connection_and_one_leaves_for_good(processes):
    """The others wait for neither; whoever comes back goes on from the fleet's state, merge by merge the same."""
    total = 120
    syncer = processes.syncer(
        "schedule.quorum=3", "schedule.sync_interval_steps=0", "schedule.quorum_timeout_s=60",
        "schedule.min_round_interval_ms=30", "schedule.grace_ms=0", learners=3, total_steps=total,
    )  # fmt: skip
    config = {"fragments": 3, "wire_dtype": "f32", "pace_s": 0.004}
    with Proxy(syncer.address) as proxy:
        steady, torn, leaver = learners = (
            Learner(syncer.address, 0, **config),
            Learner(proxy.address, 1, **config),
            Learner(syncer.address, 2, **config),
        )
        with training(*learners):
            steady.wait(lambda: len(steady.merged) >= 20, "20 merges")
            proxy.cut()
            until(lambda: syncer.events("leave"), "the loss is noticed")
            until(lambda: len(syncer.events("join")) == 4, "it is back")
            back_at = len(steady.merged)
            steady.wait(lambda: len(steady.merged) >= back_at + 20, "20 merges together again")
            leaver.leave()
            results = wait_all([steady, torn])
    assert syncer.wait() == 0
    assert same_weights(*results, final_state(syncer.folder / "model.safetensors"), saved(syncer.checkpoint))
    assert [learner.optimizer.stats.reconnects for learner in learners] == [0, 1, 0]
    for other in (torn, leaver):
        common = steady.merged.keys() & other.merged.keys()
        assert len(common) >= 30
        assert all(steady.merged[key] == other.merged[key] for key in common)
    lines = syncer.merges()
    assert [line["step"] for line in lines] == list(range(1, total + 1))
    assert max(later["time"] - earlier["time"] for earlier, later in itertools.pairwise(lines)) < AT_ONCE_S
    assert [line["id"] for line in syncer.events("leave")] == [1, 2]
    assert syncer.events("final")[0]["expected"] == [0, 1]


def slow_link(processes, width, rounds, **limits):
    """Learner 1 sits behind 1 Mbit/s."""
    syncer = processes.syncer(
        "schedule.sync_interval_steps=0", *(f"session.{key}={value}" for key, value in limits.items()),
        "schedule.grace_ms=0", learners=2, total_steps=rounds,
    )  # fmt: skip
    with Proxy(syncer.address, rate=125_000) as proxy:
        learners = [
            Learner(address, i, model=toy(i, width), fragments=2, wire_dtype="f32", streams=2, pace_s=0.02)
            for i, address in enumerate((syncer.address, proxy.address))
        ]
        with training(*learners):
            results = wait_all(learners, 300)
        moved = sum(len(pipe.up) + len(pipe.down) for pipe in proxy.pipes)
    assert syncer.wait() == 0
    assert same_weights(*results, saved(syncer.checkpoint))
    assert [learner.optimizer.stats.reconnects for learner in learners] == [0, 0]
    ended_at = syncer.events("final")[0]["time"]
    assert not [line for line in syncer.events("leave") if line["time"] < ended_at]
    assert not syncer.events("retry")
    assert all(line["responded"] == [0, 1] for line in syncer.merges())
    syncer.wait_for(r"step 1 of \d+: 2 of 2 answered, round \d+ ms, \d+\.\d\d rounds/s, \d+\.\d MB in, \d+\.\d MB out")
    return syncer, moved


def test_a_slow_link_is_not_a_dead_one(processes):
    _, moved = slow_link(processes, 130, 4, write_timeout_s=0.3, idle_timeout_s=6)
    assert moved > 300_000  # 2.4 s at least


@pytest.mark.slow
def test_a_slow_link_for_a_minute_with_heartbeats_in_between(processes):
    syncer, _ = slow_link(processes, 400, 8, write_timeout_s=1, idle_timeout_s=7)
    assert any(" s left" in line for line in syncer.lines)


@pytest.mark.slow
def test_a_learner_that_comes_half_a_minute_later_finds_everybody_alive(processes):
    syncer = processes.syncer("schedule.sync_interval_steps=0", "session.idle_timeout_s=12", learners=2, total_steps=6)
    first = Learner(syncer.address, 0)
    with training(first):
        syncer.wait_for("learner 0 .* joined")
        first.stopping.wait(30)  # half a minute goes by
        second = Learner(syncer.address, 1)
        with training(second):
            assert same_weights(*wait_all([first, second]))
    assert syncer.wait() == 0
    assert [learner.optimizer.stats.reconnects for learner in (first, second)] == [0, 0]
