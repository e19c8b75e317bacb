"""The facts of a run as one HTML page that needs nothing else.

It decides which sentence, picture and table stands where. It must not know the tape's format or how a fact is counted.
Strings of a tape are strangers' text: they reach the page through the template alone, which escapes them, and the
page itself forbids scripts and requests (its Content-Security-Policy). Only the pictures, which hold no such text, are
inserted as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from syncer.config.policy import DRIVE_LIMIT
from syncer.report import plots, timeline, words
from syncer.report.columns import Event
from syncer.report.facts import Facts, LearnerRow, Summary
from yeto_torch import __version__

_EVENTS_FIRST, _EVENTS_LAST = 100, 200
_LEARNER_ROWS = 500
_REASONS = {
    "out_of_round": "came when its round was closed already",
    "unexpected_member": "from a connection that the round had not captured",
    "future_base": "made from a version newer than the round's",
    "duplicate": "a second answer to one round",
    "norm": "much longer than the others of its round, and left out (merge.max_norm_ratio)",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A picture with its heading, the sentence that says what it shows, and how to read it."""

    name: str
    title: str
    sentence: str
    picture: str  # SVG, or nothing
    caption: str


def page_of(facts: Facts, name: str) -> str:
    """The page. ``name``: what the run is called, the tape's file name."""
    environment = Environment(loader=PackageLoader("syncer.report", "."), autoescape=True, undefined=StrictUndefined)
    template = environment.get_template("page.html.j2", globals={"words": words})
    events = facts.events
    cut = len(events) > _EVENTS_FIRST + _EVENTS_LAST
    return template.render(
        name=name,
        version=__version__,
        summary=facts.summary,
        per_column=facts.series.per_column,
        tiles=_tiles(facts.summary),
        sections=_sections(facts),
        learners=_most_missing(facts.learners),
        all_learners=len(facts.learners),
        most_share=max(row.share for row in facts.learners) or 1.0,
        reasons=[(words.count(number), _REASONS.get(key, key)) for key, number in facts.summary.rejected[:12]],
        events_first=_rows(events[:_EVENTS_FIRST] if cut else events, facts.summary.began),
        events_last=_rows(events[-_EVENTS_LAST:] if cut else (), facts.summary.began),
        events_left_out=len(events) - _EVENTS_FIRST - _EVENTS_LAST if cut else 0,
        events_total=len(events),
    )


def _tiles(summary: Summary) -> list[tuple[str, str, str]]:
    """(what, the number, what else)."""
    total = f"of {words.count(summary.total_steps)}" if summary.total_steps else "the end is not on the tape"
    late = sum(number for _, number in summary.rejected)
    middle, most = (words.duration(ms / 1e3) for ms in (summary.ms_median, summary.ms_p95))
    answers = f"{words.count(summary.answers)} of {words.count(summary.captured)}"
    return [
        ("rounds", words.count(summary.last_step), total),
        ("duration", words.duration(summary.duration_s), f"{summary.pace:.3g} rounds a minute"),
        ("learners", words.count(summary.learners), f"{words.count(summary.fragments)} fragments"),
        ("a round takes", middle, f"95 % within {most}"),
        ("answered in time", words.percent(summary.answered), f"{answers} answers"),
        ("fresh answers", words.percent(summary.fresh), "made from the newest version"),
        ("did not count", words.count(late), f"answers; {words.count(summary.retries)} further attempts"),
        ("received", words.size(summary.nbytes), "of answers that counted"),
    ]


def _sections(facts: Facts) -> list[Section]:
    series, summary = facts.series, facts.summary
    ids = tuple(row.id for row in facts.learners)
    shown = f" The {plots.ROWS} that missed most are shown." if len(ids) > plots.ROWS else ""
    present = plots.participation(series, ids)
    staleness = plots.staleness(series) if summary.fresh < 1 else ""
    driven = "" if summary.over_driven is None else plots.drive(series)
    trouble = sum(number for _, number in summary.rejected) + summary.retries
    return [
        Section("pace", "Pace", _pace(summary), timeline.pace(facts), "Level stretches are pauses."),
        Section("latency", "How long a round takes", _latency(summary), plots.latency(series), _LATENCY),
        Section("participation", "Who took part", _participation(facts), present, _PRESENT + shown),
        Section("contributions", "Who contributed", _share(facts), plots.contributions(series, ids), _WEIGHT),
        Section("staleness", "How stale the answers were", _fresh(summary), staleness, _STALE),
        Section("norms", "How far a merge moves", _norm(facts), plots.norms(series), _NORM),
        Section("drive", "How hard the outer step drives", _drive(summary), driven, _DRIVE),
        Section("trouble", "What did not count", _trouble(summary), plots.trouble(series) if trouble else "", ""),
        Section("events", "What happened", _happened(facts), timeline.events(facts) if facts.events else "", ""),
    ]


