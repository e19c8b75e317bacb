"""The profile record: one canonical name for everything in a syncer's configuration that decides how it merges.

Decides: the bytes of the record and their SHA-256, the ``syncer_profile_hash`` a HELLO may carry. A learner that
sends it joins only a syncer configured exactly so; the port and the places files are written to are left out.

Must not know: where the values come from. The syncer derives them from its validated configuration, a learner's
user writes them down; both must give the resolved ones (a quorum, never "majority").

Keys younger than the record follow it in an extension block, and only those that are not at their defaults, so that
a plain configuration keeps the hash every other v4 peer computes. The block's keys are the syncer's own:

    outer.lr                  a schedule, as [[first step, value], ...]; its first value is also ``outer_lr``
    schedule.on_loss          "stop"
    schedule.loss_after_s     seconds
    schedule.start_grace_s    seconds

Source: protocol v4, syncer_profile_hash; canonical encodings ``yeto-syncer-semantic-profile-v1`` and ``yeto-ext-v1``.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from yeto_torch.protocol.constants import U32_MAX, U64_MAX

_RECORD_DOMAIN = b"yeto-syncer-semantic-profile-v1\0"
_EXTENSION_DOMAIN = b"yeto-ext-v1\0"
_ABSENT = b"\0"
_TOKENS_SQUARED_PER_STEP = b"\0"  # the one learner weight there is
_INTEGER_MAX = {"<B": 1, "<I": U32_MAX, "<Q": U64_MAX}  # a byte of this record is a yes or a no


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """A syncer's merge, schedule and recovery configuration, resolved; the defaults are those of ``python -m syncer``.

    Attributes:
        quorum: answers a round needs; never null.
        final_ack_timeout_s: whole seconds; never null (the syncer's own default is its ``quorum_timeout_s``).
        pipeline: as configured, not clamped to the number of fragments.
        heloco: directional correction of every outer gradient is on.
        outer_lr, outer_momentum: rounded to f32 when encoded.
        checkpoint: a checkpoint path is configured.
        resume: true for ``auto`` as well.
        extensions: dotted key -> JSON value, the keys that are not at their defaults (see the top of this file).
    """

    learners: int
    quorum: int
    total_steps: int
    grace_ms: int = 1000
    grace_gamma: float = 0.8
    grace_tau: float = 2.0
    pipeline: int = 2
    min_round_interval_ms: int = 0
    sync_interval_steps: float = 24.0
    heloco: bool = True
    quorum_timeout_s: int = 900
    final_ack_timeout_s: int = 900
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    checkpoint: bool = False
    checkpoint_every: int = 8
    resume: bool = False
    mark_final: bool = False
    learner_budget_steps: int | None = None
    require_profile_binding: bool = False
    extensions: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def encode(self) -> bytes:
        """The record: 133 bytes, 8 more with a learner budget, and the extension block if there are extensions.

        Raises ValueError naming the field when a value has no place in it.
        """
        parts = [_RECORD_DOMAIN]
        parts += [self._pack(*entry) for entry in _SCHEDULE]
        parts.append(_ABSENT)
        parts += [self._pack(*entry) for entry in _OUTER_AND_CHECKPOINT]
        parts.append(_ABSENT if self.learner_budget_steps is None else b"\1" + self._pack("learner_budget_steps", "<Q"))
        parts += [_ABSENT, _TOKENS_SQUARED_PER_STEP, self._pack("require_profile_binding", "<B")]
        if self.extensions:
            parts.append(_encode_extensions(self.extensions))
        return b"".join(parts)

    @property
    def hash(self) -> bytes:
        """``syncer_profile_hash``: SHA-256 of the record, 32 bytes. Raises what ``encode`` raises."""
        return hashlib.sha256(self.encode()).digest()

    def _pack(self, name: str, code: str) -> bytes:
        value = getattr(self, name)
        legal = f"an integer from 0 to {_INTEGER_MAX[code]}" if code in _INTEGER_MAX else "a finite number"
        try:
            if code in _INTEGER_MAX:
                if value > _INTEGER_MAX[code]:
                    raise OverflowError
                return struct.pack(code, value)
            if not math.isfinite(value):
                raise OverflowError
            return struct.pack(code, value)  # "<f" rounds to the nearest f32
        except (struct.error, OverflowError, TypeError) as error:
            raise ValueError(f"profile {name}={value!r}: must be {legal}") from error


_SCHEDULE = (
    ("learners", "<I"),
    ("quorum", "<I"),
    ("grace_ms", "<Q"),
    ("grace_gamma", "<d"),
    ("grace_tau", "<d"),
    ("pipeline", "<I"),
    ("min_round_interval_ms", "<Q"),
    ("sync_interval_steps", "<d"),
    ("heloco", "<B"),
    ("quorum_timeout_s", "<Q"),
    ("final_ack_timeout_s", "<Q"),
    ("total_steps", "<Q"),
)
_OUTER_AND_CHECKPOINT = (
    ("outer_lr", "<f"),
    ("outer_momentum", "<f"),
    ("checkpoint", "<B"),
    ("checkpoint_every", "<Q"),
    ("resume", "<B"),
    ("mark_final", "<B"),
)


def _encode_extensions(extensions: Mapping[str, Any]) -> bytes:
    """Count, then by ascending key: key and canonical JSON value (sorted keys, no spaces), each behind its length."""
    parts = [_EXTENSION_DOMAIN, struct.pack("<I", len(extensions))]
    for key, value in sorted(extensions.items()):
        try:
            text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"profile extension {key}={value!r}: must be a JSON value ({error})") from error
        parts += [struct.pack("<I", len(item)) + item for item in (key.encode(), text.encode())]
    return b"".join(parts)
