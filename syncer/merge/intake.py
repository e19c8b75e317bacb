"""From a learner's bytes to a signed outer gradient: decoded and negated, once, here and nowhere else.

A learner sends ``local - anchor``; every formula of the merge wants ``anchor - local``.

Source: protocol v4, the delta semantics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yeto_torch.protocol import codec
from yeto_torch.protocol.constants import WireDType


def decode_gradient(data: codec.Buffer, numel: int, dtype: WireDType, device: torch.device) -> Tensor:
    """The signed outer gradient [numel] f32 of a push's tensor bytes, on ``device``.

    Raises:
        PeerError: a wrong length, or a value no merge may see.
    """
    return codec.decode(data, numel, dtype, negate=True).to(device)
