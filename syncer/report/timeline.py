"""The pictures of a run over the clock: how far it was when, how many bytes had come, and what happened meanwhile.

It decides what stands on which axis, and nothing about the run. It must not know HTML, files, or any text of a tape
but the names of events it expects.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from syncer.report import words
from syncer.report.columns import Event
from syncer.report.facts import Facts
from syncer.report.style import BLUE, INK, MUTED, ORANGE, RED, TEAL, legend, picture

_LANES = {"start": INK, "join": TEAL, "leave": ORANGE, "retry": RED, "reject": RED, "cutoff": INK}
_LANES |= {"final": BLUE, "end": INK}
_RATES = 120  # of bytes, over the run
_MARKS = 400  # places on a lane; what is closer together is one mark


def pace(facts: Facts) -> str:
    """Rounds over time, and below it the bytes of answers per second; a restart is a line."""
    series, summary = facts.series, facts.summary
    unit, name = _unit(summary.duration_s)
    began = min(float(series.time[0]), summary.began)
    seconds = np.append(0.0, np.maximum.accumulate(series.time - began))  # a clock may have been set back
    rounds = np.append(0.0, series.ends)
    edges = np.linspace(0.0, max(summary.duration_s, 1e-3), _RATES + 1)
    rate = np.diff(np.interp(edges, seconds, np.append(0.0, series.nbytes_total))) / edges[1]

    def draw(above: Axes, below: Axes) -> None:
        above.plot(seconds / unit, rounds, color=BLUE)
        above.set_ylim(0, 1.04 * max(rounds.max(), 1))
        above.yaxis.set_major_formatter(FuncFormatter(lambda y, _: words.count(y)))
        above.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        above.set_ylabel("rounds")
        above.tick_params(labelcolor=INK)
        below.fill_between(edges / unit, np.append(rate, rate[-1]), step="post", color=TEAL, lw=0)
        below.set_ylim(0, 1.1 * max(rate.max(), 1))
        below.yaxis.set_major_formatter(EngFormatter(unit="B/s", sep=" ", places=None))
        below.yaxis.set_major_locator(MaxNLocator(3))
        below.set_ylabel("answers")
        restarts = [(event.time - began) / unit for event in facts.events if event.name == "start"][1:]
        for number, restart in enumerate(restarts[:_MARKS]):
            above.axvline(restart, color=MUTED, lw=1, ls=":", label=None if number else "the syncer starts again")
        if restarts:
            legend(above)
        _clock(below, summary.duration_s / unit, name)

    return picture("pace", draw, 3.4, (3, 1))


def events(facts: Facts) -> str:
    """One lane per kind of event; the number at its end counts them."""
    began, duration_s = facts.summary.began, facts.summary.duration_s
    unit, name = _unit(duration_s)
    lanes = [lane for lane in _LANES if any(event.name == lane for event in facts.events)]
    strange = [event for event in facts.events if event.name not in _LANES]

    def draw(axes: Axes) -> None:
        rows = [(lane, [e for e in facts.events if e.name == lane], _LANES[lane]) for lane in lanes]
        rows += [("other", strange, MUTED)] if strange else []
        for place, (_, members, colour) in enumerate(rows):
            at = _places(members, began, duration_s) / unit
            axes.plot(at, np.full(len(at), place), "|", color=colour, ms=13, mew=1.8)
            edge = (1.01, place)
            axes.annotate(f"{len(members)}", edge, xycoords=("axes fraction", "data"), va="center", color=MUTED)
        axes.set_yticks(range(len(rows)), [lane for lane, _, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        _clock(axes, duration_s / unit, name)

    return picture("events", draw, 0.8 + 0.28 * max(len(lanes) + bool(strange), 2))


def _places(members: Sequence[Event], began: float, duration_s: float) -> np.ndarray:
    """Seconds since the beginning, those that would fall on one another once."""
    at = np.array([event.time - began for event in members])
    pitch = duration_s / _MARKS
    if len(at) <= _MARKS or not pitch:
        return at
    _, first = np.unique(np.floor(at / pitch), return_index=True)
    return at[np.sort(first)]


def _unit(seconds: float) -> tuple[float, str]:
    units = (86400, "days"), (3600, "hours"), (60, "minutes")
    return next((unit for unit in units if seconds >= 2 * unit[0]), (1, "seconds"))


def _clock(axes: Axes, end: float, name: str) -> None:
    axes.set_xlim(0, end or 1)
    axes.xaxis.set_major_locator(MaxNLocator(9))
    axes.set_xlabel(f"{name} since the beginning", loc="right", color=MUTED)
    axes.tick_params(labelcolor=INK)
