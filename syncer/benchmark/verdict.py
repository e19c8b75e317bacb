"""Was it a valid learner-budget experiment? Evidence in, checks out.

Decides what must hold once both processes have ended, and says every deviation in one sentence:

    processes    both syncer processes and every learner ended with exit code 0, no learner before its turn
    tape         rounds 1 to C under the first start, then exactly C+1 to C+F in order under the second, each on its
                 fragment, merged from every configured learner, each from the resumed version of that fragment
    budgets      every answer in those rounds carries the budget as steps and one constant token count per learner
    checkpoint   the same session at step C+F, versions by the version law, the marker beside it with that step
    ledger       both checkpoints count what the tape tells

Must not know files, processes, clocks.

Source: v4 §Budget (every learner in each of the F rounds, shown by the tape),
v4 §Versions and admission (ids 0 to M-1), v4 §Event tape; rulings §7.

* pure
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from syncer.core.record import Line
from yeto_torch.wire.errors import StateError
from yeto_torch.wire.layout import version_at

Ledger: TypeAlias = dict[int, tuple[int, int, int]]  # learner -> merges, steps, tokens
Arms: TypeAlias = Mapping[str, Mapping[str, float]]  # the fleet's and the synchronous arm's results

_MERGE_KEYS = ("step", "fragment", "quorum")
_ANSWER_KEYS = ("id", "base_version", "c_steps", "c_tokens", "weight")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint without its tensors, and the step of the marker beside it, if there is one."""

    step: int
    versions: tuple[int, ...]
    identity: tuple[int | None, bytes | None, bytes | None]  # iso backend, fingerprint, contract
    ledger: Ledger
    marker: int | None = None

    @property
    def fragments(self) -> int:
        return len(self.versions)


@dataclass(frozen=True, slots=True)
class Process:
    """How a process ended: its exit code, None if we had to end it or never started it, and what it said about it."""

    code: int | None = None
    reason: str = ""
    early: str = ""  # of a learner that ended before its turn: when that was


@dataclass(slots=True)
class Stretch:
    """What the tape tells of one process: its start, its merge lines, and the times (unix seconds) it worked between.

    ``began`` is when the last learner joined for the first time: what was before is not training.
    """

    step: int = 0
    merges: list[Line] = field(default_factory=list)
    cutoff: int | None = None
    joined: dict[int, float] = field(default_factory=dict)
    ended: float | None = None

    @property
    def seconds(self) -> float | None:
        """From the last first join to the end; None where the tape does not tell."""
        return None if self.ended is None or not self.joined else self.ended - max(self.joined.values())


def stretches(lines: Iterable[Line]) -> tuple[Stretch, ...]:
    """A tape by its starts; merge lines before the first one are counted to it. Raises StateError for a merge line
    that lacks what a merge line tells.
    """
    parts = [Stretch()]
    started = False
    for line in lines:
        part = parts[-1]
        match line.get("event"):
            case None:
                part.merges.append(_merge(line))
            case "start":
                if started:
                    part = Stretch()
                    parts.append(part)
                started, part.step = True, line.get("step", -1)
            case "cutoff":
                part.cutoff = line.get("step")
            case "join":
                part.joined.setdefault(line.get("id", -1), line.get("time", 0.0))
            case "end":
                part.ended = line.get("time")
    return tuple(parts) if started else ()


def _merge(line: Line) -> Line:
    """What is looked at of a merge line."""
    try:
        answers = [{name: answer[name] for name in _ANSWER_KEYS} for answer in line["responders"]]
        merge = {name: line[name] for name in _MERGE_KEYS} | {"responders": answers}
        counts = [merge["step"], *(answer[name] for answer in answers for name in _ANSWER_KEYS if name != "weight")]
        if not all(isinstance(count, int) for count in counts) or any(answer["c_steps"] < 1 for answer in answers):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the tape has a damaged merge line, of round {line.get('step')}") from error
    return merge


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an experiment has left behind. A checkpoint that cannot be had is the sentence why."""

    learners: int
    budget_steps: int
    first: Process = field(default_factory=Process)
    second: Process = field(default_factory=Process)
    fleet: tuple[Process, ...] = ()
    cut: Saved | str = "not written"
    final: Saved | str = "not written"
    tape: tuple[Stretch, ...] | str = ()


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict: what was looked at, what was found, what is wrong with it."""

    name: str
    found: str
    deviations: tuple[str, ...] = ()


