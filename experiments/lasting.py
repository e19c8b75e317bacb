"""The second set of evidence, which is to last: its settings, arms, seeds, and what is chosen by which rule.

Decides what is run, and in which order, from the records there are. It must not know how a run is made or judged. The
claims are ``margins.LASTING``; both were committed before anything of this set was run.

1. *The baseline* of a setting (task, run length, batch, inner optimizer) is synchronous training at the peak with the
   lowest mean loss over ``TUNING_SEEDS``. If that peak is the first or last of its grid, the grid goes on there by a
   factor of two, until it is not.
2. *The outer step* of a merge is the pair of ``OUTER`` with the lowest mean loss relative to the baseline, over
   ``TUNING_SEEDS``, M = 2 and 4, H = 24, in the setting ``MAIN``. It is tuned there once and used everywhere.
   Averaged fragments keep the default preset's step in an iso fleet, as ``outer.iso_lr`` has it.
3. *The arms* are then run on ``SEEDS``, which nothing was tuned on: those with a claim on all, others on the first few.
4. *The default* merge and outer step become those with the lowest mean over the grid's cells, unless they are worse
   than today's (rda, 0.7, 0.5), which is an arm of every cell, by more than 0.5 percent of the baseline's loss in any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.configs import Alone, Fleet, Training, plain
from experiments.records import Records
from experiments.specs import Job

TUNING_SEEDS = (100, 101, 102)
SEEDS = tuple(range(200, 210))
FEW = SEEDS[:4]  # of what claims nothing

MERGES = ("rda", "avg", "iso-norm")
TODAY = (0.7, 0.5)
OUTER: dict[str, tuple[tuple[float, float], ...]] = {
    "rda": (TODAY, (0.7, 0.7), (1.0, 0.5)),
    "avg": (TODAY, (1.0, 0.0), (1.0, 0.5)),
    "iso-norm": (TODAY, (1.0, 0.5), (1.0, 0.7), (1.4, 0.5)),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What a baseline is tuned for.

    Attributes:
        rates: peaks to begin with, each twice the one before.
        warm_steps: made synchronously by every arm.
    """

    task: str
    steps: int
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3)
    inner: str = "adamw"

    @property
    def warm_steps(self) -> int:
        return self.steps // 4

    @property
    def name(self) -> str:
        inner = "" if self.inner == "adamw" else f", {self.inner}"
        return f"{self.task}, {self.steps} steps{inner}"


MAIN = Setting("char-30k", 1600, (4e-3, 8e-3, 16e-3))
MUON = Setting("char-30k", 1600, (4e-3, 8e-3, 16e-3), "muon")
OTHERS = (
    Setting("char-30k", 640, (4e-3, 8e-3, 16e-3)),
    Setting("char", 640),
    Setting("char-30k-b64", 1600, (4e-3, 8e-3, 16e-3)),
    MUON,
    Setting("digits", 640, (1e-3, 2e-3, 4e-3)),
    Setting("char", 1600),
    Setting("char-30k", 4000, (4e-3, 8e-3, 16e-3)),
    Setting("char-1m", 640, (1e-3, 2e-3, 4e-3)),
)
"""In the order in which they are run."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A fleet, or with no learners the same outer step on one machine; ``outer`` None is the step chosen by rule 2."""

    setting: Setting
    merge: str
    learners: int
    interval: int = 24
    seeds: tuple[int, ...] = FEW
    outer: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        today = " as today" if self.outer else ""
        fleet = f"M = {self.learners}, H = {self.interval}" if self.learners else f"one machine, H = {self.interval}"
        return f"{self.setting.name}: {self.merge}{today}, {fleet}"


def arms() -> list[Arm]:
    """All of them, what claims something first."""
    claiming = [Arm(MAIN, merge, m, seeds=SEEDS) for m in (2, 4) for merge in ("iso-norm", "rda")]
    cells = [(MAIN, m, 24) for m in (2, 4)]
    cells += [(MAIN, m, h) for h in (8, 80) for m in (2, 4)] + [(MAIN, 8, h) for h in (8, 24, 80)]
    cells += [(setting, m, 24) for setting in OTHERS for m in (2, 4)]
    of_cells = [
        Arm(setting, merge, m, h, outer=outer)
        for setting, m, h in cells
        for merge, outer in (("iso-norm", None), ("rda", None), ("rda", TODAY))
    ]
    alone = [Arm(MAIN, "iso-norm", 0, seeds=SEEDS), Arm(MAIN, "rda", 0)]
    averaged = [Arm(MAIN, "avg", m) for m in (2, 4)]
    return claiming + of_cells[:18] + alone + averaged + of_cells[18:]


def baseline_job(setting: Setting, lr: float, seed: int) -> Job:
    return Job("train", plain(_training(setting, lr, seed, None)))


