"""Real processes for what is compared with them."""

from tests.support.processes import processes, zygote  # noqa: F401  # fixtures
