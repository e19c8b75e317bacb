"""The tables of the report: one function per experiment, from records to rows and to the values a margin judges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from experiments.analysis import Interval, interval, relative_differences
from experiments.margins import MARGINS
from experiments.records import Records
from experiments.specs import ARMS, LRS, TUNING_SEEDS, Arm, Scale, arm_job, tuned_lr

Losses = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Section:
    """``claims``: the values of each margin of this experiment, by the margin's name."""

    title: str
    words: str
    again: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    claims: dict[str, list[float]] = field(default_factory=dict)


def results(scale: Scale, records: Records, name: str, arm: Arm | str) -> dict[int, dict[str, object]]:
    """An arm's results by seed; of a task's name those of its baseline."""
    lr = tuned_lr(scale, arm if isinstance(arm, str) else arm.task, records)
    if lr is None:
        return {}
    keys = {seed: arm_job(scale, arm, seed, lr).key for seed in scale.seeds(ARMS[name][1])}
    return {seed: records.by_key[key]["result"] for seed, key in keys.items() if key in records.by_key}


def losses(scale: Scale, records: Records, name: str, arm: Arm | str) -> dict[int, float]:
    return {seed: float(str(found["loss"])) for seed, found in results(scale, records, name, arm).items()}


def differences(scale: Scale, records: Records, name: str, label: str, against: str | None = None) -> list[float]:
    """Percent by which the arm ``label`` is above the baseline, or above another arm."""
    arms = {arm.label: arm for arm in ARMS[name][0](scale)}
    if label not in arms or (against is not None and against not in arms):
        return []
    other = arms[label].task if against is None else arms[against]
    return relative_differences(losses(scale, records, name, arms[label]), losses(scale, records, name, other))


def verdict_row(name: str, section: Section, *, no_claims: bool) -> str:
    """One line of the table of claims."""
    values = section.claims[name]
    margin = MARGINS[name]
    limit = {"within": f"± {margin.bound:g}", "at most": f"≤ {margin.bound:g}", "at least": f"≥ {margin.bound:g}"}
    head = f"| {margin.claim} | {limit[margin.test]} {margin.unit} |"
    if not values:
        return f"{head} 0 | | | | not run | `{section.again}` |"
    found = margin.judge(values)
    verdict = "**met**" if found.is_met else f"**not met**: {found.reason}"
    shown = f"{found.interval.low:.3f} to {found.interval.high:.3f}"
    told = "none: quick" if no_claims else verdict
    figures = f"{found.interval.n} | {found.interval.mean:.3f} | {shown} | {found.p:.2g}"
    return f"{head} {figures} | {told} | `{section.again}` |"


def spread(found: Interval, form: str = "+.2f") -> str:
    """Mean and interval; of one value the mean alone."""
    if found.n < 2:
        return f"{found.mean:{form}}"
    return f"{found.mean:{form}} ({found.low:{form}} to {found.high:{form}})"


def _compared(scale: Scale, records: Records, name: str, against: str | None = None) -> Sequence[tuple[str, ...]]:
    rows = []
    for arm in ARMS[name][0](scale):
        values = differences(scale, records, name, arm.label, against)
        if not values:
            continue
        found = results(scale, records, name, arm)
        gains = [fmean(result["gain"]) for result in found.values() if "gain" in result]  # type: ignore[arg-type]
        loss = fmean(losses(scale, records, name, arm).values())
        difference = "(the reference)" if arm.label == against else spread(interval(values))
        rows.append((arm.label, str(len(values)), f"{loss:.4f}", difference, f"{fmean(gains):.2f}" if gains else ""))
    return rows


_GAIN = (
    "Aligned gain, here and below: `<theta_new - theta_old, m> / <m, m>` with m the learners' weighted mean delta, "
    "averaged over merges: how far an outer step goes along the mean progress. Plain averaging has 1."
)
_HEAD = ("arm", "n", "loss", "against {}, % (95 %)", "aligned gain")


def _head(against: str) -> tuple[str, ...]:
    return tuple(column.format(against) for column in _HEAD)


def tuning_section(scale: Scale, records: Records) -> Section:
    rows = []
    for task, rates in LRS.items():
        for lr in rates:
            found = [records.by_key.get(arm_job(scale, task, seed, lr).key) for seed in TUNING_SEEDS]
            values = [record["result"]["loss"] for record in found if record]
            if values:
                chosen = "chosen" if tuned_lr(scale, task, records) == lr else ""
                rows.append((task, f"{lr:g}", str(len(values)), f"{fmean(values):.4f}", chosen))
    words = f"Synchronous training alone, on seeds {', '.join(map(str, TUNING_SEEDS))}, which no comparison uses."
    return Section("The baseline's learning rate", words, _again("e1"), ("task", "peak", "n", "loss", ""), rows)


def e1(scale: Scale, records: Records) -> Section:
    words = (
        "Outer settings of the default preset (lr 0.7, momentum 0.5, heloco), rda, bf16. Negative = the fleet is "
        "better. Of the digits no interval tells a fleet from synchronous training. "
    ) + _GAIN
    claims = {"parity": differences(scale, records, "e1", "char, M = 2, H = 24")}
    return Section("E1: parity", words, _again("e1"), _head("synchronous"), _compared(scale, records, "e1"), claims)


