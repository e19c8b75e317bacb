"""What a learner can be told (``LearnerOptions``), and the same once it is checked (``LearnerConfig``).

``LearnerOptions`` is the one list of the learner's arguments: their names, types, defaults and meanings. The signature
of ``YetoOuterOptimizer`` is read from it. ``LearnerConfig`` decides what is legal and where a value comes from when it
is not given (the YETO_* environment, read once), before a socket is opened. This file must not know the model, tensors
or sockets. A wrong value raises ``ValueError`` naming the argument, the value and the legal range.

Source: rulings §2.6 to §2.9.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from yeto_torch.learner.syncs import OnSync
from yeto_torch.offline.rules import LOCAL, LocalRules
from yeto_torch.security import Tls, client_tls, read_key, tls_from
from yeto_torch.wire.constants import HASH_BYTES, MAX_STREAMS, U32_MAX, U64_MAX, WireDType
from yeto_torch.wire.model_layout import contract_hash
from yeto_torch.wire.profile import ProfileRecord, record_of
from yeto_torch.wire.transport.tls import ClientTls

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("yeto_torch")

Pattern: TypeAlias = Literal["binpack", "strided"]
MatrixMerge: TypeAlias = Literal["rda", "iso"]
WireWord: TypeAlias = Literal["f32", "bf16", "q4"]
OnNonfinite: TypeAlias = Literal["raise", "resync"]

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


def disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """``YETO_DISABLE=1``: the wrapper is to be the plain inner optimizer."""
    return environment.get("YETO_DISABLE", "") not in ("", "0")


@dataclass(frozen=True)
class LearnerOptions:
    """Every argument of ``YetoOuterOptimizer`` but the model's own, as it was given: nothing is checked yet.

    Args:
        syncer: where the syncer listens: ``"host:port"``, IPv6 in brackets (``"[::1]:29400"``). None: YETO_SYNCER.
            ``"local"``: no fleet; this process makes the outer step itself, in the manner of Lookahead, by the rules
            in ``local``.
        learner_id: 0 to learners - 1, another one for each learner. None: YETO_LEARNER_ID. Learner 0 gives the fleet
            its first weights. Not needed with ``syncer="local"``.
        run_id: the name of the run, the same for all its learners, so that a checkpoint of another run is never
            continued. None: YETO_RUN_ID; without that either, every run of this model counts as the same.
        fragments: into how many parts the model is cut at most, the averaged part included; one is exchanged at a
            time. From 1.
        pattern: how tensors are spread over fragments: ``"binpack"`` makes them equal in size, ``"strided"`` puts layer
            r into part r mod n.
        matrix_merge: how the fleet merges all that is not averaged: ``"rda"`` or ``"iso"`` (matrices only; the rest is
            averaged).
        average: a regular expression. A tensor whose name it finds is merged by plain averaging, as embeddings and
            heads are in any case.
        wire_dtype: what travels: ``"f32"``, ``"bf16"`` or ``"q4"`` (about 32, 16 and 4 bits a value).
        streams: data sockets beside the control socket, 0 to 256.
        merge_alpha: how much of the local value survives a broadcast, 0 to 1; 0 takes the global fragment as it is.
        tokens_per_step: what a step counts in this learner's weight when ``step(tokens=...)`` and ``count_tokens`` are
            not told. From 1.
        profile: the syncer's configuration to bind to; another one refuses this learner. What
            ``python -m syncer ... --cfg job --resolve`` prints (the text, or a path to it), a ``ProfileRecord`` or a
            mapping of its fields, or its hash (32 bytes or 64 hex digits). None: any configuration.
        contract: 32 bytes or 64 hex digits in place of the session contract that is derived from ``run_id``.
        hmac_key: the key that signs HELLO, at least one byte. None: the file that YETO_HMAC_KEY_FILE names.
        tls: True, a path to a CA file, or a mapping of ``ca``, ``cert``, ``key`` and ``server_hostname``; False: none.
            None: YETO_TLS_CA, YETO_TLS_CERT and YETO_TLS_KEY. See ``yeto_torch.security``.
        process_group: of ``torch.distributed``: the ranks of this learner, if they are several
            (``dist.group.WORLD``). Every rank makes the same calls, with its own part of the model and its own tokens;
            of all other arguments those of rank 0 count. None: this process alone.
        budget_steps: how many local steps ``report_budget`` must report, from 1. None: YETO_BUDGET_STEPS.
        wait_for_start: the constructor returns once the fleet's weights are installed. False: at once; steps that are
            made before the first weights come are overwritten by them.
        on_nonfinite: when a parameter is not finite: ``"raise"`` a NonFiniteError, or ``"resync"``, which drops local
            progress and takes the last broadcast again.
        max_reconnects: how often to dial again without a broadcast in between before giving up. None: without end.
        connect_timeout_s: seconds the constructor waits for the start of the fleet, above 0.
        final_timeout_s: seconds ``finish()`` waits for the final cut, above 0.
        on_sync: called with a ``Sync`` for every broadcast taken over, and once for the final cut (``final=True``), on
            the thread that steps; what it raises comes out of ``step`` or ``finish``. The first weights, which the
            constructor takes over itself, are not told.
        local: with ``syncer="local"`` alone: ``sync_interval_steps``, ``lr``, ``momentum``, ``delta_correction`` and
            ``iso_scale``, see ``LocalRules``. What is left out is as in the syncer's preset ``balanced``.
    """

    syncer: str | None = None
    learner_id: int | None = None
    run_id: str | None = None
    fragments: int = 8
    pattern: Pattern = "binpack"
    matrix_merge: MatrixMerge = "rda"
    average: str | None = None
    wire_dtype: WireWord = "bf16"
    streams: int = 4
    merge_alpha: float = 0.0
    tokens_per_step: int = 1
    profile: ProfileRecord | Mapping[str, object] | bytes | str | os.PathLike[str] | None = None
    contract: bytes | str | None = None
    hmac_key: bytes | None = field(default=None, repr=False)
    tls: Tls = None
    process_group: ProcessGroup | None = None
    budget_steps: int | None = None
    wait_for_start: bool = True
    on_nonfinite: OnNonfinite = "raise"
    max_reconnects: int | None = None
    connect_timeout_s: float = 900
    final_timeout_s: float = 900
    on_sync: OnSync | None = None
    local: Mapping[str, float | str] | None = None


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(LearnerOptions):
    """The options of a learner, checked when it is made; ``resolve`` also fills what is None from the environment.

    Args:
        run_dir: the launcher's run folder, where learner 0 writes ``layout.json``. None: YETO_RUN_DIR.

    Raises:
        ValueError: a wrong option; the sentence names it.
    """

    run_dir: str | None = None

    @classmethod
    def resolve(cls, environment: Mapping[str, str] = os.environ, **arguments: Any) -> LearnerConfig:
        """The configuration of ``arguments``, with what is None taken from ``environment``. Raises ValueError."""
        wrong = wrong_name(arguments, cls)
        if wrong is not None:
            raise ValueError(f"unknown argument {wrong}")
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
        _choice("pattern", self.pattern, get_args(Pattern))
        _choice("matrix_merge", self.matrix_merge, get_args(MatrixMerge))
        _pattern("average", self.average)
        _choice("wire_dtype", self.wire_dtype, get_args(WireWord))
        _integer("streams", self.streams, 0, MAX_STREAMS)
        _number("merge_alpha", self.merge_alpha, 0.0, 1.0)
        _integer("tokens_per_step", self.tokens_per_step, 1, U64_MAX)
        _choice("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
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
        """``learner_id``; without a syncer, where it may be left out, 0."""
        return self.learner_id or 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the syncer. Raises ValueError where there is none."""
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


