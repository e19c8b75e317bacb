"""Does the simulation bite? Every planted defect is caught by one of the first 200 seeds."""

import pytest

from tests.sim.defects import DEFECTS
from tests.sim.play import play
from tests.sim.world import LivenessError, SafetyError

SEEDS = 200


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_caught(name):
    with DEFECTS[name]():
        outcome = next((o for o in map(play, range(SEEDS)) if o.failure is not None), None)
    assert outcome is not None, f"{SEEDS} seeds and nobody noticed"
    noticed = outcome.failure.partition(":")[0]
    assert noticed in (SafetyError.__name__, LivenessError.__name__, "LocalError"), outcome.report()
