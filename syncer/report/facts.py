"""What a tape tells about its run, as numbers: totals, one row per learner, and series over the rounds.

It decides what is counted. It must not know plots, HTML or files.

Staleness on the tape is in outer steps. A fragment gets a new version every F of them, so an answer of staleness s is
ceil(s / F) versions behind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from syncer.config.policy import DRIVE_LIMIT
from syncer.report.checks import Numbers
from syncer.report.columns import Columns, Event
from syncer.report.series import COLUMNS, Series, series_of
from yeto_torch.wire.errors import StateError


@dataclass(frozen=True, slots=True)
class Summary:
    """The run in numbers. Times in unix seconds, latencies in milliseconds, shares from 0 to 1.

    ``outcome`` is ``complete``, ``failed``, ``interrupted`` or ``open`` (no last word on the tape).
    """

    outcome: str
    reason: str
    rounds: int
    last_step: int
    total_steps: int | None
    superseded: int
    starts: int
    learners: int
    fragments: int
    began: float
    ended: float
    ran_s: float
    answers: int
    captured: int
    nbytes: float
    ms_median: float
    ms_p95: float
    ms_longest: float
    fresh: float
    retries: int
    rejected: tuple[tuple[str, int], ...]
    refused: int
    over_driven: float | None  # of the merges whose drive is known, those beyond its limit

    @property
    def duration_s(self) -> float:
        return self.ended - self.began

    @property
    def pace(self) -> float:
        """Rounds a minute between the first commit and the last, pauses included; 0 where there is no telling."""
        return 60 * (self.rounds - 1) / self.ran_s if self.ran_s > 0 else 0.0

    @property
    def answered(self) -> float:
        """The share of captured learners that answered in time."""
        return self.answers / self.captured if self.captured else 0.0


@dataclass(frozen=True, slots=True)
class LearnerRow:
    """One learner. ``share`` is its part of all contributions, ``behind`` its mean versions behind."""

    id: int
    captured: int
    answered: int
    share: float
    c_steps: float
    behind: float
    nbytes: float
    joins: int
    leaves: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the page shows."""

    summary: Summary
    learners: tuple[LearnerRow, ...]
    series: Series
    events: tuple[Event, ...]


def facts_of(columns: Columns, most_columns: int = COLUMNS) -> Facts:
    """The facts of a tape. Raises StateError when it holds no merged round."""
    if not len(columns.step):
        seen = Counter(event.name for event in columns.events)
        held = ", ".join(f"{count} {name}" for name, count in seen.most_common(5)) or "no line"
        raise StateError(f"it holds no merged round, so there is nothing to show ({held})")
    if not columns.learners:
        raise StateError("it names no learner, so there is nothing to show")
    fragments = int(columns.fragment.max()) + 1
    behind = np.ceil(columns.staleness / fragments)
    return Facts(
        _summary(columns, fragments, behind),
        _learners(columns, behind),
        series_of(columns, fragments, behind, most_columns),
        columns.events,
    )


def _summary(columns: Columns, fragments: int, behind: Numbers) -> Summary:
    starts = [event for event in columns.events if event.name == "start"]
    total = starts[-1].fields.get("total_steps") if starts else None
    times = [*columns.time.tolist(), *(event.time for event in columns.events)]
    rejected: Counter[str] = Counter()
    for _, reason, count in columns.rejected:
        rejected[reason] += count
    outcome, reason = _outcome(columns.events)
    known = columns.drive[~np.isnan(columns.drive)]
    return Summary(
        outcome=outcome,
        reason=reason,
        rounds=len(columns.step),
        last_step=int(columns.step.max()),
        total_steps=total if type(total) is int and 0 < total < 2**63 else None,
        superseded=columns.superseded,
        starts=len(starts),
        learners=len(columns.learners),
        fragments=fragments,
        began=min(times),
        ended=max(times),
        ran_s=float(columns.time.max() - columns.time.min()),
        answers=len(columns.answer_round),
        captured=len(columns.member_round),
        nbytes=float(columns.nbytes.sum()),
        ms_median=float(np.median(columns.ms)),
        ms_p95=float(np.percentile(columns.ms, 95)),
        ms_longest=float(columns.ms.max()),
        fresh=float((behind == 0).mean()) if len(behind) else 1.0,
        retries=int(np.maximum(columns.attempt - 1, 0).sum()),
        rejected=tuple(rejected.most_common()),
        over_driven=float((known > DRIVE_LIMIT).mean()) if len(known) else None,
        refused=sum(event.name == "reject" and event.fields.get("what") == "hello" for event in columns.events),
    )


def _outcome(events: tuple[Event, ...]) -> tuple[str, str]:
    last = next((event for event in reversed(events) if event.name in ("end", "start")), None)
    if last is None or last.name == "start":
        return "open", ""
    known = {0: "complete", 130: "interrupted"}
    code = last.fields.get("code")
    return known.get(code, "failed") if type(code) is int else "failed", str(last.fields.get("reason", ""))[:300]


def _learners(columns: Columns, behind: Numbers) -> tuple[LearnerRow, ...]:
    many = len(columns.learners)
    captured = np.bincount(columns.member_learner, minlength=many)
    answered = np.bincount(columns.member_learner, columns.member_answered, minlength=many)
    answers = np.bincount(columns.answer_learner, minlength=many)

    def total(values: Numbers) -> Numbers:
        return np.bincount(columns.answer_learner, values, minlength=many).astype(float)

    each = np.maximum(answers, 1)
    contribution = total(columns.contribution)
    share = contribution / max(contribution.sum(), 1e-300)
    steps, late, nbytes = total(columns.c_steps) / each, total(behind) / each, total(columns.nbytes)
    told = Counter((event.name, event.learner) for event in columns.events)
    figures = [figure.tolist() for figure in (captured, answered.astype(int), share, steps, late, nbytes)]
    came, went = ([told[name, learner] for learner in columns.learners] for name in ("join", "leave"))
    return tuple(LearnerRow(*row) for row in zip(columns.learners, *figures, came, went, strict=True))
