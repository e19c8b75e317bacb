"""Real processes for the notebooks that are run; see ``tests/support/processes.py``."""

from tests.support.processes import processes, zygote  # noqa: F401  # fixtures
