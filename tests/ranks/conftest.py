"""Real processes and real sockets; every rank is a process."""

from tests.support.processes import processes, zygote  # noqa: F401  # fixtures
