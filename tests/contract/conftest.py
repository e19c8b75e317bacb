"""Real processes for the probe; see ``tests/support/processes.py``."""

from tests.support.processes import processes, zygote  # noqa: F401  # fixtures
