"""A learner in the middle of a run, over real sockets: anchors, answers, what the bytes say."""

import numpy as np
import pytest
import torch

from tests.support.joined_learner import flat, gradients, heard, join, model_of, pulled, started, vector, zero_gradients
from tests.support.waiting import until
from yeto_torch.fragments import build_layout
from yeto_torch.wire.codec import encode
from yeto_torch.wire.constants import SLICE_BYTES, WireDType
from yeto_torch.wire.errors import NonFiniteError, PeerError
from yeto_torch.wire.messages import Heartbeat, InitParams, PushFragment
from yeto_torch.wire.model_layout import contract_hash

TWO = {"a": vector(1, 2, 3), "b": vector(4, 5)}


def test_hello_says_what_the_learner_is(syncer):
    model = model_of(**TWO)
    with join(syncer, model, fragments=2, wire_dtype="q4", streams=3, learner_id=4, profile="ab" * 32) as optimizer:
        hello = syncer.group(0).hello
        layout = build_layout([("a", (3,)), ("b", (2,))], fragments=2)
        assert optimizer.layout == layout
        assert (hello.learner_id, hello.dtype, hello.num_streams) == (4, WireDType.Q4, 3)
        assert hello.generation != 0
        assert hello.layout == layout.wire
        assert hello.fingerprint == layout.fingerprint
        assert hello.contract == contract_hash(layout.fingerprint, "tests")
        assert hello.profile == b"\xab" * 32


@pytest.mark.parametrize("wire_dtype", ["f32", "bf16", "q4"])
def test_a_round_trip_in_every_dtype(syncer, wire_dtype):
    model = model_of(w=torch.zeros(40, 20))
    values = torch.from_numpy(np.random.default_rng(1).standard_normal(800).astype(np.float32))
    optimizer, group = started(syncer, model, [values], wire_dtype=wire_dtype, streams=2)
    syncer.group(0)
    anchor = values if wire_dtype == "f32" else values.bfloat16().float()
    assert torch.equal(flat(optimizer, model, 0), anchor)
    group.pull(0, 1)
    pulled(optimizer, 0, 1)
    gradients(model, [values.flip(0)])
    optimizer.step(tokens=12)
    push = group.push(step=1)
    assert (push.learner_id, push.fragment, push.attempt, push.base_version) == (1, 0, 1, 0)
    assert (push.local_step, push.c_steps, push.c_tokens) == (2, 1, 12)
    delta = flat(optimizer, model, 0) - anchor
    assert bytes(push.data) == bytes(encode(delta, WireDType[wire_dtype.upper()]))
    stats = optimizer.stats
    assert (stats.pushes, stats.merges, stats.versions, stats.connected) == (1, 1, (0,), True)
    until(lambda: optimizer.stats.bytes_sent > len(push.data))  # counted behind the write
    optimizer.close()


def test_two_learners_that_start_apart_hold_learner_0s_weights_after_the_first_broadcast(syncer):
    models = [model_of(a=vector(seed, 2, 3), b=vector(4, seed)) for seed in (10, 20)]
    optimizers = [join(syncer, model, learner_id=i, fragments=2) for i, model in enumerate(models)]
    groups = {g.hello.learner_id: g for g in (syncer.group(0), syncer.group(1))}
    inits = [groups[0].next(InitParams, where=lambda m, f=f: m.fragment == f) for f in range(2)]
    values = [torch.frombuffer(bytearray(init.data), dtype=torch.float32) for init in inits]
    assert [v.tolist() for v in values] == [[10, 2, 3], [4, 10]]
    for i, optimizer in enumerate(optimizers):
        groups[i].broadcast_all(0, values)
        heard(optimizer, a=(0, 0), b=(1, 0))
        zero_gradients(models[i])
        optimizer.step()
    assert all(torch.equal(models[0].get_parameter(n), models[1].get_parameter(n)) for n in "ab")
    assert models[1].a.tolist() == [10, 2, 3]
    assert groups[1].maybe(InitParams, 0.0) is None  # only learner 0 initialises
    for optimizer in optimizers:
        optimizer.close()


def test_scalars_by_hand_over_three_rounds(syncer):
    """Anchor 0, gradient 1, lr 0.1: each step moves by -0.1. alpha = 1/2; every delta is against the raw broadcast."""
    model = model_of(x=vector(5.0))
    optimizer, group = started(syncer, model, [vector(0.0)], merge_alpha=0.5)
    local = 0.0
    for version, broadcast in ((1, 1.0), (2, -2.0), (3, 0.5)):
        group.pull(0, version)
        pulled(optimizer, 0, version)
        gradients(model, [vector(1.0)])
        optimizer.step()
        raw = {1: 0.0, 2: 1.0, 3: -2.0}[version]
        local -= 0.1
        assert group.delta(group.push(step=version)).item() == pytest.approx(local - raw, abs=1e-6)
        group.broadcast(0, version, vector(broadcast))
        heard(optimizer, x=(0, version))
        zero_gradients(model)
        optimizer.step()
        local = 0.5 * local + 0.5 * broadcast
        assert model.x.item() == pytest.approx(local, abs=1e-6)
    optimizer.close()


