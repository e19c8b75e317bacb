"""Put every check to every subject, and print what came out as a table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import tests.contract.keeping
import tests.contract.stepping  # noqa: F401  # both register their checks, in this order
from tests.contract.registry import CHECKS, Check
from tests.contract.subjects import SUBJECTS, Subject
from tests.support.processes import Processes, Zygote

Findings = dict[str, list[str | None]]  # by subject: what went wrong with each check, None if nothing did


@contextmanager
def asking(name: str, processes: Processes) -> Iterator[Subject]:
    """The subject, ready to be asked."""
    subject = SUBJECTS[name](processes)
    try:
        yield subject
    finally:
        subject.close()


def ask(subject: Subject, check: Check) -> str | None:
    """What went wrong, in a line; None if nothing did."""
    state = torch.get_rng_state()
    try:
        check.run(subject)
    except Exception as error:  # noqa: BLE001  # whatever a wrapper raises is its answer
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        torch.set_rng_state(state)
    return None


def probe(names: Iterable[str], folder: Path, zygote: Zygote) -> Findings:
    """Ask every subject everything."""
    findings: Findings = {}
    for number, name in enumerate(names):
        own = folder / str(number)
        own.mkdir()
        processes = Processes(own, zygote)
        try:
            with asking(name, processes) as subject:
                findings[name] = [ask(subject, check) for check in CHECKS]
        finally:
            processes.close()
    return findings


def table(findings: Findings) -> list[str]:
    """Markdown: a line for every check, a column for every subject."""
    lines = [f"| | {' | '.join(findings)} |", f"|---|{'---|' * len(findings)}"]
    for number, check in enumerate(CHECKS):
        marks = ["ok" if found[number] is None else "**no**" for found in findings.values()]
        lines.append(f"| {check.sentence} | {' | '.join(marks)} |")
    met = [f"{sum(wrong is None for wrong in found)} of {len(CHECKS)}" for found in findings.values()]
    return [*lines, f"| together | {' | '.join(met)} |"]


def alone(names: Iterable[str]) -> Findings:
    """The same without a test runner."""
    with tempfile.TemporaryDirectory() as folder:
        zygote = Zygote()
        try:
            return probe(names, Path(folder), zygote)
        finally:
            zygote.close()
