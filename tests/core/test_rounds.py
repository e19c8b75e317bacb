"""One round's life: capture, K, attempts, grace, acceptance."""

import pytest

from syncer.core.events import Member
from syncer.core.rounds import Rejection, Round, RoundState
from tests.support.coordinator_desk import answer

A, B, C, D = (Member(i, 10 + i) for i in range(4))


def launched(*members, quorum=2, now=0.0, base_version=5, timeout_s=10.0):
    round_ = Round(7, 1, base_version, timeout_s)
    round_.launch(members or (A, B, C), quorum, now)
    return round_


def offer(round_, member, now=1.0, **fields):
    return round_.offer(answer(member, 7, **{"fragment": 1, "base_version": 5, **fields}), now)


def arm(round_, window_s, now):
    assert round_.at_quorum
    round_.arm_grace(window_s, now)
    round_.settle(now)


@pytest.mark.parametrize(("quorum", "members", "k"), [(2, (A, B, C), 2), (3, (A, B), 2), (1, (A,), 1), (9, (A, B), 2)])
def test_k_is_the_smaller_of_quorum_and_captured_members(quorum, members, k):
    assert launched(*members, quorum=quorum).quorum == k


ROUTES = [
    # (why, who, fields, expected)
    ("another attempt", A, {"attempt": 2}, Rejection.OUT_OF_ROUND),
    ("another fragment", A, {"fragment": 0}, Rejection.OUT_OF_ROUND),
    ("not captured", D, {}, Rejection.UNEXPECTED_MEMBER),
    ("another generation of a captured learner", Member(0, 99), {}, Rejection.UNEXPECTED_MEMBER),
    ("base in the future", A, {"base_version": 6}, Rejection.FUTURE_BASE),
    ("answered already", B, {}, Rejection.DUPLICATE),
    ("fresh base", A, {"base_version": 5}, None),
    ("stale base", A, {"base_version": 0}, None),
    # first match wins
    ("another attempt before not captured", D, {"attempt": 2}, Rejection.OUT_OF_ROUND),
    ("another attempt before base in the future", A, {"attempt": 2, "base_version": 6}, Rejection.OUT_OF_ROUND),
    ("not captured before base in the future", D, {"base_version": 6}, Rejection.UNEXPECTED_MEMBER),
    ("base in the future before answered already", B, {"base_version": 6}, Rejection.FUTURE_BASE),
]


@pytest.mark.parametrize(("why", "who", "fields", "expected"), ROUTES, ids=[route[0] for route in ROUTES])
def test_an_answer_is_routed_by_the_first_rule_that_matches(why, who, fields, expected):
    round_ = launched(A, B, C, quorum=3)
    assert offer(round_, B) is None
    assert offer(round_, who, **fields) is expected
    assert set(round_.responses) == ({A, B} if expected is None else {B}), why


def test_the_first_answer_of_a_member_wins():
    round_ = launched(quorum=3)
    offer(round_, A, c_tokens=10)
    assert offer(round_, A, c_tokens=99) is Rejection.DUPLICATE
    assert round_.responses[A].c_tokens == 10


def test_all_answered_closes_without_a_grace_window():
    round_ = launched(A, B, quorum=2)
    offer(round_, A)
    offer(round_, B, now=3.0)
    round_.settle(3.0)
    assert round_.state is RoundState.CLOSED
    assert round_.grace_s is None
    assert round_.quorum_s == 3.0


def test_the_grace_window_is_armed_at_k_and_more_answers_do_not_move_it():
    round_ = launched(A, B, C, D, quorum=2)
    offer(round_, A)
    offer(round_, B, now=2.0)
    arm(round_, 4.0, 2.0)
    assert (round_.state, round_.due) == (RoundState.GRACE, 6.0)
    assert offer(round_, C, now=5.0) is None
    round_.settle(5.0)
    assert (round_.state, round_.due, round_.quorum_s) == (RoundState.GRACE, 6.0, 2.0)
    round_.settle(6.0)
    assert round_.state is RoundState.CLOSED
    assert round_.missing == (D,)
    assert offer(round_, D, now=6.0) is Rejection.OUT_OF_ROUND


def test_a_window_of_nothing_closes_at_k():
    round_ = launched(quorum=1)
    offer(round_, A)
    arm(round_, 0.0, 1.0)
    assert round_.state is RoundState.CLOSED
    assert round_.grace_s == 0.0


