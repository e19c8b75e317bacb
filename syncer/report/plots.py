"""The pictures of a run over its rounds, each one function of the series.

It decides what stands on which axis, and nothing about the run. It must not know HTML, files, or any text of a tape:
learners and fragments are numbers, reasons of rejections are counted elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from syncer.config.policy import DRIVE_LIMIT
from syncer.report import words
from syncer.report.checks import Numbers
from syncer.report.series import BEHIND, Series
from syncer.report.style import AGES, BLUE, EMPTY, INK, LEARNERS, MUTED, ORANGE, OTHERS, RED, TEAL, legend, picture

ROWS = 24  # learners with a row of their own in the picture of participation
_FRAGMENT_LINES = 8  # more are shown as one band
_LOG_SPREAD = 30.0  # a longest round this many times the middle one calls for a logarithmic axis
_DRIVE_SPREAD = 10.0  # beyond, the axis is logarithmic
_DOTS = 60  # so few columns are marked one by one


def latency(series: Series) -> str:
    """From launch to commit, and how long of it the quorum took."""
    x, band = _middles(series), series.ms

    def draw(axes: Axes) -> None:
        axes.fill_between(x, band.low / 1e3, band.high / 1e3, color=BLUE, alpha=0.16, lw=0, label="shortest to longest")
        axes.plot(x, band.middle / 1e3, color=BLUE, label="round", marker=_marker(series), ms=3.5)
        axes.plot(x, series.quorum_ms / 1e3, color=TEAL, lw=1.4, label="until the quorum had answered")
        axes.plot(x, series.sync_ms / 1e3, color=ORANGE, lw=1.4, label="merge and commit")
        _seconds(axes, band.high, band.middle)

    return _over_rounds(series, "latency", draw)


def participation(series: Series, ids: tuple[int, ...]) -> str:
    """One row per learner: answered, missed, not there; those that missed most first if there are too many."""
    rows = np.argsort(-series.missed.sum(axis=1), kind="stable")[:ROWS] if len(ids) > ROWS else np.arange(len(ids))
    rows = np.sort(rows)

    def draw(axes: Axes) -> None:
        for place, row in enumerate(rows):
            _strip(axes, series, place, series.answered[row], series.missed[row])
        for colour, label in ((BLUE, "answered"), (ORANGE, "captured, but no answer in time"), (EMPTY, "not there")):
            axes.fill_between([], [], color=colour, lw=0, label=label)
        axes.set_ylim(len(rows) - 0.1, -0.1)
        axes.set_yticks(np.arange(len(rows)) + 0.4, [f"learner {ids[row]}" for row in rows])
        axes.grid(False)

    return _over_rounds(series, "participation", draw, 0.9 + 0.3 * max(len(rows), 2))


def _strip(axes: Axes, series: Series, place: int, answered: Numbers, missed: Numbers) -> None:
    """A row from ``place + 0.8`` (its foot) up to ``place``: shares of every column, stacked."""
    foot, height = place + 0.8, 0.8
    first, second = foot - height * answered, foot - height * (answered + missed)
    top = np.full_like(answered, place)
    for low, high, colour in ((np.full_like(top, foot), first, BLUE), (first, second, ORANGE), (second, top, EMPTY)):
        if not np.allclose(low, high):
            axes.fill_between(series.step, _stepped(low), _stepped(high), step="post", color=colour, lw=0)


def staleness(series: Series) -> str:
    """The answers that were behind, by how many versions, as shares of each column's answers; the rest was fresh."""
    late = series.behind[1:]

    def draw(axes: Axes) -> None:
        labels = ["1 version behind", *map(str, range(2, BEHIND)), f"{BEHIND} or more"]
        _stack(axes, series, late, labels, AGES)
        axes.set_ylabel("of the answers")
        most = min(1.0, 1.1 * float(late.sum(axis=0).max()))
        axes.set_ylim(0, most)
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if most > 0.03 else 2, symbol=" %"))

    return _over_rounds(series, "staleness", draw, 2.0)


def contributions(series: Series, ids: tuple[int, ...]) -> str:
    """Each learner's part of the merges; the smallest are one area when there are more learners than colours."""
    order = np.argsort(-series.contribution.sum(axis=1), kind="stable")
    own = np.sort(order[: len(LEARNERS) if len(ids) <= len(LEARNERS) else len(LEARNERS) - 1])
    rest = [row for row in range(len(ids)) if row not in own]
    areas, labels, colours = series.contribution[own], [f"learner {ids[row]}" for row in own], [*LEARNERS[: len(own)]]
    if rest:
        areas = np.vstack([areas, series.contribution[rest].sum(axis=0)])
        labels, colours = [*labels, f"{len(rest)} others"], [*colours, OTHERS]

    def draw(axes: Axes) -> None:
        _stack(axes, series, areas, labels, colours)
        axes.set_ylabel("part of the merge")
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.5, 1])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))

    return _over_rounds(series, "contributions", draw, 2.4)


