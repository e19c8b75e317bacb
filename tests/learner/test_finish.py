"""How a run ends for a learner: the final cut, its acknowledgement, SHUTDOWN; the learner budget."""

import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from tests.support.joined_learner import (
    await_session,
    gradients,
    join,
    model_of,
    pulled,
    started,
    vector,
    zero_gradients,
)
from tests.support.scripted_syncer import WAIT_S
from yeto_torch import RefusedError, RunError
from yeto_torch.wire.messages import BudgetDone, FinalAck, FinalManifest, InitParams

pytestmark = pytest.mark.usefixtures("quick_redial")

TWO = {"a": vector(1, 2, 3), "b": vector(4, 5)}
FINAL = [vector(0.1, 0.2, 0.3), vector(1 / 3, 1e-8)]


def trained(syncer, model, **arguments):
    return started(syncer, model, [vector(0, 0, 0), vector(0, 0)], fragments=2, **arguments)


def in_background(call, *arguments):
    """Run ``call`` on a thread that plays the training thread; join() returns what it raised, or None."""
    raised = []

    def run():
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - handed to the test
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait():
        thread.join(WAIT_S)
        assert not thread.is_alive()
        return raised[0] if raised else None

    return wait


def holds(model, values):
    return torch.equal(model.a, values[0]) and torch.equal(model.b, values[1])


@pytest.mark.parametrize("wire_dtype", ["f32", "bf16", "q4"])
def test_finish_serves_then_installs_the_exact_f32_cut(syncer, wire_dtype):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model, wire_dtype=wire_dtype, streams=1, merge_alpha=0.5)
    ended = in_background(optimizer.finish)
    group.pull(0, 1)
    push = group.push(fragment=0)
    assert (push.c_steps, push.c_tokens, push.base_version) == (1, 0, 0)
    assert not bool(group.delta(push).any())
    group.broadcast(0, 1, vector(9, 9, 9))  # a BCAST of the cut's version neither completes nor contradicts it
    assert not optimizer.finished
    group.cut(2, (1, 2), FINAL)
    assert group.next(FinalAck).step == 2
    group.shutdown()
    assert ended() is None
    assert optimizer.finished
    assert holds(model, FINAL)
    assert optimizer.stats.global_step == 2
    assert optimizer.stats.versions == (1, 2)
    assert group.maybe(FinalAck, 0.0) is None
    optimizer.finish()  # at once, and again
    optimizer.close()


def test_the_training_loop_installs_it_too_and_steps_afterwards_change_nothing(syncer):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    group.cut(2, (1, 2), FINAL)
    await_session(optimizer, lambda s: s.attention)
    gradients(model, [vector(1, 1, 1), vector(1, 1)])
    optimizer.step()
    assert holds(model, FINAL)
    group.next(FinalAck)
    await_session(optimizer, lambda s: s.finished)
    with pytest.warns(UserWarning, match="finished"):
        assert optimizer.step() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # warned once
    assert holds(model, FINAL)
    group.shutdown()
    optimizer.finish(timeout=WAIT_S)
    optimizer.close()


def test_a_lower_precision_parameter_gets_the_cut_rounded_to_its_own_dtype(syncer):
    model = model_of(a=vector(1, 2, 3).bfloat16(), b=vector(4, 5).bfloat16())
    optimizer, group = trained(syncer, model)
    ended = in_background(optimizer.finish)
    group.cut(2, (1, 2), FINAL)
    group.next(FinalAck)
    group.shutdown()
    assert ended() is None
    assert holds(model, [v.bfloat16() for v in FINAL])


def test_a_connection_lost_before_shutdown_is_dialled_again_and_acknowledged_again(syncer):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    ended = in_background(optimizer.finish)
    group.cut(2, (1, 2), FINAL)
    group.next(FinalAck)
    group.cut_off()
    again = syncer.group(1)
    again.broadcast_all(2, [vector(7, 7, 7), vector(7, 7)])  # a new generation gets present state first
    assert again.maybe(FinalAck, 0.3) is None  # not before the cut has come on this generation too
    again.cut(2, (1, 2), FINAL)
    assert again.next(FinalAck).step == 2
    again.shutdown()
    assert ended() is None
    assert holds(model, FINAL)


def test_a_cut_lost_half_way_is_installed_from_the_next_connection_only(syncer):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    ended = in_background(optimizer.finish)
    group.cut(2, (1, 2), [vector(5, 5, 5)])  # the manifest and one of two fragments
    await_session(optimizer, lambda s: s._cut.missing() == [1] and s._cut.manifest is not None)
    group.cut_off()
    again = syncer.group(1)
    again.cut(4, (3, 4), FINAL)
    assert again.next(FinalAck).step == 4
    again.shutdown()
    assert ended() is None
    assert holds(model, FINAL)


