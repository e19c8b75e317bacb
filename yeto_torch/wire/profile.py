"""The profile record: one canonical name for everything in a syncer's configuration that decides how it merges.

Decides: the bytes of the record and their SHA-256, the ``syncer_profile_hash`` a HELLO may carry; and which key of a
configuration is which field (``record_of``), on either side the same. A learner that sends the hash joins only a syncer
configured exactly so; the port and the places files are written to are left out.

Must not know: where the values come from. The syncer derives them from its validated configuration, a learner reads
what the syncer printed of it or is told the fields; the record holds them resolved (a quorum, never "majority").

Keys younger than the record follow it in an extension block, and only those that are not at their defaults, so that
a plain configuration keeps the hash every other v4 peer computes. The block's keys are the syncer's own:

    merge.delta_correction    "heloco-normalized"; ``heloco`` is then true
    merge.iso_scale           "norm"
    merge.max_norm_ratio      a number
    outer.guard               "cap"
    outer.lr                  a schedule, as [[first step, value], ...]; its first value is also ``outer_lr``
    schedule.on_loss          "stop"
    schedule.loss_after_s     seconds
    schedule.start_grace_s    seconds

Source: v4 §Contract and profile (the identity of the configuration, without port and output paths);
rulings §2.7 (the record and its extension block).

* pure
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, SupportsFloat, TypeAlias, get_args

from yeto_torch.wire.constants import U32_MAX, U64_MAX

Correction: TypeAlias = Literal["heloco", "heloco-normalized", "none"]
Spectrum: TypeAlias = Literal["mean", "norm"]
OnLoss: TypeAlias = Literal["continue", "stop"]
Guard: TypeAlias = Literal["off", "cap"]

# The defaults of a configuration that have no place in the record's own fields. These, and those of the fields, are
# what a learner must know of the syncer's configuration without importing it; a test holds them equal to the syncer's.
CORRECTION: Correction = "heloco"
SPECTRUM: Spectrum = "mean"

_RECORD_DOMAIN = b"yeto-syncer-semantic-profile-v1\0"
_EXTENSION_DOMAIN = b"yeto-ext-v1\0"
_ABSENT = b"\0"
_TOKENS_SQUARED_PER_STEP = b"\0"  # the one learner weight there is
_NORMALIZED = "heloco-normalized"
_OPTIONAL = "optional <Q"
_INTEGER_MAX = {"<B": 1, "<I": U32_MAX, "<Q": U64_MAX}  # a byte of this record is a yes or a no


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """A syncer's merge, schedule and recovery configuration, resolved; the defaults are those of ``python -m syncer``.

    Attributes:
        quorum: answers a round needs; never null.
        final_ack_timeout_s: whole seconds; never null (the syncer's own default is its ``quorum_timeout_s``).
        pipeline: as configured, not clamped to the number of fragments.
        heloco: directional correction of every outer gradient is on, in whatever form.
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
    heloco: bool = CORRECTION != "none"
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
    extensions: Mapping[str, object] = field(default_factory=dict, hash=False)

    def encode(self) -> bytes:
        """The record: 133 bytes, 8 more with a learner budget, and the extension block if there are extensions.

        Raises ValueError naming the field when a value has no place in it.
        """
        parts = [_RECORD_DOMAIN]
        for name, (code, _, _) in _FIELDS.items():
            parts += [self._pack(name, code), _FOLLOWED_BY.get(name, b"")]
        if self.extensions:
            parts.append(_encode_extensions(self.extensions))
        return b"".join(parts)

    @classmethod
    def of_fields(cls, values: Mapping[str, Any]) -> ProfileRecord:
        """A record from its fields by name; what is not given has the syncer's default, and null is resolved.

        ``delta_correction`` (the word) may stand for ``heloco``. Raises ValueError naming the field.
        """
        given = dict(values)
        if "delta_correction" in given:
            word = _correction("delta_correction", given.pop("delta_correction"))
            given["heloco"] = word != "none"
            if word == _NORMALIZED:
                given["extensions"] = {**given.get("extensions", {}), "merge.delta_correction": word}
        known = {entry.name: entry.default for entry in fields(cls)} | {"quorum": None, "final_ack_timeout_s": None}
        for name in given:
            if name not in known:
                raise ValueError(f"{name!r} is no field of the record; known are {', '.join(known)}")
        for name, default in known.items():
            if name not in given and default is MISSING and name != "extensions":
                raise ValueError(f"{name} is missing")
        record = {name: value for name, value in known.items() if value is not MISSING} | given
        return cls(**_resolved(record | {"resume": _resume("resume", record["resume"])}))

    @property
    def hash(self) -> bytes:
        """``syncer_profile_hash``: SHA-256 of the record, 32 bytes. Raises what ``encode`` raises."""
        return hashlib.sha256(self.encode()).digest()

    def _pack(self, name: str, code: str) -> bytes:
        value = getattr(self, name)
        if code == _OPTIONAL:
            return _ABSENT if value is None else b"\1" + self._pack(name, "<Q")
        most = _INTEGER_MAX.get(code)
        try:
            if value > most if most is not None else not math.isfinite(value):
                raise OverflowError
            return struct.pack(code, value)  # "<f" rounds to the nearest f32
        except (struct.error, OverflowError, TypeError) as error:
            legal = "a finite number" if most is None else f"an integer from 0 to {most}"
            raise ValueError(f"profile {name}={value!r}: must be {legal}") from error


PLAIN = ProfileRecord(learners=1, quorum=1, total_steps=1)  # all else is at its default


def _encode_extensions(extensions: Mapping[str, object]) -> bytes:
    """Count, then by ascending key: key and canonical JSON value (sorted keys, no spaces), each behind its length."""
    parts = [_EXTENSION_DOMAIN, struct.pack("<I", len(extensions))]
    for key, value in sorted(extensions.items()):
        try:
            text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"profile extension {key}={value!r}: must be a JSON value ({error})") from error
        parts += [struct.pack("<I", len(item)) + item for item in (key.encode(), text.encode())]
    return b"".join(parts)