def test_half_frozen_and_tied_only_what_is_trained_travels_and_once(syncer):
    model = torch.nn.Module()
    model.big = torch.nn.Linear(1000, 1000, bias=False)
    model.big.requires_grad_(False)
    model.small = torch.nn.Linear(1000, 8, bias=False)
    model.tied = model.small
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with join(syncer, model, inner, learner_id=0) as optimizer:
        init = syncer.group(0).next(InitParams)
        assert len(init.data) == 4 * 8000
        assert syncer.group(0).hello.layout.numels == (8000,)
        assert [t.name for t in optimizer.layout.tensors] == ["small.weight"]
        assert model.big.weight.shape == (1000, 1000)


def test_fragments_that_cross_every_border_arrive_whole(syncer):
    """A tensor of several slices over three streams, q4 tails, and 22 small layers in one fragment."""
    torch.manual_seed(0)
    layers = {f"l{i:02}": torch.randn(3, 7) for i in range(22)}
    model = model_of(big=torch.randn(SLICE_BYTES // 4 * 2 + 77), **layers)
    optimizer = join(syncer, model, learner_id=0, fragments=2, wire_dtype="q4", streams=3)
    group = syncer.group(0)
    assert len(optimizer.layout.fragments[1].tensors) == 22
    values = [torch.randn(n) for n in optimizer.layout.wire.numels]
    group.broadcast_all(0, values)
    heard(optimizer, a=(0, 0), b=(1, 0))
    zero_gradients(model)
    optimizer.step()
    for fragment, value in enumerate(values):
        assert torch.equal(flat(optimizer, model, fragment), value.bfloat16().float())
        group.pull(fragment, fragment + 1)
        pulled(optimizer, fragment, fragment + 1)
    gradients(model, [torch.randn_like(p) for p in model.parameters()])
    optimizer.step()
    for fragment, value in enumerate(values):
        push = group.push(fragment=fragment)
        delta = flat(optimizer, model, fragment) - value.bfloat16().float()
        assert bytes(push.data) == bytes(encode(delta, WireDType.Q4))
    optimizer.close()


def test_learner_0_drops_its_starting_values_as_they_are_seen(syncer):
    model = model_of(**TWO)
    optimizer = join(syncer, model, learner_id=0, fragments=2)
    group = syncer.group(0)
    group.broadcast(1, 0, vector(0, 0))
    heard(optimizer, b=(1, 0))
    group.cut_off()
    again = syncer.group(1)
    assert again.next(InitParams).fragment == 0  # fragment 1 was seen once in the life of the process
    assert again.maybe(InitParams, 0.3) is None
    optimizer.close()


def test_a_step_that_is_asked_for_nothing_sends_nothing_but_heartbeats(syncer, monkeypatch):
    monkeypatch.setattr("yeto_torch.learner.link.HEARTBEAT_S", 0.05)
    model = model_of(**TWO)
    optimizer, group = started(syncer, model, [vector(0, 0, 0, 0, 0)], fragments=1)
    for _ in range(6):
        optimizer.step()
    beat = group.next(Heartbeat, where=lambda m: m.local_step == 7)
    assert beat.learner_id == 1
    assert group.maybe(PushFragment, 0.0) is None
    optimizer.close()


# ---------------------------------------------------------------------------------------------- what is not finite


def test_a_parameter_that_is_not_finite_is_named_and_nothing_is_pushed(syncer):
    model = model_of(**TWO)
    optimizer, group = started(syncer, model, [vector(0, 0, 0, 0, 0)], fragments=1)
    with torch.no_grad():
        model.b[1] = float("nan")
    group.pull(0, 1)
    pulled(optimizer, 0, 1)
    with pytest.raises(NonFiniteError, match="'b'"):
        optimizer.step()
    with pytest.raises(NonFiniteError, match="'b'"):
        optimizer.step()
    group.wait_closed()
    assert group.maybe(PushFragment, 0.0) is None
    optimizer.close()


def test_resync_takes_the_anchors_again_and_forgets_the_poisoned_state(syncer, caplog):
    model = model_of(**TWO, c=vector(6))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer, group = started(
        syncer, model, [vector(7, 7, 7), vector(8, 8), vector(9)], inner=inner, fragments=3, on_nonfinite="resync"
    )
    poisoned = [vector(1, 1, 1), vector(1, float("inf")), vector(1)]
    group.pull(1, 1)
    group.pull(2, 2)
    pulled(optimizer, 1, 1)
    pulled(optimizer, 2, 2)
    gradients(model, poisoned)
    optimizer.step()
    assert "'b'" in caplog.text
    assert model.b.tolist() == [8, 8]
    assert model.b not in inner.state
    assert model.c.item() == pytest.approx(8.9)  # sound fragments keep their progress
    assert group.delta(group.push(fragment=2)).item() == pytest.approx(-0.1, abs=1e-6)
    gradients(model, [vector(0, 0, 0), vector(1, 1), vector(0)])
    optimizer.step(tokens=5)
    push = group.push(fragment=1)
    assert (push.c_steps, push.c_tokens, push.step) == (1, 5, 1)
    assert group.delta(push).tolist() == pytest.approx([-0.1, -0.1], abs=1e-6)
    optimizer.close()


def test_a_broadcast_that_is_not_finite_is_the_syncers_fault_and_touches_nothing(syncer):
    model = model_of(**TWO)
    optimizer = join(syncer, model, fragments=2)
    group = syncer.group(0)
    group.broadcast(0, 0, vector(1, float("nan"), 1))
    heard(optimizer, a=(0, 0))
    zero_gradients(model)
    with pytest.raises(PeerError, match="not finite"):
        optimizer.step()
    assert model.a.tolist() == [1, 2, 3]
    group.wait_closed()
    optimizer.close()
