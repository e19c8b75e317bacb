"""The verdict for people and for programs: a table, one sentence per deviation, ``verdict.json``.

Decides only how things are told. Must not know processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncer.benchmark.verdict import Arms, Check, Evidence, Saved


def holds(checks: Sequence[Check]) -> bool:
    """Is it a valid experiment?"""
    return not any(check.deviations for check in checks)


def table(evidence: Evidence, checks: Sequence[Check]) -> list[str]:
    """One line per check, then the deviations, then the verdict."""
    name_width = max(len(check.name) for check in checks)
    found_width = max(len(check.found) for check in checks)
    lines = [f"learner-budget benchmark: {evidence.learners} learners, {evidence.budget_steps} local steps each", ""]
    lines += [
        f"  {check.name:<{name_width}}  {check.found:<{found_width}}  {'DEVIATES' if check.deviations else 'ok'}"
        for check in checks
    ]
    deviations = [deviation for check in checks for deviation in check.deviations]
    if deviations:
        lines += ["", *(f"  - {deviation}" for deviation in deviations)]
    many = "1 deviation" if len(deviations) == 1 else f"{len(deviations)} deviations"
    return [*lines, "", f"FAIL: {many}" if deviations else "PASS: a valid experiment"]


def document(evidence: Evidence, checks: Sequence[Check], arms: Arms | None) -> dict[str, object]:
    """What ``verdict.json`` holds."""
    cut, final = evidence.cut, evidence.final
    return {
        "valid": holds(checks),
        "learners": evidence.learners,
        "budget_steps": evidence.budget_steps,
        "cutoff_step": cut.step if isinstance(cut, Saved) else None,
        "final_step": final.step if isinstance(final, Saved) else None,
        "fragments": cut.fragments if isinstance(cut, Saved) else None,
        "seconds": _seconds(evidence),
        "checks": [{"name": c.name, "found": c.found, "deviations": list(c.deviations)} for c in checks],
        "arms": arms,
    }


def _seconds(evidence: Evidence) -> dict[str, float | None]:
    parts = evidence.tape if not isinstance(evidence.tape, str) else ()
    return {
        name: parts[index].seconds if index < len(parts) else None
        for index, name in enumerate(("training", "consolidation"))
    }


def comparison(evidence: Evidence, arms: Arms) -> list[str]:
    """The fleet beside the synchronous arm: held-out accuracy and loss, and the time for equal samples."""
    seconds, fleet, synchronous = _seconds(evidence), arms["fleet"], arms["synchronous"]
    training, consolidation = seconds["training"] or 0.0, seconds["consolidation"] or 0.0
    result = "accuracy {accuracy:5.1f} %  loss {loss:.3f}"
    return [
        f"equal samples ({synchronous['samples']:,}) on this machine",
        f"  fleet        {result.format(**fleet)}  training {training:.1f} s, consolidation {consolidation:.1f} s",
        f"  synchronous  {result.format(**synchronous)}  training {synchronous['seconds']:.1f} s",
    ]
