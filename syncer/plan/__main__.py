"""``python -m syncer.plan``: what a fleet will do before there is one, and which settings to take.

    python -m syncer.plan model=100M learners=4 step=0.5s link=100mbit mtbf=6h

Decides: what people type and how the answer reads. The fleet runs in virtual time, with the real coordinator
(``simulated_fleet``). Nothing is connected, and nothing written but the file of ``json=``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from syncer.config.plain_command import key_values, run_command
from syncer.plan.advice import Advice, Wishes, plan, shortfalls
from syncer.plan.situation import SCHEDULE, Situation, learner_bytes, syncer_bytes
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import StateError

USAGE = (
    "python -m syncer.plan model=PARAMETERS learners=M step=TIME link=RATE [syncer_link=RATE] [latency=TIME] "
    "[mtbf=TIME] [repair=TIME] [speeds=1,1,0.5] [wire_dtype=f32|bf16|q4] [fragments=F] [interval=H] [quorum=Q] "
    "[pipeline=P] [merge_rate=RATE] [seed=N] [json=PATH]; for example model=100M step=0.5s link=100mbit mtbf=6h"
)
_REQUIRED = ("model", "learners", "step", "link")
_OPTIONAL = (
    "syncer_link", "latency", "mtbf", "repair", "speeds", "wire_dtype", "fragments", "interval", "quorum", "pipeline",
    "merge_rate", "seed", "json",
)  # fmt: skip
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_RATES = {"mbit": 1e6 / 8, "gbit": 1e9 / 8, "kbit": 1e3 / 8, "MB": 1e6, "GB": 1e9}  # bytes per second
_MOST_LEARNERS = 1024
_LEAST_SPEED = 0.01  # of the slower ones whole cycles are watched, while the fastest makes all of its steps
T = TypeVar("T")


def command(argv: Sequence[str]) -> None:
    """The command. Raises ValueError naming the key, the value and what is legal; StateError for the file."""
    values = key_values(argv, _REQUIRED, _OPTIONAL)
    situation, wishes = situation_of(values), wishes_of(values)
    seed = _taken(values, "seed", _whole(0, 2**31), 0)
    found = plan(situation, wishes, seed)
    print(told(situation, found))
    if "json" in values:
        settings = found.settings
        content = {
            "settings": {**asdict(settings), "wire_dtype": settings.wire_dtype.name.lower()},
            "forecast": asdict(found.forecast),
            "memory": {
                "syncer_bytes": syncer_bytes(situation, settings),
                "learner_bytes": learner_bytes(situation, settings),
            },
            "reasons": found.reasons,
        }
        try:
            Path(values["json"]).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise StateError(f"json {values['json']}: cannot be written: {error.strerror or error}") from error


def situation_of(values: Mapping[str, str]) -> Situation:
    """What the user has. Raises ValueError."""
    learners = _taken(values, "learners", _whole(1, _MOST_LEARNERS), 0)
    link = _taken(values, "link", _rate, 0.0)
    situation = Situation(
        parameters=int(_taken(values, "model", _count, 0.0)),
        learners=learners,
        step_s=_taken(values, "step", _time, 0.0),
        link=link,
        syncer_link=_taken(values, "syncer_link", _rate, link),
        latency_s=_taken(values, "latency", _time, 0.02),
        mtbf_s=_taken(values, "mtbf", _time, None),
        repair_s=_taken(values, "repair", _time, 300.0),
        speeds=_taken(values, "speeds", lambda text: _speeds(text, learners), ()),
    )
    merge_rate = _taken(values, "merge_rate", _rate, None)
    return situation if merge_rate is None else replace(situation, merge_rate=merge_rate)


def wishes_of(values: Mapping[str, str]) -> Wishes:
    """What the user has chosen already. Raises ValueError."""
    learners = int(values["learners"])
    return Wishes(
        _taken(values, "wire_dtype", _dtype, None),
        _taken(values, "fragments", _whole(1, 4096), None),
        _taken(values, "interval", lambda text: _quantity(text, {"": 1.0}, "a number of steps above 0"), None),
        _taken(values, "quorum", _whole(1, learners), None),
        _taken(values, "pipeline", _whole(1, 64), SCHEDULE.pipeline),
    )


def told(situation: Situation, found: Advice) -> str:
    """The answer as text."""
    s, f = found.settings, found.forecast
    quorum = s.quorum or situation.learners // 2 + 1
    memory = syncer_bytes(situation, s), learner_bytes(situation, s)
    rows = [
        ("rounds", f"{f.rounds_per_s:.3g} per second, {f.round_s:.2f} s each from launch to commit"),
        ("a fragment is merged", f"every {f.interval_steps:.0f} steps of the fastest learner"),
        ("steps that are merged", f"{f.merged_share:.1%} of those made"),
        ("goodput", f"{f.goodput:.1%} of a fleet that never fails or stalls"),
        ("answers", f"{f.participation:.1%} of those asked for, {f.staleness:.2f} versions behind on average"),
        ("a learner moves", f"{_bytes(f.sent_per_step)} up and {_bytes(f.received_per_step)} down per step"),
        ("busy", f"learner's link {f.link_use:.1%}, syncer's link {f.syncer_link_use:.1%}, syncer {f.syncer_use:.1%}"),
        ("training stalls", f"{f.stall:.2%} of the time"),
        ("memory of tensors", f"syncer up to {_bytes(memory[0])}, learner {_bytes(memory[1])} beyond its model"),
    ]
    if f.against_gradients:
        rows.append(("f32 gradients", f"every step would be {f.against_gradients:.0f} times the bytes"))
    if situation.mtbf_s is not None:
        rows.append(("failures", f"{f.failures} were watched, {f.relaunches} rounds launched again"))
    syncer = [f"learners={situation.learners}", f"schedule.sync_interval_steps={s.interval:g}"]
    syncer += [f"schedule.quorum={quorum}", f"schedule.pipeline={s.pipeline}", "total_steps=..."]
    return "\n".join(
        [
            *(f"{name:<22} {text}" for name, text in rows),
            "",
            "held up: " + ("; ".join(shortfalls(f)) or "nothing"),
            *(f"why: {reason}" for reason in found.reasons),
            "",
            " ".join(["python -m syncer", *syncer]),
            f'YetoOuterOptimizer(..., fragments={s.fragments}, wire_dtype="{s.wire_dtype.name.lower()}")',
        ]
    )


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _taken(values: Mapping[str, str], key: str, read: Callable[[str], T], default: T) -> T:
    """The value of ``key``; a reader's ValueError says what is legal."""
    if key not in values:
        return default
    try:
        return read(values[key])
    except ValueError as legal:
        raise ValueError(f"{key}={values[key]}: must be {legal}") from None


