"""SIGKILL at many points of a live run: nothing that anybody was shown is lost, nobody hangs, all end as one.

The short storms are part of every test run; ``make crash`` adds long ones, a hundred kills in all.
"""

from contextlib import closing

import pytest

from tests.support.killed_run import MOMENTS, Storm


def weather(storm, blows, learner_kills):
    """``blows`` syncer deaths, every kind of moment in turn, and learners' deaths among them."""
    for number in range(blows):
        storm.strike(MOMENTS[number % len(MOMENTS)])
        if number < learner_kills:
            storm.strike_learner(number % 2)
    storm.finish()


def test_what_was_visible_was_durable_and_the_run_goes_on(processes):
    with closing(Storm(processes, seed=1, every=1)) as storm:
        weather(storm, 5, 1)
        assert storm.rollbacks == 0
        assert storm.kills == {"syncer": 7, "learner": 1}


def test_learners_follow_a_syncer_that_was_set_back(processes):
    with closing(Storm(processes, seed=2, every=8)) as storm:
        weather(storm, 3, 1)
        assert storm.rollbacks > 0


@pytest.mark.crash
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_a_long_storm_with_every_commit_durable(processes, seed):
    with closing(Storm(processes, seed=seed, every=1)) as storm:
        weather(storm, 15, 5)
        assert storm.rollbacks == 0


@pytest.mark.crash
def test_a_long_storm_with_rollbacks(processes):
    with closing(Storm(processes, seed=21, every=8)) as storm:
        weather(storm, 15, 5)
        assert storm.rollbacks > 3
        assert any("set back" in line for learner in storm.learners.values() for line in learner.lines)