def test_who_leaves_with_the_cut_at_hand_takes_it_first(syncer):
    """The loop was over before the cut came, and nobody calls finish()."""
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    group.cut(2, (1, 2), FINAL)
    await_session(optimizer, lambda session: session._cut.is_whole)
    left = in_background(optimizer.close)
    group.next(FinalAck)
    group.shutdown()
    assert left() is None
    assert optimizer.finished
    assert holds(model, FINAL)


def test_a_cut_that_never_gets_whole_holds_nobody_for_long(syncer, caplog, monkeypatch):
    monkeypatch.setattr("yeto_torch.learner.learner.RELEASE_S", 0.2)
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    assert group.group.send(FinalManifest(2, (1, 2)))
    await_session(optimizer, lambda session: session._cut.manifest is not None)
    optimizer.close()
    group.wait_closed()
    assert "leaving without the final cut: the final values of fragments 0, 1 at step 2" in caplog.text
    assert not optimizer.finished


def test_no_cut_in_time_is_an_error_that_says_what_was_missing(syncer):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    begun = time.monotonic()
    with pytest.raises(RunError, match=r"within 0\.2 s: still waiting for the final cut"):
        optimizer.finish(timeout=0.2)
    assert time.monotonic() - begun < 5
    group.cut(2, (1, 2), [vector(5, 5, 5)])
    await_session(optimizer, lambda s: s._cut.missing() == [1] and s._cut.manifest is not None)
    with pytest.raises(RunError, match="the final values of fragment 1 at step 2"):
        optimizer.finish(timeout=0.2)
    optimizer.close()
    with pytest.raises(RunError, match="closed before"):
        optimizer.finish()


def test_without_shutdown_it_warns_and_returns(syncer, caplog, monkeypatch):
    monkeypatch.setattr("yeto_torch.learner.link.RELEASE_S", 0.2)
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    ended = in_background(optimizer.finish)
    group.cut(2, (1, 2), FINAL)
    group.next(FinalAck)
    assert ended() is None
    assert "no SHUTDOWN" in caplog.text
    assert optimizer.finished
    assert group.wait_closed()


def test_a_refusal_behind_the_acknowledgement_is_a_warning(syncer, caplog):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    ended = in_background(optimizer.finish)
    group.cut(2, (1, 2), FINAL)
    group.next(FinalAck)
    await_session(optimizer, lambda s: s.finished)
    group.cut_off()
    syncer.group(1).error("the run is ending")
    assert ended() is None
    optimizer._learner.link._thread.join(WAIT_S)
    assert "the run is ending" in caplog.text


def test_a_refusal_before_the_cut_raises_out_of_finish(syncer):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    ended = in_background(optimizer.finish)
    group.error("learner 1 is gone for good")
    assert isinstance(ended(), RefusedError)
    optimizer.close()


ENDS = """
import sys, torch
from yeto_torch import YetoOuterOptimizer
model = torch.nn.Linear(1, 1, bias=False)
optimizer = YetoOuterOptimizer(
    torch.optim.SGD(model.parameters()), model, syncer=sys.argv[1], learner_id=0, run_id="r", streams=1
)
while not optimizer.finished:
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
print(model.weight.item(), flush=True)
"""


def test_a_loop_that_simply_ends_does_not_strand_the_fleet(syncer, root):
    """The process has nothing left to do, yet it waits for SHUTDOWN, through a lost connection too."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ENDS, syncer.address],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            group = syncer.group(0, 120.0)
            group.next(InitParams)
            group.broadcast(0, 0, vector(0.0))
            group.cut(1, (1,), [vector(0.25)])
            group.next(FinalAck)
            assert child.stdout.readline() == "0.25\n"
            group.cut_off()
            again = syncer.group(1)
            again.cut(1, (1,), [vector(0.25)])
            again.next(FinalAck)
            assert child.poll() is None
            again.shutdown()
            assert child.wait(WAIT_S) == 0
        finally:
            child.kill()


ENDS_EARLY = (
    ENDS.partition("while not")[0]
    + """
