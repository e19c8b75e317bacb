"""Every target on its seeds, on the kept corpus, and on what hypothesis makes of both."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.seeds import kept, seeds
from tests.fuzz.targets import TARGETS

SEEDS = seeds()


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_before_stays_harmless(name):
    assert SEEDS[name]
    for data in [*SEEDS[name], *kept(name), b""]:
        TARGETS[name](data)


@st.composite
def spoilt(draw, name):
    """A lawful input cut, overwritten, repeated or spliced with another one."""
    data = bytearray(draw(st.sampled_from(SEEDS[name])))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 3)):
            case 0:
                data[at : at + draw(st.integers(0, 12))] = draw(st.binary(max_size=12))
            case 1:
                del data[at:]
            case 2:
                data[at:at] = data[: draw(st.integers(0, len(data)))][:200]
            case _:
                data[at:] = draw(st.sampled_from(SEEDS[name]))[at:]
    return bytes(data[:2000])


@pytest.mark.parametrize("name", TARGETS)
def test_a_lawful_input_may_be_spoilt_anyhow(name):
    @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
    @given(spoilt(name) | st.binary(max_size=300))
    def search(data):
        TARGETS[name](data)

    search()
