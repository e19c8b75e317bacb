"""Real processes for the plans that are compared with them."""

from tests.support.processes import processes, zygote  # noqa: F401  # fixtures