# ------------------------------------------------------------------------------------------- from a configuration


def record_of(configuration: Mapping[str, object]) -> ProfileRecord:
    """The record of a syncer's configuration, as it is printed (sections as mappings) or with dotted keys.

    Null stands for what the syncer resolves it to. Keys that do not move the record are passed over, but for ones
    unknown to this version in the sections that decide about merging: those would.

    Raises ValueError, one sentence naming the key.
    """
    values = _dotted(configuration)
    for key in values:
        if key.partition(".")[0] in _SECTIONS and key not in _KNOWN:
            raise ValueError(f"{key}: unknown to this version, so its record cannot be made")
    record = _resolved({name: _value(values, key, parse) for name, (_, key, parse) in _FIELDS.items()})
    extensions = {key: _value(values, key, parse) for key, (_, parse) in _EXTENSIONS.items()}
    schedule = record["outer_lr"]
    record["outer_lr"] = schedule[0][1]
    changed = {key: value for key, value in extensions.items() if value != _EXTENSIONS[key][0]}
    if len(schedule) > 1:
        changed["outer.lr"] = schedule
    if record["heloco"] == _NORMALIZED:
        changed["merge.delta_correction"] = _NORMALIZED
    record["heloco"] = record["heloco"] != "none"
    return ProfileRecord(**record, extensions=changed)


