"""What is run: the arms and seeds of every experiment, as values.

Decides which runs an experiment consists of. Runs that two experiments share are the same run. Arms train with the
learning rate tuned for the synchronous baseline, on seeds of its own; nothing is tuned for a fleet. It must not know
how a run is made or judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.configs import Alone, Fleet, Training, key_of, plain
from experiments.records import Records

TUNING_SEEDS = (100, 101, 102)
SEEDS = tuple(range(8))
MAP_SEEDS = (3, 4, 5)  # of what claims nothing; seed 0 was looked at when the guard was made
FEW_SEEDS = MAP_SEEDS[:2]  # of the many arms of e6 and e7
QUICK_SEEDS = (0, 1)
QUICK_STEPS, QUICK_WARM_STEPS = 144, 48
LRS = {"char": (2e-3, 4e-3, 8e-3, 16e-3), "digits": (1e-3, 2e-3, 4e-3)}  # peaks among which the baseline's is tuned
MERGES = ("avg", "avg-norm", "rda", "iso-mean", "iso-norm")
OUTER = ((1.0, 0.0), (0.7, 0.5), (0.7, 0.9))


@dataclass(frozen=True, slots=True)
class Job:
    """One run. ``kind`` says who makes it: train, alone, trace, wire or kills."""

    kind: str
    config: dict[str, Any]

    @property
    def key(self) -> str:
        return key_of(self.kind, self.config)


@dataclass(frozen=True, slots=True)
class Arm:
    """A fleet under comparison, or one machine alone, and how the report calls it."""

    label: str
    fleet: Fleet | None
    task: str = "char"
    alone: tuple[tuple[str, Any], ...] = ()  # of ``Alone``
    claims: bool = False

    @property
    def seeds(self) -> Sequence[int]:
        """It is run with no others: what claims nothing needs fewer."""
        return SEEDS if self.claims else MAP_SEEDS


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run; ``quick`` is two seeds, fewer arms and short runs."""

    quick: bool = False

    def training(self, task: str, seed: int, lr: float, fleet: Fleet | None) -> Training:
        sizes = {"steps": QUICK_STEPS, "warm_steps": QUICK_WARM_STEPS} if self.quick else {}
        return Training(task, seed, lr, fleet=fleet, **sizes)

    def seeds(self, seeds: Sequence[int]) -> Sequence[int]:
        return QUICK_SEEDS if self.quick else seeds


def fleet_at(learners: int, interval: int, **more: Any) -> Fleet:
    """Four fragments; an interval of 2 has room for two."""
    return Fleet(learners, interval, min(4, interval), **more)


def arms_e1(scale: Scale) -> list[Arm]:
    learners, intervals = ((2,), (8, 24)) if scale.quick else ((2, 4), (2, 8, 24, 80))
    char = [
        Arm(f"char, M = {m}, H = {h}", fleet_at(m, h), claims=(m, h) == (2, 24)) for m in learners for h in intervals
    ]
    return char + [Arm(f"digits, M = 2, H = {h}", fleet_at(2, h), "digits") for h in intervals if h != 2]


def arms_e4(scale: Scale) -> list[Arm]:
    wires = ("f32", "q4") if scale.quick else ("f32", "bf16", "q4", "q2")
    return [Arm(wire, fleet_at(2, 24, wire=wire), claims=True) for wire in wires]


def arms_e5(scale: Scale) -> list[Arm]:
    learners, merges = ((2,), ("avg", "rda", "iso-norm")) if scale.quick else ((2, 4, 8), MERGES)
    return [
        Arm(f"{merge}, M = {m}", fleet_at(m, 24, merge=merge), claims=(m, merge) == (2, "iso-norm"))
        for m in learners
        for merge in merges
    ]


def arms_e6(scale: Scale) -> list[Arm]:
    if scale.quick:
        return [Arm("H = 24, lr 1, momentum 0", fleet_at(2, 24, lr=1.0, momentum=0.0))]
    regime = [
        Arm(f"H = {h}, lr {lr:g}, momentum {mu:g}", fleet_at(2, h, lr=lr, momentum=mu))
        for h in (8, 24, 80)
        for lr, mu in OUTER
    ]
    return regime + _plain() + _stale() + _uneven() + _guarded()


