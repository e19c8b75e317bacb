"""Models as users have them, in a living fleet: what travels, under which name, and what becomes of it."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.contract.loop import holding
from tests.support.real_learners import Learner, same_weights, training, wait_all
from tests.support.saved_parameters import final_state, saved
from yeto_torch.fragments import collect

AT_ONCE = "schedule.sync_interval_steps=0"


def mixed(seed):
    """Scalars, an empty tensor, turned and channels-last storage, half and double precision, one never used."""
    torch.manual_seed(seed)
    model = holding(
        scalar=torch.randn(()),
        empty=torch.ones(0, 4),
        turned=torch.randn(5, 3).t(),
        strided=torch.randn(6, 8)[::2, 1::2],
        images=torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        f16=torch.randn(7).half(),
        bf16=torch.randn(7).bfloat16(),
        f64=torch.randn(7).double(),
        unused=torch.randn(3),
    )
    model.tied = model.turned
    return model


def towards_own_goal(model, learner_id, number):
    for name, parameter in model.named_parameters():
        if name != "unused":
            parameter.grad = parameter.detach() - (learner_id + 1) / number


@pytest.mark.parametrize("wire_dtype", ["f32", "bf16", "q4"])
def test_every_kind_of_parameter_ends_as_the_syncer_has_it(processes, wire_dtype):
    syncer = processes.syncer(AT_ONCE, "schedule.quorum=2", learners=2, total_steps=6)
    models = [mixed(seed) for seed in (1, 2)]
    kinds = [(p.dtype, p.stride()) for p in models[0].parameters()]
    unused = models[0].unused.detach().clone()
    learners = [
        Learner(syncer.address, i, model=model, gradients=towards_own_goal, fragments=2, wire_dtype=wire_dtype)
        for i, model in enumerate(models)
    ]
    with training(*learners):
        results = wait_all(learners)
    assert syncer.wait() == 0
    layout = learners[0].optimizer.layout
    assert sorted(t.name for t in layout.tensors) == sorted(
        ["scalar", "turned", "strided", "images", "f16", "bf16", "f64", "unused"]
    )
    assert same_weights(*results)
    final, named = saved(syncer.checkpoint), dict(models[0].named_parameters())
    for fragment, values in zip(layout.fragments, final, strict=True):
        at = 0
        for tensor in fragment.tensors:
            part = torch.from_numpy(values[at : at + tensor.numel].copy()).view(tensor.shape)
            assert torch.equal(named[tensor.name], part.to(named[tensor.name].dtype)), tensor.name
            at += tensor.numel
    assert same_weights(final, final_state(syncer.folder / "model.safetensors"))
    assert [(p.dtype, p.stride()) for p in models[0].parameters()] == kinds
    assert models[0].tied is models[0].turned
    exact = wire_dtype == "f32"
    assert torch.equal(models[0].unused, unused if exact else unused.bfloat16().float()), "nobody moved it"


def rounded_away(model, _learner_id, number):
    """One real step, then none."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 if number == 1 else 0.0)


def test_what_bf16_weights_round_away_is_sent_back_as_a_step(processes):
    """The delta is f32(local) - anchor: with f32 on the wire bf16 weights answer with their own rounding error."""
    syncer = processes.syncer(
        AT_ONCE, "preset=direct", "outer.lr=0.3", "schedule.pipeline=1", learners=1, total_steps=5
    )
    model = holding(weight=torch.linspace(1.0, 2.0, 64).bfloat16())
    start = model.weight.detach().float().numpy()
    learner = Learner(
        syncer.address, 0, model=model, gradients=rounded_away, fragments=1, wire_dtype="f32", lr=0.25, pace_s=0.01,
        streams=0,  # on one stream no pull overtakes its broadcast
    )  # fmt: skip
    with training(learner):
        wait_all([learner])
    assert syncer.wait() == 0

    def rounded(values):
        return torch.from_numpy(values).bfloat16().float().numpy()

    sent = [rounded(start - np.float32(0.25)) - start]
    state = start
    for _ in range(5):
        state = (state - np.float32(0.3) * -sent[-1]).astype(np.float32)
        sent.append(rounded(state) - state)
    measured = [line["gnorm"] for line in syncer.merges()]
    assert measured == pytest.approx([float(np.linalg.norm(delta)) for delta in sent[:5]], rel=1e-4)
    assert measured[0] == pytest.approx(0.25 * 8, rel=0.05)
    assert all(0 < residue < 64**0.5 * 2**-8 for residue in measured[1:]), "no step was made, and yet something came"


