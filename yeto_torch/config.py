"""LearnerConfig: everything a learner can be told, checked before a socket is opened.

Decides what is legal and where a value comes from when it is not given (the YETO_* environment, read once). It must
not know the model, tensors or sockets. A wrong value raises ``ValueError`` naming the argument, the value and the
legal range.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from yeto_torch.learner.syncs import OnSync
from yeto_torch.offline.rules import LOCAL, LocalRules
from yeto_torch.security import client_tls, read_key, tls_from
from yeto_torch.wire.constants import HASH_BYTES, MAX_STREAMS, U32_MAX, U64_MAX, WireDType
from yeto_torch.wire.layout import contract_hash
from yeto_torch.wire.profile import ProfileRecord, record_of
from yeto_torch.wire.transport.tls import ClientTls

log = logging.getLogger("yeto_torch")
_ENVIRONMENT = {
    "syncer": "YETO_SYNCER",
    "learner_id": "YETO_LEARNER_ID",
    "run_id": "YETO_RUN_ID",
    "budget_steps": "YETO_BUDGET_STEPS",
    "run_dir": "YETO_RUN_DIR",
}
_PROFILE = (
    "the YAML that `python -m syncer ... --cfg job --resolve` prints (text, or a path to it), a mapping of the "
    "record's fields, 32 bytes or 64 hex digits"
)
_warned_about_run_id = False


def disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """``YETO_DISABLE=1``: the wrapper is to be the plain inner optimizer."""
    return environment.get("YETO_DISABLE", "") not in ("", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """The arguments of ``YetoOuterOptimizer`` but for the model's own; validated when it is made.

    ``LearnerConfig.resolve(**arguments)`` also fills what is None from the environment.

    Attributes:
        syncer: ``"host:port"``, IPv6 in brackets. Env YETO_SYNCER.
        learner_id: 0 to learners - 1; learner 0 gives the fleet its first weights. Env YETO_LEARNER_ID.
        run_id: names the run, so that a checkpoint of another run is never continued. Env YETO_RUN_ID.
        fragments, pattern, matrix_merge, average: the layout, see ``fragments.build_layout``.
        wire_dtype: ``"f32"``, ``"bf16"`` or ``"q4"``.
        streams: data sockets beside the control socket.
        merge_alpha: weight of the local value when a broadcast is adopted; 0 takes the global fragment as it is.
        tokens_per_step: what a step counts when ``step(tokens=...)`` is not told.
        profile: the syncer configuration to bind to: what ``python -m syncer ... --cfg job --resolve`` prints (text, or
            a path to it), a ``ProfileRecord`` or a mapping of its fields, or its hash (32 bytes or 64 hex digits).
        contract: an explicit 32-byte session contract instead of the one derived from ``run_id``.
        hmac_key: signs HELLO. Env YETO_HMAC_KEY_FILE names a file with the key.
        tls: True, a path to a CA file, or a mapping of ca, cert, key and server_hostname; see ``security``. Env
            YETO_TLS_CA, YETO_TLS_CERT and YETO_TLS_KEY.
        process_group: of ``torch.distributed``: the ranks of this learner; None = this process alone.
        budget_steps: the learner-budget target. Env YETO_BUDGET_STEPS.
        wait_for_start: the constructor returns once the fleet's weights are installed.
        on_nonfinite: ``"raise"``, or ``"resync"`` to drop local progress and take the anchor again.
        max_reconnects: redials without a broadcast in between before giving up; None = never.
        connect_timeout_s: how long the constructor waits for the start.
        final_timeout_s: how long ``finish()`` waits for the final cut.
        on_sync: called on the training thread with a ``Sync`` for every broadcast taken over.
        local: with ``syncer="local"`` alone: what a syncer would decide, see ``LocalRules``.
        run_dir: the launcher's run folder, where learner 0 writes ``layout.json``. Env YETO_RUN_DIR.
    """

    syncer: str | None = None
    learner_id: int | None = None
    run_id: str | None = None
    fragments: int = 8
    pattern: str = "binpack"
    matrix_merge: str = "rda"
    average: str | None = None
    wire_dtype: str = "bf16"
    streams: int = 4
    merge_alpha: float = 0.0
    tokens_per_step: int = 1
    profile: ProfileRecord | Mapping[str, Any] | bytes | str | os.PathLike[str] | None = None
    contract: bytes | str | None = None
    hmac_key: bytes | None = field(default=None, repr=False)
    tls: bool | str | os.PathLike[str] | Mapping[str, Any] | None = None
    process_group: Any = None
    budget_steps: int | None = None
    wait_for_start: bool = True
    on_nonfinite: str = "raise"
    max_reconnects: int | None = None
    connect_timeout_s: float = 900.0
    final_timeout_s: float = 900.0
    on_sync: OnSync | None = None
    local: Mapping[str, Any] | None = None
    run_dir: str | None = None

    @classmethod
    def resolve(cls, environment: Mapping[str, str] = os.environ, **arguments: Any) -> LearnerConfig:
        """The configuration of ``arguments``, with what is None taken from ``environment``. Raises ValueError."""
        unknown = sorted(set(arguments) - {item.name for item in fields(cls)})
        if unknown:
            raise ValueError(f"unknown argument {unknown[0]!r}")
        for name, variable in _ENVIRONMENT.items():
            if arguments.get(name) is None and environment.get(variable):
                text = environment[variable]
                arguments[name] = _whole(variable, text) if name in ("learner_id", "budget_steps") else text
        if arguments.get("hmac_key") is None and environment.get("YETO_HMAC_KEY_FILE"):
            arguments["hmac_key"] = read_key("YETO_HMAC_KEY_FILE", environment["YETO_HMAC_KEY_FILE"])
        arguments["tls"] = tls_from(environment, arguments.get("tls"))
        config = cls(**arguments)
        learners = environment.get("YETO_LEARNERS")
        if learners and config.identity >= _whole("YETO_LEARNERS", learners):
            raise ValueError(
                f"learner_id={config.learner_id}: must be 0 to {int(learners) - 1} (YETO_LEARNERS={learners})"
            )
        return config

    def __post_init__(self) -> None:
        self._check_identity()
        _integer("fragments", self.fragments, 1, U32_MAX)
        _choice("pattern", self.pattern, ("binpack", "strided"))
        _choice("matrix_merge", self.matrix_merge, ("rda", "iso"))
        _pattern("average", self.average)
        _choice("wire_dtype", self.wire_dtype, ("f32", "bf16", "q4"))
        _integer("streams", self.streams, 0, MAX_STREAMS)
        _number("merge_alpha", self.merge_alpha, 0.0, 1.0)
        _integer("tokens_per_step", self.tokens_per_step, 1, U64_MAX)
        _choice("on_nonfinite", self.on_nonfinite, ("raise", "resync"))
        _choice("wait_for_start", self.wait_for_start, (True, False))
        if self.budget_steps is not None:
            _integer("budget_steps", self.budget_steps, 1, U32_MAX)
        if self.max_reconnects is not None:
            _integer("max_reconnects", self.max_reconnects, 0, U64_MAX)
        _number("connect_timeout_s", self.connect_timeout_s, 0.0, math.inf, above=True)
        _number("final_timeout_s", self.final_timeout_s, 0.0, math.inf, above=True)
        _ = None if self.is_local else self.client_tls
        if self.on_sync is not None and not callable(self.on_sync):
            raise ValueError(f"on_sync={self.on_sync!r}: must be a function of one argument, the Sync, or None")

    def _check_identity(self) -> None:
        if self.syncer is None:
            raise ValueError("syncer: not given; pass syncer='host:port' or set YETO_SYNCER")
        if self.is_local:
            _ = self.local_rules
            return
        if self.local is not None:
            raise ValueError(f"local={dict(self.local)!r}: goes with syncer='local' alone; a syncer has its own rules")
        parse_address(self.syncer)
        if self.learner_id is None:
            raise ValueError("learner_id: not given; pass learner_id=0, 1, ... or set YETO_LEARNER_ID")
        _integer("learner_id", self.learner_id, 0, U32_MAX)
        if self.run_id is not None and not _is_filled(self.run_id, str):
            raise ValueError(f"run_id={self.run_id!r}: must be a text that is not empty, or None")
        if self.hmac_key is not None and not _is_filled(self.hmac_key, bytes):
            raise ValueError("hmac_key: must be bytes, at least one")  # the key itself is never shown
        if self.contract is not None:
            _hash("contract", self.contract)
        _ = self.profile_hash

    @property
    def is_local(self) -> bool:
        """Is there no syncer at all?"""
        return self.syncer == LOCAL

    @property
    def local_rules(self) -> LocalRules:
        """What a syncer would decide, where there is none."""
        return LocalRules.of(self.local)

    @property
    def identity(self) -> int:
        """``learner_id``, which is given once the configuration is valid; alone one is 0."""
        assert self.learner_id is not None or self.is_local
        return self.learner_id or 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the syncer."""
        assert self.syncer is not None
        return parse_address(self.syncer)

    @property
    def dtype(self) -> WireDType:
        """The session dtype."""
        return WireDType[self.wire_dtype.upper()]

    @property
    def profile_hash(self) -> bytes | None:
        """The 32-byte hash HELLO carries, None when the learner does not bind."""
        return None if self.profile is None else _profile_hash(self.profile)

    @property
    def client_tls(self) -> ClientTls | None:
        """How to dial, None without TLS; reads the files anew."""
        return client_tls(self.tls, self.address[0])

    def contract_for(self, fingerprint: bytes) -> bytes:
        """The session contract: the explicit one, else derived from the layout's fingerprint and ``run_id``."""
        if self.contract is not None:
            return _hash("contract", self.contract)
        if self.run_id is None:
            _warn_about_run_id()
        return contract_hash(fingerprint, self.run_id)


