"""The learner budget over real sockets: what closes a cut-off process, what voids it, what the second process does.

Source: v4 §Budget; rulings §5.13, §6.9.
"""

import os
import signal
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from syncer.checkpoint.files import read_checkpoint
from tests.support import merge_oracle as oracle
from tests.support.numpy_replay import Replay, to_bf16
from tests.support.scripted_learner import Journal, ScriptedLearner, random_values
from tests.support.toy_model import flat, loss_of, toy
from tests.support.waiting import until
from yeto_torch import YetoOuterOptimizer
from yeto_torch.wire.constants import MAGIC, MergeMode, MessageType, WireDType
from yeto_torch.wire.messages import BudgetDone, FinalManifest, InitParams, PullReq
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

BUDGET = 20
WRITTEN = "learner-budget cutoff checkpoint written"
LAYOUT = Layout(
    (
        Fragment(MergeMode.AVG, (Tensor("embed", (5, 4)),)),
        Fragment(MergeMode.RDA, (Tensor("a", (3, 4)), Tensor("b", (7,)))),
        Fragment(MergeMode.ISO, (Tensor("c", (6, 4)),)),
    )
)
FAST = ("schedule.sync_interval_steps=0", "schedule.grace_ms=0", "merge.iso_backend=scalar", "checkpoint.every=0")


def cutoff(processes, *overrides, learners=2, total_steps=1000, budget=BUDGET, port=0):
    keys = (*FAST, *([f"budget.learner_steps={budget}"] if budget else []), *overrides)
    return processes.syncer(*keys, learners=learners, total_steps=total_steps, port=port)


def fleet(syncer, learners=2, journal=None, **changes):
    """All peers have joined, learner 0 has sent the starting values."""
    peers = [ScriptedLearner(syncer.address, i, LAYOUT, journal=journal, **changes) for i in range(learners)]
    peers[0].init(random_values(LAYOUT, seed=1))
    return peers


def report(peer, steps=BUDGET):
    peer.send(BudgetDone(steps))


def answer_all(peers, pulls, **counts):
    for peer, pull in zip(peers, pulls, strict=True):
        peer.answer(pull, random_values(LAYOUT, seed=pull.step + peer.learner_id)[pull.fragment], **counts)


def ended(syncer, peers):
    code = syncer.wait()
    for peer in peers:
        peer.close()
    return code


def test_the_first_report_cancels_whole_rounds_and_the_last_writes_an_unmarked_checkpoint(processes):
    syncer = cutoff(processes, "schedule.pipeline=2")
    peers = fleet(syncer)
    for step in (1, 2, 3):
        answer_all(peers, [peer.pull(step=step) for peer in peers])
    pulls = {step: [peer.pull(step=step) for peer in peers] for step in (4, 5)}
    peers[0].answer(pulls[4][0], random_values(LAYOUT, seed=4)[0])
    answer_all(peers, pulls[5])  # complete, but round 4 is not: both go
    report(peers[1])
    syncer.wait_for("cut-off at step 3")
    peers[1].answer(pulls[4][1], random_values(LAYOUT, seed=9)[0])
    syncer.wait_for("refused a push of learner 1, step 4, attempt 1: out of round")
    report(peers[0])
    assert ended(syncer, peers) == 0
    assert WRITTEN in syncer.text
    snapshot = read_checkpoint(syncer.checkpoint)
    assert (snapshot.step, [f.version for f in snapshot.fragments]) == (3, [1, 2, 3])
    assert not syncer.checkpoint.with_name("checkpoint.final").exists()
    assert [line["step"] for line in syncer.merges()] == [1, 2, 3]
    assert syncer.events("cutoff")[0] | {"time": 0} == {
        "event": "cutoff",
        "step": 3,
        "first": 1,
        "cancelled": [4, 5],
        "time": 0,
    }
    for peer in peers:
        assert max(m.step for m in peer.seen if isinstance(m, PullReq)) == 5, "nothing was pulled behind the report"
        assert not peer.has(FinalManifest)
        assert not peer.released
        assert peer.closed.peer_error is None, "they are to redial"


def frame(payload):
    return struct.pack("<IBQ", MAGIC, MessageType.BUDGET_DONE, len(payload)) + payload


