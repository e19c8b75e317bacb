"""Ours meets every check of the contract; the page on optimizers says what the probe finds."""

import pytest

from tests.contract.keeping import SCHEDULES, classes_of_torch
from tests.contract.probe import probe, table
from tests.contract.registry import CHECKS
from tests.contract.subjects import SUBJECTS, Subject, Yeto, available, versions

PAGE = "docs/optimizers.md"
HEAD = "| | plain |"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.sentence)
def test_ours_meets_the_contract(ours, check):
    check.run(ours)


def table_of_the_page(root) -> list[str]:
    lines = (root / PAGE).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(HEAD))
    return [line for line in lines[start : start + len(CHECKS) + 3] if line.startswith("|")]


def columns(lines: list[str]) -> dict[str, list[str]]:
    """By heading, the marks below it; the first column is under ``""``."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: [row[index] for row in rows[2:]] for index, name in enumerate(rows[0])}


def test_the_page_shows_what_the_probe_finds(root, tmp_path, zygote):
    """The columns of others are compared where their packages have the versions that the page names."""
    text = (root / PAGE).read_text(encoding="utf-8")
    said = columns(table_of_the_page(root))
    assert list(said) == ["", *SUBJECTS]
    others = [name for name in available() if name != Yeto.name]
    if versions() not in text:
        others = [Subject.name]
    found = columns(table(probe(others, tmp_path, zygote)))
    assert said[""] == found[""]
    for name in others:
        assert said[name] == found[name]
    assert said[Yeto.name] == [*["ok"] * len(CHECKS), f"{len(CHECKS)} of {len(CHECKS)}"]


def test_every_scheduler_of_torch_is_in_the_probe():
    assert classes_of_torch() <= SCHEDULES.keys()