def parse_address(text: Any) -> tuple[str, int]:
    """``"host:port"`` or ``"[v6]:port"`` as (host, port). Raises ValueError."""
    match = (
        re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]+)):(\d{1,5})", text) if isinstance(text, str) else None
    )
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ValueError(f"syncer={text!r}: must be 'host:port' with a port from 1 to 65535 (IPv6 as '[::1]:29400')")
    return match[1] or match[2], int(match[3])


def _warn_about_run_id() -> None:
    global _warned_about_run_id
    if not _warned_about_run_id:
        _warned_about_run_id = True
        log.warning(
            "no run_id: every run of this model shares one session contract, so a syncer could continue a stale "
            "checkpoint of another run; give run_id='...' or set YETO_RUN_ID"
        )


def _profile_hash(profile: Any) -> bytes:
    """The hash of every form ``profile=`` may have. Raises ValueError."""
    if isinstance(profile, bytes) or (isinstance(profile, str) and re.fullmatch(r"[0-9a-fA-F]{64}", profile)):
        return _hash("profile", profile)
    try:
        if isinstance(profile, ProfileRecord):
            return profile.hash
        if isinstance(profile, (str, os.PathLike)):
            return record_of(_configuration(profile)).hash
        if isinstance(profile, Mapping):
            return (record_of(profile) if "schedule" in profile else ProfileRecord.of_fields(profile)).hash
    except ValueError as error:
        raise ValueError(f"profile: {error}") from error
    raise ValueError(f"profile={profile!r}: must be {_PROFILE}")


