"""The world against a fleet of two written out by hand, and its rules one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from experiments.codecs import decode_answer, encode_answer
from experiments.configs import Fleet, Training, key_of, plain, training
from experiments.merging import aligned_gain, layout_for, outer_gradient
from experiments.world import Learner, World
from syncer.config.policy import DRIVE_LIMIT
from yeto_torch.fragments import bind
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.layout import WireFragment

TARGETS = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]])


def model():
    torch.manual_seed(1)
    return nn.ModuleDict({"embed": nn.Linear(3, 4), "out": nn.Linear(4, 3)})


def train(which, net, inner):
    """One step towards the target of learner ``which``; 8 tokens."""
    inner.zero_grad()
    loss = (net["out"](torch.tanh(net["embed"](TARGETS[which]))) - TARGETS[which].flip(0)).square().sum()
    loss.backward()
    inner.step()
    return 8


def fleet_of(fleet):
    layout = layout_for(fleet, [(n, tuple(p.shape)) for n, p in model().named_parameters()], None)
    parts = bind(layout, dict(model().named_parameters()))
    start = [torch.cat([p.detach().flatten() for p in part]) for part in parts]

    def make(which):
        net = model()
        inner = torch.optim.SGD(net.parameters(), lr=0.05)
        return Learner(net, [inner], layout, fleet.wire, lambda n, i: train(which, n, *i))

    return World(fleet, layout, start, make), layout


def by_hand(layout, ticks, per_round, lr, mu):
    """Two learners in f32 under plain averaging, with nothing of the product but the layout's order."""
    nets = [model(), model()]
    inners = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]

    def flat(net, fragment):
        named = dict(net.named_parameters())
        return torch.cat([named[t.name].detach().flatten() for t in layout.fragments[fragment].tensors])

    def put(net, fragment, values):
        named = dict(net.named_parameters())
        parts = values.split([t.numel for t in layout.fragments[fragment].tensors])
        for t, part in zip(layout.fragments[fragment].tensors, parts, strict=True):
            named[t.name].data.copy_(part.view(t.shape))

    count = len(layout)
    theta = [flat(nets[0], f) for f in range(count)]
    anchors = [value.clone() for value in theta]
    momentum = [torch.zeros_like(value) for value in theta]
    adopt, rounds = None, 0
    for tick in range(1, ticks + 1):
        for which in (0, 1):
            train(which, nets[which], inners[which])
            if adopt is not None:
                put(nets[which], adopt, theta[adopt])
        if adopt is not None:
            anchors[adopt] = theta[adopt].clone()
            adopt = None
        if tick % per_round == 0:
            fragment, rounds = rounds % count, rounds + 1
            outer = -sum(flat(net, fragment) - anchors[fragment] for net in nets) / 2
            momentum[fragment] = mu * momentum[fragment] + outer
            theta[fragment] = theta[fragment] - lr * (outer + mu * momentum[fragment])
            adopt = fragment
    return theta


