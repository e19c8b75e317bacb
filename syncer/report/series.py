"""A run over its rounds, made short without loss of what matters.

It decides the columns: rounds are put into at most so many, of equal number, and a column keeps the least, middle and
greatest value, or shares that add up. It must not know plots, HTML or files.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from syncer.report.checks import Numbers, Whole
from syncer.report.columns import Columns

COLUMNS = 240  # at most
BEHIND = 4  # versions behind are told apart up to here; the last class is "so many or more"
_FRAGMENTS = 64  # with series of their own
_REASONS = 5  # of rejections; the rarer ones are one series


@dataclass(frozen=True, slots=True)
class Band:
    """Per column the least, the middle and the greatest value; NaN where there is none."""

    low: Numbers
    middle: Numbers
    high: Numbers


@dataclass(frozen=True, slots=True)
class Series:
    """A run over its rounds, in C columns.

    Attributes:
        per_column: rounds in a column (the last may have fewer).
        step: [C + 1] the outer steps at which columns begin; the last one is behind the run.
        ends, time, nbytes_total: [C] a column's last step, when it was committed, the bytes of all answers by then.
        ms, gnorm, drive: bands; quorum_ms, sync_ms, agreement, lag_cosine, momentum: [C] medians.
        answered, missed: [learners, C] shares of the column's rounds; what is left, the learner was not there.
        contribution: [learners, C] mean share of the merge.
        behind: [BEHIND + 1, C] shares of the answers that were 0, 1, ... versions behind.
        retries: [C] further attempts; rejected: reason -> [C] answers not counted.
        gnorm_by_fragment: [F, C] medians, NaN where a column has no round of the fragment.
    """

    per_column: int
    step: Numbers
    ends: Numbers
    time: Numbers
    nbytes_total: Numbers
    ms: Band
    quorum_ms: Numbers
    sync_ms: Numbers
    gnorm: Band
    gnorm_by_fragment: Numbers
    drive: Band
    agreement: Numbers
    lag_cosine: Numbers
    momentum: Numbers
    answered: Numbers
    missed: Numbers
    contribution: Numbers
    behind: Numbers
    retries: Numbers
    rejected: dict[str, Numbers]


class _Grid:
    """Which round lies in which column, and sums over both members and answers."""

    def __init__(self, columns: Columns, most: int) -> None:
        rounds = len(columns.step)
        self.per_column = -(-rounds // most)
        self.starts = np.arange(0, rounds, self.per_column)
        self.width = len(self.starts)
        self.of_round = np.arange(rounds) // self.per_column
        self.rounds = np.bincount(self.of_round).astype(float)

    def sums(self, rows: int, row: Whole, rounds: Whole, values: Numbers | None = None) -> Numbers:
        """[rows, C] sums of ``values`` (or counts), each of a row and a round."""
        flat = np.bincount(row * self.width + self.of_round[rounds], values, minlength=rows * self.width)
        return flat.astype(float).reshape(rows, self.width)

    def band(self, values: Numbers) -> Band:
        """Of one value per round."""
        parts = [part[~np.isnan(part)] for part in np.split(values, self.starts[1:])]
        rows = [(part.min(), np.median(part), part.max()) if len(part) else (np.nan,) * 3 for part in parts]
        low, middle, high = np.array(rows, dtype=float).T
        return Band(low, middle, high)


def series_of(columns: Columns, fragments: int, behind: Numbers, most: int = COLUMNS) -> Series:
    """The series of at least one round. ``behind``: [answers] versions behind."""
    grid, many, said = _Grid(columns, most), len(columns.learners), columns.member_answered
    total = np.bincount(columns.answer_round, columns.nbytes, minlength=len(columns.step)).cumsum()
    by_class = grid.sums(BEHIND + 1, np.minimum(behind, BEHIND).astype(np.int64), columns.answer_round)
    ends = np.append(grid.starts[1:], len(columns.step)) - 1
    return Series(
        per_column=grid.per_column,
        step=np.append(columns.step[grid.starts], columns.step[-1] + 1).astype(float),
        ends=columns.step[ends].astype(float),
        time=columns.time[ends],
        nbytes_total=total[ends],
        ms=grid.band(columns.ms),
        quorum_ms=grid.band(columns.quorum_ms).middle,
        sync_ms=grid.band(columns.sync_ms).middle,
        gnorm=grid.band(columns.gnorm),
        gnorm_by_fragment=_by_fragment(columns, fragments, grid),
        drive=grid.band(columns.drive),
        agreement=grid.band(columns.agreement).middle,
        lag_cosine=grid.band(columns.lag_cosine).middle,
        momentum=grid.band(columns.momentum).middle,
        answered=grid.sums(many, columns.member_learner[said], columns.member_round[said]) / grid.rounds,
        missed=grid.sums(many, columns.member_learner[~said], columns.member_round[~said]) / grid.rounds,
        contribution=grid.sums(many, columns.answer_learner, columns.answer_round, columns.contribution) / grid.rounds,
        behind=by_class / np.maximum(by_class.sum(axis=0), 1),
        retries=np.bincount(grid.of_round, np.maximum(columns.attempt - 1, 0), minlength=grid.width).astype(float),
        rejected=_rejected(columns, grid),
    )


def _rejected(columns: Columns, grid: _Grid) -> dict[str, Numbers]:
    totals: Counter[str] = Counter()
    for _, reason, count in columns.rejected:
        totals[reason] += count
    named = [reason for reason, _ in totals.most_common(_REASONS)]
    out: dict[str, Numbers] = {}
    for row, reason, count in columns.rejected:
        kept = reason if reason in named else "other"
        out.setdefault(kept, np.zeros(grid.width))[grid.of_round[row]] += count
    return out


def _by_fragment(columns: Columns, fragments: int, grid: _Grid) -> Numbers:
    """[F, C] medians of the merged norms."""
    out = np.full((min(fragments, _FRAGMENTS), grid.width), np.nan)
    for fragment in range(len(out)):
        mine = (columns.fragment == fragment) & ~np.isnan(columns.gnorm)
        where, values = grid.of_round[mine], columns.gnorm[mine]
        cuts = np.flatnonzero(np.diff(where)) + 1
        for group, part in zip(np.split(where, cuts), np.split(values, cuts), strict=True):
            if len(part):
                out[fragment, group[0]] = np.median(part)
    return out