def twice(peers, syncer):
    report(peers[0])
    syncer.wait_for("has used up its budget")  # two in one outbox would become one
    report(peers[0])


def a_new_generation(peers, syncer):
    report(peers[0])
    syncer.wait_for("has used up its budget")
    peers.append(ScriptedLearner(syncer.address, 0, LAYOUT))
    report(peers[-1])


@pytest.mark.parametrize(
    ("play", "words"),
    [
        (lambda peers, _: report(peers[1], BUDGET - 1), "learner 1 reported 19 local steps, the budget is 20"),
        (twice, "learner 0 reported its budget twice"),
        (a_new_generation, "learner 0 reported its budget twice"),
        (lambda peers, _: peers[1].raw(frame(struct.pack("<QB", BUDGET, 0))), "learner 1 .* malformed budget report"),
        (lambda peers, _: peers[1].raw(frame(struct.pack("<I", BUDGET))), "learner 1 .* malformed budget report"),
        (lambda peers, _: report(peers[0]), "no budget report within 1 s of the first one from learners 1"),
    ],
    ids=["wrong count", "twice", "twice, from a new generation", "trailing byte", "too short", "timeout"],
)
def test_what_voids_the_experiment(processes, play, words):
    syncer = cutoff(processes, *(["schedule.quorum_timeout_s=1"] if "within" in words else []))
    peers = fleet(syncer)
    for peer in peers:
        peer.next(PullReq, step=1)
    play(peers, syncer)
    assert ended(syncer, peers) == 1
    assert syncer.wait_for(f"the experiment is void: .*{words}")
    assert WRITTEN not in syncer.text
    assert not syncer.checkpoint.exists()
    assert [line["code"] for line in syncer.events("end")] == [1]
    told = [peer.closed.peer_error for peer in peers if peer.closed.peer_error]
    assert any("void" in text for text in told), "learners are told why, and not to redial"


def test_total_steps_before_a_report_void_it_too(processes):
    syncer = cutoff(processes, total_steps=2)
    peers = fleet(syncer)
    for step in (1, 2):
        answer_all(peers, [peer.pull(step=step) for peer in peers])
    assert ended(syncer, peers) == 1
    assert syncer.wait_for(
        "the experiment is void: all 2 outer steps were made before a learner used up its budget of 20"
    )
    assert not syncer.checkpoint.exists()


def svd_children(syncer):
    """Process ids of the pool's children."""
    pids = [
        int(pid) for task in Path(f"/proc/{syncer.pid}/task").glob("*/children") for pid in task.read_text().split()
    ]
    return [pid for pid in pids if b"syncer.svd.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the pool's children in /proc")
def test_a_cut_off_is_not_published_behind_a_pool_that_cannot_be_drained(processes):
    pool = ("merge.iso_backend=torch-svd", "svd.devices=[cpu]", "svd.drain_timeout_s=1")
    syncer = cutoff(processes, *pool, "schedule.pipeline=1", learners=1)
    (peer,) = fleet(syncer, learners=1)
    for step in (1, 2):
        answer_all([peer], [peer.pull(step=step)])
    (child,) = until(lambda: svd_children(syncer), "the pool has a child")
    os.kill(child, signal.SIGSTOP)
    answer_all([peer], [peer.pull(step=3)])  # iso: its matrix waits for the child
    report(peer)
    assert ended(syncer, [peer]) == 1
    assert syncer.events("cutoff")[0]["cancelled"] == [3]
    assert WRITTEN not in syncer.text
    assert not syncer.checkpoint.exists()
    assert not Path(f"/proc/{child}").exists(), "killed and reaped"


def test_without_a_budget_a_report_ends_that_connection_alone(processes):
    syncer = cutoff(processes, budget=None, total_steps=1)
    peers = fleet(syncer)
    peers[1].next(PullReq, step=1)
    report(peers[1])
    assert "runs no learner budget" in peers[1].wait_closed().peer_error
    again = ScriptedLearner(syncer.address, 1, LAYOUT)
    for peer in (peers[0], again):
        peer.serve(lambda _, pull: np.zeros(LAYOUT.fragments[pull.fragment].numel, np.float32))
    assert ended(syncer, [*peers, again]) == 0


