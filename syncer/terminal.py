"""The live panel of a terminal: drawn with rich, a few times a second, from whatever the view says.

It decides how the view looks and owns the terminal while it is open: log lines go above the panel. It must not know
rounds, learners or clocks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from syncer.progress import View

_REFRESHES_PER_S = 4
_BAR_COLUMNS, _LABEL_COLUMNS = 72, 11


class Panel:
    """Shows ``now()`` until it is closed; ``now`` is called on rich's own thread."""

    def __init__(self, now: Callable[[], View]) -> None:
        self._now = now
        self._live = Live(get_renderable=self._draw, console=Console(stderr=True), refresh_per_second=_REFRESHES_PER_S)
        original = sys.stderr
        self._live.start()
        # Handlers made before hold the terminal itself, and would write into the panel.
        self._handlers = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is original
        ]
        self._original = original
        self._redirect()

    def close(self) -> None:
        """Draw a last time and give the terminal back. Idempotent."""
        self._live.stop()
        for handler in self._handlers:
            handler.setStream(self._original)

    def _redirect(self) -> None:
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def _draw(self) -> RenderableType:
        view = self._now()
        rows = Table.grid(padding=(0, 1))
        rows.add_column(style="bold", no_wrap=True, min_width=_LABEL_COLUMNS)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        for name, text in (
            ("rounds", f"{view.step}/{view.total}  {view.rounds_per_s:.2f} a second, {view.left}"),
            ("learners", view.learners),
            ("last round", view.line or "none yet"),
            ("bytes", view.traffic),
            ("waiting for", view.waiting),
        ):
            if text:
                rows.add_row(name, Text(text))
        bar = Table.grid()  # a bar alone ends without a new line
        bar.add_row(ProgressBar(total=max(view.total or 0, 1), completed=view.step, width=_BAR_COLUMNS))
        return Group(bar, rows)