@pytest.mark.parametrize(("interval", "fragments"), [(2, 2), (6, 2), (3, 3), (12, 3)])
@pytest.mark.parametrize("outer", [(1.0, 0.0), (0.7, 0.5)])
def test_two_learners_do_what_is_written_out_by_hand(interval, fragments, outer):
    lr, mu = outer
    fleet = Fleet(2, interval, fragments, "f32", "avg", correction="none", lr=lr, momentum=mu)
    world, layout = fleet_of(fleet)
    assert len(layout) == fragments
    for _ in range(4 * interval):
        world.tick()
    for found, expected in zip(world.final(), by_hand(layout, world.now, interval // fragments, lr, mu), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert world.state.step == 4 * fragments


def test_plain_averaging_has_gain_one_and_momentum_more():
    for lr, mu, expected in ((1.0, 0.0, 1.0), (0.5, 0.0, 0.5)):
        world, _ = fleet_of(Fleet(2, 4, 2, "f32", "avg", correction="none", lr=lr, momentum=mu))
        for _ in range(16):
            world.tick()
        assert all(gain == pytest.approx(expected, rel=1e-3) for gains in world.gains for gain in gains)
    m = torch.tensor([3.0, 4.0])
    assert aligned_gain(2 * m + torch.tensor([4.0, -3.0]), [-m, -m], [1.0, 3.0]) == pytest.approx(2.0)
    assert aligned_gain(m, [torch.zeros(2)], [1.0]) == 0.0


def test_under_the_guard_no_step_goes_beyond_the_limit_and_without_need_nothing_changes():
    def gains(**outer):
        world, _ = fleet_of(Fleet(2, 4, 2, "f32", "avg", correction="none", **outer))
        for _ in range(40):
            world.tick()
        return [gain for fragment in world.gains for gain in fragment], world.final()

    free, _ = gains(lr=0.7, momentum=0.9)
    capped, _ = gains(lr=0.7, momentum=0.9, guard="cap")
    assert max(free) > 2 * DRIVE_LIMIT
    assert max(capped) == pytest.approx(DRIVE_LIMIT, rel=1e-3)
    needless, same = gains(lr=0.7, momentum=0.3, guard="cap")
    assert max(needless) < DRIVE_LIMIT
    assert all(torch.equal(a, b) for a, b in zip(same, gains(lr=0.7, momentum=0.3)[1], strict=True))


def test_each_correction_merges_otherwise_where_answers_oppose_the_momentum():
    layout = WireFragment(MergeMode.RDA, (3,))
    momentum, gradients = torch.tensor([10.0, 0.0, 0.0]), [torch.tensor([-1.0, 1.0, 0.0])]

    def merged(correction, merge="rda"):
        fleet = Fleet(1, 4, 2, "f32", merge, correction=correction, momentum=0.9)
        return outer_gradient(fleet, layout, gradients, [1.0], momentum)[0]

    for merge in ("rda", "avg-norm"):
        found = [float(merged(word, merge)) for word in ("none", "heloco", "heloco-normalized")]
        assert found == sorted(found)
        assert len(set(found)) == 3


def test_a_slow_learner_holds_a_round_up_until_its_boundary():
    world, _ = fleet_of(Fleet(2, 2, 2, "f32", "avg", speeds=(1.0, 0.25)))
    merged = []
    for _ in range(16):
        world.tick()
        merged.append(world.state.step)
    assert merged == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]


def test_a_late_broadcast_is_adopted_late():
    prompt, _ = fleet_of(Fleet(2, 4, 2, "f32", "avg", correction="none"))
    late, _ = fleet_of(Fleet(2, 4, 2, "f32", "avg", correction="none", delays=(0, 3)))
    same = []
    for _ in range(8):
        prompt.tick()
        late.tick()
        same.append(all(torch.equal(a, b) for a, b in zip(prompt.final(), late.final(), strict=True)))
    # The broadcast of tick 2 is adopted behind step 3, or step 6: the first step that differs is the fourth.
    assert same == [True] * 3 + [False] * 5


def test_who_leaves_is_not_waited_for_and_comes_back_to_the_fleet():
    world, _ = fleet_of(Fleet(2, 2, 2, "f32", "avg", absences=((1, 3, 6),)))
    present = []
    for _ in range(8):
        world.tick()
        present.append(world.active(world.now))
    assert present == [[0, 1]] * 2 + [[0]] * 3 + [[0, 1]] * 3
    assert world.state.step == 8


@pytest.mark.parametrize("wire", ["f32", "bf16", "q4", "q2"])
def test_wires_differ_as_they_should(wire):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    back = decode_answer(encode_answer(values, wire), 1000, wire).neg()
    error = float((back - values).norm() / values.norm())
    low, high = {"f32": (0, 0), "bf16": (1e-4, 4e-3), "q4": (0.05, 0.3), "q2": (0.5, 2.0)}[wire]
    assert low <= error <= high


@pytest.mark.parametrize("merge", ["avg", "avg-norm", "rda", "iso-mean", "iso-norm"])
def test_every_merge_trains(merge):
    world, layout = fleet_of(Fleet(2, 4, 2, "bf16", merge))
    before = [value.clone() for value in world.final()]
    for _ in range(8):
        world.tick()
    for fragment, (a, b) in enumerate(zip(before, world.final(), strict=True)):
        assert not torch.equal(a, b), layout.fragments[fragment]


def test_a_configuration_is_its_name():
    config = Training("char", 3, 1e-3, fleet=Fleet(4, speeds=(1.0, 1.0, 0.5, 0.5), absences=((1, 2, 3),)))
    assert training(plain(config)) == config
    assert key_of("train", plain(config)) == key_of("train", plain(training(plain(config))))
    assert key_of("train", plain(config)) != key_of("train", plain(Training("char", 4, 1e-3, fleet=config.fleet)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"interval": 25}, "interval=25: must be a multiple of the 4 fragments"),
        ({"merge": "sum"}, "merge='sum': must be one of avg"),
        ({"wire": "f16"}, "wire='f16': must be one of"),
        ({"correction": "some"}, "correction='some': must be one of heloco, heloco-normalized, none"),
        ({"guard": "warn"}, "guard='warn': must be one of off, cap"),
        ({"speeds": (1.0,)}, "must be one value for each of 2"),
        ({"speeds": (1.0, 2.0)}, "must be above 0 and at most 1"),
    ],
)
def test_what_no_fleet_can_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Fleet(**wrong)
