"""The merge line of the event tape, as far as decisions know it.

The actor adds what only it can measure: gnorm, ms, sync_ms and the time. docs/tape.md lists the keys.

Source: v4 §Event tape (frozen members, responders, staleness, weights, timings); rulings §7.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, TypedDict

from syncer.core.events import Member, PushArrived
from syncer.core.rounds import Round
from yeto_torch.wire.constants import PROTOCOL_VERSION

Line: TypeAlias = dict[str, Any]
"""One line of a tape as it is read: a JSON object, of whatever origin."""


class MemberEntry(TypedDict):
    id: int
    generation: int


class LeftOutEntry(MemberEntry):
    norm: float
    median_norm: float


class ResponderEntry(MemberEntry):
    base_version: int
    staleness: int
    c_steps: int
    c_tokens: int
    weight: float
    contribution: float
    bytes: int


class MergeLine(TypedDict):
    """What decisions know of one committed round."""

    protocol_version: int
    delta_semantics: str
    step: int
    fragment: int
    launch_base_version: int
    attempt: int
    quorum: int
    expected: list[int]
    expected_members: list[MemberEntry]
    responded: list[int]
    responded_members: list[MemberEntry]
    missed_grace: list[int]
    missed_members: list[MemberEntry]
    quorum_ms: float | None
    grace_ms: float | None
    rejected: dict[str, int]
    left_out_members: list[LeftOutEntry]
    responders: list[ResponderEntry]


class MeasuredLine(MergeLine):
    """With what the actor adds; ``time`` in unix seconds."""

    gnorm: float
    gain: float | None
    drive: float | None
    agreement: float | None
    lag_cosine: float | None
    momentum: float
    ms: float
    sync_ms: float
    time: float


def merge_line(round_: Round, rejected: dict[str, int]) -> MergeLine:
    """Everything about one committed round but its timings and norm. An answer left out contributes nothing."""
    responses, total = round_.ordered_responses, round_.weight
    left_out = {outlier.member for outlier in round_.outliers}
    missed = round_.missing
    return {
        "protocol_version": PROTOCOL_VERSION,
        "delta_semantics": "local_minus_raw_anchor",
        "step": round_.step,
        "fragment": round_.fragment,
        "launch_base_version": round_.base_version,
        "attempt": round_.attempt,
        "quorum": round_.quorum,
        "expected": [m.learner_id for m in round_.members],
        "expected_members": _members(round_.members),
        "responded": [r.member.learner_id for r in responses],
        "responded_members": _members(r.member for r in responses),
        "missed_grace": [m.learner_id for m in missed],
        "missed_members": _members(missed),
        "quorum_ms": None if round_.quorum_s is None else 1000 * round_.quorum_s,
        "grace_ms": None if round_.grace_s is None else 1000 * round_.grace_s,
        "rejected": rejected,
        "left_out_members": [
            {"id": o.member.learner_id, "generation": o.member.generation, "norm": o.norm, "median_norm": o.median}
            for o in round_.outliers
        ],
        "responders": [_responder(r, round_.base_version, 0.0 if r.member in left_out else total) for r in responses],
    }


def _members(members: Iterable[Member]) -> list[MemberEntry]:
    return [{"id": m.learner_id, "generation": m.generation} for m in members]


def _responder(response: PushArrived, launch_base: int, total_weight: float) -> ResponderEntry:
    return {
        "id": response.member.learner_id,
        "generation": response.member.generation,
        "base_version": response.base_version,
        "staleness": max(0, launch_base - response.base_version),
        "c_steps": response.c_steps,
        "c_tokens": response.c_tokens,
        "weight": response.weight,
        "contribution": response.weight / total_weight if total_weight > 0 else 0.0,
        "bytes": response.nbytes,
    }
