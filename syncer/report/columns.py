"""The lines of a tape as columns of numbers: every value checked, superseded rounds dropped.

It decides what a line may hold and which rounds still stand. A tape may come from anybody, so a wrong value is one
sentence with the line's number, and what is kept of free text is short. It must not know plots, HTML or files.
Values are checked by the column, not one by one: a tape of 100,000 rounds holds ten million.

A run that resumes from a checkpoint makes its last rounds again: an ``event: start`` line of step s voids the merge
lines of a higher step before it, as ``syncer.tape.merges`` has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncer.core.record import Line
from syncer.report.checks import LARGEST_ID, At, Numbers, Whole, number_column, shortened, whole_column, whole_number
from yeto_torch.wire.errors import StateError


@dataclass(frozen=True, slots=True)
class Event:
    """A line that is not a merge. ``step`` and ``learner`` are None where it names none; ``text`` is the rest of it."""

    time: float
    name: str
    step: int | None
    learner: int | None
    text: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Columns:
    """A tape's content. Rounds in tape order; members and answers point to their round by its row.

    Attributes:
        step, fragment, attempt, quorum: [rounds].
        time: [rounds] unix seconds of the commit.
        ms, quorum_ms, grace_ms, sync_ms, gnorm: [rounds]; NaN where the line has null.
        drive, agreement, lag_cosine, momentum: [rounds]; NaN where the line has null, or is older than these keys.
        member_round, member_learner, member_answered: [members] whom each round's last attempt had captured.
        answer_round, answer_learner, staleness, c_steps, nbytes, contribution: [answers].
        rejected: (row of the round, reason, answers not counted since the round before).
        events: the other lines.
        superseded: rounds that a later start voided, and were made again.
        learners: every id that occurs, ascending; the columns hold positions in it.
    """

    step: Whole
    fragment: Whole
    attempt: Whole
    quorum: Whole
    time: Numbers
    ms: Numbers
    quorum_ms: Numbers
    grace_ms: Numbers
    sync_ms: Numbers
    gnorm: Numbers
    drive: Numbers
    agreement: Numbers
    lag_cosine: Numbers
    momentum: Numbers
    member_round: Whole
    member_learner: Whole
    member_answered: NDArray[np.bool_]
    answer_round: Whole
    answer_learner: Whole
    staleness: Numbers
    c_steps: Numbers
    nbytes: Numbers
    contribution: Numbers
    rejected: tuple[tuple[int, str, int], ...]
    events: tuple[Event, ...]
    superseded: int
    learners: tuple[int, ...]


_WHOLE = ("step", "fragment", "attempt", "quorum")
_NUMBERS = ("time", "ms", "quorum_ms", "grace_ms", "sync_ms", "gnorm")
_MAY_BE_NULL = ("quorum_ms", "grace_ms", "sync_ms", "gnorm")
_MAY_BE_MISSING = ("drive", "agreement", "lag_cosine", "momentum")
_MAY_BE_NEGATIVE = ("drive", "lag_cosine")
_LISTS = ("expected", "responded", "responders")
_ANSWER = ("id", "staleness", "c_steps", "bytes", "contribution")
_fields, _answer = itemgetter(*_WHOLE, *_NUMBERS), itemgetter(*_ANSWER)


@dataclass(frozen=True, slots=True)
class _Round:
    """A merge line as it came; only ``step`` and the lists are known to be what they should."""

    line: int
    step: int
    fields: tuple[object, ...]
    expected: list[object]
    marks: list[bool]  # who of them answered
    answers: list[tuple[object, ...]]
    rejected: dict[str, object]


def columns_of(entries: Iterable[Line]) -> Columns:
    """The columns of a tape's objects, in their order. Raises StateError naming the line, the key and the value."""
    rounds: list[_Round] = []
    events: list[Event] = []
    superseded = 0
    for line, entry in enumerate(entries, start=1):
        if "event" not in entry:
            rounds.append(_round(line, entry))
            continue
        event = _event(line, entry)
        events.append(event)
        if event.name == "start" and event.step is not None:
            standing = [round_ for round_ in rounds if round_.step <= event.step]
            superseded += len(rounds) - len(standing)
            rounds = standing
    return _columns(rounds, events, superseded)


