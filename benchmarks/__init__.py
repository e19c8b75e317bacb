"""Measurements of yeto-torch, each a ratio against a limit or a rival: ``python -m benchmarks``, see README.md.

A figure's module has ``measure(size, start)``, which yields its lines. They are imported when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.harness import Figure, Size

FIGURES = ("step", "stall", "wire", "codec", "merge", "round", "memory", "scale", "checkpoint", "start", "gpu")


def figures(name: str, size: Size, *start: Any) -> list[Figure]:
    """The lines of one figure. Raises ValueError for a name that is none of ``FIGURES``."""
    if name not in FIGURES:
        raise ValueError(f"figure {name!r}: expected one of {', '.join(FIGURES)}")
    return list(import_module(f"benchmarks.{name}").measure(size, *start))