def test_a_report_overtakes_the_starting_values_on_the_data_streams(processes):
    """Control and data travel on different sockets: no order between them is promised."""
    syncer = cutoff(processes, learners=1)
    peer = ScriptedLearner(syncer.address, 0, LAYOUT)
    report(peer)
    syncer.wait_for("cut-off at step 0")
    for fragment, values in enumerate(random_values(LAYOUT, seed=1)):
        peer.send(InitParams(fragment, values.tobytes()))
    assert ended(syncer, [peer]) == 0
    assert read_checkpoint(syncer.checkpoint).step == 0


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q4"])
def test_two_processes_on_one_endpoint_consolidate_what_scripted_learners_froze(processes, dtype):
    """Ordinary rounds with budget and totals for counters; a connection lost meanwhile costs an attempt, nothing else.

    A replay of both processes from the recorded bytes gives the final parameters.
    """
    first = cutoff(processes, "schedule.pipeline=3", "outer.lr=0.7", "outer.momentum=0.5")
    journal = Journal()
    peers = fleet(first, journal=journal, dtype=dtype)
    for step in range(1, 6):
        answer_all(peers, [peer.pull(step=step) for peer in peers])
    for peer in peers:
        peer.next(PullReq, step=8)  # the window is three rounds: round 5 is committed
        report(peer)
    assert ended(first, peers) == 0
    cut = read_checkpoint(first.checkpoint)
    assert cut.step == 5

    last, port = cut.step + 3, int(first.address.rpartition(":")[2])
    keys = ("checkpoint.resume=true", "checkpoint.mark_final=true", "schedule.quorum=2", "schedule.pipeline=3")
    second = cutoff(processes, *keys, "outer.lr=0.7", "outer.momentum=0.5", total_steps=last, budget=None, port=port)
    assert second.address == first.address
    journal.epoch += 1
    peers = [ScriptedLearner(second.address, i, LAYOUT, dtype=dtype, journal=journal) for i in range(2)]
    counts = [
        {"local_step": BUDGET, "c_steps": BUDGET, "c_tokens": 640},
        {"local_step": BUDGET, "c_steps": BUDGET, "c_tokens": 999},
    ]
    pulls = [[peer.pull(step=step) for step in (6, 7, 8)] for peer in peers]  # all fragments at once
    peers[0].answer(pulls[0][1], random_values(LAYOUT, seed=70)[0], **counts[0])
    again = ScriptedLearner(second.address, 0, LAYOUT, dtype=dtype, journal=journal)
    second.wait_for(f"generation {again.generation:016x}.* joined")
    peers[0].close()  # its answer to round 7 stays; rounds 6 and 8 expire
    peers[0] = again
    second.wait_for("round 6 attempt 1 expired")
    peers[1].answer(pulls[1][1], random_values(LAYOUT, seed=71)[0], **counts[1])
    for step in (6, 8):
        for peer, count in zip(peers, counts, strict=True):
            pull = peer.pull(step=step, attempt=2)
            peer.answer(pull, random_values(LAYOUT, seed=10 * step + peer.learner_id)[pull.fragment], **count)
    for peer in peers:
        manifest, values = peer.cut()
        peer.ack(manifest.step)
    assert ended(second, peers) == 0

    lines = second.merges()
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    for line in lines[cut.step :]:
        assert [(r["id"], r["c_steps"], r["c_tokens"]) for r in line["responders"]] == [(0, 20, 640), (1, 20, 999)]
        assert [r["base_version"] for r in line["responders"]] == [line["launch_base_version"]] * 2
    assert [line["attempt"] for line in lines[cut.step :]] == [2, 1, 2]
    assert second.checkpoint.with_name("checkpoint.final").read_text() == f"YETO_FINAL_V1\nglobal_step={last}\n"
    start = random_values(LAYOUT, seed=1)
    start = start if dtype == "f32" else [to_bf16(value) for value in start]
    replay = Replay(LAYOUT.wire, WireDType[dtype.upper()], start, lr=0.7, momentum=0.5, correction=True)
    for line in lines:
        replay.commit(line, journal.pushes)
    for expected, value in zip(replay.params, values, strict=True):
        np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-6)


