"""The operator's view in words, by hand. How it looks in a terminal: tests/e2e/test_terminal.py."""

import logging
from types import SimpleNamespace

import pytest

from syncer import progress
from syncer.progress import Progress, Speed, View
from tests.support.invented_tapes import answer, merge


def test_speed_is_that_of_the_window_and_sinks_when_nothing_moves():
    speed = Speed(10.0)
    assert speed.at(0.0, 0.0) == 0.0
    assert speed.at(5.0, 50.0) == 10.0
    assert speed.at(10.0, 100.0) == 10.0
    assert speed.at(20.0, 100.0) == 0.0  # since second 10
    assert speed.at(30.0, 400.0) == 30.0


@pytest.mark.parametrize(
    ("step", "rate", "left"),
    [
        (100, 1.0, "0 s left"),
        (70, 1.0, "30 s left"),
        (0, 1.0, "1 min 40 s left"),
        (0, 0.01, "2 h 46 min left"),
        (50, 0.0, "time left unknown"),
    ],
)
def test_time_left_in_words(step, rate, left):
    assert View(100, 2, step=step, rounds_per_s=rate).left == left
    assert View(None, 2, step=step, rounds_per_s=rate).left == ""


def test_learners_in_words():
    assert View(1, 3).learners == "0 of 3 connected"
    few = View(1, 4, connected=(0, 1, 3), lags={0: 0, 1: 2, 2: 0, 3: None})
    assert few.learners == "3 of 4 connected: #0 fresh, #1 2 behind, #3 late, #2 away"
    assert View(1, 2, connected=(1,)).learners == "1 of 2 connected: #1 new"
    lags = dict.fromkeys(range(20), 0) | {3: 1, 4: 2, 5: None}
    many = View(1, 30, connected=tuple(range(19)), lags=lags)
    assert many.learners == "19 of 30 connected: 16 fresh, 2 behind, 1 late, 1 away"


def policy(**fields):
    return SimpleNamespace(
        **{"progress": "auto", "total_steps": 9, "learners": 3, "budget_learner_steps": None} | fields
    )


def test_outside_of_a_terminal_a_plain_line_every_ten_seconds(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = Progress(policy(), lambda: (5_000_000, 1_000_000))
    assert not shown.live
    for step, at in ((1, 100.0), (2, 101.0), (3, 109.0), (4, 110.0)):
        now[0] = at
        late = answer(1, staleness=4) if step > 2 else answer(1)
        shown.committed(merge(step, [answer(0), late], missed=[2], ms=25.0), (0, 1, 2))
    bytes_and_speed = "5.0 MB in, 1.0 MB out (0.0 and 0.0 MB/s now)"
    first, second = caplog.messages
    assert first == (
        f"step 1 of 9: 2 of 3 answered, round 25 ms, 0.00 rounds/s, {bytes_and_speed}; "
        "3 of 3 connected: #0 fresh, #1 fresh, #2 late; time left unknown"
    )
    assert second == (
        f"step 4 of 9: 2 of 3 answered, round 25 ms, 0.30 rounds/s, {bytes_and_speed}; "
        "3 of 3 connected: #0 fresh, #1 2 behind, #2 late; 17 s left"
    )
    shown.close()


def test_a_learner_budget_has_no_time_left(caplog):
    caplog.set_level(logging.INFO)
    Progress(policy(budget_learner_steps=720), lambda: (0, 0)).committed(merge(1, [answer(0)]), (0,))
    assert caplog.messages[0].startswith("step 1, until learners have made 720 local steps: 1 of 1 answered")