def _plain() -> list[Arm]:
    """Outer steps that go no further than the learners did, for every merge: lr 1 without momentum or correction."""
    return [
        Arm(
            f"M = {m}, H = 24, lr 1, momentum 0, {merge}, not corrected",
            fleet_at(m, 24, merge=merge, lr=1.0, momentum=0.0, correction="none"),
        )
        for m in (2, 4)
        for merge in ("avg", "rda", "iso-norm")
    ]


def _stale() -> list[Arm]:
    """Answers whose base is s merges of their fragment old: a broadcast takes s H steps longer to arrive."""
    out = []
    for correction in ("heloco", "none"):
        said = "corrected" if correction != "none" else "not corrected"
        late = {"correction": correction}
        out += [Arm(f"M = 4, one s = {s}, {said}", fleet_at(4, 24, delays=(0, 0, 0, 24 * s), **late)) for s in (1, 3)]
        out.append(Arm(f"M = 4, all s = 1, {said}", fleet_at(4, 24, delays=(24,) * 4, **late)))
    return out


def _uneven() -> list[Arm]:
    return [
        Arm("M = 4, all there, speed 1", fleet_at(4, 24)),
        Arm("M = 2, speeds 1, 0.5", fleet_at(2, 24, speeds=(1.0, 0.5))),
        Arm("M = 4, speeds 1, 1, 0.5, 0.25", fleet_at(4, 24, speeds=(1.0, 1.0, 0.5, 0.25))),
        Arm("M = 4, one away for a third", fleet_at(4, 24, absences=((3, 120, 300),))),
        Arm(
            "M = 4, each away once",
            fleet_at(4, 24, absences=tuple((i, 50 + 110 * i, 125 + 110 * i) for i in range(4))),
        ),
        Arm("M = 4, three leave for good at half", fleet_at(4, 24, absences=tuple((i, 240, 10**9) for i in (1, 2, 3)))),
    ]


def _guarded() -> list[Arm]:
    """The gain guard and the normalised correction, each alone, beside arms of the map that differ in nothing else."""
    outers = ((0.7, 0.5), (0.7, 0.9))
    out = [
        Arm(f"H = {h}, lr {lr:g}, momentum {mu:g}, cap", fleet_at(2, h, lr=lr, momentum=mu, guard="cap"))
        for h in (8, 24)
        for lr, mu in outers
    ]
    normalized = {"correction": "heloco-normalized"}
    out += [
        Arm(f"H = 24, lr {lr:g}, momentum {mu:g}, heloco-normalized", fleet_at(2, 24, lr=lr, momentum=mu, **normalized))
        for lr, mu in outers
    ]
    return [*out, Arm("M = 4, one s = 1, heloco-normalized", fleet_at(4, 24, delays=(0, 0, 0, 24), **normalized))]


def arms_e7(scale: Scale) -> list[Arm]:
    intervals = (24,) if scale.quick else (8, 24, 80)
    arms = [Arm(f"alone, H = {h}", None, alone=(("interval", h),)) for h in intervals]
    if not scale.quick:
        arms.append(Arm("alone, H = 24, momentum 0.9", None, alone=(("momentum", 0.9),)))
        arms.append(Arm("alone, H = 24, iso, norm scale", None, alone=(("merge", "iso"),)))
    return arms


ARMS: dict[str, tuple[Callable[[Scale], list[Arm]], Sequence[int]]] = {
    "e1": (arms_e1, SEEDS),
    "e4": (arms_e4, SEEDS),
    "e5": (arms_e5, SEEDS),
    "e6": (arms_e6, FEW_SEEDS),
    "e7": (arms_e7, FEW_SEEDS),
}


def tuning(scale: Scale, tasks: Sequence[str]) -> list[Job]:
    """The synchronous baseline at every learning rate of the grid."""
    if scale.quick:
        return []
    return [_job(scale.training(task, seed, lr, None)) for task in tasks for lr in LRS[task] for seed in TUNING_SEEDS]