class Budgeted(threading.Thread):
    """A real learner that makes ``BUDGET`` steps, reports them and serves until the final cut."""

    def __init__(self, address, learner_id, tokens, **config):
        super().__init__(name=f"budgeted learner {learner_id}", daemon=True)
        self.model, self.learner_id, self.tokens = toy(learner_id, width=4), learner_id, tokens
        self._address, self._config = address, config
        self.frozen, self.layout, self.error = None, None, None
        self.reconnects, self.still_running = 0, []
        self.start()

    def run(self):
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001  # handed on to the test's thread
            self.error = error

    def _train(self):
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        with YetoOuterOptimizer(
            inner,
            self.model,
            syncer=self._address,
            learner_id=self.learner_id,
            run_id="budget",
            streams=1,
            wire_dtype="f32",
            budget_steps=BUDGET,
            final_timeout_s=60.0,
            **self._config,
        ) as optimizer:
            for step in range(BUDGET):
                optimizer.zero_grad()
                loss_of(self.model, self.learner_id, step).backward()
                optimizer.step(tokens=self.tokens)
            optimizer.report_budget(BUDGET)
            self.layout = optimizer.layout
            self.frozen = flat(self.model, optimizer.layout)
            optimizer.finish()
            own = f"learner {self.learner_id}-"  # what its connections' threads are called
            self.still_running = [t.name for t in threading.enumerate() if t.name.startswith(own)]
            self.reconnects = optimizer.stats.reconnects

    def ended(self):
        self.join(60.0)
        assert not self.is_alive(), f"{self.name} is still at work"
        assert self.error is None, self.error
        return flat(self.model, self.layout)


@pytest.mark.parametrize(
    ("learners", "config"),
    [(2, {"average": ".*"}), (3, {"matrix_merge": "rda"}), (2, {"matrix_merge": "iso"})],
    ids=["avg", "rda", "iso"],
)
def test_real_learners_are_consolidated_from_what_they_froze(processes, learners, config):
    """Every fragment of the final model is one merge of (resumed global - frozen local), by tokens² / budget."""
    first = cutoff(processes, learners=learners)
    fleet = [Budgeted(first.address, i, tokens=10 * (i + 1), **config) for i in range(learners)]
    assert first.wait() == 0
    cut = read_checkpoint(first.checkpoint)
    last = cut.step + len(cut.fragments)
    keys = ("checkpoint.resume=true", "checkpoint.mark_final=true", f"schedule.quorum={learners}")
    port = int(first.address.rpartition(":")[2])
    second = cutoff(processes, *keys, learners=learners, total_steps=last, budget=None, port=port)
    finals = [learner.ended() for learner in fleet]
    assert second.wait() == 0

    lines = second.merges()[cut.step :]
    assert [line["step"] for line in lines] == list(range(cut.step + 1, last + 1))
    for line in lines:
        told = [(r["id"], r["c_steps"], r["c_tokens"], r["staleness"]) for r in line["responders"]]
        assert told == [(i, BUDGET, BUDGET * 10 * (i + 1), 0) for i in range(learners)]
    weights = [oracle.weight(BUDGET * 10 * (i + 1), BUDGET) for i in range(learners)]
    moved: list[float] = []  # one that was taken over at the very last step has not
    for fragment, (record, part) in enumerate(zip(cut.fragments, fleet[0].layout.wire.fragments, strict=True)):
        params, momentum = (np.frombuffer(data, "<f4") for data in (record.params, record.momentum))
        deltas = [params - learner.frozen[fragment] for learner in fleet]
        mode = MergeMode(part.mode).name.lower()
        merged = oracle.merge(mode, part.numels, part.dims, deltas, weights, momentum, correction=True)
        expected, _ = oracle.outer(params, momentum, merged.astype(np.float32), 0.7, 0.5)
        moved.append(float(np.abs(merged).max()))
        for final in finals:
            np.testing.assert_allclose(final[fragment], expected, rtol=1e-4, atol=1e-5)
    assert max(moved) > 1e-3, "the learners have moved"
    assert not [name for learner in fleet for name in learner.still_running], "a process may exit behind finish()"
    assert all(learner.reconnects == 1 for learner in fleet)