def judge(evidence: Evidence) -> list[Check]:
    """All checks that can be made; those behind a failed process say nothing new and are left out."""
    checks = [_process("cut-off process", evidence.first)]
    if evidence.first.code == 0:
        checks += [_cut(evidence), _process("consolidation process", evidence.second)]
    checks.append(_fleet(evidence))
    cut, final, tape = evidence.cut, evidence.final, evidence.tape
    if evidence.second.code != 0 or isinstance(cut, str):
        return checks
    if isinstance(tape, str):
        checks.append(Check("tape", "unreadable", (tape,)))
    elif len(tape) != 2:
        checks.append(Check("tape", f"{len(tape)} starts", (f"the tape tells of {len(tape)} starts, not of two",)))
    else:
        checks += [_tape(evidence, tape[0], tape[1], cut), _budgets(evidence, tape[1])]
    if isinstance(final, str):
        return [*checks, Check("checkpoint", "missing", (f"the final checkpoint cannot be used: {final}",))]
    checks += [_final(final, cut), _marker(final, cut)]
    return checks if isinstance(tape, str) else [*checks, _ledger(tape, cut, final)]


# ------------------------------------------------------------------------------------------------------ processes


def _process(name: str, process: Process) -> Check:
    if process.code == 0:
        return Check(name, "exit 0")
    if process.code is None:
        return Check(name, "not completed", (f"the {name} could not complete",))
    why = f": {process.reason}" if process.reason else ""
    return Check(name, f"exit {process.code}", (f"the {name} ended with exit code {process.code}{why}",))


def _fleet(evidence: Evidence) -> Check:
    well = sum(process.code == 0 and not process.early for process in evidence.fleet)
    deviations = []
    for learner, process in enumerate(evidence.fleet):
        if process.code is not None and (process.code or process.early):
            deviations.append(f"learner {learner} ended with exit code {process.code}{process.early}")
    return Check("learners", f"{well} of {evidence.learners} ended with exit 0", tuple(deviations))


# ----------------------------------------------------------------------------------------------------- checkpoints


def _cut(evidence: Evidence) -> Check:
    name, cut = "cut-off checkpoint", evidence.cut
    if isinstance(cut, str):
        return Check(name, "missing", (f"the cut-off checkpoint cannot be used: {cut}",))
    marked = () if cut.marker is None else (f"the cut-off checkpoint carries a final marker of step {cut.marker}",)
    return Check(name, f"step C = {cut.step}, {cut.fragments} fragments", marked)


def _final(final: Saved, cut: Saved) -> Check:
    deviations = []
    step = cut.step + cut.fragments
    if final.step != step:
        deviations.append(f"the final checkpoint is at step {final.step}, not at C + F = {step}")
    if final.identity != cut.identity or final.fragments != cut.fragments:
        deviations.append("the final checkpoint is of another session or layout than the cut-off checkpoint")
    for fragment, version in enumerate(final.versions):
        lawful = version_at(fragment, final.step, final.fragments)
        if version != lawful:
            deviations.append(f"fragment {fragment} is at version {version}, at step {final.step} it must be {lawful}")
    versions = f"{min(final.versions)} to {max(final.versions)}" if final.versions else "none"
    return Check("checkpoint", f"step {final.step}, versions {versions}", tuple(deviations))


def _marker(final: Saved, cut: Saved) -> Check:
    marker, step = final.marker, cut.step + cut.fragments
    if marker is None:
        return Check("marker", "missing", ("there is no final marker beside the checkpoint",))
    wrong = () if marker == step else (f"the final marker names step {marker}, not C + F = {step}",)
    return Check("marker", f"step {marker}", wrong)


def _ledger(tape: tuple[Stretch, ...], cut: Saved, final: Saved) -> Check:
    deviations = []
    told: Ledger = {}
    for saved, name, parts in ((cut, "cut-off", tape[:1]), (final, "final", tape[1:])):
        for answer in (answer for part in parts for line in part.merges for answer in line["responders"]):
            merges, steps, tokens = told.get(answer["id"], (0, 0, 0))
            told[answer["id"]] = (merges + 1, steps + answer["c_steps"], tokens + answer["c_tokens"])
        for learner in sorted(told.keys() | saved.ledger.keys()):
            by_file, by_tape = saved.ledger.get(learner, (0, 0, 0)), told.get(learner, (0, 0, 0))
            if by_file != by_tape:
                deviations.append(
                    f"the {name} checkpoint counts {_counts(by_file)} of learner {learner}, the tape {_counts(by_tape)}"
                )
    return Check("ledger", "as the tape tells" if not deviations else "not as the tape tells", tuple(deviations))


