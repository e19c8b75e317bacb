"""How the pictures look: colours, type, and a figure as inline SVG.

It decides nothing about a run. Text stays text (it can be selected, and takes the page's font); identifiers are made
unique, as all pictures share one page. Nothing from a tape but numbers may become part of a picture.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

WIDTH_IN = 10.0
INK, MUTED, GRID, SURFACE, EMPTY = "#1f1f1d", "#6f6e69", "#e8e6e0", "#ffffff", "#efede8"
BLUE, ORANGE, TEAL, RED = "#2a78d6", "#eb6834", "#1baf7a", "#d03b3b"
LEARNERS = (BLUE, TEAL, "#eda100", "#4a3aa7", "#e87ba4", "#008300", ORANGE, "#7a5c3e")
OTHERS = "#b9b7b0"
AGES = ("#9cc4f2", "#4f95e4", "#1f5fae", "#0d2f5e")  # the older the darker

_RC: dict[RcKeyType, object] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # measured with it; the page's own font is narrower
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelsize": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.borderaxespad": 0.2,
    "legend.handlelength": 1.1,
    "legend.handleheight": 0.9,
    "legend.columnspacing": 1.4,
    "legend.borderpad": 0,
    "axes.formatter.useoffset": False,
    "path.simplify": True,
}


def picture(name: str, draw: Callable[..., None], height_in: float = 2.6, rows: tuple[int, ...] = (1,)) -> str:
    """An ``<svg>`` element that scales with the page; ``name`` is unique on it.

    ``draw`` gets one pair of axes per entry of ``rows``, their relative heights; they share the x axis.
    """
    with rc_context({**_RC, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained", facecolor=SURFACE)
        grid = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=rows)
        draw(*grid[:, 0])
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    for before in ('id="', "url(#", 'href="#'):
        svg = svg.replace(before, f"{before}{name}-")
    return svg.replace("<svg", f'<svg role="img" aria-labelledby="{name}-title"', 1)


def legend(axes: Axes) -> None:
    """Above the axes, left, in one row."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=8)
