"""The report's pictures. It decides nothing but their look."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.analysis import interval
from experiments.records import Records
from experiments.sections import differences
from experiments.specs import ARMS, OUTER, Scale


def parity(scale: Scale, records: Records, folder: Path) -> str | None:
    """Difference from synchronous training over H, one line per number of learners; None without records."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for learners in (2, 4):
        labels = [a.label for a in ARMS["e1"][0](scale) if a.label.startswith(f"char, M = {learners},")]
        _line(axes, scale, records, "e1", {label: _interval_of(label) for label in labels}, f"M = {learners}")
    return _saved(figure, axes, folder, "parity.png")


def regimes(scale: Scale, records: Records, folder: Path) -> str | None:
    """The same for the outer settings of e6."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for lr, mu in OUTER:
        ending = f", lr {lr:g}, momentum {mu:g}"
        labels = [a.label for a in ARMS["e6"][0](scale) if a.label.endswith(ending)]
        _line(axes, scale, records, "e6", {label: _interval_of(label) for label in labels}, ending[2:])
    return _saved(figure, axes, folder, "regimes.png")


def _interval_of(label: str) -> int:
    return int(label.split("H = ")[1].split(",")[0])


def _line(axes: Axes, scale: Scale, records: Records, name: str, points: dict[str, int], label: str) -> None:
    found = {h: differences(scale, records, name, arm) for arm, h in points.items()}
    known = {h: interval(values) for h, values in found.items() if len(values) > 1}
    if known:
        means = [i.mean for i in known.values()]
        errors = [i.high - i.mean for i in known.values()]
        axes.errorbar(list(known), means, errors, marker="o", capsize=3, label=label)


def _saved(figure: Figure, axes: Axes, folder: Path, name: str) -> str | None:
    is_drawn = bool(axes.containers)
    if is_drawn:
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set(
            xscale="log", xlabel="H, local steps between merges of a fragment", ylabel="loss against synchronous, %"
        )
        axes.legend()
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / name, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return name if is_drawn else None
