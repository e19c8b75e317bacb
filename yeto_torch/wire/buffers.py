"""Memory for what arrives: writable, and not touched before its bytes come.

``bytearray`` writes zeros over its whole length while it holds the interpreter lock: tens of milliseconds for a
large fragment, and real memory for a header that only promises bytes. Large pieces are therefore private anonymous
mappings, whose pages the kernel supplies as bytes are received into them. Small ones stay on the heap, where freed
memory is reused warm.

Pages that the kernel must clear first cost a third of a whole transfer over loopback. ``Spare`` keeps a few mappings
that nobody refers to any more and lends them again: they come as they were left, so they are for messages only, of
which nobody sees a byte before all have been received.

* pure
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes that travel or are stored; wherever they come from, they are not changed while somebody else may look."""

LARGE_BYTES = 8 * 1024 * 1024  # measured: from about here fresh pages cost less than clearing heap memory
LENT_BYTES = 1024 * 1024  # smaller pieces are not worth a mapping, even one that is lent again and again
_PAGE_BYTES = mmap.PAGESIZE
_HUGE_BYTES = 2 * 1024 * 1024  # what the kernel aligns a mapping to if its length is a multiple of it
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)


def allocate(nbytes: int, large_bytes: int = LARGE_BYTES) -> memoryview:
    """A writable view of ``nbytes`` zeros that nobody else holds; lazily backed from ``large_bytes`` on.

    Raises MemoryError.
    """
    if nbytes < large_bytes:
        return memoryview(bytearray(nbytes))
    return memoryview(_map(nbytes, nbytes))


class Spare:
    """Lends memory, and keeps what came back for the next one; from any thread, without a lock.

    What is lent comes back when the last view of it is gone, wherever that happens, within a garbage collection too. (A
    ``__del__`` that saves a view out of a garbage cycle saves it too late: it may have been lent again.)
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep  # so many mappings at most; the oldest goes first
        self._kept: list[_Pages] = []

    def __len__(self) -> int:
        return len(self._kept)

    def allocate(self, nbytes: int) -> memoryview:
        """A writable view of ``nbytes`` whose content is whatever it is; nobody else holds it. Raises MemoryError."""
        if nbytes < LENT_BYTES:
            return memoryview(bytearray(nbytes))
        pages = self._take(nbytes) or _Pages(nbytes)
        # A view can be cut and cast without end; the one object behind all of them tells when the last is gone.
        array = (ctypes.c_char * nbytes).from_buffer(pages.memory)
        weakref.finalize(array, self._give_back, pages).atexit = False
        return memoryview(array).cast("B")

    def _take(self, nbytes: int) -> _Pages | None:
        for pages in tuple(self._kept):
            if pages.fits(nbytes):
                with suppress(ValueError):  # another thread was faster
                    self._kept.remove(pages)
                    pages.use(nbytes)
                    return pages
        return None

    def _give_back(self, pages: _Pages) -> None:
        self._kept.append(pages)
        with suppress(IndexError):
            while len(self._kept) > self.keep:
                self._kept.pop(0)


class _Pages:
    """One mapping, of which the first ``used`` bytes may be real memory."""

    __slots__ = ("memory", "used")

    def __init__(self, nbytes: int) -> None:
        self.memory = _map(-(-nbytes // _HUGE_BYTES) * _HUGE_BYTES, nbytes)
        self.used = nbytes

    def fits(self, nbytes: int) -> bool:
        """Long enough, and not so long that a smaller message had better leave it to another."""
        return nbytes <= len(self.memory) and self.used <= 2 * nbytes + _HUGE_BYTES

    def use(self, nbytes: int) -> None:
        """It is lent for ``nbytes`` now; what lies behind them goes back to the kernel, if that is worth a call."""
        end = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        if self.used - end <= nbytes // 16:
            self.used = max(self.used, nbytes)
        elif _DONT_NEED is not None:
            with suppress(OSError):  # pages that are locked into memory stay
                self.memory.madvise(_DONT_NEED, end, self.used - end)
                self.used = nbytes


def _map(nbytes: int, used: int) -> mmap.mmap:
    """A private mapping of which ``used`` bytes are going to be used: on huge pages, but for its last part."""
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no memory for a message of {used} bytes ({error})") from error
    huge = used // _HUGE_BYTES * _HUGE_BYTES
    if _HUGE_PAGES is not None and huge:
        with suppress(OSError):  # a kernel without them
            pages.madvise(_HUGE_PAGES, 0, huge)
    return pages
