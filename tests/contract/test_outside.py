"""Optimizers that are not torch's: they step, save and load inside the wrapper as they do alone."""

import copy
import warnings

import numpy as np
import pytest
import torch

from tests.contract.loop import closure_of, holding, loss_of, network, push_all, same, same_state, train
from tests.support.waiting import WAIT_S
from yeto_torch import YetoOuterOptimizer
from yeto_torch.wrapper import OptimizerWrapper

OUTSIDE = [
    ("lion_pytorch", "Lion", {}),
    ("prodigyopt", "Prodigy", {"lr": 1.0}),
    ("optimi", "StableAdamW", {"triton": False}),
    ("optimi", "Adan", {"triton": False, "foreach": True}),
    ("schedulefree", "AdamWScheduleFree", {}),
    ("schedulefree", "SGDScheduleFree", {}),
    ("schedulefree", "RAdamScheduleFree", {}),
    ("pytorch_optimizer", "ADOPT", {}),
    ("pytorch_optimizer", "AdaBelief", {}),
    ("pytorch_optimizer", "AdaFactor", {}),
    ("pytorch_optimizer", "AdEMAMix", {}),
    ("pytorch_optimizer", "CAME", {}),
    ("pytorch_optimizer", "GaLore", {}),
    ("pytorch_optimizer", "Kron", {}),
    ("pytorch_optimizer", "Lamb", {}),
    ("pytorch_optimizer", "SOAP", {}),
    ("pytorch_optimizer", "SophiaH", {}),
]


def made(package, name, arguments, model):
    kind = getattr(pytest.importorskip(package), name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some talk about torch's own deprecations
        return kind(model.parameters(), **{"lr": 0.01, **arguments})


def steps(model, optimizer, count, create_graph):
    torch.manual_seed(1)
    np.random.seed(1)  # Kron draws from numpy's global generator
    for batch in range(count):
        optimizer.zero_grad()
        loss_of(model, batch).backward(create_graph=create_graph)
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "name", "arguments"), OUTSIDE, ids=lambda v: v if isinstance(v, str) else "")
def test_it_steps_saves_and_loads_as_it_does_alone(ours, package, name, arguments):
    model, plain = network(), network()
    reference = made(package, name, arguments, plain)
    optimizer = ours.wrap(model, made(package, name, arguments, model))
    for network_, stepper in ((model, optimizer), (plain, reference)):
        if package == "schedulefree":
            stepper.train()
        steps(network_, stepper, 3, create_graph=name == "SophiaH")
        stepper.load_state_dict(copy.deepcopy(stepper.state_dict()))
        steps(network_, stepper, 3, create_graph=name == "SophiaH")
    assert same(model, plain)
    assert not same(model, network())
    assert same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])
    assert optimizer._learner.local_step == 6


@pytest.mark.parametrize("name", ["SAM", "Lookahead"])
def test_optimizers_around_optimizers(ours, name):
    package = pytest.importorskip("pytorch_optimizer")
    model, plain = network(), network()

    def around(network_):
        if name == "SAM":
            return package.SAM(network_.parameters(), base_optimizer=torch.optim.SGD, lr=0.1)
        return package.Lookahead(torch.optim.SGD(network_.parameters(), lr=0.1), k=2)

    optimizer, reference = ours.wrap(model, around(model)), around(plain)
    for network_, stepper in ((model, optimizer), (plain, reference)):
        for _ in range(4):
            stepper.zero_grad()
            loss_of(network_).backward()
            stepper.step(closure_of(network_, stepper, []))
    assert same(model, plain)
    assert optimizer._learner.local_step == 4


# ---------------------------------------------------------------------------------------------- train and eval


def schedule_free(model):
    return pytest.importorskip("schedulefree").SGDScheduleFree(model.parameters(), lr=0.1, momentum=0.5)


def test_modes_reach_the_inner_optimizer(ours):
    model, plain = network(), network()
    optimizer, reference = ours.wrap(model, schedule_free(model)), schedule_free(plain)
    with pytest.raises(Exception, match="train mode"):
        train(model, optimizer)
    assert optimizer._learner.local_step == 0
    for network_, stepper in ((model, optimizer), (plain, reference)):
        stepper.train()
        train(network_, stepper, 3)
        stepper.eval()
    assert same(model, plain)
    optimizer.train()
    assert not same(model, plain)


def test_modes_reach_each_of_several_that_has_them_and_are_nothing_to_others(ours):
    model = network()
    plain = OptimizerWrapper(torch.optim.SGD(model.parameters()))
    plain.train()
    plain.eval()
    kind = pytest.importorskip("schedulefree").SGDScheduleFree
    parts = [torch.optim.SGD([model.weight], lr=0.1), kind([model.bias], lr=0.1)]
    optimizer = ours.wrap(model, parts)
    optimizer.train()
    assert parts[1].param_groups[0]["train_mode"]
    train(model, optimizer)
    optimizer.eval()
    assert not parts[1].param_groups[0]["train_mode"]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_no_mode_moves_the_final_parameters(processes, mode):
    """Schedule-free optimizers move the parameters when they change their mode."""
    syncer = processes.syncer("preset=direct", "schedule.sync_interval_steps=0", learners=1, total_steps=3)
    model = holding(weight=torch.arange(6.0))
    with YetoOuterOptimizer(
        schedule_free(model), model, syncer=syncer.address, learner_id=0, run_id="modes", connect_timeout_s=WAIT_S
    ) as optimizer:
        optimizer.train()
        push_all(model, optimizer, 3)
        if mode == "train":
            optimizer.eval()
        optimizer.finish(WAIT_S)
        final = model.weight.clone()
        getattr(optimizer, mode)()
        assert torch.equal(model.weight, final)
    assert syncer.wait() == 0
