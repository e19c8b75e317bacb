"""The file that says a run is complete: its bytes, and the step they name. Whoever reads or writes it opens it.

Source: v4 §Checkpoints (the marker); rulings §7.

* pure
"""

from __future__ import annotations

import re

from yeto_torch.wire.constants import U64_MAX

LIMIT_BYTES = 64
"""Read no more: a longer file is no marker."""

_CONTENT = re.compile(rb"YETO_FINAL_V1\nglobal_step=(0|[1-9][0-9]{0,19})\n")


def encode(step: int) -> bytes:
    """The marker of global step ``step``."""
    return f"YETO_FINAL_V1\nglobal_step={step}\n".encode()


def decode(content: bytes) -> int | None:
    """The step a file's content names; None where that is no marker."""
    match = _CONTENT.fullmatch(content)
    step = U64_MAX + 1 if match is None else int(match[1])
    return step if step <= U64_MAX else None
