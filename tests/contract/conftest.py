"""Real processes for the probe; see ``tests/support/processes.py``."""

import pytest

from tests.contract.probe import asking
from tests.contract.subjects import Yeto
from tests.support.processes import Processes, processes, zygote  # noqa: F401  # fixtures


@pytest.fixture(scope="module")
def ours(tmp_path_factory, zygote):  # noqa: F811  # the fixture
    """Learner 0 of fleets that merge nothing: ``ours.wrap(model, inner)``."""
    started = Processes(tmp_path_factory.mktemp("contract"), zygote)
    try:
        with asking(Yeto.name, started) as subject:
            yield subject
    finally:
        started.close()