def test_with_bf16_on_the_wire_bf16_weights_hold_the_broadcast_exactly(processes):
    syncer = processes.syncer(
        AT_ONCE, "preset=direct", "outer.lr=0.3", "schedule.pipeline=1", learners=1, total_steps=4
    )
    model = holding(weight=torch.linspace(1.0, 2.0, 64).bfloat16())
    learner = Learner(syncer.address, 0, model=model, gradients=rounded_away, fragments=1, lr=0.25, pace_s=0.01)
    with training(learner):
        wait_all([learner])
    assert syncer.wait() == 0
    assert [line["gnorm"] > 0 for line in syncer.merges()] == [True, False, False, False]


class Normed(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count += 1
        return self.last(self.norm(self.first(x)))


def normed_gradients(model, learner_id, number):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * learner_id + number)) + learner_id
    model(x).square().mean().backward()


@pytest.mark.filterwarnings("ignore:1 layer")  # which is asked for above the run
def test_running_statistics_stay_at_home_and_one_warning_says_so(processes):
    syncer = processes.syncer(AT_ONCE, "schedule.quorum=2", learners=2, total_steps=6)
    models = [Normed(seed) for seed in (1, 2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        taken = collect([torch.optim.SGD(models[0].parameters())], models[0])
    assert [str(w.message).partition(" (")[0] for w in caught] == ["1 layer(s) keep running statistics"]
    assert "norm" in str(caught[0].message)
    assert "norm.running_mean" not in taken
    learners = [
        Learner(syncer.address, i, model=model, gradients=normed_gradients, fragments=2)
        for i, model in enumerate(models)
    ]
    with training(*learners):
        results = wait_all(learners)
    assert syncer.wait() == 0
    assert same_weights(*results)
    assert not torch.equal(models[0].norm.running_mean, models[1].norm.running_mean)
    for learner, model in zip(learners, models, strict=True):
        assert model.count == model.norm.num_batches_tracked == learner.step_number


@pytest.mark.parametrize(
    "quiet",
    [
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.BatchNorm1d(6, momentum=0.0),
        nn.LayerNorm(6),
        nn.InstanceNorm1d(6, affine=True),
    ],
    ids=str,
)
def test_norms_without_running_statistics_get_no_warning(quiet):
    model = nn.Sequential(nn.Linear(4, 6), quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect([torch.optim.SGD(model.parameters())], model)


# ---------------------------------------------------------------------------------------------- wrapped models


@pytest.fixture
def group():
    """A process group of one, for what wants any."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Network(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.body(x)


def compiled(model):
    return torch.compile(model, backend="eager")


def parallel(model):
    return nn.parallel.DistributedDataParallel(model)


def both(model):
    return compiled(parallel(model))


def loss_gradients(model, learner_id, number):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * learner_id + number))
    (model(x) - 1).square().mean().backward()


@pytest.mark.usefixtures("group")
def test_compiled_and_data_parallel_models_train_in_one_fleet_with_the_plain_one(processes):
    """Under other names HELLO would be refused."""
    syncer = processes.syncer(AT_ONCE, "schedule.quorum=4", learners=4, total_steps=6)
    learners = [
        Learner(syncer.address, i, model=wrap(Network(i)), gradients=loss_gradients, fragments=2)
        for i, wrap in enumerate((lambda model: model, compiled, parallel, both))
    ]
    with training(*learners):
        results = wait_all(learners)
    assert syncer.wait() == 0
    layouts = [learner.optimizer.layout for learner in learners]
    assert len({layout.fingerprint for layout in layouts}) == 1
    assert {t.name for t in layouts[0].tensors} == {"body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"}
    assert same_weights(*results)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:FSDP")
def test_fully_sharded_and_checkpointed_models_have_the_names_of_the_plain_one():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    plain = list(dict(Network(0).named_parameters()))
    sharded = FullyShardedDataParallel(Network(0), use_orig_params=True, device_id=torch.device("cpu"))
    newer = fully_shard(Network(0), mesh=init_device_mesh("cpu", (1,)))
    checkpointed = Network(0)
    checkpointed.body[0] = checkpoint_wrapper(checkpointed.body[0])
    for model in (sharded, newer, checkpointed, compiled(checkpointed)):
        assert list(collect([torch.optim.SGD(model.parameters())], model)) == plain
    assert any("_fsdp_wrapped_module" in name for name, _ in sharded.named_parameters())
    assert any("_checkpoint_wrapped_module" in name for name, _ in checkpointed.named_parameters())
