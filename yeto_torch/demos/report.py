"""The result of the demonstration: the table, the sentence under it, ``result.json`` and ``curves.png``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only; works without a display
from matplotlib import pyplot as plt
from rich import box
from rich.console import Console
from rich.table import Table

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
class Arm:
    """One training as it is drawn.

    Attributes:
        label: in the legend.
        points: (samples, accuracy, loss) of its model as it trains. All arms are evaluated on all of the held-out data,
            when they have seen as many samples as the fleet had at its own evaluations; no value is smoothed.
        end: of its final model.
    """

    label: str
    points: list[tuple[int, float, float]]
    end: Trained


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


def save(path: Path, results: list[Result], options: Mapping[str, object]) -> None:
    """Everything the table was made of, as JSON."""
    document = {"options": options, "findings": findings(results), "seeds": [asdict(result) for result in results]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, title: str, arms: list[Arm]) -> None:
    """Held-out loss and accuracy over samples, all arms by one rule: a line through the points, a dot at the end."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, arm in enumerate(arms):
        samples, accuracies, losses = zip(*arm.points, strict=True)
        for axes, values, end in ((left, losses, arm.end.loss), (right, accuracies, arm.end.accuracy)):
            axes.plot(samples, values, label=arm.label, color=f"C{number}", alpha=0.8)
            axes.plot([arm.end.samples], [end], "o", color=f"C{number}")
    left.set(ylabel="loss on held-out data, nats", yscale="log", title=title)
    right.set(ylabel="accuracy on held-out data, %", title="line: as it trains, dot: final model")
    for axes in (left, right):
        axes.set(xlabel="samples seen, of all learners together")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
