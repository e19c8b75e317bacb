"""The world is the fleet: a real syncer and real learners end with the same bits.

Each learner waits between two steps until the broadcast of the last round and the pull of the next one are both there:
then real time can no longer decide anything, and what is left is the arithmetic and the order of the product.
"""

from __future__ import annotations

import threading

import pytest
import torch

from experiments.codecs import bulk_of
from experiments.configs import Fleet
from experiments.merging import layout_for
from experiments.tasks import loss_of, make_task
from experiments.training import inner_optimizer, lr_at
from experiments.world import Learner, World
from yeto_torch import YetoOuterOptimizer
from yeto_torch.fragments import bind, collect
from yeto_torch.learner.exchange import Exchange

WAIT_S = 120.0
ROUNDS, PEAK = 24, 4e-3
LEARNERS, FRAGMENTS = 2, 4


class RealLearner(threading.Thread):
    """Makes ``ROUNDS`` steps on its part of every global batch, none before the network has said all it can."""

    def __init__(self, address, number, task, **options):
        super().__init__(daemon=True)
        self.number, self.error = number, None
        self._address, self._task, self._options = address, task, options
        self.model = task.model()
        self.start()

    def run(self):
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001  # handed on to the test
            self.error = error

    def _train(self):
        inner = inner_optimizer(self.model)
        with YetoOuterOptimizer(
            inner, self.model, syncer=self._address, learner_id=self.number, fragments=FRAGMENTS,
            streams=1, connect_timeout_s=WAIT_S, final_timeout_s=WAIT_S, **self._options,
        ) as optimizer:  # fmt: skip
            stream, share = self._task.stream(), self._task.batch // LEARNERS
            for step in range(1, ROUNDS + 1):
                self._await_network(optimizer, step)
                parts = [stream.take(share) for _ in range(LEARNERS)]
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["lr"] = lr_at((step - 1) / ROUNDS, PEAK)
                loss_of(self.model, parts[self.number]).backward()
                optimizer.step(tokens=share * self._task.tokens)
            optimizer.finish()

    def _await_network(self, optimizer, step):
        link = optimizer._learner.link
        slots = link.session._slots
        last, due = (step - 2) % FRAGMENTS, (step - 1) % FRAGMENTS

        def all_said():
            pull = slots[due].pull
            return pull is not None and pull.step == step and (step == 1 or slots[last].queued is not None)

        with link.lock:
            assert link._attention.wait_for(all_said, WAIT_S), f"step {step}: {link.waiting_for()}"


def in_the_world(task, fleet):
    shapes = [(name, tuple(p.shape)) for name, p in task.model().named_parameters()]
    layout = layout_for(fleet, shapes, None)
    stream, share, made = task.stream(), task.batch // LEARNERS, [0]

    def train(model, inners):
        (inner,) = inners
        for group in inner.param_groups:
            group["lr"] = lr_at(made[0] // LEARNERS / ROUNDS, PEAK)
        loss = loss_of(model, stream.take(share))
        inner.zero_grad()
        loss.backward()
        inner.step()
        made[0] += 1
        return share * task.tokens

    def make(_number):
        model = task.model()
        return Learner(model, [inner_optimizer(model)], layout, fleet.wire, train)

    model = task.model()
    exchange = Exchange(layout, bind(layout, collect([inner_optimizer(model)], model)), bulk_of(fleet.wire), 0.0)
    world = World(fleet, layout, [exchange.values(f) for f in range(len(layout))], make)
    for _ in range(ROUNDS):
        world.tick()
    exchange.install([world.state.final_bytes(fragment) for fragment in range(len(layout))])
    return model.state_dict(), task.model().state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "merge", "options", "outer"),
    [
        ("f32", "rda", {}, {}),
        ("bf16", "rda", {}, {}),
        ("q4", "rda", {}, {}),
        ("f32", "iso-norm", {"matrix_merge": "iso"}, {}),
        ("bf16", "rda", {}, {"momentum": 0.9, "guard": "cap", "correction": "heloco-normalized"}),
    ],
)
def test_the_world_ends_with_the_bits_of_real_processes(processes, wire, merge, options, outer):
    task, fleet = make_task("char", 5), Fleet(LEARNERS, FRAGMENTS, FRAGMENTS, wire, merge, **outer)
    syncer = processes.syncer(
        "preset=lockstep",
        "merge.iso_backend=scalar",
        "merge.iso_scale=norm",
        f"merge.delta_correction={fleet.correction}",
        f"outer.momentum={fleet.momentum}",
        f"outer.guard={fleet.guard}",
        "checkpoint.path=null",
        "final.state_path=null",
        learners=LEARNERS,
        total_steps=ROUNDS,
    )
    learners = [
        RealLearner(syncer.address, number, task, wire_dtype=wire, run_id="lockstep", **options)
        for number in range(LEARNERS)
    ]
    expected, start = in_the_world(task, fleet)
    for learner in learners:
        learner.join(WAIT_S)
        assert learner.error is None, learner.error
        assert not learner.is_alive()
    assert syncer.wait() == 0
    lines = syncer.merges()
    assert [len(line["responders"]) for line in lines] == [LEARNERS] * ROUNDS
    assert (min(line["momentum"] for line in lines) < fleet.momentum) == (fleet.guard == "cap")
    for learner in learners:
        for name, value in learner.model.state_dict().items():
            assert torch.equal(value, expected[name]), f"learner {learner.number}, {name}"
            assert not torch.equal(value, start[name]), f"{name} was not trained"
