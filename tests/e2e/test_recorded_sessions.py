"""Every broadcast of a recorded session is what the tape and the pushes say it must be.

Scripted learners push random deltas, fresh and stale, through a real syncer; a replay in numpy computes every state
anew. The layout holds all three merge modes and is made to hurt: 22 tensors in one fragment, sizes that end within a
block of q4 and, in one session, a fragment larger than a chunk.

Source: v4 §Merging, v4 §Outer step, v4 §Q4; rulings §4.
"""

import numpy as np
import pytest

from tests.support.numpy_replay import Replay, decode, to_bf16
from tests.support.scripted_learner import Journal, ScriptedLearner, random_values
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

SMALL, LARGE = 230, 2300  # rows of the embedding; LARGE makes it 4.7 MB of f32: two chunks


def layout_of(rows):
    layers = tuple(Tensor(f"layer.{i}", (37, i + 1)) for i in range(21))
    return Layout(
        (
            Fragment(MergeMode.AVG, (Tensor("embed", (rows, 513)),)),
            Fragment(MergeMode.RDA, (*layers, Tensor("scale", ()))),
            Fragment(MergeMode.ISO, (Tensor("wide", (12, 40)), Tensor("tall", (33, 8)), Tensor("one", (1, 1)))),
        )
    )


TOLERANCE = {MergeMode.AVG: 3e-6, MergeMode.RDA: 3e-6, MergeMode.ISO: 2e-5}


class Script:
    """Three learners that answer in turn, some late, some on an old anchor, one with nothing to say for itself."""

    def __init__(self, syncer, layout, dtype, streams):
        self.journal, self.layout = Journal(), layout
        self.generator = np.random.default_rng(5)
        self.peers = [
            ScriptedLearner(syncer.address, i, layout, dtype=dtype, streams=streams, journal=self.journal)
            for i in range(3)
        ]
        self.initial = random_values(layout, 1)
        self.peers[0].init(self.initial)

    def delta(self, fragment, learner_id):
        """Partly common, partly the learner's own, sometimes against all that came before."""
        numel = self.layout.fragments[fragment].numel
        own = self.generator.standard_normal(numel)
        scale = 0.02 * (learner_id + 1) * self.generator.choice([1.0, 1.0, -0.5])
        return (scale * (0.3 + own)).astype(np.float32)

    def round(self, step):
        """Everybody answers round ``step``, but for the one whose turn it is to miss it."""
        absent = step % 4  # 3: nobody
        for peer in self.peers:
            pull = peer.pull(step=step)
            if peer.learner_id == absent:
                continue
            anchor = peer.anchors[pull.fragment].version
            stale = peer.learner_id == 1 and step > 6 and step % 2 == 0
            peer.answer(
                pull,
                self.delta(pull.fragment, peer.learner_id),
                base=anchor - 3 if stale and anchor >= 3 else anchor,
                c_steps=int(self.generator.integers(1, 30)),
                c_tokens=0 if peer.learner_id == 2 and step % 5 == 0 else int(self.generator.integers(1, 2000)),
            )

    def finish(self, step):
        cuts = [peer.cut() for peer in self.peers]
        for peer in self.peers:
            peer.ack(step)
        return cuts


@pytest.mark.parametrize(
    ("dtype", "streams", "correction", "lr", "momentum", "rows", "steps"),
    [
        (WireDType.F32, 0, "none", 1.0, 0.0, SMALL, 20),
        (WireDType.F32, 3, "heloco", 0.7, 0.9, LARGE, 10),
        (WireDType.BF16, 1, "heloco", 0.7, 0.5, SMALL, 20),
        (WireDType.Q4, 3, "heloco", 0.7, 0.5, SMALL, 20),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, WireDType) else str(value),
)
def test_every_broadcast_equals_the_replay(processes, dtype, streams, correction, lr, momentum, rows, steps):
    layout = layout_of(rows)
    syncer = processes.syncer(
        "merge.iso_backend=scalar",
        f"merge.delta_correction={correction}",
        f"outer.lr={lr}",
        f"outer.momentum={momentum}",
        "schedule.quorum=2",
        "schedule.sync_interval_steps=0",
        "schedule.grace_ms=40",
        "schedule.pipeline=2",
        "checkpoint.every=0",
        learners=3,
        total_steps=steps,
    )
    script = Script(syncer, layout, dtype.name, streams)
    for step in range(1, steps + 1):
        script.round(step)
    cuts = script.finish(steps)
    assert syncer.wait() == 0
    script.journal.check()

    lines = syncer.merges()
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert sum(len(line["missed_grace"]) for line in lines) >= steps // 2
    assert max(told["staleness"] for line in lines for told in line["responders"]) == 3
    assert any(told["weight"] == 0 for line in lines for told in line["responders"])

    initial = script.initial if dtype is WireDType.F32 else [to_bf16(values) for values in script.initial]
    replay = Replay(layout.wire, dtype, initial, lr=lr, momentum=momentum, correction=correction == "heloco")
    for fragment, values in enumerate(initial):
        first = decode(script.journal.broadcasts[0, fragment, 0], len(values), dtype.bulk)
        assert first.tobytes() == values.tobytes()
    for line in lines:
        replay.commit(line, script.journal.pushes)
        fragment = line["fragment"]
        if line["step"] < steps:  # the last one needs no broadcast
            sent = script.journal.broadcasts[0, fragment, line["step"]]
            assert replay.distance(fragment, sent) <= TOLERANCE[layout.fragments[fragment].mode], line
    for manifest, finals in cuts:
        assert manifest.step == steps
        assert list(manifest.versions) == replay.versions
        for fragment, values in enumerate(finals):
            want = replay.params[fragment]
            error = np.abs(values.astype(np.float64) - want).max() / np.abs(want).max()
            assert error <= TOLERANCE[layout.fragments[fragment].mode], fragment
