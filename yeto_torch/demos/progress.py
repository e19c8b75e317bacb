"""Live progress of the demonstration: a panel in a terminal, else a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from yeto_torch.demos.follow import RunView

LINE_EVERY_S = 5.0


@contextmanager
def showing(console: Console, view: RunView, total_rounds: int) -> Iterator[Callable[[], None]]:
    """Gives a function to call now and then, which reads the run folder and shows where the run is."""
    if not console.is_terminal:
        yield _Lines(console, view, total_rounds)
        return
    with Live(_panel(view, total_rounds), console=console, refresh_per_second=8, transient=True) as live:

        def show() -> None:
            view.update()
            live.update(_panel(view, total_rounds))

        yield show


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def _panel(view: RunView, total_rounds: int) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_row(
        f"round {view.round}/{total_rounds}",
        ProgressBar(total=total_rounds, completed=view.round, width=40),
        f"quorum {view.responded}/{view.quorum}" if view.round else "starting",
        megabytes(view.tensor_bytes),
    )
    body = Table.grid(padding=(0, 2))
    for number, learner in enumerate(view.learners):
        loss = "" if learner.loss is None else f"loss {learner.loss:.4f}"
        body.add_row(f"learner {number}", f"step {learner.step}", loss, f"{learner.steps_per_s:.0f} steps/s")
    return Group(head, body)


class _Lines:
    def __init__(self, console: Console, view: RunView, total_rounds: int) -> None:
        self._console, self._view, self._total = console, view, total_rounds
        self._next = time.monotonic()
        self._last = ""

    def __call__(self) -> None:
        self._view.update()
        now = time.monotonic()
        if now < self._next or not self._view.round:
            return
        self._next = now + LINE_EVERY_S
        losses = ", ".join(
            f"learner {number}: step {learner.step}" + ("" if learner.loss is None else f" loss {learner.loss:.4f}")
            for number, learner in enumerate(self._view.learners)
        )
        text = (
            f"  round {self._view.round}/{self._total}, quorum {self._view.responded}/{self._view.quorum}, "
            f"{megabytes(self._view.tensor_bytes)}; {losses}"
        )
        if text != self._last:
            self._console.print(text, highlight=False, soft_wrap=True)
        self._last = text
