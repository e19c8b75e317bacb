"""The pictures of the records; docs/evidence.md shows some, notebooks/05 all. It decides nothing but their look.

A function that is given axes draws on them and says whether there was anything to draw; else the axes say "not run".
Means come with 95 % intervals and, where there is room, with every seed's value: of two seeds an interval is wide.
Figures are made without pyplot, so that whoever imports this keeps a way of their own to show them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.figure import Figure

from experiments.analysis import interval
from experiments.configs import Fleet
from experiments.margins import MARGINS
from experiments.records import Records
from experiments.sections import differences, results
from experiments.specs import ARMS, MERGES, OUTER, Arm, Scale, fleet_at

AGAINST = "loss against {}, %"
SYNCHRONOUS = AGAINST.format("synchronous")
Quantity = Literal["loss", "gain"]


def compared(
    scale: Scale, records: Records, name: str, arms: Sequence[Arm], against: str | None = None
) -> dict[str, list[float]]:
    """Of the arms that have a pair, by label: each seed's difference from synchronous training or another arm, in %."""
    found = {arm.label: differences(scale, records, name, arm.label, against) for arm in arms}
    return {label: values for label, values in found.items() if values}


def gains(scale: Scale, records: Records, name: str, arm: Arm) -> list[float]:
    """Each seed's aligned gain, averaged over fragments and merges."""
    found = results(scale, records, name, arm).values()
    return [fmean(result["gain"]) for result in found]  # type: ignore[arg-type]


def of_map(scale: Scale, records: Records, quantity: Quantity) -> dict[tuple[int, tuple[float, float]], list[float]]:
    """Each seed's value of every cell of the map that was run, by H and (lr, momentum)."""
    cells = {}
    for h in _intervals(scale):
        for outer in OUTER:
            arm = _of_map(scale, h, outer)
            if arm is not None and quantity == "loss":
                cells[h, outer] = differences(scale, records, "e6", arm.label)
            elif arm is not None:
                cells[h, outer] = gains(scale, records, "e6", arm)
    return {at: values for at, values in cells.items() if values}


# ------------------------------------------------------------------------------------------ on given axes


def parity(axes: Axes, scale: Scale, records: Records, task: str = "char") -> bool:
    """Difference from synchronous training over H, one line per number of learners; of char with the claim's margin."""
    for learners in (2, 4):
        arms = [arm for arm in ARMS["e1"][0](scale) if arm.task == task and _fleet(arm).learners == learners]
        _over_intervals(axes, scale, records, "e1", arms, f"{task}, M = {learners}")
    if task == "char":
        bound = MARGINS["parity"].bound
        axes.axhspan(-bound, bound, color="C0", alpha=0.1, linewidth=0, label=f"margin of the claim, ± {bound:g} %")
    return _finished(axes)


def regimes(axes: Axes, scale: Scale, records: Records) -> bool:
    """The same for the outer settings of e6, one line each."""
    for lr, mu in OUTER:
        arms = [arm for h in _intervals(scale) if (arm := _of_map(scale, h, (lr, mu)))]
        _over_intervals(axes, scale, records, "e6", arms, f"lr {lr:g}, momentum {mu:g}")
    return _finished(axes)


def regime_map(axes: Axes, scale: Scale, records: Records, quantity: Quantity) -> bool:
    """H x (lr, momentum) as a heat map of the loss difference or the aligned gain.

    The number is the mean; of a loss it is followed by its interval, and bold where that does not hold 0. A cell that
    was not run is empty.
    """
    cells = of_map(scale, records, quantity)
    if not cells:
        return _empty(axes)
    intervals = sorted({h for h, _ in cells})
    means = {at: fmean(values) for at, values in cells.items()}
    grid = [[means.get((h, outer), math.nan) for h in intervals] for outer in OUTER]
    axes.imshow(grid, cmap="RdBu_r", norm=_colors(means.values(), quantity), aspect="auto")
    for (h, outer), values in cells.items():
        text, weight = _said(values, quantity)
        box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0}
        x, y = intervals.index(h), OUTER.index(outer)
        axes.text(x, y, text, ha="center", va="center", fontsize=8, weight=weight, bbox=box)
    axes.set(title=SYNCHRONOUS if quantity == "loss" else "aligned gain", xlabel="H")
    axes.set_xticks(range(len(intervals)), [str(h) for h in intervals])
    axes.set_yticks(range(len(OUTER)), [f"lr {lr:g}\nmomentum {mu:g}" for lr, mu in OUTER])
    return True


