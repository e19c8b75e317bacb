"""Memory for what arrives: writable, zeroed, and not touched before its bytes come.

``bytearray`` writes zeros over its whole length while it holds the interpreter lock: tens of milliseconds for a
large fragment, and real memory for a header that only promises bytes. Large pieces are therefore private anonymous
mappings, whose pages the kernel supplies as bytes are received into them. Small ones stay on the heap, where freed
memory is reused warm.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

LARGE_BYTES = 8 * 1024 * 1024  # measured: from about here fresh pages cost less than clearing heap memory
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


def allocate(nbytes: int, large_bytes: int = LARGE_BYTES) -> memoryview:
    """A writable view of ``nbytes`` zeros that nobody else holds; lazily backed from ``large_bytes`` on.

    Raises MemoryError.
    """
    if nbytes < large_bytes:
        return memoryview(bytearray(nbytes))
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no memory for a message of {nbytes} bytes ({error})") from error
    if _HUGE_PAGES is not None and nbytes >= LARGE_BYTES:
        with suppress(OSError):  # a kernel without them
            pages.madvise(_HUGE_PAGES)
    return memoryview(pages)
