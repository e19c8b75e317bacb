"""The same work by the compiled kernels or without them, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syncer.merge import kernels as merging
from yeto_torch.protocol.codec import kernels as coding


@contextmanager
def working(way: str) -> Iterator[None]:
    """``way``: "compiled", which skips where nothing was compiled, or "numpy"."""
    if way == "compiled":
        if coding.compiled is None or merging.compiled is None:
            pytest.skip("the kernels were not built here")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coding, "compiled", None)
        patch.setattr(merging, "compiled", None)
        yield