def norms(series: Series) -> str:
    """The length of the merged outer gradient, per fragment if there are few."""
    x, fragments = _middles(series), len(series.gnorm_by_fragment)

    def draw(axes: Axes) -> None:
        if fragments <= _FRAGMENT_LINES:
            for fragment, line in enumerate(series.gnorm_by_fragment):
                there = ~np.isnan(line)
                colour = colormaps["viridis"](0.85 * fragment / max(fragments - 1, 1))
                axes.plot(x[there], line[there], color=colour, lw=1.4, label=f"fragment {fragment}")
        else:
            band = series.gnorm
            axes.fill_between(x, band.low, band.high, color=BLUE, alpha=0.16, lw=0, label="all fragments")
            axes.plot(x, band.middle, color=BLUE, label="middle one")
        if np.nanmax(series.gnorm.high, initial=0.0) > 0:
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("norm of the merged gradient")

    return _over_rounds(series, "norms", draw, 2.8)


def drive(series: Series) -> str:
    """How hard the outer step drives, where its band ends, and what the learners' answers say of each other."""
    x, band = _middles(series), series.drive

    def draw(axes: Axes) -> None:
        axes.fill_between(x, band.low, band.high, color=BLUE, alpha=0.16, lw=0)
        axes.plot(x, band.middle, color=BLUE, label="drive", marker=_marker(series), ms=3.5)
        axes.plot(x, series.agreement, color=TEAL, lw=1.4, label="agreement of the learners")
        axes.plot(x, series.lag_cosine, color=ORANGE, lw=1.4, label="cosine with the momentum")
        axes.plot(x, series.momentum, color=OTHERS, lw=1.4, label="momentum coefficient")
        axes.axhline(DRIVE_LIMIT, color=RED, lw=1.0, ls="--")
        least, most = (float(extreme) for extreme in (np.nanmin(band.low), np.nanmax(band.high)))
        if max(-least, most) > _DRIVE_SPREAD:
            axes.set_yscale("symlog", linthresh=_DRIVE_SPREAD)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))

    return _over_rounds(series, "drive", draw, 2.4)


def trouble(series: Series) -> str:
    """Answers that did not count, and further attempts, per column."""
    rejected = sum(series.rejected.values(), np.zeros(len(series.retries)))

    def draw(axes: Axes) -> None:
        width = np.diff(series.step)
        bars = partial(axes.bar, series.step[:-1], width=width, align="edge")
        bars(rejected, color=ORANGE, label="answers not counted")
        bars(series.retries, bottom=rejected, color=RED, label="further attempts")
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.set_ylabel("in a round" if series.per_column == 1 else f"in {series.per_column} rounds")

    return _over_rounds(series, "trouble", draw, 1.9)


# ------------------------------------------------------------------ shared by the pictures above


def _middles(series: Series) -> Numbers:
    if series.per_column == 1:
        return series.step[:-1]
    return (series.step[:-1] + series.step[1:] - 1) / 2


def _stepped(values: Numbers) -> Numbers:
    """[C + 1] for step="post": a column keeps its value up to its end."""
    return np.append(values, values[-1])


def _stack(axes: Axes, series: Series, areas: Numbers, labels: list[str], colours: list[str] | tuple[str, ...]) -> None:
    low = np.zeros(areas.shape[1])
    for area, label, colour in zip(areas, labels, colours, strict=True):
        high = low + area
        axes.fill_between(series.step, _stepped(low), _stepped(high), step="post", color=colour, lw=0, label=label)
        low = high


def _marker(series: Series) -> str:
    return "o" if len(series.retries) <= _DOTS else ""


def _over_rounds(series: Series, name: str, draw: Callable[[Axes], None], height_in: float = 2.6) -> str:
    """What ``draw`` draws, over an axis of rounds and under a legend."""

    def whole(axes: Axes) -> None:
        draw(axes)
        axes.set_xlim(series.step[0], series.step[-1])
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: words.count(x)))
        axes.set_xlabel("round", loc="right", color=MUTED)
        axes.tick_params(axis="both", labelcolor=INK)
        legend(axes)

    return picture(name, whole, height_in)


def _seconds(axes: Axes, high: Numbers, middle: Numbers) -> None:
    longest, usual = float(np.nanmax(high)), float(np.nanmedian(middle))
    if longest > _LOG_SPREAD * max(usual, 1e-9):
        axes.set_yscale("log", nonpositive="mask")
    else:
        axes.set_ylim(0, 1.05 * longest / 1e3 or 1.0)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(EngFormatter(unit="s", sep=" "))
