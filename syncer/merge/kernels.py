"""The merge's loops over elements, compiled, where they could be built; else ``compiled`` is None.

Torch does the same work then, in more trips over memory, as it does on a GPU. f32 results have the same bits; sums in
f64 are taken in another order, and may differ in their last ones.
"""

from __future__ import annotations

try:
    from syncer.merge import _kernels
except ImportError:  # no C compiler where this was installed
    compiled = None
else:
    compiled = _kernels