def _counts(entry: tuple[int, int, int]) -> str:
    return f"{entry[0]} merges, {entry[1]} steps and {entry[2]} tokens"


# ----------------------------------------------------------------------------------------------------------- tape


def _tape(evidence: Evidence, first: Stretch, second: Stretch, cut: Saved) -> Check:
    last = cut.step + cut.fragments
    deviations = []
    if (first.step, second.step) != (0, cut.step):
        deviations.append(f"the processes started at steps {first.step} and {second.step}, not at 0 and {cut.step}")
    if first.cutoff != cut.step:
        told = "no cut-off" if first.cutoff is None else f"a cut-off at step {first.cutoff}"
        deviations.append(f"the tape tells of {told}, the checkpoint is at step {cut.step}")
    deviations += _sequence(first.merges, 1, cut.step)
    deviations += _sequence(second.merges, cut.step + 1, last)
    for line in second.merges:
        if line["step"] in range(cut.step + 1, last + 1):
            deviations += _round(line, evidence.learners, cut)
    found = f"rounds {cut.step + 1} to {last}, each from all {evidence.learners} learners"
    return Check("tape", found if not deviations else "not as it must be", tuple(deviations))


def _sequence(lines: Iterable[Line], first: int, last: int) -> list[str]:
    """Are these exactly the rounds ``first`` to ``last``, once each and in order?"""
    steps = [line["step"] for line in lines]
    counts = Counter(steps)
    found = [f"round {step} is missing on the tape" for step in range(first, last + 1) if step not in counts]
    found += [f"round {step} is on the tape {n} times" for step, n in sorted(counts.items()) if n > 1]
    alien = [step for step in sorted(counts) if not first <= step <= last]
    found += [f"round {step} is on the tape, where only {first} to {last} belong" for step in alien]
    if not found and steps != sorted(steps):
        found.append(f"rounds {first} to {last} are not in order on the tape")
    return found


def _round(line: Line, learners: int, cut: Saved) -> list[str]:
    """One consolidation round: its fragment, its answers, what each of them started from."""
    step, fragment = line["step"], (line["step"] - 1) % cut.fragments
    found = []
    if line["fragment"] != fragment:
        found.append(f"round {step} merged fragment {line['fragment']}, its turn was fragment {fragment}")
    answers = [answer["id"] for answer in line["responders"]]
    found += [f"round {step} was merged without learner {i}" for i in range(learners) if i not in answers]
    if len(set(answers)) != len(answers) or not set(answers) <= set(range(learners)):
        found.append(f"round {step} was merged from learners {answers}, the fleet is 0 to {learners - 1}")
    if line["quorum"] != learners:
        found.append(f"round {step} needed {line['quorum']} answers, not {learners}")
    for answer in line["responders"]:
        if answer["base_version"] != cut.versions[fragment]:
            found.append(
                f"round {step}: learner {answer['id']} answered from version {answer['base_version']} of fragment "
                f"{fragment}, resumed was version {cut.versions[fragment]}"
            )
    return found


def _budgets(evidence: Evidence, second: Stretch) -> Check:
    deviations = []
    tokens: dict[int, tuple[int, int]] = {}  # learner -> the first count, and the round that told it
    for line in second.merges:
        for answer in line["responders"]:
            learner, steps, count = answer["id"], answer["c_steps"], answer["c_tokens"]
            where = f"in round {line['step']} learner {learner}"
            if steps != evidence.budget_steps:
                deviations.append(f"{where} answered for {steps} local steps, the budget is {evidence.budget_steps}")
            first, step = tokens.setdefault(learner, (count, line["step"]))
            if count != first:
                deviations.append(f"{where} counted {count} tokens, in round {step} {first}")
            weight = float(count) ** 2 / steps
            if answer["weight"] != weight:
                deviations.append(f"{where} weighed {answer['weight']}, tokens² / steps is {weight}")
    told = ", ".join(str(tokens[learner][0]) for learner in sorted(tokens))
    return Check("budgets", f"{evidence.budget_steps} steps each; tokens {told or 'none'}", tuple(deviations))
