"""What a learner without a syncer is told instead: the rules a syncer would have.

Decides what is legal. It must not know tensors, or what the rules lead to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from yeto_torch.wire.profile import CORRECTION, PLAIN, SPECTRUM, Correction, Spectrum

LOCAL = "local"  # what stands in the place of a syncer's address


@dataclass(frozen=True, slots=True)
class LocalRules:
    """What a syncer would be told; the defaults are those of its preset ``balanced``.

    Attributes:
        sync_interval_steps: H, steps between two merges of one fragment.
        lr: of the outer step.
        momentum: of the outer step.
        delta_correction: directional correction of what is merged.
        iso_scale: what the flat spectrum is set to, for ``matrix_merge="iso"``.
    """

    sync_interval_steps: float = PLAIN.sync_interval_steps
    lr: float = PLAIN.outer_lr
    momentum: float = PLAIN.outer_momentum
    delta_correction: Correction = CORRECTION
    iso_scale: Spectrum = SPECTRUM

    def __post_init__(self) -> None:
        _check("sync_interval_steps", self.sync_interval_steps, "a number from 1", low=1.0)
        _check("lr", self.lr, "a number above 0", low=math.ulp(0.0))
        _check("momentum", self.momentum, "a number from 0, below 1", low=0.0, below=1.0)
        for name, legal in (("delta_correction", get_args(Correction)), ("iso_scale", get_args(Spectrum))):
            if getattr(self, name) not in legal:
                raise ValueError(f"local[{name!r}]={getattr(self, name)!r}: must be one of {', '.join(legal)}")

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> LocalRules:
        """Raises ValueError naming the key, the value and what is legal."""
        known = [item.name for item in fields(LocalRules)]
        for key in given or {}:
            if key not in known:
                raise ValueError(f"local: unknown key {key!r}; known are {', '.join(known)}")
        return LocalRules(**(given or {}))


def _check(name: str, value: object, legal: str, *, low: float, below: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < below:
        raise ValueError(f"local[{name!r}]={value!r}: must be {legal}")