def _dotted(configuration: Mapping[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in configuration.items():
        if isinstance(value, Mapping):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            values[str(name)] = value
    return values


def _value(values: Mapping[str, object], key: str, parse: _Parser) -> object:
    value = values.get(key, "???")  # also how a configuration prints what it was not given
    if value == "???":
        raise ValueError(f"{key} is missing: the whole resolved configuration is needed")
    return parse(key, value)


def _resolved(record: dict[str, Any]) -> dict[str, Any]:
    """A null quorum is the majority, a null acknowledgement timeout the quorum timeout."""
    if record["quorum"] is None:
        record["quorum"] = _whole("learners", record["learners"]) // 2 + 1
    if record["final_ack_timeout_s"] is None:
        record["final_ack_timeout_s"] = record["quorum_timeout_s"]
    return record


_Parser: TypeAlias = Callable[[str, object], object]  # of a key and its value; raises ValueError


def _wrong(key: str, value: object, legal: str) -> ValueError:
    return ValueError(f"{key}={value!r}: must be {legal}")


def _whole(key: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise _wrong(key, value, "an integer from 0")
    return value


def _real(key: str, value: object) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (str, SupportsFloat)):
            raise TypeError
        if not math.isfinite(number := float(value)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise _wrong(key, value, "a finite number") from None
    return number + 0.0  # no negative zero: the record hashes the bits


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def _or_null(parse: _Parser) -> _Parser:
    return lambda key, value: None if value is None else parse(key, value)


def _word(words: object) -> _Parser:
    """One of a Literal's words. YAML reads a bare ``off`` as false."""
    legal = get_args(words)

    def parse(key: str, value: object) -> str:
        word = "off" if value is False and "off" in legal else value
        if word not in legal:
            raise _wrong(key, value, "one of " + ", ".join(legal))
        return str(word)

    return parse


_correction = _word(Correction)


def _resume(key: str, value: object) -> bool:
    """``auto`` is true: what is resumed is resumed the same way."""
    if value in (True, "true", "auto"):
        return True
    if value in (False, "false"):
        return False
    raise _wrong(key, value, "one of false, true, auto")


def _rate(key: str, value: object) -> list[list[float]]:
    """A constant or a schedule, as [[first step, value], ...]."""
    if not isinstance(value, (list, tuple)):
        return [[1, _real(key, value)]]
    try:
        pairs = [[_whole(key, step), _real(key, rate)] for step, rate in value]
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        raise _wrong(key, value, "a number, or a schedule [[1, number], [step, number], ...]")
    return pairs


_FIELDS: dict[str, tuple[str, str, _Parser]] = {  # in the record's order: how it is packed, its key, how that is read
    "learners": ("<I", "learners", _whole),
    "quorum": ("<I", "schedule.quorum", _or_null(_whole)),
    "grace_ms": ("<Q", "schedule.grace_ms", _whole),
    "grace_gamma": ("<d", "schedule.grace_gamma", _real),
    "grace_tau": ("<d", "schedule.grace_tau", _real),
    "pipeline": ("<I", "schedule.pipeline", _whole),
    "min_round_interval_ms": ("<Q", "schedule.min_round_interval_ms", _whole),
    "sync_interval_steps": ("<d", "schedule.sync_interval_steps", _real),
    "heloco": ("<B", "merge.delta_correction", _correction),
    "quorum_timeout_s": ("<Q", "schedule.quorum_timeout_s", _whole),
    "final_ack_timeout_s": ("<Q", "final.ack_timeout_s", _or_null(_whole)),
    "total_steps": ("<Q", "total_steps", _whole),
    "outer_lr": ("<f", "outer.lr", _rate),
    "outer_momentum": ("<f", "outer.momentum", _real),
    "checkpoint": ("<B", "checkpoint.path", lambda _key, value: value is not None),
    "checkpoint_every": ("<Q", "checkpoint.every", _whole),
    "resume": ("<B", "checkpoint.resume", _resume),
    "mark_final": ("<B", "checkpoint.mark_final", _flag),
    "learner_budget_steps": (_OPTIONAL, "budget.learner_steps", _or_null(_whole)),
    "require_profile_binding": ("<B", "session.require_profile_binding", _flag),
}
_FOLLOWED_BY = {"total_steps": _ABSENT, "learner_budget_steps": _ABSENT + _TOKENS_SQUARED_PER_STEP}
_EXTENSIONS: dict[str, tuple[object, _Parser]] = {  # key -> (default, parser)
    "merge.iso_scale": (SPECTRUM, _word(Spectrum)),
    "merge.max_norm_ratio": (None, _or_null(_real)),
    "outer.guard": ("off", _word(Guard)),
    "schedule.on_loss": ("continue", _word(OnLoss)),
    "schedule.loss_after_s": (300.0, _real),
    "schedule.start_grace_s": (60.0, _real),
}
_SECTIONS = ("schedule", "merge", "outer")  # every key of theirs moves the record, but for
_SILENT = {"merge.iso_backend", "merge.device"}  # which the checkpoint carries, and which changes no result
_KNOWN = {key for _, key, _ in _FIELDS.values()} | _EXTENSIONS.keys() | _SILENT
