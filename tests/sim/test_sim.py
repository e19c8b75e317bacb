"""A few hundred seeds of the simulated world; ``make sim SEEDS=5000`` plays thousands.

A failure prints the seed, the command that replays it, and the end of its story.
"""

import pytest

from tests.sim.play import play
from tests.sim.scenario import draw

SEEDS, CHUNK = 240, 20


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_whatever_goes_wrong_nothing_false_happens_and_the_run_ends(first):
    for seed in range(first, first + CHUNK):
        outcome = play(seed)
        assert outcome.failure is None, outcome.report()


def test_a_seed_always_tells_the_same_story():
    one, other = play(11), play(11)
    assert one.story == other.story
    assert len(one.story) > 20


def test_the_seeds_are_of_every_kind():
    """Whatever a scenario can be, the seeds that are played hold many of it."""
    scenarios = [draw(seed) for seed in range(SEEDS)]
    policies = [scenario.policy for scenario in scenarios]
    for kind in (
        [s.bytes_level for s in scenarios],
        [s.pooled for s in scenarios],
        [s.never_back is not None for s in scenarios],
        [s.alpha > 0 for s in scenarios],
        [p.checkpoint.every == 1 for p in policies],
        [p.checkpoint.every > 1 for p in policies],
        [p.schedule.quorum < p.learners for p in policies],
        [min(p.schedule.pipeline, len(s.layout)) > 1 for p, s in zip(policies, scenarios, strict=True)],
    ):
        assert SEEDS // 12 < sum(kind) < SEEDS


def test_the_trouble_really_comes():
    stories = "\n".join(line for seed in range(40) for line in play(seed).story)
    for trouble in ("CRASH", "CUT", "STALL", "FROZEN", "KILLED", "notices late", "set back", "expired", "is cloned"):
        assert trouble in stories, f"no {trouble} in 40 seeds"
