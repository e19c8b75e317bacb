"""The codec's loops over elements, compiled, where they could be built; else ``compiled`` is None.

Torch does the same work then, and numpy for q4, to the same bits, in more trips over memory. That code stands beside
every use of a kernel and is its reference: the tests run both. Numpy packs q4 because torch compares into bytes one by
one, which takes it three times as long.
"""

from __future__ import annotations

try:
    from yeto_torch.wire.codec import _kernels
except ImportError:  # no C compiler where this was installed
    compiled = None
else:
    compiled = _kernels
