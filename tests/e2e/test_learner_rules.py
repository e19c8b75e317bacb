"""What a learner makes of a run, seen from outside: its own weights after every step, and the bytes on the wire.

Source: v4 §Deltas and staleness, v4 §Anchors; rulings §5.1, §5.4.
"""

import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from syncer.checkpoint.files import read_checkpoint
from tests.support.numpy_replay import decode, to_bf16
from tests.support.real_learners import Learner, same_weights, training, wait_all
from tests.support.relay import Proxy
from tests.support.saved_parameters import final_state, saved
from tests.support.scripted_learner import ScriptedLearner
from tests.support.toy_model import flat, loss_of, toy
from tests.support.waiting import until
from yeto_torch import YetoOuterOptimizer
from yeto_torch.fragments import build_layout
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.messages import BcastFragment, PushFragment

WAIT_S = 60.0
LR = 0.05


def test_with_zero_gradients_while_a_push_is_away_one_learner_is_the_plain_optimizer(processes):
    rounds = 15
    syncer = processes.syncer("preset=direct", "schedule.sync_interval_steps=0", learners=1, total_steps=rounds)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    plain.load_state_dict(model.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = torch.randn(rounds, 8, 6, generator=torch.Generator().manual_seed(1))

    def gradient(network, number):
        network.zero_grad()
        ((network(batches[number]) - batches[number, :, :3].sin()) ** 2).mean().backward()

    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with YetoOuterOptimizer(
        inner, model, syncer=syncer.address, learner_id=0, run_id="plain", fragments=1, wire_dtype="f32", streams=0
    ) as optimizer:
        for number in range(rounds):
            gradient(model, number)
            optimizer.step()
            deadline = time.monotonic() + WAIT_S
            while not (optimizer.finished if number == rounds - 1 else optimizer.stats.versions == (number + 1,)):
                assert time.monotonic() < deadline, f"round {number + 1} was not adopted: {syncer.told()}"
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                if optimizer.stats.versions != (rounds,):
                    optimizer.step()
                time.sleep(0.001)
            gradient(plain, number)
            reference.step()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-7)
    assert syncer.wait() == 0
    assert optimizer.stats.merges == rounds  # the first weights, and every round but the last, which is the final cut's
    lines = syncer.merges()
    assert [line["step"] for line in lines] == list(range(1, rounds + 1))
    assert all(line["responders"][0]["staleness"] == 0 for line in lines)


@pytest.mark.parametrize(("dtype", "alphas"), [(WireDType.F32, (0.0, 0.0)), (WireDType.BF16, (0.0, 0.5))], ids=str)
def test_free_running_learners_follow_the_rules_and_end_as_one(processes, dtype, alphas):
    """A scripted third learner leaves in mid-round, so that one round is asked again of the two that stay."""
    steps, left_at = 24, 8
    syncer = processes.syncer("schedule.sync_interval_steps=4", "schedule.quorum=3", learners=3, total_steps=steps)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in toy(0).named_parameters()]
    third = ScriptedLearner(syncer.address, 2, build_layout(shapes, fragments=3), dtype=dtype.name)
    with Proxy(syncer.address) as proxy:
        learners = [
            Learner(
                proxy.address,
                learner_id,
                merge_alpha=alpha,
                wire_dtype=dtype.name.lower(),
                fragments=3,
                streams=3,
                lr=LR,
                tokens=partial(_tokens, learner_id),
            )
            for learner_id, alpha in enumerate(alphas)
        ]
        with training(*learners):
            for step in range(1, left_at):
                pull = third.pull(step=step)
                third.answer(pull, np.zeros(third.layout.fragments[pull.fragment].numel, np.float32))
            third.pull(step=left_at)
            until(lambda: len(_pushes(proxy, left_at)) == 2, "both answer the first attempt")
            third.close()
            results = wait_all(learners)
        assert syncer.wait() == 0
        twice = _pushes(proxy, left_at)
        layout = learners[0].optimizer.layout
        wire = list(proxy.messages(up=True)), list(proxy.messages(up=False))
    assert len(layout) == 3
    for learner_id in (0, 1):  # what the first answer told is told again: nothing is lost with an attempt
        first, again = sorted((p for p in twice if p.learner_id == learner_id), key=lambda push: push.attempt)
        assert (first.attempt, again.attempt) == (1, 2)
        assert again.base_version == first.base_version
        assert again.c_steps == first.c_steps + again.local_step - first.local_step

    assert same_weights(*results, final_state(syncer.folder / "model.safetensors"), saved(syncer.checkpoint))
    assert [record.version for record in read_checkpoint(syncer.checkpoint).fragments] == [22, 23, 24]
    start = flat(toy(0), layout)  # learner 0's weights
    start = start if dtype is WireDType.F32 else [to_bf16(values) for values in start]
    assert same_weights(start, *(learner.started for learner in learners))

    broadcasts = {}
    for _, message in wire[1]:
        if isinstance(message, BcastFragment):
            data = bytes(message.data)
            assert broadcasts.setdefault((message.fragment, message.version), data) == data
    for learner, alpha in zip(learners, alphas, strict=True):
        pushes = [m for hello, m in wire[0] if isinstance(m, PushFragment) and hello.learner_id == learner.learner_id]
        assert len(pushes) >= steps // 2
        _follow(learner, layout, dtype, alpha, broadcasts, pushes)
    if alphas == (0.0, 0.0):
        common = learners[0].merged.keys() & learners[1].merged.keys()
        assert len(common) >= steps // 3
        assert all(learners[0].merged[key] == learners[1].merged[key] for key in common)


