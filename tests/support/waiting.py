"""Waiting for what nobody announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_S = 60.0  # for what takes a second at most on a free machine


def until(condition: Callable[[], Any], what: str = "", timeout_s: float = WAIT_S, pause_s: float = 0.02) -> Any:
    """The first true value of ``condition``, for what only a look at a file or another process tells."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(pause_s)
