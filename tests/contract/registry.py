"""The checks as data: a sentence, the case it belongs to, and a function that fails when a subject does not do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.contract.subjects import Subject

Run = Callable[[Subject], None]


@dataclass(frozen=True)
class Check:
    """``run`` raises whatever it likes when the subject fails."""

    topic: str
    sentence: str
    run: Run


CHECKS: list[Check] = []


def check(topic: str, sentence: str) -> Callable[[Run], Run]:
    """Add the function to the probe."""

    def add(run: Run) -> Run:
        CHECKS.append(Check(topic, sentence, run))
        return run

    return add
