"""What loops need that are not the user's own: tokens counted beside step(), a checkpoint loaded over the model, a
closure after the end.
"""

import pytest
import torch

from tests.support.joined_learner import (
    await_session,
    gradients,
    heard,
    model_of,
    pulled,
    started,
    vector,
    zero_gradients,
)
from yeto_torch import RefusedError, RunError

ANCHORS = [vector(1, 2, 3), vector(4, 5)]
ONES = [torch.ones(3), torch.ones(2)]


@pytest.fixture
def joined(syncer):
    """(model, optimizer, group) of a learner that has adopted ANCHORS at its local step 1; plain SGD, lr 0.1."""
    model = model_of(a=vector(0, 0, 0), b=vector(0, 0))
    optimizer, group = started(syncer, model, ANCHORS, fragments=2)
    with optimizer:
        yield model, optimizer, group


@pytest.fixture
def ended(joined):
    """(model, optimizer) of a learner that has installed the final cut, nines."""
    model, optimizer, group = joined
    group.cut(1, (1, 1), [vector(9, 9, 9), vector(9, 9)])
    await_session(optimizer, lambda s: s._cut.to_install)
    zero_gradients(model)
    optimizer.step()
    return model, optimizer


def answer(optimizer, group, step, **fields):
    """What the step that follows tells the syncer about fragment 0."""
    group.pull(0, step)
    pulled(optimizer, 0, step)
    optimizer.step(**fields)
    return group.push(step=step)


def test_tokens_counted_beside_step_add_up_until_a_step_is_made(joined):
    model, optimizer, group = joined
    gradients(model, ONES)
    optimizer.count_tokens(5)
    optimizer.count_tokens(torch.tensor(7))
    assert answer(optimizer, group, 1).c_tokens == 12
    assert answer(optimizer, group, 2).c_tokens == 13  # nothing counted: tokens_per_step, which is 1
    optimizer.count_tokens(0)
    assert answer(optimizer, group, 3).c_tokens == 13
    optimizer.count_tokens(4)
    assert answer(optimizer, group, 4, tokens=3).c_tokens == 20


def test_tokens_of_a_step_that_was_not_made_count_with_the_next_one(joined):
    _, optimizer, group = joined

    def fails():
        raise ArithmeticError

    optimizer.count_tokens(5)
    with pytest.raises(ArithmeticError):
        optimizer.step(fails, tokens=2)
    assert answer(optimizer, group, 1).c_tokens == 5


@pytest.mark.parametrize("tokens", [-1, 1.5])
def test_counted_tokens_are_whole_and_not_negative(joined, tokens):
    with pytest.raises((ValueError, TypeError)):
        joined[1].count_tokens(tokens)


def test_a_checkpoint_loaded_over_the_model_is_dropped_by_resync(joined):
    model, optimizer, group = joined
    gradients(model, ONES)
    optimizer.step()
    model.load_state_dict({"a": vector(-7, -8, -9), "b": vector(-7, -8)})
    optimizer.resync()
    assert torch.equal(model.a, ANCHORS[0])
    assert torch.equal(model.b, ANCHORS[1])
    push = answer(optimizer, group, 1, tokens=9)
    assert (push.c_steps, push.c_tokens) == (1, 9)  # of the step after resync alone
    assert torch.allclose(group.delta(push), torch.full((3,), -0.1))


def test_resync_after_the_final_cut_is_refused(ended):
    model, optimizer = ended
    with pytest.raises(RunError, match="resync"):
        optimizer.resync()
    assert torch.equal(model.a, vector(9, 9, 9))


def test_a_closure_still_runs_after_the_final_cut_and_moves_nothing(ended):
    model, optimizer = ended

    def closure():
        loss = model.a.sum()
        loss.backward()
        return loss

    with torch.no_grad(), pytest.warns(UserWarning, match="run has finished"):
        assert optimizer.step(closure).item() == 27
    assert torch.equal(model.a, vector(9, 9, 9))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError()], ids=lambda e: type(e).__name__)
def test_a_boundary_that_is_interrupted_is_made_up_for_at_the_next_step(joined, monkeypatch, error):
    """A cell of a notebook that is stopped and run again: no anchor counts that the parameters have never seen."""
    model, optimizer, group = joined
    adopt = optimizer._learner._exchange.adopt

    def fails_once(fragment, *arguments):
        if fragment == 1:
            monkeypatch.undo()
            raise error
        adopt(fragment, *arguments)

    monkeypatch.setattr(optimizer._learner._exchange, "adopt", fails_once)
    group.broadcast(0, 1, vector(7, 7, 7))
    group.broadcast(1, 2, vector(8, 8))
    heard(optimizer, a=(0, 1), b=(1, 2))
    gradients(model, ONES)
    with pytest.raises(type(error)):
        optimizer.step()
    assert torch.equal(model.a, vector(7, 7, 7))
    optimizer.step()
    assert torch.equal(model.b, vector(8, 8))
    group.pull(1, 3)
    pulled(optimizer, 1, 3)
    optimizer.step()
    push = group.push(step=3)
    assert (push.base_version, push.c_steps) == (2, 1)
    assert torch.allclose(group.delta(push), torch.full((2,), -0.1))


def test_after_a_refusal_close_leaves_the_inner_optimizer_alone(joined):
    model, optimizer, group = joined
    group.error("the run is ending")
    await_session(optimizer, lambda s: s.failure is not None)
    gradients(model, ONES)
    with pytest.raises(RefusedError, match="the run is ending"):
        optimizer.step()
    with pytest.raises(RefusedError, match="the run is ending"):
        optimizer.step()  # a loop that swallows it does not train on unnoticed
    optimizer.close()
    before = model.a.clone()
    optimizer.step()
    assert torch.allclose(model.a, before - 0.1)
    with pytest.raises(RefusedError, match="the run is ending"):
        optimizer.finish()
