"""Tapes of invented runs: lines as the syncer writes them, so short that their facts can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

START = 1_700_000_000.0  # unix seconds of the first line


def start(step: int = 0, at: float = 0.0, **fields: Any) -> dict[str, Any]:
    """An ``event: start`` line."""
    return {"time": START + at, "event": "start", "step": step, "total_steps": 8, "profile": "ab" * 32, **fields}


def event(name: str, at: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"time": START + at, "event": name, **fields}


def answer(learner: int, weight: float = 1.0, **fields: Any) -> dict[str, Any]:
    """One responder; ``contribution`` is put right by ``merge``."""
    return {
        "id": learner,
        "generation": 100 + learner,
        "base_version": 0,
        "staleness": 0,
        "c_steps": 4,
        "c_tokens": 40,
        "weight": weight,
        "bytes": 1000,
        **fields,
    }


def merge(
    step: int, answers: Iterable[dict[str, Any]], missed: Iterable[int] = (), fragments: int = 2, **fields: Any
) -> dict[str, Any]:
    """A merge line; committed at second ``step`` unless ``time`` says otherwise."""
    answers, missed = list(answers), list(missed)
    total = sum(one["weight"] for one in answers)
    responded = [one["id"] for one in answers]
    expected = sorted([*responded, *missed])
    return {
        "time": START + step,
        "protocol_version": 4,
        "delta_semantics": "local_minus_raw_anchor",
        "step": step,
        "fragment": (step - 1) % fragments,
        "launch_base_version": max(0, step - fragments),
        "attempt": 1,
        "quorum": 1,
        "expected": expected,
        "expected_members": _members(expected),
        "responded": responded,
        "responded_members": _members(responded),
        "missed_grace": missed,
        "missed_members": _members(missed),
        "quorum_ms": 50.0,
        "grace_ms": None,
        "rejected": {},
        "left_out_members": [],
        "responders": [one | {"contribution": one["weight"] / total if total else 0.0} for one in answers],
        "gnorm": 1.0,
        "gain": 1.1,
        "drive": 1.0,
        "agreement": 0.9,
        "lag_cosine": None,
        "momentum": 0.5,
        "ms": 100.0,
        "sync_ms": 5.0,
        **fields,
    }


def _members(ids: Iterable[int]) -> list[dict[str, int]]:
    return [{"id": learner, "generation": 100 + learner} for learner in ids]


def written(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """``lines`` as a tape at ``path``."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
