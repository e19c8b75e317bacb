"""The merge line of the event tape, as far as decisions know it.

The actor adds what only it can measure: gnorm, ms, sync_ms and the time. docs/tape.md lists the keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from syncer.core.events import Member, PushArrived
from syncer.core.rounds import Round
from yeto_torch.wire.constants import PROTOCOL_VERSION


def merge_line(round_: Round, rejected: dict[str, int]) -> dict[str, Any]:
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


def _members(members: Iterable[Member]) -> list[dict[str, int]]:
    return [{"id": m.learner_id, "generation": m.generation} for m in members]


def _responder(response: PushArrived, launch_base: int, total_weight: float) -> dict[str, Any]:
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
