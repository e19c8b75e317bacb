"""The end: whose acknowledgement counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.core.events import Member
from syncer.core.finalization import Finalization

A1, A2, B1 = Member(0, 1), Member(0, 2), Member(1, 1)
STEP = 12


def final(*expected):
    machine = Finalization(STEP, 30.0)
    machine.freeze(expected or (0, 1))
    return machine


def test_an_acknowledgement_counts_from_a_generation_the_cut_was_queued_to():
    machine = final()
    machine.queued(A1)
    assert machine.acknowledge(A1, STEP) is None
    assert machine.missing == (1,)
    assert machine.acked_members == (A1,)


@pytest.mark.parametrize(
    ("queued", "member", "step", "words"),
    [
        ((), A1, STEP, "before the final cut was sent on this connection"),
        ((A1,), A2, STEP, "before the final cut was sent on this connection"),
        ((A1,), A1, STEP - 1, "FINAL_ACK of step 11: the final step is 12"),
        ((A1,), A1, STEP + 1, "FINAL_ACK of step 13: the final step is 12"),
    ],
)
def test_any_other_acknowledgement_is_a_violation_and_never_counts(queued, member, step, words):
    machine = final()
    for served in queued:
        machine.queued(served)
    assert words in machine.acknowledge(member, step)
    assert machine.missing == (0, 1)
    assert not machine.acked_members


def test_an_accepted_acknowledgement_outlives_its_connection():
    machine = final(0)
    machine.queued(A1)
    machine.acknowledge(A1, STEP)
    machine.lost(A1)
    assert machine.complete


def test_a_lost_connection_must_be_served_again():
    machine = final(0)
    machine.queued(A1)
    machine.lost(A1)
    assert machine.acknowledge(A1, STEP) is not None
    machine.queued(A2)
    assert machine.acknowledge(A2, STEP) is None
    assert machine.complete


def test_the_same_acknowledgement_twice_is_harmless():
    machine = final()
    machine.queued(A1)
    assert machine.acknowledge(A1, STEP) is None
    assert machine.acknowledge(A1, STEP) is None
    assert machine.missing == (1,)


def test_a_superseded_generation_that_was_served_may_still_acknowledge():
    machine = final(0)
    machine.queued(A1)
    machine.queued(A2)
    assert machine.acknowledge(A1, STEP) is None
    assert machine.complete
    assert machine.acked_members == (A1,), "SHUTDOWN goes to this generation only"
    assert machine.acknowledge(A2, STEP) is None
    assert machine.acked_members == (A1, A2)


def test_the_wait_begins_when_it_is_first_asked_for():
    machine = final()
    assert machine.deadline is None
    assert not machine.overdue(100.0)
    assert machine.deadline == 130.0
    assert not machine.overdue(129.9)
    assert machine.overdue(130.0)


@given(st.lists(st.tuples(st.sampled_from(["queue", "lose", "ack", "wrong"]), st.sampled_from([A1, A2, B1]))))
def test_finalization_equals_a_dumb_twin(moves):
    """Twin: an ACK counts if, searching backwards, its generation was queued later than it was lost."""
    machine, log = final(), []
    for what, member in moves:
        log.append((what, member))
        if what == "queue":
            machine.queued(member)
        elif what == "lose":
            machine.lost(member)
        else:
            machine.acknowledge(member, STEP - (what == "wrong"))
    accepted = [m for i, (what, m) in enumerate(log) if what == "ack" and _served(log[:i], m)]
    assert machine.missing == tuple(i for i in (0, 1) if i not in {m.learner_id for m in accepted})
    assert machine.acked_members == tuple(sorted(set(accepted)))


def _served(log, member):
    last = next((what for what, m in reversed(log) if m == member and what in ("queue", "lose")), "lose")
    return last == "queue"
