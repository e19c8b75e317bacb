"""Real processes and real sockets for every test here; see ``tests/support/processes.py``."""

from tests.support.processes import processes, zygote  # noqa: F401  # fixtures
