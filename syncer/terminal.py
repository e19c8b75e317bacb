"""The live panel of a terminal: a bar and named lines, drawn with rich a few times a second.

It decides how they look and owns the terminal while it is open: log lines go above the panel. It must not know rounds,
learners or clocks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_REFRESHES_PER_S = 4
_BAR_COLUMNS, _LABEL_COLUMNS = 72, 11


Picture = tuple[int, int, Mapping[str, str]]
"""(how much is done, of how much, and the lines by their names; an empty line is left out)."""


class Panel:
    """Shows ``now()`` until it is closed; ``now`` is called on rich's own thread."""

    def __init__(self, now: Callable[[], Picture]) -> None:
        self._now = now
        self._live = Live(get_renderable=self._draw, console=Console(stderr=True), refresh_per_second=_REFRESHES_PER_S)
        self._terminal = sys.stderr
        self._live.start()
        # Handlers made before hold the terminal itself, and would write into the panel.
        self._handlers = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._terminal
        ]
        self._write_to(sys.stderr)

    def close(self) -> None:
        """Draw a last time and give the terminal back. Idempotent."""
        self._live.stop()
        self._write_to(self._terminal)

    def _write_to(self, stream: TextIO) -> None:
        for handler in self._handlers:
            handler.setStream(stream)

    def _draw(self) -> RenderableType:
        done, total, lines = self._now()
        rows = Table.grid(padding=(0, 1))
        rows.add_column(style="bold", no_wrap=True, min_width=_LABEL_COLUMNS)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        for name, text in lines.items():
            if text:
                rows.add_row(name, Text(text))
        bar = Table.grid()  # a bar alone ends without a new line
        bar.add_row(ProgressBar(total=max(total, 1), completed=done, width=_BAR_COLUMNS))
        return Group(bar, rows)
