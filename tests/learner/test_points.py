"""What a schedule-free optimizer keeps beside the parameters moves with them when a broadcast is taken over."""

import pytest
import torch

from tests.support.joined_learner import gradients, heard, join, model_of, vector
from tests.support.scripted_syncer import ScriptedSyncer
from yeto_torch.learner.points import points_beside


def schedule_free(model):
    package = pytest.importorskip("schedulefree")
    inner = package.SGDScheduleFree(model.parameters(), lr=0.5, momentum=0.5)
    inner.train()
    return inner


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_z_makes_the_move_of_its_parameter(alpha):
    with ScriptedSyncer() as syncer:
        model, twin = model_of(w=vector(0.0, 0.0)), model_of(w=vector(0.0, 0.0))
        inner, alone = schedule_free(model), schedule_free(twin)
        optimizer = join(syncer, model, inner, merge_alpha=alpha)
        group = syncer.group(0)
        for version, values, step in ((0, vector(1.0, 2.0), 3.0), (1, vector(10.0, -20.0), -1.0)):
            group.broadcast(0, version, values)
            heard(optimizer, f0=(0, version))
            for network, stepper in ((model, optimizer), (twin, alone)):
                gradients(network, [vector(step, 2 * step)])
                stepper.step()
            kept = alpha if version else 0.0  # the first broadcast overwrites
            arrived = kept * twin.w + (1 - kept) * values
            moved = arrived - twin.w
            assert torch.allclose(model.w, arrived)
            assert torch.allclose(inner.state[model.w]["z"], alone.state[twin.w]["z"] + moved)
            with torch.no_grad():  # the twin goes on from there
                twin.w.copy_(model.w)
                alone.state[twin.w]["z"].copy_(inner.state[model.w]["z"])
        optimizer.close()


def test_after_nan_z_starts_anew_at_the_broadcast():
    with ScriptedSyncer() as syncer:
        model = model_of(w=vector(0.0, 0.0))
        inner = schedule_free(model)
        optimizer = join(syncer, model, inner)
        group = syncer.group(0)
        group.broadcast(0, 0, vector(1.0, 2.0))
        heard(optimizer, f0=(0, 0))
        gradients(model, [vector(float("nan"), 1.0)])
        optimizer.step()
        z = inner.state[model.w]["z"]
        assert (model.w[0].item(), z[0].item()) == (1.0, 1.0)
        assert z.isfinite().all()
        optimizer.close()


def test_directions_and_the_points_of_nobody_stay():
    model = model_of(w=vector(1.0))
    parameter = model.w
    momentum = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    momentum.state[parameter]["z"] = vector(1.0)  # of an optimizer without modes: not known to be a point
    free = schedule_free(model)
    assert points_beside([momentum, free], parameter) == []
    gradients(model, [vector(1.0)])
    free.step()
    assert points_beside([momentum, free], parameter) == [free.state[parameter]["z"]]
