import pytest

from tests.support.raw_sockets import Rig


@pytest.fixture
def rig():
    """Makes groups; the test ends when all of them have."""
    rig = Rig()
    yield rig
    rig.finish()