def _quantity(text: str, units: Mapping[str, float], legal: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in units or not 0 < float(match[1]) * units[match[2]] < 1e18:
        raise ValueError(legal)
    return float(match[1]) * units[match[2]]


def _count(text: str) -> float:
    legal = "a number of parameters from 1, as 30e6, 100M or 7B"
    value = _quantity(text, _COUNTS, legal)
    if value < 1:
        raise ValueError(legal)
    return value


def _time(text: str) -> float:
    return _quantity(text, _TIMES, "a time above 0, as 500ms, 0.5s, 30min, 6h or 2d; without a unit in seconds")


def _rate(text: str) -> float:
    return _quantity(text, _RATES, "a rate above 0 with its unit, as 100mbit, 1gbit, 10MB or 2GB (per second)")


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,12}", text) or not low <= int(text) <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return int(text)

    return read


def _speeds(text: str, learners: int) -> tuple[float, ...]:
    legal = f"{learners} numbers from {_LEAST_SPEED} to 1 with commas between them, one of them 1"
    words = text.split(",")
    if len(words) != learners or not all(re.fullmatch(r"\d+(\.\d+)?", word) for word in words):
        raise ValueError(legal)
    speeds = tuple(map(float, words))
    if max(speeds) != 1.0 or min(speeds) < _LEAST_SPEED:
        raise ValueError(legal)
    return speeds


def _dtype(text: str) -> WireDType:
    names = {dtype.name.lower(): dtype for dtype in WireDType}
    if text not in names:
        raise ValueError("one of " + ", ".join(names))
    return names[text]


if __name__ == "__main__":
    sys.exit(run_command(command, USAGE, sys.argv[1:]))
