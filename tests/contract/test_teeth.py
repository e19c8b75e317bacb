"""No check of the probe is toothless: each of them fails for an optimizer that is wrong in a way it is about."""

import warnings

import pytest
import torch

from tests.contract.loop import push_all
from tests.contract.probe import ask
from tests.contract.registry import CHECKS
from tests.contract.subjects import Subject
from yeto_torch.wrapper import OptimizerWrapper


class StepsTwice(OptimizerWrapper):
    def _step(self, closure=None, **arguments):
        super()._step(closure, **arguments)
        return super()._step(closure, **arguments)


class Deaf(OptimizerWrapper):
    """It does nothing of what it is told between steps."""

    def zero_grad(self, set_to_none=True):
        pass

    def load_state_dict(self, state_dict):
        pass

    def add_param_group(self, param_group):
        pass


class Talks(OptimizerWrapper):
    def _step(self, closure=None, **arguments):
        warnings.warn("a step is made", stacklevel=1)
        return super()._step(closure, **arguments)


class Bare(torch.optim.Optimizer):
    """As a first draft has it: no hooks, no defaults, groups that are looked up once, a state of its own."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):
        self.inner.step(closure)

    def state_dict(self):
        return {**self.inner.state_dict(), "rounds": 0}

    def load_state_dict(self, state_dict):
        assert state_dict["rounds"] == 0
        self.inner.load_state_dict(state_dict)


class Stranger:
    """No optimizer by its class."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Wrong(Subject):
    """The optimizer of ``kind``; a new process loads nothing."""

    def __init__(self, kind):
        super().__init__()
        self._kind = kind

    def wrap(self, model, inner):
        del model
        return self._kind(inner)

    def load_and_step(self, model, saved):
        del model
        result = saved.with_suffix(".out")
        torch.save(torch.nn.Linear(4, 3).state_dict(), result)
        return result


class Nudges(Subject):
    """It touches every parameter of the model, and makes a step at once."""

    def wrap(self, model, inner):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        push_all(model, inner)
        return inner


WRONG = [*(Wrong(kind) for kind in (StepsTwice, Deaf, Talks, Bare, Stranger)), Nudges()]


@pytest.mark.filterwarnings("ignore:a step is made")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.sentence)
def test_some_wrong_optimizer_fails(check):
    told = next((wrong for subject in WRONG if (wrong := ask(subject, check)) is not None), None)
    assert told is not None
    assert "\n" not in told
    assert ask(Wrong(OptimizerWrapper), check) is None or "new process" in check.sentence
