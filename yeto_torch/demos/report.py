"""The result of the demonstration: the table, the sentence under it, ``result.json`` and ``curves.png``."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; works without a display
from matplotlib import pyplot as plt
from rich import box
from rich.console import Console
from rich.table import Table

from yeto_torch.demos.baselines import Curve
from yeto_torch.demos.progress import megabytes

GRADIENT_BYTES = 4  # a value of a gradient in f32


@dataclass(frozen=True)
class Trained:
    """One training of one seed."""

    name: str
    accuracy: float  # percent, held-out
    loss: float  # nats, held-out
    steps: float  # per learner
    samples: int  # of all learners
    bytes_moved: int | None  # sent and received, of all learners; None where nothing is exchanged


@dataclass(frozen=True)
class Result:
    """One seed: the fleet first, then what it is compared with."""

    seed: int
    fleet: Trained
    alone: list[Trained]
    synchronous: Trained
    outer_steps: int
    seconds: float  # of the fleet, start of the processes included


def gradient_bytes(parameters: int, steps: float, learners: int) -> int:
    """What exchanging every step's f32 gradient moves: each learner sends one and receives one a step."""
    return round(2 * learners * steps * parameters * GRADIENT_BYTES)


def show(console: Console, results: list[Result]) -> None:
    """Print the table over all seeds and what it says."""
    title = f"{len(results)} seeds: mean ± standard deviation" if results[1:] else None
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("held-out result of", no_wrap=True)
    for column in ("accuracy, %", "loss", "steps", "samples", "moved"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [[result.fleet, *result.alone, result.synchronous] for result in results]
    for runs in zip(*rows, strict=True):
        moved = statistics.mean(run.bytes_moved or 0 for run in runs)
        table.add_row(
            runs[0].name,
            _spread([run.accuracy for run in runs], 1),
            _spread([run.loss for run in runs], 3),
            f"{statistics.mean(run.steps for run in runs):.0f}",
            f"{statistics.mean(run.samples for run in runs):,.0f}",
            megabytes(moved) if moved else "none",
        )
    console.print(table)
    for sentence in findings(results):
        console.print(sentence, highlight=False, soft_wrap=True)


def findings(results: list[Result]) -> list[str]:
    """The comparison in sentences; differences are in points of held-out accuracy, paired by seed."""
    to_sync = [r.fleet.accuracy - r.synchronous.accuracy for r in results]
    to_best = [r.fleet.accuracy - max(alone.accuracy for alone in r.alone) for r in results]
    ratio = [(r.synchronous.bytes_moved or 0) / max(1, r.fleet.bytes_moved or 0) for r in results]
    lone = "the better lone learner" if results[0].alone[1:] else "the lone learner"
    return [
        f"Fleet against synchronous training: {_spread(to_sync, 1, sign=True)} points of accuracy.",
        f"Fleet against {lone}: {_spread(to_best, 1, sign=True)} points of accuracy.",
        f"Bytes: {statistics.mean(ratio):.0f} times fewer than exchanging an f32 gradient every step.",
    ]


def _spread(values: list[float], digits: int, *, sign: bool = False) -> str:
    mean = f"{statistics.mean(values):{'+' if sign else ''}.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def save(path: Path, results: list[Result], options: dict[str, Any]) -> None:
    """Everything the table was made of, as JSON."""
    document = {"options": options, "findings": findings(results), "seeds": [asdict(result) for result in results]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, title: str, fleet: list[Curve], final_accuracy: float, others: dict[str, Curve]) -> None:
    """Loss and held-out accuracy over steps; ``fleet`` has one curve per learner, the first with held-out accuracy."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, curve in enumerate(fleet):
        left.plot(*_smooth(curve.loss), label=f"fleet, learner {number}", color=f"C{number}")
    right.plot(*_columns(fleet[0].held_out_accuracy), label="fleet, learner 0 as it trains", color="C0", alpha=0.7)
    right.axhline(final_accuracy, label="fleet, final model", color="C0", linestyle="--")
    for number, (name, curve) in enumerate(others.items(), start=len(fleet)):
        left.plot(*_smooth(curve.loss), label=name, color=f"C{number}", alpha=0.8)
        right.plot(*_columns(curve.held_out_accuracy), label=name, color=f"C{number}", alpha=0.8)
    left.set(xlabel="inner steps of a learner", ylabel="training loss", yscale="log", title=title)
    right.set(xlabel="inner steps of a learner", ylabel="held-out accuracy, %", title="held-out data")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _smooth(points: list[tuple[int, float]], keep: float = 0.9) -> tuple[list[int], list[float]]:
    """An exponential average, unbiased at the start."""
    steps, values = _columns(points)
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        out.append(total / weight)
    return steps, out
