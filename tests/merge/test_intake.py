"""Bytes of a push become the signed outer gradient: negated once."""

import pytest
import torch

from syncer.merge.intake import decode_gradient
from yeto_torch.wire import codec
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import PeerError

pytestmark = pytest.mark.usefixtures("either_way")

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", WireDType)
def test_the_sign_of_the_outer_gradient(dtype):
    """The learner went from 1 to 3: it sends +2, and the outer gradient, anchor minus local, is -2."""
    anchor, local = torch.tensor([1.0, 1.0]), torch.tensor([3.0, 0.5])
    data = codec.encode(local - anchor, dtype)
    assert decode_gradient(data, 2, dtype, CPU).tolist() == [-2.0, 0.5]


def test_it_owns_its_values():
    data = bytearray(codec.encode(torch.ones(3), WireDType.F32))
    gradient = decode_gradient(data, 3, WireDType.F32, CPU)
    data[:] = bytes(12)
    assert gradient.tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize("dtype", WireDType)
def test_a_push_of_the_wrong_length_is_the_peers_fault(dtype):
    with pytest.raises(PeerError, match="tensor bytes"):
        decode_gradient(bytes(5), 300, dtype, CPU)