def arm_job(arm: Arm, outer: tuple[float, float], lr: float, seed: int) -> Job:
    """An arm's run, with this outer step and inner peak."""
    if arm.learners:
        fleet = fleet_of(arm.merge, outer, arm.learners, arm.interval)
        return Job("train", plain(_training(arm.setting, lr, seed, fleet)))
    setting = arm.setting
    merge = "iso" if arm.merge.startswith("iso") else arm.merge
    rates: dict[str, Any] = {"lr": outer[0], "momentum": outer[1]}
    if merge == "iso":
        rates = {"lr": TODAY[0], "momentum": TODAY[1], "iso_lr": outer[0], "iso_momentum": outer[1]}
    alone = Alone(
        setting.task, seed, lr, arm.interval, merge=merge, steps=setting.steps, warm_steps=setting.warm_steps,
        inner=setting.inner, **rates,
    )  # fmt: skip
    return Job("alone", plain(alone))


def fleet_of(merge: str, outer: tuple[float, float], learners: int, interval: int) -> Fleet:
    """Iso fragments take ``outer``; what an iso fleet averages keeps the default preset's step."""
    if merge.startswith("iso"):
        return Fleet(learners, interval, merge=merge, iso_lr=outer[0], iso_momentum=outer[1])
    return Fleet(learners, interval, merge=merge, lr=outer[0], momentum=outer[1])


def _training(setting: Setting, lr: float, seed: int, fleet: Fleet | None) -> Training:
    return Training(setting.task, seed, lr, setting.steps, setting.warm_steps, fleet, setting.inner)


# ------------------------------------------------------------------------------------------ what was chosen


def grid(setting: Setting, records: Records) -> list[float]:
    """The peaks that are to be tried: the setting's, and as many more as rule 1 asks for by the records there are."""
    rates = list(setting.rates)
    while True:
        means = [_mean([baseline_job(setting, lr, seed) for seed in TUNING_SEEDS], records) for lr in rates]
        known = [mean for mean in means if mean is not None]
        if len(known) < len(rates):
            return rates
        best = means.index(min(known))
        if best == 0:
            rates.insert(0, rates[0] / 2)
        elif best == len(rates) - 1:
            rates.append(rates[-1] * 2)
        else:
            return rates


def peak(setting: Setting, records: Records) -> float | None:
    """The baseline's peak; None while a run that decides it is missing."""
    means = {}
    for lr in grid(setting, records):
        mean = _mean([baseline_job(setting, lr, seed) for seed in TUNING_SEEDS], records)
        if mean is None:
            return None
        means[lr] = mean
    return min(means, key=lambda lr: means[lr])


def outer_losses(merge: str, lr: float, records: Records) -> dict[tuple[float, float], float | None]:
    """The mean loss of every outer step of ``merge`` relative to the baseline, as rule 2 has it."""
    baselines = {seed: _loss(baseline_job(MAIN, lr, seed), records) for seed in TUNING_SEEDS}
    out: dict[tuple[float, float], float | None] = {}
    for outer in OUTER[merge]:
        found = [
            (_loss(arm_job(Arm(MAIN, merge, m), outer, lr, seed), records), baselines[seed])
            for m in (2, 4)
            for seed in TUNING_SEEDS
        ]
        ratios = [loss / base for loss, base in found if loss is not None and base is not None]
        out[outer] = fmean(ratios) if len(ratios) == len(found) else None
    return out


def outer_of(merge: str, records: Records) -> tuple[float, float] | None:
    """The outer step of a merge; None while a run that decides it is missing."""
    lr = peak(MAIN, records)
    means = {} if lr is None else outer_losses(merge, lr, records)
    known = {outer: mean for outer, mean in means.items() if mean is not None}
    return min(known, key=lambda outer: known[outer]) if len(known) == len(OUTER[merge]) else None


def _mean(jobs: list[Job], records: Records) -> float | None:
    losses = [_loss(job, records) for job in jobs]
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if len(known) == len(losses) else None


def _loss(job: Job, records: Records) -> float | None:
    record = records.by_key.get(job.key)
    return None if record is None else float(record["result"]["loss"])


# ------------------------------------------------------------------------------------------ what is to be run


def jobs_now(records: Records) -> list[Job]:
    """The runs without a record that can be named by the records there are, in order; none when all is done."""
    return [job for job in _jobs(records) if job.key not in records.by_key]


def _jobs(records: Records) -> Iterator[Job]:
    yield from (baseline_job(MAIN, lr, seed) for lr in grid(MAIN, records) for seed in TUNING_SEEDS)
    lr = peak(MAIN, records)
    if lr is None:
        return
    for merge in ("iso-norm", "rda", "avg"):
        for outer in OUTER[merge]:
            yield from (arm_job(Arm(MAIN, merge, m), outer, lr, seed) for seed in TUNING_SEEDS for m in (2, 4))
    for arm in arms():
        outer, own = arm.outer or outer_of(arm.merge, records), peak(arm.setting, records)
        if own is None:
            yield from (
                baseline_job(arm.setting, rate, seed) for rate in grid(arm.setting, records) for seed in TUNING_SEEDS
            )
        elif outer is not None:
            for seed in arm.seeds:
                yield baseline_job(arm.setting, own, seed)
                yield arm_job(arm, outer, own, seed)