def e2(_scale: Scale, records: Records) -> Section:
    traces = [record["result"] for record in records.of_kind("trace")]
    kills = [record["result"] for record in records.of_kind("kills")]
    names = {
        "decoupled": ("decoupled fleet, against the same fleet without failures", "decoupled_bound", "at most"),
        "of_ideal": ("its merged steps / all that the machines can make", "of_ideal_bound", "about at most"),
        "made": ("its steps made by the living / all that the machines can make", "", ""),
        "stalled": ("synchronous, waits for the repair", "stalled_formula", "formula"),
        "elastic": ("synchronous, goes on after a restart of 5 steps", "elastic_formula", "formula"),
    }
    rows = []
    for name, (label, form, word) in names.items() if traces else ():
        found = interval([trace[name] for trace in traces])
        rows.append((label, str(found.n), spread(found, ".3f"), f"{word} {traces[0][form]:.3f}" if form else ""))
    for name in ("decoupled", "synchronous", "ratio") if kills else ():
        found = interval([kill[name] for kill in kills])
        rows.append((f"real processes: {name}", str(found.n), spread(found, ".3f"), ""))
    words = (
        "M = 4; a machine works 300 steps on average and is away for 30. Virtual time is the real coordinator's at the "
        "defaults (H = 24, 8 fragments). Real processes are killed with SIGKILL and start again; the synchronous ones "
        "are torch's DDP over gloo and go on from a checkpoint every 20 steps. Decoupled goodput counts a step only if "
        "it was merged, in virtual time against the fleet without failures: at H = 24 one in 24 is overwritten even "
        "where nobody fails, which the second line counts too, as do the real processes. The five traces that had been "
        "seen before both were made claims gave, with the planner's figures of then, 0.89 and 0.85."
    )
    claims = {
        "goodput": [t["decoupled"] for t in traces],
        "of_ideal": [t["of_ideal"] for t in traces],
        "kills": [k["ratio"] for k in kills],
    }
    return Section(
        "E2: goodput under failures", words, _again("e2"), ("who", "n", "goodput", "closed form"), rows, claims
    )


def e3(_scale: Scale, records: Records) -> Section:
    groups: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
    for record in records.of_kind("wire"):
        groups[record["config"]["interval"], record["config"]["wire"]].append(record["result"])
    rows, every = [], []
    for (h, wire), found in sorted(groups.items()):
        every += [result["deviation"] for result in found]
        per_step = found[0]["per_step"]
        rows.append((
            f"H = {h}, {wire}", str(len(found)), f"{fmean(r['deviation'] for r in found):+.2f} %", f"{per_step:,.0f}",
            f"{found[0]['ddp_f32'] / per_step:.1f} x", f"{found[0]['ddp_bf16'] / per_step:.1f} x",
        ))  # fmt: skip
    words = (
        "A syncer and two learners; a relay counts every byte of a whole run, handshake to final cut. Per step: what a "
        "learner sends and receives while the run goes on, by the formula at the nominal H, against a ring all-reduce "
        "of the gradient. The claim's values are these configurations."
    )
    head = ("", "n", "count against formula", "bytes per step", "f32 gradients", "bf16 gradients")
    return Section("E3: bytes", words, _again("e3"), head, rows, {"bytes": every})


def e4(scale: Scale, records: Records) -> Section:
    bad = differences(scale, records, "e4", "q2", "f32")
    words = "M = 2, H = 24. q2 is a bad codec of two bits: if the test let it pass, the test would have no power."
    if bad:
        passed = MARGINS["q4"].judge(bad).is_met
        words += f" It {'lets it pass: its verdict on q4 is worth nothing' if passed else 'does not let it pass'}."
    claims = {"q4": differences(scale, records, "e4", "q4", "f32")}
    rows = _compared(scale, records, "e4", "f32")
    return Section("E4: four bits", words, _again("e4"), _head("f32"), rows, claims)


def e5(scale: Scale, records: Records) -> Section:
    words = "H = 24. avg-norm is the mean's direction at rda's length: what of rda's effect is length alone."
    claims = {"iso": differences(scale, records, "e5", "iso-norm, M = 2")}
    return Section("E5: merging", words, _again("e5"), _head("synchronous"), _compared(scale, records, "e5"), claims)


def e6(scale: Scale, records: Records) -> Section:
    words = (
        "A map, without claims: outer settings over H (M = 2), stale answers (s = merges of a fragment by which a "
        "broadcast comes late), learners of unequal speed, members that come and go. Tokens are equal; where members "
        "are slow or away a fleet makes more, smaller steps, and more rounds, which by itself lowers the loss."
    )
    return Section("E6: where it holds", words, _again("e6"), _head("synchronous"), _compared(scale, records, "e6"))


def e7(scale: Scale, records: Records) -> Section:
    words = (
        'A single machine with `syncer="local"` against its plain optimizer: the same batches, the outer step on top, '
        "in the manner of Lookahead."
    )
    return Section("E7: alone", words, _again("e7"), _head("plain optimizer"), _compared(scale, records, "e7"))


def _again(name: str) -> str:
    return f"python -m experiments run {name} --jobs 2"


ALL: tuple[Callable[[Scale, Records], Section], ...] = (tuning_section, e1, e2, e3, e4, e5, e6, e7)
