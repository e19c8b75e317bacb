"""A free-running learner equals a replay of the learner's rules, written here once more in numpy, bit for bit.

Learning rate and alpha are powers of two, so that every product is exact and no compiler's choice (fused or not) can
change a bit.
"""

import numpy as np
import pytest
import torch

from tests.support.joined_learner import await_session, flat, gradients, heard, join, model_of, pulled
from tests.support.scripted_syncer import ScriptedSyncer
from yeto_torch.wire.messages import PushFragment

LR, ALPHA, STEPS = 0.125, 0.5, 60
SHAPES = {"embed.w": (5, 3), "layers.0.w": (6, 7), "layers.0.b": (7,), "layers.1.w": (4, 4), "gain": ()}


def rounded(values, dtype):
    """f32 -> what travels and is seen by the receiver."""
    if dtype == "f32":
        return values.astype(np.float32)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Replay:
    """One fragment of a learner, as the law describes it."""

    def __init__(self, start, dtype):
        self.theta, self.dtype = start.copy(), dtype
        self.anchor = self.version = None
        self.steps = self.tokens = 0

    def step(self, gradient, tokens):
        self.theta = (self.theta - np.float32(LR) * gradient).astype(np.float32)
        self.steps += 1
        self.tokens += tokens

    def adopt(self, version, values, overwrite=False):
        values = rounded(values, self.dtype)
        if self.anchor is None or overwrite:
            self.theta = values.copy()
        else:
            self.theta = (np.float32(ALPHA) * self.theta + np.float32(1 - ALPHA) * values).astype(np.float32)
        self.anchor, self.version = values, version
        self.steps = self.tokens = 0

    def answer(self):
        """What a PUSH must carry now, or None."""
        if self.anchor is None or self.steps < 1:
            return None
        return self.version, self.steps, self.tokens, rounded(self.theta - self.anchor, self.dtype)


class World:
    """The real learner and its replay, told the same things."""

    def __init__(self, syncer, dtype, seed):
        self.rng = np.random.default_rng(seed)
        self.syncer, self.dtype = syncer, dtype
        self.model = torch.nn.Module()
        for name, shape in SHAPES.items():
            *path, leaf = name.split(".")
            at = self.model
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, torch.nn.Module())
                at = getattr(at, part)
            at.register_parameter(leaf, torch.nn.Parameter(torch.from_numpy(self.noise(shape))))
        inner = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.optimizer = join(
            syncer, self.model, inner, fragments=3, wire_dtype=dtype, streams=2, merge_alpha=ALPHA, tokens_per_step=3
        )
        self.group = syncer.group(0)
        self.fragments = range(len(self.optimizer.layout))
        self.replays = [Replay(flat(self.optimizer, self.model, f).numpy(), dtype) for f in self.fragments]
        self.queued, self.pulls = {}, {}
        self.round = 0

    def noise(self, shape):
        return np.asarray(self.rng.standard_normal(shape), np.float32)

    def broadcast(self, fragment, set_back=False):
        self.round += 1
        version = self.round if not set_back else max(0, (self.replays[fragment].version or 0) - 1)
        values = self.noise(self.optimizer.layout.wire.numels[fragment])
        self.group.broadcast(fragment, version, torch.from_numpy(values))
        heard(self.optimizer, it=(fragment, version))
        self.queued[fragment] = (version, values, set_back or self.queued.get(fragment, (0, 0, False))[2])

    def pull(self, fragment):
        self.round += 1
        self.group.pull(fragment, self.round)
        pulled(self.optimizer, fragment, self.round)
        self.pulls[fragment] = self.round

    def reconnect(self):
        self.group.cut_off()
        await_session(self.optimizer, lambda s: s.generation is None)
        self.group = self.syncer.group(len(self.syncer.groups))
        self.queued, self.pulls = {}, {}
        for fragment in self.fragments:
            if self.replays[fragment].version is not None:
                self.broadcast(fragment, set_back=bool(self.rng.integers(2)))

    def step(self):
        by_name = {name: self.noise(p.shape) for name, p in self.model.named_parameters()}
        gradients(self.model, (torch.from_numpy(g) for g in by_name.values()))
        tokens = int(self.rng.integers(0, 9)) if self.rng.integers(2) else None
        self.optimizer.step(tokens=tokens)
        expected = {}
        for fragment, replay in enumerate(self.replays):
            tensors = self.optimizer.layout.fragments[fragment].tensors
            replay.step(np.concatenate([by_name[t.name].reshape(-1) for t in tensors]), 3 if tokens is None else tokens)
            if fragment in self.queued:
                replay.adopt(*self.queued.pop(fragment))
            answer = replay.answer()
            if fragment in self.pulls and answer is not None:
                expected[self.pulls.pop(fragment)] = (fragment, *answer)
        for number, (fragment, version, steps, count, delta) in expected.items():
            push = self.group.push(step=number)
            assert (push.fragment, push.base_version) == (fragment, version)
            assert (push.c_steps, push.c_tokens) == (steps, count)
            assert np.array_equal(self.group.delta(push).numpy().view(np.uint32), delta.view(np.uint32))
        for fragment, replay in enumerate(self.replays):
            mine = flat(self.optimizer, self.model, fragment).numpy()
            assert np.array_equal(mine.view(np.uint32), replay.theta.view(np.uint32))
        return len(expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_free_running_learner_equals_the_replay(monkeypatch, dtype, seed):
    monkeypatch.setattr("yeto_torch.learner.redial.FIRST_PAUSE_S", 0.01)
    answered = 0
    with ScriptedSyncer() as syncer:
        world = World(syncer, dtype, seed)
        for number in range(STEPS):
            for fragment in world.fragments:
                chance = world.rng.random()
                if chance < 0.25:
                    world.broadcast(fragment)
                if 0.2 < chance < 0.6:
                    world.pull(fragment)
            if number % 20 == 19:
                world.reconnect()
            answered += world.step()
        assert answered > STEPS // 4
        assert world.group.maybe(PushFragment, 0.0) is None
        world.optimizer.close()


def test_one_learner_with_a_direct_outer_step_is_the_plain_optimizer():
    """Pull, steps of zero gradient until its merge comes back, then go on: nothing may be lost or counted twice."""
    torch.manual_seed(3)
    start = torch.randn(7)
    model, plain = model_of(x=start), model_of(x=start)
    reference = torch.optim.SGD(plain.parameters(), lr=LR)
    with ScriptedSyncer() as syncer:
        optimizer = join(syncer, model, torch.optim.SGD(model.parameters(), lr=LR))
        group = syncer.group(0)
        state = start.clone()
        group.broadcast(0, 0, state)
        heard(optimizer, x=(0, 0))
        gradients(model, [torch.zeros(7)])
        optimizer.step()
        for number in range(1, 11):
            group.pull(0, number)
            pulled(optimizer, 0, number)
            gradient = torch.randn(7)
            for one, its in ((model, optimizer), (plain, reference)):
                gradients(one, [gradient])
                its.step()
            state += group.delta(group.push(step=number))  # lr 1, momentum 0: the global is anchor + delta
            group.broadcast(0, number, state)
            heard(optimizer, x=(0, number))
            gradients(model, [torch.zeros(7)])
            optimizer.step()
            assert torch.allclose(model.x, plain.x, rtol=0, atol=1e-6)
        optimizer.close()