def _pushes(proxy, step):
    return [m for _, m in proxy.messages(up=True) if isinstance(m, PushFragment) and m.step == step]


def _follow(learner, layout, dtype, alpha, broadcasts, pushes):
    """The law's rules once more, step by step, against the learner's own weights and the pushes it sent."""
    twin = toy(learner.learner_id)
    inner = torch.optim.SGD(twin.parameters(), lr=LR)
    numels = [fragment.numel for fragment in layout.fragments]
    anchors = [decode(broadcasts[fragment, 0], numels[fragment], dtype.bulk) for fragment in range(len(layout))]
    for fragment, anchor in enumerate(anchors):
        _overwrite(twin, layout.fragments[fragment], anchor)
    versions, adopted_at, tokens_at, tokens = [0] * 3, [0] * 3, [0] * 3, 0

    for number, (now, theirs) in enumerate(learner.history[: max(push.local_step for push in pushes)], start=1):
        tokens += _tokens(learner.learner_id, number)
        twin.zero_grad()
        loss_of(twin, learner.learner_id, number).backward()
        inner.step()
        for fragment, version in enumerate(now):
            if version != versions[fragment]:
                assert version > versions[fragment]
                anchors[fragment] = decode(broadcasts[fragment, version], numels[fragment], dtype.bulk)
                local = flat(twin, layout)[fragment]
                blended = np.float32(alpha) * local + np.float32(1 - alpha) * anchors[fragment]
                _overwrite(twin, layout.fragments[fragment], blended)
                versions[fragment], adopted_at[fragment], tokens_at[fragment] = version, number, tokens
        ours = flat(twin, layout)
        if alpha == 0.0:
            assert same_weights(ours, theirs), f"step {number}"
        else:
            for fragment in range(len(layout)):
                np.testing.assert_allclose(theirs[fragment], ours[fragment], rtol=1e-5, atol=1e-6)
                _overwrite(twin, layout.fragments[fragment], theirs[fragment])  # a rounding of the blend must not grow
            ours = theirs
        for push in (push for push in pushes if push.local_step == number):
            fragment = push.fragment
            assert push.base_version == versions[fragment]
            assert push.c_steps == number - adopted_at[fragment] >= 1
            assert push.c_tokens == tokens - tokens_at[fragment]
            delta = ours[fragment] - anchors[fragment]
            delta = delta if dtype is WireDType.F32 else to_bf16(delta)
            assert delta.tobytes() == decode(push.data, numels[fragment], dtype).tobytes()


def _overwrite(model, fragment, values):
    named, at = dict(model.named_parameters()), 0
    with torch.no_grad():
        for tensor in fragment.tensors:
            named[tensor.name].copy_(torch.from_numpy(values[at : at + tensor.numel].reshape(tensor.shape)))
            at += tensor.numel


def _tokens(learner_id, step):
    return step * (learner_id + 3) % 7