def tuned_lr(scale: Scale, task: str, records: Records) -> float | None:
    """The rate with the lowest mean loss over the tuning seeds; None while a run of them is missing."""
    if scale.quick:
        return LRS[task][1]
    means: dict[float, float] = {}
    for lr in LRS[task]:
        found = [records.by_key.get(_job(scale.training(task, seed, lr, None)).key) for seed in TUNING_SEEDS]
        if not all(found):
            return None
        means[lr] = sum(record["result"]["loss"] for record in found if record) / len(found)
    return min(means, key=lambda lr: means[lr])


def arm_job(scale: Scale, arm: Arm | str, seed: int, lr: float) -> Job:
    """The run of an arm; of a task's name that of its baseline."""
    if isinstance(arm, str):
        return _job(scale.training(arm, seed, lr, None))
    if arm.fleet is None:
        same = scale.training(arm.task, seed, lr, None)
        alone = Alone(arm.task, seed, lr, steps=same.steps, warm_steps=same.warm_steps, **dict(arm.alone))
        return Job("alone", plain(alone))
    return _job(scale.training(arm.task, seed, lr, arm.fleet))


def training_jobs(name: str, scale: Scale, records: Records, seeds: Sequence[int] | None = None) -> list[Job]:
    """All runs of an experiment that trains; first the tuning, and only that while it is unfinished."""
    make_arms, default = ARMS[name]
    arms = make_arms(scale)
    tasks = sorted({arm.task for arm in arms})
    rates = {task: lr for task in tasks if (lr := tuned_lr(scale, task, records)) is not None}
    if len(rates) < len(tasks):
        return tuning(scale, tasks)
    jobs = []
    chosen = seeds is None and not scale.quick
    for seed in scale.seeds(default) if seeds is None else seeds:
        jobs += [arm_job(scale, task, seed, rates[task]) for task in tasks]
        jobs += [arm_job(scale, arm, seed, rates[arm.task]) for arm in arms if not chosen or seed in arm.seeds]
    return jobs


def _job(config: Training) -> Job:
    return Job("train", plain(config))


# ------------------------------------------------------------------------------------------ bytes and failures


@dataclass(frozen=True, slots=True)
class Wire:
    """Real processes whose bytes are counted."""

    learners: int
    interval: int
    wire: str
    seed: int = 0
    fragments: int = 4
    rounds: int = 32
    step_s: float = 0.02


@dataclass(frozen=True, slots=True)
class Trace:
    """A fleet under failures in virtual time; lengths in steps. ``interval`` and all else as the product has it."""

    seed: int
    learners: int = 4
    interval: int = 24
    up: float = 300.0
    repair: float = 30.0
    steps: int = 3000


@dataclass(frozen=True, slots=True)
class Kills:
    """Real processes killed by one trace, decoupled and synchronous."""

    seed: int
    learners: int = 4
    interval: int = 24
    step_s: float = 0.1
    up: float = 300.0
    repair: float = 30.0
    steps: int = 500
    checkpoint_every: int = 20


def other_jobs(name: str, scale: Scale, seeds: Sequence[int] | None = None) -> list[Job]:
    """The runs of e2 and e3."""
    quick = scale.quick
    if name == "e3":
        intervals, wires = ((24,), ("bf16",)) if quick else ((8, 24), ("f32", "bf16", "q4"))
        wires_of = [Wire(2, h, w, s) for h in intervals for w in wires for s in seeds or range(1)]
        return [Job("wire", asdict(config)) for config in wires_of]
    jobs = [Job("trace", asdict(Trace(seed))) for seed in seeds or range(5 if quick else 200)]
    return jobs + ([] if quick else [Job("kills", asdict(Kills(seed))) for seed in seeds or range(3)])


EXPERIMENTS = ("e1", "e2", "e3", "e4", "e5", "e6", "e7")
ALONE = ("wire", "kills")  # time matters there: nothing else is run beside them


def jobs_of(name: str, scale: Scale, records: Records, seeds: Sequence[int] | None = None) -> list[Job]:
    """The runs of an experiment that can be named now. Raises ValueError for one that does not exist."""
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment {name!r}: expected one of {', '.join(EXPERIMENTS)}")
    return training_jobs(name, scale, records, seeds) if name in ARMS else other_jobs(name, scale, seeds)