def merges(axes: Axes, scale: Scale, records: Records) -> bool:
    """Difference from synchronous training of every way of merging, one colour per number of learners."""
    counts = sorted({_fleet(arm).learners for arm in ARMS["e5"][0](scale)})
    for number, learners in enumerate(counts):
        arms = [arm for arm in ARMS["e5"][0](scale) if _fleet(arm).learners == learners]
        beside = 0.2 * (number - (len(counts) - 1) / 2)
        places = {arm.label: MERGES.index(_fleet(arm).merge) + beside for arm in arms}
        found = compared(scale, records, "e5", arms)
        _points(axes, {places[label]: values for label, values in found.items()}, f"M = {learners}", line="")
    if not axes.containers:
        return _empty(axes)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(MERGES)), MERGES)
    axes.set(ylabel=SYNCHRONOUS, xlim=(-0.5, len(MERGES) - 0.5))
    axes.legend(fontsize=8)
    return True


def bars(axes: Axes, rows: Mapping[str, Sequence[float]], xlabel: str = SYNCHRONOUS) -> bool:
    """One row per label: every seed's value, mean and interval; the first row on top."""
    known = {label: values for label, values in rows.items() if values}
    if not known:
        return _empty(axes)
    for y, values in enumerate(known.values()):
        axes.plot(values, [y] * len(values), ".", color="C0", alpha=0.35)
        axes.errorbar(fmean(values), y, xerr=_half(values), marker="o", capsize=3, color="C0")
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(known)), list(known))
    axes.set(xlabel=xlabel, ylim=(len(known) - 0.5, -0.5))
    return True


def goodput(axes: Axes, records: Records) -> bool:
    """Every trace's and every real run's goodput; closed forms as ticks."""
    traces = [record["result"] for record in records.of_kind("trace")]
    kills = [record["result"] for record in records.of_kind("kills")]
    rows = [
        ("decoupled, against itself\nwithout failures", traces, "decoupled", "decoupled_bound"),
        ("decoupled, of all\nthat can be made", traces, "of_ideal", "of_ideal_bound"),
        ("synchronous, stalled", traces, "stalled", "stalled_formula"),
        ("synchronous, elastic", traces, "elastic", "elastic_formula"),
        ("real processes:\ndecoupled", kills, "decoupled", ""),
        ("real processes:\nsynchronous", kills, "synchronous", ""),
    ]
    known = [row for row in rows if row[1]]
    if not known:
        return _empty(axes)
    for y, (_, found, key, form) in enumerate(known):
        values = [result[key] for result in found]
        axes.plot(values, [y] * len(values), ".", color="C0", alpha=0.25)
        axes.errorbar(fmean(values), y, xerr=_half(values), marker="o", capsize=3, color="C0")
        if form:
            axes.plot(found[0][form], y, "|", color="C3", markersize=18)
    axes.set_yticks(range(len(known)), [row[0] for row in known])
    axes.set(xlabel="goodput (red: closed form, or its bound)", xlim=(0, 1.05), ylim=(len(known) - 0.5, -0.5))
    return True


def counterpart(scale: Scale, arm: Arm) -> Arm | None:
    """The arm of e6 that differs from ``arm`` in nothing but its guard and its correction, which are the default's."""
    usual = replace(_fleet(arm), guard="off", correction="heloco")
    return next((other for other in ARMS["e6"][0](scale) if other.fleet == usual), None)


# ------------------------------------------------------------------------------------------ for the report


def _parity_picture(scale: Scale, records: Records, folder: Path) -> str | None:
    figure = Figure(figsize=(6, 3.5))
    return _saved(figure, folder, "parity.png") if parity(figure.subplots(), scale, records) else None