_LATENCY = (
    "From the launch of the attempt that was merged to its commit. What lies between the quorum and the merge is grace."
)
_PRESENT = "A learner is captured by a round if it is connected at its launch; only then may it answer."
_WEIGHT = "A learner's part in a merge is its tokens² / steps over the sum of all that answered."
_STALE = "A fragment has a new version every time its turn comes; an answer counts from the version it was made from."
_AT_ONCE = "every round was merged at its first attempt"
_DRIVE = (
    "How far a step went along the learners' mean progress, in units of what the merge itself would have gone; the "
    f"dashed line is its limit, {DRIVE_LIMIT:g}. Agreement: the mean answer's length over the answers' mean length."
)
_NORM = "The Euclidean length of the merged outer gradient, before the outer learning rate and momentum."


def _pace(summary: Summary) -> str:
    text = f"{words.count(summary.rounds)} rounds in {words.duration(summary.duration_s)}"
    if summary.starts > 1:
        text += f", over {summary.starts} starts of the syncer"
    if summary.superseded:
        text += f"; {words.count(summary.superseded)} more were made, lost with a restart, and made again"
    return text + "."


def _latency(summary: Summary) -> str:
    half, most, longest = (words.duration(ms / 1e3) for ms in (summary.ms_median, summary.ms_p95, summary.ms_longest))
    return f"Half of the rounds took at most {half}, 95 % at most {most}, the longest {longest}."


def _participation(facts: Facts) -> str:
    late = facts.summary.captured - facts.summary.answers
    if late <= 0:
        return "Every learner answered every round that had captured it."
    worst = max(facts.learners, key=lambda row: row.captured - row.answered)
    return (
        f"{words.percent(facts.summary.answered)} of the answers came in time. Learner {worst.id} missed most: "
        f"{words.count(worst.captured - worst.answered)} of its {words.count(worst.captured)} rounds."
    )


def _share(facts: Facts) -> str:
    most, least = max(facts.learners, key=lambda row: row.share), min(facts.learners, key=lambda row: row.share)
    if len(facts.learners) == 1:
        return f"Learner {most.id} is alone."
    parts = words.percent(most.share), words.percent(least.share)
    return f"Learner {most.id} gave most, {parts[0]}; learner {least.id} least, {parts[1]}."


def _fresh(summary: Summary) -> str:
    if summary.fresh == 1:
        return "Every answer was made from the newest version of its fragment."
    return f"{words.percent(summary.fresh)} of the answers were made from the newest version of their fragment."


def _norm(facts: Facts) -> str:
    lines = [line[~np.isnan(line)] for line in facts.series.gnorm_by_fragment]
    ratios = [line[-1] / line[0] for line in lines if len(line) > 1 and line[0] > 0]
    if not ratios:
        return "Too few rounds to tell a direction."
    return f"From a fragment's first round to its last, the norm changed by a factor of {np.median(ratios):.2g}."


def _drive(summary: Summary) -> str:
    if summary.over_driven is None:
        return "The tape does not tell."
    if summary.over_driven == 0:
        return "Every merge was within the limit."
    return f"{words.percent(summary.over_driven)} of the merges were driven beyond the limit."


def _trouble(summary: Summary) -> str:
    rejected = sum(number for _, number in summary.rejected)
    answers = f"{words.count(rejected)} {'answer' if rejected == 1 else 'answers'} did not count"
    again = f"rounds were launched again {words.count(summary.retries)} times before their quorum had answered"
    if summary.retries == 1:
        again = "one round was launched again before its quorum had answered"
    return f"{answers if rejected else 'Every answer counted'}; {again if summary.retries else _AT_ONCE}."


def _happened(facts: Facts) -> str:
    if not facts.events:
        return "The tape holds no events."
    refused = f", {words.count(facts.summary.refused)} HELLOs refused" if facts.summary.refused else ""
    return f"{words.count(len(facts.events))} events{refused}."


def _most_missing(learners: Sequence[LearnerRow]) -> list[LearnerRow]:
    """In the order of their ids; of very many, those that missed most."""
    worst = sorted(learners, key=lambda row: row.answered - row.captured)[:_LEARNER_ROWS]
    return sorted(worst, key=lambda row: row.id)


def _rows(events: Sequence[Event], began: float) -> list[tuple[str, str, str, str, str]]:
    """(when, what, step, learner, the rest)."""
    return [
        (
            f"+{words.duration(max(0.0, event.time - began))}",
            event.name,
            "" if event.step is None else words.count(event.step),
            "" if event.learner is None else str(event.learner),
            event.text,
        )
        for event in events
    ]
