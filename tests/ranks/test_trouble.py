"""What ends one rank ends all, with one sentence: nobody hangs, and the syncer is told by a closed connection.

The syncer is scripted, the ranks are processes; each must end within the process group's timeout and a little more.
"""

import signal

import pytest
import torch

from tests.ranks.support import raised, start_island
from tests.support.scripted_syncer import ScriptedSyncer
from yeto_torch.wire.messages import BudgetDone, FinalAck, PushFragment

SHORT_S = 4.0  # a process group's timeout that a test outwaits


@pytest.fixture
def syncer():
    with ScriptedSyncer() as syncer:
        yield syncer


def values(group, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for numel in group.hello.layout.numels]


def started(processes, syncer, **options):
    """The ranks of a learner in training, and its connection."""
    ranks = start_island(processes, syncer.address, **{"wrap": "plain", **options})
    group = syncer.group(0)
    group.broadcast_all(1, values(group))
    for rank in ranks:
        rank.wait_for("^joined")
    return ranks, group


def finished(ranks, group, step):
    """The run ends; what each rank said last."""
    group.cut(step, (step,) * 3, values(group, step))
    assert group.next(FinalAck).step == step
    group.shutdown()
    assert [rank.wait() for rank in ranks] == [0, 0], "".join(rank.told() for rank in ranks)
    return [rank.wait_for(rf"^finished at {step} after .*")[0] for rank in ranks]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_an_error_of_the_syncer_reaches_every_rank(processes, syncer, wrap):
    ranks, group = started(processes, syncer, wrap=wrap)
    group.error("the run is over")
    assert raised(ranks) == ["RefusedError: the syncer ended the session: the run is over"] * 2


def test_a_violation_reaches_every_rank(processes, syncer):
    ranks, group = started(processes, syncer)
    group.broadcast(0, 1, torch.zeros(group.hello.layout.numels[0]))
    errors = raised(ranks)
    assert errors[0].startswith("PeerError: the syncer broke the protocol: ")
    assert errors[0] == errors[1]


@pytest.mark.parametrize(("wrap", "on"), [("plain", 0), ("plain", 1), ("fsdp", 1)])
def test_a_value_that_is_not_finite_on_one_rank_ends_all(processes, syncer, wrap, on):
    ranks, group = started(processes, syncer, wrap=wrap, trouble=[{"at": 1, "on": on, "what": "nan"}])
    for rank in ranks:
        rank.wait_for("^step 1,")
    group.pull(0, 4)
    group.pull(1, 5)
    group.pull(2, 6)
    errors = raised(ranks)
    assert errors[0] == errors[1]
    assert "NonFiniteError: parameter 'embed.weight': a value on rank" in errors[0]
    if wrap == "plain":
        assert f"rank {on} of this learner is not finite" in errors[0]
    group.wait_closed()


def test_the_wait_in_finish_ends_on_every_rank(processes, syncer):
    optimizer = {"final_timeout_s": SHORT_S + 2}
    ranks, group = started(processes, syncer, steps=2, timeout_s=SHORT_S, optimizer=optimizer)
    assert raised(ranks) == ["RunError: the run did not end within 6 s: still waiting for the final cut"] * 2
    group.wait_closed()


@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("what", ["raise", "kill", "hang"])
def test_a_rank_that_fails_ends_the_other_one_and_the_connection(processes, syncer, on, what):
    trouble = [] if what == "kill" else [{"at": 3, "on": on, "what": what}]
    ranks, group = started(processes, syncer, trouble=trouble, timeout_s=SHORT_S if what == "hang" else 60)
    if what == "kill":
        ranks[on].signal(signal.SIGKILL)
    other = ranks[1 - on]
    assert other.wait() == 1
    text = other.wait_for("^raised (.*)")[1]
    assert "RankLostError: a rank of this learner has failed, left, or not answered within the timeout" in text
    assert f"(ranks 0, 1 of the job; this is rank {1 - on})" in text
    if on == 1 or what != "hang":
        group.wait_closed()


def test_a_rank_0_that_closes_leaves_the_others_their_own_optimizer(processes, syncer):
    ranks, group = started(processes, syncer, steps=30, trouble=[{"at": 3, "on": 0, "what": "close"}])
    assert raised(ranks) == ["RunError: the learner was closed before the final cut came"] * 2
    group.wait_closed()


def test_on_sync_cannot_begin_a_turn_within_the_turn_that_calls_it(processes, syncer):
    ranks, group = started(processes, syncer, nested=True)
    group.broadcast(0, 4, values(group, 4)[0])
    errors = raised(ranks)
    assert errors[0].startswith("RunError: on_sync must not step, finish or resync")
    assert errors[0] == errors[1]


def test_what_the_syncer_is_sent(processes, syncer):
    """The delta of rank 0, the tokens of both; a pull is answered behind the same step on every rank."""
    ranks, group = started(processes, syncer, pace_s=0.02)
    group.pull(1, 5)
    push = group.next(PushFragment)
    assert push.c_tokens == 3 * push.c_steps
    assert group.delta(push).abs().max() > 0
    group.broadcast_all(9, values(group, 9))
    steps = {line.split(",")[0] for line in finished(ranks, group, 9)}
    assert len(steps) == 1


def test_refused_at_the_door(processes, syncer):
    ranks = start_island(processes, syncer.address, wrap="plain")
    syncer.group(0).error("no room")
    assert raised(ranks) == ["RefusedError: the syncer ended the session: no room"] * 2


def test_a_fleet_that_does_not_start(processes, syncer):
    optimizer = {"connect_timeout_s": SHORT_S + 2}
    errors = raised(start_island(processes, syncer.address, wrap="plain", timeout_s=SHORT_S, optimizer=optimizer))
    assert errors[0].startswith("ConnectionLostError: the fleet did not start within 6 s")
    assert errors[0] == errors[1]


def test_a_budget_is_reported_by_all(processes, syncer):
    ranks, group = started(processes, syncer, steps=5, budget=5, optimizer={"budget_steps": 5})
    assert group.next(BudgetDone).steps == 5
    group.pull(0, 4)
    assert group.push(fragment=0).c_tokens == 15
    finished(ranks, group, 7)


def test_a_wrong_budget_is_wrong_on_every_rank(processes, syncer):
    ranks, _ = started(processes, syncer, steps=3, budget=5, optimizer={"budget_steps": 5})
    assert raised(ranks) == ["ValueError: report_budget(5): 3 local steps were made"] * 2


@pytest.mark.parametrize("on", [0, 1])
def test_a_resync_puts_every_rank_back_on_the_last_broadcast(processes, syncer, on):
    trouble = [{"at": 1, "on": on, "what": "nan"}]
    options = {"on_nonfinite": "resync", "merge_alpha": 0.5}
    ranks, group = started(processes, syncer, pace_s=0.02, optimizer=options, trouble=trouble)
    for rank in ranks:
        rank.wait_for("^step 1,")
    group.pull(0, 4)
    group.pull(1, 5)
    for fragment in (0, 1):
        push = group.push(fragment=fragment)
        assert group.delta(push).isfinite().all()
        assert push.c_tokens == 3 * push.c_steps
    assert any("is not finite" in line and "were put back" in line for line in ranks[0].lines)
    group.broadcast_all(8, values(group, 8))  # half of the local value stays: equal only if the ranks were
    locally = {rank.wait_for(r"^step 8, local (\w+)")[1] for rank in ranks}
    assert len(locally) == 1
    finished(ranks, group, 9)