def wrong_name(arguments: Iterable[str], options: type[LearnerOptions]) -> str | None:
    """The first of ``arguments`` that is none of ``options``, and the option it may have meant; None if all are."""
    legal = [item.name for item in fields(options)]
    for name in arguments:
        if name not in legal:
            near = difflib.get_close_matches(name, legal, n=1)
            return repr(name) + "".join(f"; did you mean {option!r}?" for option in near)
    return None


def parse_address(text: object) -> tuple[str, int]:
    """``"host:port"`` or ``"[v6]:port"`` as (host, port). Raises ValueError."""
    match = (
        re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]+)):(\d{1,5})", text) if isinstance(text, str) else None
    )
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ValueError(f"syncer={text!r}: must be 'host:port' with a port from 1 to 65535 (IPv6 as '[::1]:29400')")
    return match[1] or match[2], int(match[3])


@cache
def _warn_about_run_id() -> None:
    """Once in a process."""
    log.warning(
        "no run_id: every run of this model shares one session contract, so a syncer could continue a stale "
        "checkpoint of another run; give run_id='...' or set YETO_RUN_ID"
    )


def _profile_hash(profile: object) -> bytes:
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


def _configuration(source: str | os.PathLike[str]) -> Mapping[str, object]:
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


def _is_filled(value: object, kind: type) -> bool:
    return isinstance(value, kind) and bool(value)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: must be an integer from {low} to {high}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not fits or (above and value == low):
        legal = f"a number above {low:g}" if above else f"a number from {low:g} to {high:g}"
        raise ValueError(f"{name}={value!r}: must be {legal}")


def _choice(name: str, value: object, legal: tuple[object, ...]) -> None:
    if not any(type(value) is type(item) and value == item for item in legal):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, legal))}")


def _pattern(name: str, value: str | None) -> None:
    if value is None:
        return
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        raise ValueError(f"{name}={value!r}: must be a regular expression ({error})") from error


def _hash(name: str, value: object) -> bytes:
    if isinstance(value, str):
        try:
            value = bytes.fromhex(value)
        except ValueError:
            value = b""
    if not isinstance(value, bytes) or len(value) != HASH_BYTES:
        raise ValueError(f"{name}: must be {HASH_BYTES} bytes or {2 * HASH_BYTES} hex digits")
    return value
