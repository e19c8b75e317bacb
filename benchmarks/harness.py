"""What a figure is, and how two things are measured beside each other.

A figure is never a number of this machine alone: it is a ratio of two measurements of one run, taken in turns, so that
whatever else the machine does meets both. It is the median over several such turns and says how far they lie apart.
This file must not know what is measured.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")
clock = time.perf_counter


class Size(Enum):
    """How large a measurement is: the figures' own size, two minutes for everything, or just enough to run."""

    FULL = "full"
    QUICK = "quick"
    TINY = "tiny"

    def of(self, full: T, quick: T, tiny: T) -> T:
        """The value for this size."""
        return {Size.FULL: full, Size.QUICK: quick, Size.TINY: tiny}[self]

    @property
    def runs(self) -> int:
        """How many turns a figure takes."""
        return self.of(7, 3, 2)


@dataclass(frozen=True)
class Target:
    """What is to be reached, and what is aimed at.

    Attributes:
        reach, aim: in the figure's unit.
        more_is_better: whether they are lower bounds.
    """

    reach: float
    aim: float
    more_is_better: bool = False

    def met(self, value: float) -> str:
        """``aim``, ``ok`` or ``misses``."""
        for word, bound in (("aim", self.aim), ("ok", self.reach)):
            if value >= bound if self.more_is_better else value <= bound:
                return word
        return "misses"


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        name: what was measured, with its size.
        against: what it is compared with.
        unit: of everything here: ``x`` a ratio, ``%`` a share, ``us`` microseconds more.
        target: None where the figure only informs.
        runs: one value per turn; empty when it could not be measured.
        note: the two absolute numbers behind it, or why there are none.
    """

    name: str
    against: str
    unit: str
    target: Target | None
    runs: tuple[float, ...]
    note: str = ""

    @property
    def value(self) -> float | None:
        """The median of the turns."""
        return statistics.median(self.runs) if self.runs else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The least and the greatest turn."""
        return (min(self.runs), max(self.runs)) if self.runs else None

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return self.target.met(self.value) if self.target else ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"value": self.value, "spread": self.spread, "verdict": self.verdict}


def not_measured(name: str, against: str, why: str, target: Target | None = None) -> Figure:
    """A figure whose line says why there is none."""
    return Figure(name, against, "x", target, (), why)


def alternate(runs: int, *sides: Callable[[], T]) -> list[list[T]]:
    """Call the sides in turn, ABAB, once for warming up and then ``runs`` times; what each returned, per side."""
    for side in sides:
        side()
    results: list[list[T]] = [[] for _ in sides]
    for _ in range(runs):
        for side, found in zip(sides, results, strict=True):
            found.append(side())
    return results


def seconds(work: Callable[[], object]) -> Callable[[], float]:
    """``work``, to be asked how long it took."""

    def timed() -> float:
        started = clock()
        work()
        return clock() - started

    return timed


def ratios(over: Iterable[float], under: Iterable[float]) -> tuple[float, ...]:
    """One ratio per turn: neighbours in time are compared, not averages of an hour."""
    return tuple(a / b for a, b in zip(over, under, strict=True))


def both(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The absolute medians of two lists of seconds, for a note."""
    return f"{_time(statistics.median(ours))} against {_time(statistics.median(theirs))}"


def _time(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def table(figures: Sequence[Figure]) -> str:
    """All figures as aligned text."""
    rows = [("figure", "against", "reach", "aim", "median", "least .. greatest", "", "note")]
    for figure in figures:
        target, spread = figure.target, figure.spread
        sign = "" if target is None else ">= " if target.more_is_better else "<= "
        rows.append(
            (
                figure.name,
                figure.against,
                f"{sign}{target.reach:g} {figure.unit}" if target else "",
                f"{target.aim:g}" if target else "",
                "-" if figure.value is None else f"{figure.value:.3g} {figure.unit}",
                "" if spread is None else f"{spread[0]:.3g} .. {spread[1]:.3g}",
                figure.verdict,
                figure.note,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def report(figures: Sequence[Figure], size: Size, load: Sequence[float]) -> dict[str, Any]:
    """The same as a JSON document, with what the reader must know of the machine."""
    import torch

    from syncer.merge import kernels

    return {
        "size": size.value,
        "cores": os.cpu_count(),
        "load_before": list(load),
        "load_after": list(os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiled_loops": kernels.compiled is not None,
        "figures": [figure.to_json() for figure in figures],
    }


def finite(figure: Figure) -> bool:
    """Were there turns, all of them finite?"""
    return bool(figure.runs) and all(math.isfinite(value) for value in figure.runs)
