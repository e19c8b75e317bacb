"""Pauses, limits and complaints of redialling."""

import pytest

from yeto_torch.learner.redial import LAST_PAUSE_S, Redial


def test_pauses_double_from_one_second_to_thirty_with_some_chance_in_them():
    redial = Redial(None)
    pauses = [redial.next_pause_s() for _ in range(12)]
    for pause, base in zip(pauses, [1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30, 30], strict=True):
        assert base <= pause <= min(1.5 * base, LAST_PAUSE_S)
    assert len({Redial(None).next_pause_s() for _ in range(20)}) > 1
    redial.succeeded()
    assert redial.next_pause_s() <= 1.5


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_limit_counts_redials_since_the_last_broadcast(limit):
    redial = Redial(limit)
    for _ in range(limit):
        redial.next_pause_s()
        assert not redial.exhausted
    redial.next_pause_s()
    assert redial.exhausted
    redial.succeeded()
    assert not redial.exhausted


def test_without_a_limit_it_never_gives_up():
    redial = Redial(None)
    for _ in range(1000):
        redial.next_pause_s()
    assert not redial.exhausted


def test_the_first_failure_is_said_then_every_ten_seconds():
    redial = Redial(None)
    said = [now for now in range(0, 31, 3) if redial.failed(f"cause {now}", float(now))]
    assert said == [0, 12, 24]
    assert redial.cause == "cause 30"
    redial.succeeded()
    assert redial.failed("again", 31.0)