def _regimes_picture(scale: Scale, records: Records, folder: Path) -> str | None:
    figure = Figure(figsize=(6, 3.5))
    return _saved(figure, folder, "regimes.png") if regimes(figure.subplots(), scale, records) else None


def _map_picture(scale: Scale, records: Records, folder: Path) -> str | None:
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    drawn = [regime_map(left, scale, records, "loss"), regime_map(right, scale, records, "gain")]
    return _saved(figure, folder, "regime-map.png") if all(drawn) else None


PICTURES: tuple[Callable[[Scale, Records, Path], str | None], ...] = (_parity_picture, _regimes_picture, _map_picture)
"""Each writes a file into a folder and returns its name; None without records to draw."""


# ------------------------------------------------------------------------------------------ how


def _fleet(arm: Arm) -> Fleet:
    assert arm.fleet is not None, arm.label
    return arm.fleet


def _intervals(scale: Scale) -> list[int]:
    """The H of the map."""
    fleets = [arm.fleet for arm in ARMS["e6"][0](scale) if arm.fleet is not None]
    return sorted({f.interval for f in fleets if f == fleet_at(2, f.interval, lr=f.lr, momentum=f.momentum)})


def _of_map(scale: Scale, h: int, outer: tuple[float, float]) -> Arm | None:
    """The arm of e6 that is the default's but for H and the outer step's settings."""
    fleet = fleet_at(2, h, lr=outer[0], momentum=outer[1])
    return next((arm for arm in ARMS["e6"][0](scale) if arm.fleet == fleet), None)


def _colors(means: Iterable[float], quantity: Quantity) -> Normalize:
    """White is 0 % of loss, and a gain of 1: plain averaging's. Losses above 1 % are told apart by their logarithm."""
    if quantity == "loss":
        most = max(10.0, *(abs(mean) for mean in means))
        return SymLogNorm(1.0, vmin=-most, vmax=most)
    most = max(1.0, *(abs(mean - 1) for mean in means))
    return Normalize(1 - most, 1 + most)


def _said(values: Sequence[float], quantity: Quantity) -> tuple[str, str]:
    """A cell's text and its weight."""
    found = interval(values)
    if quantity == "gain":
        return f"{found.mean:.2f}", "normal"
    if found.n < 2:
        return f"{found.mean:+.2f}", "normal"
    text = f"{found.mean:+.2f}\n({found.low:+.2f} to {found.high:+.2f})"
    return text, "normal" if found.low <= 0 <= found.high else "bold"


def _over_intervals(axes: Axes, scale: Scale, records: Records, name: str, arms: Sequence[Arm], label: str) -> None:
    """Arms of which each has an H of its own, as one line."""
    found = {_fleet(arm).interval: differences(scale, records, name, arm.label) for arm in arms}
    _points(axes, {h: values for h, values in found.items() if values}, label, line="-")


def _points(axes: Axes, at: Mapping[float, Sequence[float]], label: str, line: str) -> None:
    if at:
        means = [fmean(values) for values in at.values()]
        halves = [_half(values) for values in at.values()]
        axes.errorbar(list(at), means, halves, marker="o", capsize=3, label=label, linestyle=line)


def _half(values: Sequence[float]) -> float:
    """Half of the interval's length; 0 (nothing is drawn) for a single value."""
    found = interval(values)
    return found.high - found.mean if found.n > 1 else 0.0


def _finished(axes: Axes) -> bool:
    """Axes over H, if a line was drawn."""
    if not axes.containers:
        return _empty(axes)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="H, local steps between merges of a fragment", ylabel=SYNCHRONOUS)
    shown = sorted({x for container in axes.containers for x in container[0].get_xdata()})
    axes.set_xticks(shown, [f"{x:g}" for x in shown], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return True


def _empty(axes: Axes) -> bool:
    """Beside pictures of what was run."""
    axes.clear()
    axes.set_axis_off()
    axes.text(0.5, 0.5, "not run", ha="center", va="center", transform=axes.transAxes)
    return False


def _saved(figure: Figure, folder: Path, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / name, dpi=120, bbox_inches="tight")
    return name
