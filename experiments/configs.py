"""What one run is, as plain values: every run is named by them, and is never made twice.

Decides the defaults (the product's own where it has one) and the name of a run. It must not know results.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from yeto_torch.wire.constants import MergeMode

MERGES = ("avg", "avg-norm", "rda", "iso-mean", "iso-norm")
WIRES = ("f32", "bf16", "q4", "q2")
CORRECTIONS = ("heloco", "heloco-normalized", "none")
GUARDS = ("off", "cap")


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet in lockstep: one round at a time, all members answer.

    Attributes:
        interval: H, local steps from one merge of a fragment to its next; a multiple of ``fragments``.
        wire: ``q2`` is no wire dtype of the product but a bad one, for a test that must fail.
        merge: ``avg-norm`` is the mean's direction at rda's length.
        correction, guard: as the product's ``merge.delta_correction`` and ``outer.guard``.
        lr, momentum: of the outer step.
        iso_lr, iso_momentum: of that of iso fragments, as the product's ``outer.iso_lr``; None = as the others.
        delays: per learner the local steps by which a broadcast comes late; () = none does.
        speeds: per learner, 1 = one step a tick; () = all 1.
        absences: (learner, first tick, tick of the return): it comes back as a new process.
    """

    learners: int = 2
    interval: int = 24
    fragments: int = 4
    wire: str = "bf16"
    merge: str = "rda"
    correction: str = "heloco"
    guard: str = "off"
    lr: float = 0.7
    momentum: float = 0.5
    delays: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    absences: tuple[tuple[int, int, int], ...] = ()
    iso_lr: float | None = None
    iso_momentum: float | None = None

    def __post_init__(self) -> None:
        _require("merge", self.merge, self.merge in MERGES, f"one of {', '.join(MERGES)}")
        _require("wire", self.wire, self.wire in WIRES, f"one of {', '.join(WIRES)}")
        _require("correction", self.correction, self.correction in CORRECTIONS, f"one of {', '.join(CORRECTIONS)}")
        _require("guard", self.guard, self.guard in GUARDS, f"one of {', '.join(GUARDS)}")
        whole = self.interval >= 1 and self.interval % self.fragments == 0
        _require("interval", self.interval, whole, f"a multiple of the {self.fragments} fragments")
        for name in ("delays", "speeds"):
            given = getattr(self, name)
            _require(name, given, len(given) in (0, self.learners), f"one value for each of {self.learners} learners")
        _require("speeds", self.speeds, all(0 < speed <= 1 for speed in self.speeds), "above 0 and at most 1")

    @property
    def steps_per_round(self) -> int:
        return self.interval // self.fragments

    def outer(self, mode: MergeMode) -> tuple[float, float]:
        """Learning rate and momentum of the outer step of a fragment that is merged so."""
        if mode is not MergeMode.ISO:
            return self.lr, self.momentum
        lr = self.lr if self.iso_lr is None else self.iso_lr
        return lr, self.momentum if self.iso_momentum is None else self.iso_momentum


@dataclass(frozen=True, slots=True)
class Training:
    """One training run; without a fleet it is the synchronous baseline.

    Attributes:
        steps: global batches in all, the same for every arm.
        warm_steps: of them, made synchronously by every arm before it goes its way.
        inner: the optimizer inside, as ``experiments.inner`` names it.
    """

    task: str
    seed: int
    peak_lr: float
    steps: int = 640
    warm_steps: int = 160
    fleet: Fleet | None = None
    inner: str = "adamw"

    def __post_init__(self) -> None:
        _require("warm_steps", self.warm_steps, 0 <= self.warm_steps < self.steps, f"0 to {self.steps - 1}")


@dataclass(frozen=True, slots=True)
class Alone:
    """One machine under ``syncer="local"``: no fleet, the same outer step; the rest is as in ``Training``.

    Attributes:
        interval: H, as ``local["sync_interval_steps"]``.
        merge: the product's ``matrix_merge``; of one answer ``rda`` is the answer itself.
        lr, momentum: of the outer step.
    """

    task: str
    seed: int
    peak_lr: float
    interval: int = 24
    fragments: int = 4
    merge: str = "rda"
    lr: float = 0.7
    momentum: float = 0.5
    steps: int = 640
    warm_steps: int = 160
    iso_lr: float | None = None
    iso_momentum: float | None = None
    inner: str = "adamw"

    @property
    def baseline(self) -> Training:
        """The plain optimizer."""
        return Training(self.task, self.seed, self.peak_lr, self.steps, self.warm_steps, inner=self.inner)


def _require(name: str, value: object, is_legal: bool, legal: str) -> None:
    if not is_legal:
        raise ValueError(f"{name}={value!r}: must be {legal}")


def plain(config: Any) -> dict[str, Any]:
    """A dataclass as JSON would give it back: lists for tuples.

    What came later (``_LATER``) is named only where it is not at its default, so that runs made before keep their keys.
    """
    out: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    for values in (out, out.get("fleet") or {}):
        for name, default in _LATER.items():
            if name in values and values[name] == default:
                del values[name]
    return out


_LATER = {"iso_lr": None, "iso_momentum": None, "inner": "adamw"}


def training(values: dict[str, Any]) -> Training:
    """What ``plain`` made of a Training. Raises TypeError and ValueError for anything else."""
    fleet = values["fleet"]
    if fleet is not None:
        absences = tuple((int(a), int(b), int(c)) for a, b, c in fleet["absences"])
        fleet = Fleet(
            **fleet | {"delays": tuple(fleet["delays"]), "speeds": tuple(fleet["speeds"]), "absences": absences}
        )
    return Training(**values | {"fleet": fleet})


def key_of(kind: str, config: dict[str, Any]) -> str:
    """The name of a run: of equal values the same in every process and version of Python."""
    text = json.dumps([kind, config], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
