"""docs/evidence.md, from the records and the margins alone.

Decides what is shown and in which words. A margin's verdict is the test's; what has no margin is described and not
judged. It must not run anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import sections
from experiments.records import Records
from experiments.sections import Section
from experiments.specs import ALONE, ARMS, EXPERIMENTS, Job, Scale, jobs_of, tuning

RULES = """\
* Equal tokens, equal global batch, the same samples in the same order, the same inner schedule (linear warm-up, then a
  cosine).
* The baseline's peak learning rate is the best of a grid of at least three on seeds of its own; fleets use that rate.
  Nothing is tuned for a fleet: in E1, E4 and E5 outer rate, momentum and correction are those of the default preset.
* Every arm of a seed begins with the same 160 synchronous steps, and goes on from there with the same optimizer state.
* The syncer's global f32 parameters are evaluated, never a learner's.
* Seeds are paired; intervals are 95 % (Student's t over the paired differences). "Within" is two one-sided tests at
  5 %: the 90 % interval must lie inside the margin. All bounds, tests, and the claims of loss with their arms and seeds
  were committed before anything was run (`experiments/margins.py`, `experiments/analysis.py`). The definition of
  goodput was not: it was settled after five traces, so both readings are claims now.
* Nothing is run again for a better seed: of one configuration the first record counts (`experiments/records.py`).
  There was one false start: learners shared their optimizer state by a mistake of the harness. Its 22 records of fleets
  (seeds 0, 1 and a part of 2) were discarded, all of them. Behind it the arms that claim nothing were cut to fewer
  seeds, among them seeds of their own, and the runs with kills and counted bytes to shorter and fewer ones, for time.
* Fleets are simulated in lockstep on one thread out of the product's own parts; a test shows that a real syncer with
  two real learners ends with the same bits, for each of some merges, wires and corrections (`pytest -m slow
  tests/experiments`). Bytes and kills are of real processes.
* A model has four fragments (two at H = 2); the product's default, and virtual time, have eight."""

LIMITS = """\
* A model of 110,000 parameters has curvature, noise and layers of its own kind. What a fleet of such models loses, and
  what it does not, says little about one of a billion parameters.
* 480 steps hold 20 merges of a fragment at H = 24 and 6 at H = 80. The published setting with momentum 0.9 (`paper`)
  is meant for hundreds: it cannot be judged here.
* Learners share the global batch: each takes 16 / M samples a step, at the rate tuned for 16. A fleet whose learners
  keep their batch pays less for it. For the same reason the arms of E6 in which members are slow or away look better
  than the full fleet: they make more, smaller steps (and more rounds) with the same tokens.
* The batch is small and its noise large. With large batches per learner, drift rather than noise decides.
* All learners draw from one distribution. Learners with data of their own are in the demonstration, not here.
* In lockstep, but for the delayed arms, exactly one step of H is overwritten. A slow network overwrites more.
* Two or three seeds tell only large differences apart; of the digits, whose losses are tiny, six tell none.
* Three runs with kills, of 50 seconds, with two kills each in the synchronous one: much of its loss is the start of
  four processes on two cores. Where starting is quick against training the ratio is smaller.
* Losses are those of one text and one set of digits, both easy, and of AdamW alone.
* Failures are drawn independently of each other, and all machines are alike. Real ones fail in groups."""


ELSEWHERE = """\
* Digits split evenly and by classes, against learners alone (README, with its figures): `python -m yeto_torch.demo
  --seeds 3`.
* Speed and memory, against limits and rivals (`benchmarks/README.md`): `make bench-rivals bench`.
* What a syncer serves (`docs/scaling.md`): the `python -m syncer.plan` command beside each figure."""


def write(target: Path, scale: Scale, records: Records) -> None:
    """The report and its pictures, beside each other."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text(scale, records, target.parent / "evidence"), encoding="utf-8")


def text(scale: Scale, records: Records, pictures: Path | None = None) -> str:
    """The whole report. With ``pictures`` (a folder) plots are drawn there and linked."""
    head = "# Evidence" + (": quick, no claims" if scale.quick else "")
    parts = [head, _introduction(scale, records), "## Ground rules\n\n" + RULES]
    if records.by_key:
        found = [section(scale, records) for section in sections.ALL]
        parts.append(_verdicts(found, scale))
        parts += [_section(section) for section in found]
        parts += _pictures(scale, records, pictures)
    parts.append("## Figures that are measured elsewhere\n\n" + ELSEWHERE)
    parts.append("## What tiny scale cannot show\n\n" + LIMITS)
    return "\n\n".join(parts) + "\n"


def estimate(scale: Scale, records: Records, workers: int) -> str:
    """How many runs are missing, and how long they would take by the runs there are (else by default figures)."""
    total, lines = 0.0, []
    seen: set[str] = set()
    for name in EXPERIMENTS:
        jobs = {job.key: job for job in _all_jobs(name, scale, records) if job.key not in seen}
        seen |= jobs.keys()
        missing = [jobs[key] for key in records.missing(jobs)]
        seconds = sum(_seconds(job, records) / (1 if job.kind in ALONE else workers) for job in missing)
        total += seconds
        lines.append(f"{name}: {len(missing)} of {len(jobs)} runs missing, {seconds / 60:.0f} min")
    whole = f"{total / 3600:.1f} hours" if total > 3600 else f"{total / 60:.0f} min"
    return "\n".join([*lines, f"in all {whole}, {workers} runs beside each other"])


def _all_jobs(name: str, scale: Scale, records: Records) -> list[Job]:
    """Of an experiment that still tunes, the tuning and as good a guess at the rest as its first rate gives."""
    jobs = jobs_of(name, scale, records)
    if name not in ARMS or scale.quick:
        return jobs
    tasks = sorted({arm.task for arm in ARMS[name][0](scale)})
    pretended = Records(None)
    for job in tuning(scale, tasks):
        pretended.by_key[job.key] = {"key": job.key, "result": {"loss": job.config["peak_lr"]}}
    return tuning(scale, tasks) + (jobs_of(name, scale, pretended) if jobs == tuning(scale, tasks) else jobs)


_DEFAULT_S = {"trace": 1.2, "wire": 30.0, "kills": 400.0}
_TRAIN_S = {0: 24.0, 2: 28.0, 4: 34.0, 8: 50.0}  # of one core of a busy machine, by learners; 0 = synchronous
_START_S = 6.0  # data, model, the evaluations
_DIGITS = 0.4  # of the characters'


def _seconds(job: Job, records: Records) -> float:
    alike = [r["wall_seconds"] for r in records.of_kind(job.kind) if _shape(r["config"]) == _shape(job.config)]
    if alike:
        return float(sum(alike) / len(alike))
    if job.kind in _DEFAULT_S:
        return _DEFAULT_S[job.kind]
    learners = _shape(job.config)[1]
    share = job.config["steps"] / 640 * (_DIGITS if job.config["task"] == "digits" else 1.0)
    return float(_START_S + _TRAIN_S[learners] * share)


def _shape(config: dict[str, Any]) -> tuple[Any, int]:
    """What a run's length depends on."""
    fleet = config.get("fleet")
    return config.get("task"), fleet["learners"] if fleet else 0


def _introduction(scale: Scale, records: Records) -> str:
    again = "make evidence-quick" if scale.quick else "make evidence"
    if not records.by_key:
        return f"Nothing was run yet: there are no records. `{again}` makes them, and this page from them."
    commits = sorted({record["commit"] for record in records.by_key.values()})
    versions = sorted({" ".join(f"{k} {v}" for k, v in r["versions"].items()) for r in records.by_key.values()})
    lines = [
        f"Made from {len(records.by_key)} recorded runs, at {', '.join(commits)}, with {'; '.join(versions)}.",
        f"`{again}` makes the runs that have no record and goes on where it was stopped. To repeat what is recorded,",
        "give the commands below another file, `--records again.jsonl`, and look at it with `python -m experiments",
        "report --records again.jsonl --output again.md`. Losses are nats on data that no run trains on.",
    ]
    if scale.quick:
        lines.append("\n**Quick runs are short and few. They show that the machinery works, and nothing else.**")
    return "\n".join(lines)


def _verdicts(found: list[Section], scale: Scale) -> str:
    lines = ["## Claims", "", "| claim | margin | n | mean | interval of the test | p | verdict | again |"]
    lines.append("|" + "---|" * 8)
    for section in found:
        lines += [sections.verdict_row(name, section, no_claims=scale.quick) for name in section.claims]
    return "\n".join(lines)


def _section(section: Section) -> str:
    rows = [f"| {' | '.join(section.head)} |", "|" + "---|" * len(section.head)]
    rows += [f"| {' | '.join(row)} |" for row in section.rows]
    table = "\n".join(rows) if section.rows else "No complete pair is recorded yet."
    return f"## {section.title}\n\n{section.words}\n\n{table}\n\nAgain: `{section.again}`"


def _pictures(scale: Scale, records: Records, folder: Path | None) -> list[str]:
    if folder is None:
        return []
    try:
        from experiments import plots
    except ImportError:
        return []
    made = [path for path in (draw(scale, records, folder) for draw in plots.PICTURES) if path]
    return [f"![{path}](evidence/{path})" for path in made]