print("joined", flush=True)
session = optimizer._learner.link.session
assert optimizer._learner.link.wait(lambda: session._cut.is_whole, 60)
print("over", flush=True)
"""
)


def test_a_script_that_ends_with_the_cut_at_hand_takes_it_first(syncer, root):
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ENDS_EARLY, syncer.address], cwd=root, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            group = syncer.group(0, 120.0)
            group.broadcast(0, 0, vector(0.0))
            assert child.stdout.readline() == "joined\n"
            group.cut(1, (1,), [vector(0.25)])
            assert child.stdout.readline() == "over\n"
            group.next(FinalAck)
            group.shutdown()
            assert child.wait(WAIT_S) == 0
        finally:
            child.kill()


# ---------------------------------------------------------------------------------------------- the learner budget


def test_the_budget_is_reported_once_and_then_frozen_parameters_are_consolidated(syncer):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model, budget_steps=4, merge_alpha=0.5)
    for _ in range(3):
        gradients(model, [vector(1, 1, 1), vector(1, 1)])
        optimizer.step(tokens=10)
    frozen = [model.a.detach().clone(), model.b.detach().clone()]
    with pytest.raises(ValueError, match="budget_steps is 4"):
        optimizer.report_budget(3)
    assert group.maybe(BudgetDone, 0.0) is None
    optimizer.report_budget(4)
    assert group.next(BudgetDone).steps == 4
    with pytest.raises(RunError, match="already"):
        optimizer.report_budget(4)
    with pytest.raises(RunError, match="frozen"):
        optimizer.step()
    group.broadcast(0, 8, vector(50, 50, 50))
    group.pull(1, 9)
    ended = in_background(optimizer.finish)
    group.push(step=9)
    group.cut_off()

    resumed = syncer.group(1)
    resumed.broadcast(0, 2, vector(1, 1, 1))  # lower than what the cutoff process had broadcast
    resumed.broadcast(1, 3, vector(2, 2))
    resumed.pull(0, 4)
    resumed.pull(1, 5)
    for fragment, (step, base) in enumerate([(4, 2), (5, 3)]):
        push = resumed.push(step=step)
        assert (push.base_version, push.local_step, push.c_steps, push.c_tokens) == (base, 4, 4, 31)
        assert torch.equal(resumed.delta(push), frozen[fragment] - (1.0 + fragment))
    assert holds(model, frozen)
    assert resumed.maybe(BudgetDone, 0.0) is None
    resumed.cut(5, (4, 5), FINAL)
    resumed.next(FinalAck)
    resumed.shutdown()
    assert ended() is None
    assert holds(model, FINAL)


@pytest.mark.parametrize("steps", [0, 2, -1])
def test_a_wrong_budget_raises_before_anything_is_sent(syncer, steps):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    with pytest.raises(ValueError, match="1 local steps were made"):
        optimizer.report_budget(steps)
    zero_gradients(model)
    optimizer.step()  # nothing is frozen
    assert group.maybe(BudgetDone, 0.1) is None
    optimizer.close()


def test_a_report_waits_for_a_connection(syncer):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    group.cut_off()
    await_session(optimizer, lambda s: s.generation is None)
    optimizer.report_budget(1)
    assert syncer.group(1).next(BudgetDone).steps == 1
    optimizer.close()


# ---------------------------------------------------------------------------------------------- the layout file


def test_learner_0_writes_the_layout_into_the_run_folder(syncer, tmp_path, monkeypatch):
    monkeypatch.setenv("YETO_RUN_DIR", str(tmp_path))
    for learner in (1, 0):
        optimizer = join(syncer, model_of(**TWO), learner_id=learner)
        optimizer.close()
        assert [file.name for file in tmp_path.iterdir()] == ([] if learner else ["layout.json"])
    assert type(optimizer.layout).load(tmp_path / "layout.json") == optimizer.layout
    monkeypatch.setenv("YETO_RUN_DIR", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="YETO_RUN_DIR"):
        join(syncer, model_of(**TWO), learner_id=0)


def test_an_answer_with_steps_inside_finish_is_the_usual_one(syncer):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    gradients(model, [vector(1, 1, 1), vector(1, 1)])
    optimizer.step(tokens=6)
    ended = in_background(optimizer.finish)
    group.pull(1, 2)
    push = group.push(fragment=1)
    assert (push.c_steps, push.c_tokens) == (1, 6)
    assert group.delta(push).tolist() == pytest.approx([-0.1, -0.1])
    optimizer.close()
    assert "closed before the final cut" in str(ended())


def test_a_pull_that_came_during_training_is_answered_with_zeros_once_the_data_has_ended(syncer):
    model = model_of(**TWO)
    optimizer, group = trained(syncer, model)
    group.pull(0, 1)
    pulled(optimizer, 0, 1)
    ended = in_background(optimizer.finish)
    assert group.push(step=1).c_tokens == 0
    group.cut(2, (1, 2), FINAL)
    group.next(FinalAck)
    group.shutdown()
    assert ended() is None