def _round(line: int, entry: Line) -> _Round:
    step = whole_number("step", entry.get("step"), line)
    try:
        expected, responded, responders = (entry[key] for key in _LISTS)
        if not all(type(value) is list for value in (expected, responded, responders)):
            raise TypeError
        said, rejected = frozenset(responded), entry.get("rejected", {})
        answers = [_answer(responder) for responder in responders]
        if type(rejected) is not dict:
            raise TypeError
        marks = [who in said for who in expected]
        fields = (*_fields(entry), *map(entry.get, _MAY_BE_MISSING))
    except KeyError as error:
        raise StateError(f"line {line}: {error.args[0]} is missing") from error
    except TypeError as error:
        told = f"{', '.join(_LISTS)} or rejected is of the wrong kind"
        raise StateError(f"line {line}: not a merge line: {told}") from error
    return _Round(line, step, fields, expected, marks, answers, rejected)


def _columns(rounds: list[_Round], events: list[Event], superseded: int) -> Columns:
    lines = [round_.line for round_ in rounds]
    fields = _by_key((*_WHOLE, *_NUMBERS, *_MAY_BE_MISSING), [round_.fields for round_ in rounds])
    whole = {key: whole_column(key, fields[key], lines) for key in _WHOLE}
    numbers = {key: number_column(key, fields[key], lines, key in _MAY_BE_NULL) for key in _NUMBERS}
    later = {key: number_column(key, fields[key], lines, True, key in _MAY_BE_NEGATIVE) for key in _MAY_BE_MISSING}
    answers = _by_key(_ANSWER, [answer for round_ in rounds for answer in round_.answers])
    expected = list(chain.from_iterable(round_.expected for round_ in rounds))
    members = _rows([len(round_.expected) for round_ in rounds])
    answered = _rows([len(round_.answers) for round_ in rounds])
    captured = whole_column("expected", expected, At(lines, members), LARGEST_ID)
    at = At(lines, answered)
    who = whole_column("id", answers["id"], at, LARGEST_ID)
    named = np.array([event.learner for event in events if event.learner is not None], dtype=np.int64)
    learners = np.unique(np.concatenate([captured, who, named]))
    by_name: dict[str, Any] = {**whole, **numbers, **later}
    return Columns(
        **by_name,
        member_round=members,
        member_learner=np.searchsorted(learners, captured),
        member_answered=np.fromiter(chain.from_iterable(round_.marks for round_ in rounds), dtype=bool),
        answer_round=answered,
        answer_learner=np.searchsorted(learners, who),
        staleness=whole_column("staleness", answers["staleness"], at).astype(float),
        c_steps=whole_column("c_steps", answers["c_steps"], at).astype(float),
        nbytes=whole_column("bytes", answers["bytes"], at).astype(float),
        contribution=number_column("contribution", answers["contribution"], at),
        rejected=tuple(_rejected(rounds)),
        events=tuple(events),
        superseded=superseded,
        learners=tuple(learners.tolist()),
    )


def _rejected(rounds: list[_Round]) -> Iterable[tuple[int, str, int]]:
    for row, round_ in enumerate(rounds):
        for reason, count in round_.rejected.items():
            yield row, shortened(reason), whole_number(f"rejected {shortened(reason, 60)}", count, round_.line)


def _event(line: int, entry: Mapping[str, object]) -> Event:
    rest = {key: value for key, value in entry.items() if key not in ("event", "time", "step", "id", "generation")}
    step, learner = entry.get("step"), entry.get("id")
    return Event(
        float(number_column("time", [entry.get("time")], [line])[0]),
        shortened(str(entry["event"])),
        None if step is None else whole_number("step", step, line),
        None if learner is None else whole_number("id", learner, line, LARGEST_ID),
        shortened(", ".join(f"{key} {value}" for key, value in rest.items())),
        entry,
    )


def _rows(sizes: list[int]) -> Whole:
    """Each round's row, once per member or answer of it."""
    return np.repeat(np.arange(len(sizes)), np.array(sizes, dtype=np.int64))


def _by_key(keys: Sequence[str], rows: list[tuple[object, ...]]) -> dict[str, Sequence[object]]:
    """The columns of ``rows``, by name."""
    return dict(zip(keys, zip(*rows, strict=True) if rows else [()] * len(keys), strict=True))
