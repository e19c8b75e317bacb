"""Outer settings that over-drive the fleet: on the tape, said once, and held by ``outer.guard=cap``, restarts or not.

Source: the key ``outer.guard``.
"""

import re
import signal

import numpy as np
import pytest

from syncer.config.policy import DRIVE_LIMIT
from syncer.core.drive import MERGES
from tests.support.saved_parameters import saved
from tests.support.scripted_learner import ScriptedLearner, random_values
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.messages import BcastFragment
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

LAYOUT = Layout((Fragment(MergeMode.AVG, (Tensor("a", (40,)),)), Fragment(MergeMode.RDA, (Tensor("b", (6, 7)),))))
KEYS = ("schedule.sync_interval_steps=0", "schedule.pipeline=1", "schedule.grace_ms=0", "merge.delta_correction=none")
LR, MU = 0.7, 0.9
HARD = (f"outer.lr={LR}", f"outer.momentum={MU}")
ROUNDS = 2 * (MERGES + 4)
WARNING = "the outer step over-drives fragment"


def steady(peers, first, last, noise=0.0):
    """Every learner goes the same way in every round, but for some noise of its own."""
    for step in range(first, last + 1):
        for peer in peers:
            pull = peer.pull(step=step)
            same = random_values(LAYOUT, 7, 0.1)[pull.fragment]
            own = random_values(LAYOUT, 10 * step + peer.learner_id, 0.1)[pull.fragment]
            peer.answer(pull, same + np.float32(noise) * own)


def run(processes, *keys, noise=0.0):
    """A whole run of two learners: the syncer that has ended, and its final values."""
    syncer = processes.syncer(*KEYS, *keys, learners=2, total_steps=ROUNDS)
    peers = [ScriptedLearner(syncer.address, i, LAYOUT) for i in range(2)]
    peers[0].init(random_values(LAYOUT, 1))
    steady(peers, 1, ROUNDS, noise)
    finals = peers[0].cut()[1]
    peers[1].cut()
    for peer in peers:
        peer.ack(ROUNDS)
    assert syncer.wait() == 0
    return syncer, finals


def test_it_is_on_the_tape_and_said_once_with_the_cure(processes):
    syncer, _ = run(processes, *HARD)
    told = [line for line in syncer.lines if WARNING in line]
    assert len(told) == 1
    cure = re.search(r"lower outer\.momentum from 0\.9 to about (0\.\d\d), or set outer\.guard=cap", told[0])
    assert cure
    assert float(cure[1]) < MU
    for fragment in range(2):
        lines = syncer.merges()[fragment::2]
        momentum = 0.0
        for number, line in enumerate(lines):
            assert line["gain"] == pytest.approx(LR * (1 + MU + MU**2 * momentum), rel=1e-4)
            assert line["agreement"] == pytest.approx(1.0)
            assert line["lag_cosine"] == (None if number == 0 else pytest.approx(1.0))
            assert line["momentum"] == MU
            momentum = MU * momentum + 1
            assert line["drive"] == pytest.approx(line["gain"], rel=1e-4), "who agree are merged to their mean"
        assert lines[-1]["drive"] > 2 * DRIVE_LIMIT


def test_settings_that_do_not_over_drive_are_let_be(processes):
    syncer, _ = run(processes, "outer.lr=1", "outer.momentum=0", noise=1.0)
    assert WARNING not in syncer.text
    lines = syncer.merges()
    assert all(line["drive"] == pytest.approx(1.0) and line["agreement"] < 0.95 for line in lines)
    assert all(line["gain"] == pytest.approx(1.0) for line in lines[::2])
    assert all(line["gain"] > 1.05 for line in lines[1::2]), "rda's mean is longer than the mean"


def test_the_guard_holds_the_gain_and_a_restarted_run_caps_as_an_unbroken_one(processes, tmp_path):
    def keys(name):
        return (
            *HARD,
            "outer.guard=cap",
            "checkpoint.every=1",
            "checkpoint.resume=auto",
            f"checkpoint.path={tmp_path / name}",
        )

    syncer, finals = run(processes, *keys("one"), noise=0.5)
    assert WARNING not in syncer.text
    lines = syncer.merges()
    assert max(line["drive"] for line in lines) <= DRIVE_LIMIT + 1e-6
    assert all(0 < line["momentum"] <= MU for line in lines)
    assert min(line["momentum"] for line in lines[-4:]) < 0.6

    broken = processes.syncer(*KEYS, *keys("two"), f"tape.path={tmp_path / 'tape'}", learners=2, total_steps=ROUNDS)
    peers = [ScriptedLearner(broken.address, i, LAYOUT) for i in range(2)]
    peers[0].init(random_values(LAYOUT, 1))
    middle = ROUNDS // 2 + 1
    steady(peers, 1, middle, 0.5)
    peers[0].next(BcastFragment, version=middle)
    broken.signal(signal.SIGKILL)
    broken.wait()
    again = processes.syncer(*KEYS, *keys("two"), f"tape.path={tmp_path / 'tape'}", learners=2, total_steps=ROUNDS)
    peers = [ScriptedLearner(again.address, i, LAYOUT) for i in range(2)]
    steady(peers, middle + 1, ROUNDS, 0.5)
    for peer in peers:
        assert [part.tobytes() for part in peer.cut()[1]] == [part.tobytes() for part in finals]
        peer.ack(ROUNDS)
    assert again.wait() == 0
    assert all(np.array_equal(a, b) for a, b in zip(saved(tmp_path / "two"), saved(tmp_path / "one"), strict=True))