def _configuration(source: str | os.PathLike[str]) -> Mapping[str, Any]:
    """A printed configuration, from its YAML (which has more than one line) or the file that holds it."""
    from omegaconf import OmegaConf  # whose loader reads numbers as the syncer's does; only who binds needs it
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]  # comes with OmegaConf, its stubs do not

    text = source if isinstance(source, str) and "\n" in source else None
    try:
        text = Path(source).read_text(encoding="utf-8") if text is None else text
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except OSError as error:
        raise ValueError(f"{str(source)!r} cannot be read ({error.strerror or error}): must be {_PROFILE}") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"no configuration in it: must be {_PROFILE}")
    return {str(name): value for name, value in content.items()}


def _whole(variable: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,20}", text):
        raise ValueError(f"{variable}={text!r}: must be a whole number")
    return int(text)


def _is_filled(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and bool(value)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: must be an integer from {low} to {high}")


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not fits or (above and value == low):
        legal = f"a number above {low:g}" if above else f"a number from {low:g} to {high:g}"
        raise ValueError(f"{name}={value!r}: must be {legal}")


def _choice(name: str, value: Any, legal: tuple[Any, ...]) -> None:
    if not any(type(value) is type(item) and value == item for item in legal):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, legal))}")


def _pattern(name: str, value: Any) -> None:
    if value is None:
        return
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        raise ValueError(f"{name}={value!r}: must be a regular expression ({error})") from error


def _hash(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        try:
            value = bytes.fromhex(value)
        except ValueError:
            value = b""
    if not isinstance(value, bytes) or len(value) != HASH_BYTES:
        raise ValueError(f"{name}: must be {HASH_BYTES} bytes or {2 * HASH_BYTES} hex digits")
    return value