def test_a_member_that_is_gone_is_not_waited_for_in_the_window():
    round_ = launched(A, B, C, quorum=2)
    offer(round_, A)
    offer(round_, B)
    arm(round_, 4.0, 1.0)
    round_.lose(C)
    round_.settle(1.5)
    assert round_.state is RoundState.CLOSED
    assert round_.missing == (C,)


def test_below_k_the_deadline_drops_every_answer():
    round_ = launched(quorum=3)
    offer(round_, A)
    offer(round_, B)
    round_.settle(9.999)
    assert round_.state is RoundState.PULLING
    round_.settle(10.0)
    assert round_.state is RoundState.EXPIRED
    assert not round_.responses
    assert offer(round_, C, now=10.0) is Rejection.OUT_OF_ROUND


def test_at_k_the_deadline_expires_nothing_any_more():
    round_ = launched(quorum=2, timeout_s=2.0)
    offer(round_, A)
    offer(round_, B, now=1.9)
    arm(round_, 5.0, 1.9)
    round_.settle(3.0)
    assert round_.state is RoundState.GRACE


@pytest.mark.parametrize(
    ("quorum", "answered", "lost", "state"),
    [
        (2, (), (A,), RoundState.PULLING),  # B and C can still make two
        (2, (), (A, B), RoundState.EXPIRED),
        (3, (), (A,), RoundState.EXPIRED),
        (3, (A,), (A,), RoundState.PULLING),  # it answered before it left: that answer stays
        (3, (A,), (A, B), RoundState.EXPIRED),
        (2, (A,), (A, B), RoundState.PULLING),
        (2, (A,), (B, C), RoundState.EXPIRED),
        (1, (), (A, B, C), RoundState.EXPIRED),
        (2, (A, B), (A, B), RoundState.PULLING),  # K is there; whether to wait for C is another question
    ],
)
def test_an_attempt_expires_at_once_when_k_is_out_of_reach(quorum, answered, lost, state):
    round_ = launched(A, B, C, quorum=quorum)
    for member in answered:
        offer(round_, member)
    for member in lost:
        round_.lose(member)
    round_.settle(1.0)
    assert round_.state is state


def test_a_stranger_that_is_lost_changes_nothing():
    round_ = launched(A, B, quorum=2)
    round_.lose(D)
    round_.lose(Member(0, 99))
    round_.settle(1.0)
    assert round_.state is RoundState.PULLING


def test_a_relaunch_starts_from_nothing_but_the_base():
    round_ = launched(A, B, C, quorum=3)
    offer(round_, A)
    round_.lose(B)
    round_.settle(2.0)
    round_.launch((A, D), 3, 4.0)
    assert (round_.attempt, round_.members, round_.quorum, round_.base_version) == (2, (A, D), 2, 5)
    assert (round_.due, round_.quorum_s, round_.grace_s, round_.missing) == (14.0, None, None, (A, D))
    assert offer(round_, A, attempt=1, now=5.0) is Rejection.OUT_OF_ROUND
    assert offer(round_, A, attempt=2, now=5.0) is None


def test_answers_are_ordered_by_member_not_by_arrival():
    round_ = launched(A, B, C, quorum=3)
    for member in (C, A, B):
        offer(round_, member)
    assert [r.member for r in round_.ordered_responses] == [A, B, C]


def test_w_is_the_sum_of_accepted_weights():
    round_ = launched(A, B, C, quorum=3)
    offer(round_, A, c_tokens=6, c_steps=3)
    offer(round_, B, c_tokens=0, c_steps=1)
    assert round_.weight == 12.0


def test_what_it_waits_for_is_a_clause():
    round_ = launched(A, B, C, quorum=3)
    assert round_.waiting_for() == "round 7 attempt 1: 0 of 3, missing learners 0, 1, 2"
    offer(round_, A)
    offer(round_, B)
    assert round_.waiting_for() == "round 7 attempt 1: 2 of 3, missing learner 2"
    round_.lose(C)
    round_.settle(1.0)
    assert round_.waiting_for() == "round 7 attempt 1: no learner is connected"
    round_.state = RoundState.MERGING
    assert round_.waiting_for() == "round 7 attempt 1: merging"
    round_.state = RoundState.READY
    assert round_.waiting_for() == "round 7 attempt 1: merged, an earlier round is not committed yet"
