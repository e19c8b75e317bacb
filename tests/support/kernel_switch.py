"""The same work by the compiled kernels or without them, in this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

from syncer.merge import kernels as merging
from yeto_torch.wire.codec import kernels as coding

T = TypeVar("T")


@contextmanager
def working(way: str) -> Iterator[None]:
    """``way``: "compiled", which skips where nothing was compiled, or "plain": without them."""
    if way == "compiled":
        if coding.compiled is None or merging.compiled is None:
            pytest.skip("the kernels were not built here")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coding, "compiled", None)
        patch.setattr(merging, "compiled", None)
        yield


def both_ways(work: Callable[[], T]) -> tuple[T, T]:
    """What ``work`` returns with the kernels, and without."""
    with working("compiled"):
        one = work()
    with working("plain"):
        return one, work()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit."""
    return one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
