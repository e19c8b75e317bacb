"""Every key of ``python -m syncer``: its default, its legal range, its meaning; and the way to a frozen policy.

Decides: which values are legal, alone and together, and what null stands for. The dataclasses below are the schema
Hydra merges YAML and overrides into (mutable, because it must); ``validate`` turns one at once into the frozen
``SyncerPolicy`` all other rooms read. A key is declared once, with its default and its rule, by ``key``. ``Keys`` is
the catalogue of one command's, and a command beside the server may add keys of its own to the schema.

Must not know: how the values came together (``compose.py``), torch, sockets. Every error is a ValueError of
one line: the key, the value, the legal range.
"""

from __future__ import annotations

import copy
import ipaddress
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from omegaconf import MISSING

from syncer.config import policy as policies
from syncer.config import rules
from syncer.config.files import HMAC_KEY, check_files, check_tls, read_hmac_key
from syncer.config.policy import IsoBackend, IsoScale, Progress, Resuming, SyncerPolicy
from syncer.config.rules import Rule, shown, wrong
from yeto_torch.wire.constants import U32_MAX, U64_MAX
from yeto_torch.wire.profile import Correction, Guard, OnLoss, ProfileRecord, Spectrum, record_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LONGEST_S = 10**9  # 31 years; the waits of the standard library overflow at nine times that
_LONGEST_MS = 10**9
_NEUTRAL = {"checkpoint.resume": "false", "checkpoint.mark_final": False, "budget.learner_steps": None}
Values: TypeAlias = dict[str, Any]
"""Dotted key -> value as its rule gives it, of the type that the policy of the same name declares."""

REQUIRED = MISSING  # the default of a key that has none
S_co = TypeVar("S_co", bound="DataclassInstance", covariant=True)
T = TypeVar("T")
P = TypeVar("P", bound="DataclassInstance")


# --------------------------------------------------------------------------------------------------------- schema


def key(default: T, rule: Rule, meaning: str) -> T:
    """Declare a key. A default of None makes null legal."""
    legal = f"null or {rule.legal}" if default is None else rule.legal
    metadata = {"rule": Rule(legal, rule.parse, meaning)}
    if isinstance(default, list):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _seconds(default: float, meaning: str) -> float:
    return key(default, rules.real(0, _LONGEST_S, above=True), meaning)


@dataclass
class ListenConfig:
    host: str = key("127.0.0.1", rules.host(), "address to listen on")
    port: int = key(29400, rules.whole(0, 65535), "port to listen on; 0 = any free one")
    address_file: str | None = key(None, rules.path("to write"), "gets host:port once listening")


@dataclass
class ScheduleConfig:
    quorum: int | None = key(None, rules.whole(1, U32_MAX), "answers a round needs; null = the majority")
    quorum_timeout_s: int = key(900, rules.whole(1, _LONGEST_S), "until an attempt below its quorum is retried")
    start_grace_s: float = key(60.0, rules.real(0, _LONGEST_S), "until a resumed run starts with the quorum alone")
    on_loss: str = key("continue", rules.word(OnLoss), "what a learner lost for good does to the run")
    loss_after_s: float = key(300.0, rules.real(0, _LONGEST_S), "absence after which a learner counts as lost")
    pipeline: int = key(2, rules.whole(1, U32_MAX), "rounds in flight, of distinct fragments")
    sync_interval_steps: float = key(
        24.0, rules.real(0, 1e9), "inner steps between syncs of a fragment; 0 = no throttle"
    )
    min_round_interval_ms: int = key(0, rules.whole(0, _LONGEST_MS), "least time between two launches")
    grace_ms: int = key(1000, rules.whole(0, _LONGEST_MS), "longest wait for stragglers after the quorum")
    grace_gamma: float = key(0.8, rules.real(0, 1e9), "adaptive grace: share of the slack that is waited")
    grace_tau: float = key(2.0, rules.real(0, 1e9), "adaptive grace: slack in step times")


@dataclass
class MergeConfig:
    delta_correction: str = key(REQUIRED, rules.word(Correction), "directional correction before merging")
    iso_backend: str = key(
        "torch-svd", rules.word(Literal["torch-svd", "scalar"]), "who computes the SVD of iso fragments"
    )
    iso_scale: str = key("mean", rules.word(Spectrum), "what the flat spectrum of an iso merge is set to")
    device: str = key("auto", rules.device(), "where merging runs; auto = CUDA when present")
    max_norm_ratio: float | None = key(
        None, rules.real(1, 1e9, above=True), "answers longer than so many times the round's median are left out"
    )


@dataclass
class OuterConfig:
    lr: Any = key(REQUIRED, rules.learning_rate(), "Nesterov learning rate, constant or by step")  # noqa: RUF009 (a field)
    momentum: float = key(REQUIRED, rules.momentum(), "Nesterov momentum")
    guard: bool | str = key("off", rules.word(Guard), "cap = less momentum where a step would go too far")


@dataclass
class SvdConfig:
    devices: list[str] = key(["auto"], rules.devices(), "one child process each")  # noqa: RUF009 (a field)
    queue_capacity: int = key(16, rules.whole(1, 65536), "matrices queued and running")
    startup_timeout_s: float = _seconds(300.0, "until a child must be ready")
    request_timeout_s: float = _seconds(3540.0, "until a matrix must be done, from submission")
    drain_timeout_s: float = _seconds(3600.0, "until all admitted matrices must be done")


@dataclass
class CheckpointConfig:
    path: str | None = key(None, rules.path("to write"), "the checkpoint file; null = no checkpoints")
    every: int = key(8, rules.whole(0, U64_MAX), "outer steps between checkpoints; 0 = only the final one")
    resume: bool | str = key(False, rules.word(Resuming), "continue from the file; auto = if there is one")
    mark_final: bool = key(False, rules.flag(), "write PATH.final once all learners hold the final cut")


@dataclass
class FinalConfig:
    ack_timeout_s: int | None = key(None, rules.whole(1, _LONGEST_S), "wait for the final cut; null = quorum_timeout_s")
    state_path: str | None = key(None, rules.path("to write"), "the final parameters, safetensors")
    layout_path: str | None = key(
        None, rules.path("to read"), "a learner's saved layout: parameter names for state_path"
    )


@dataclass
class TapeConfig:
    path: str | None = key(None, rules.path("to append to"), "the event tape, JSON lines")


@dataclass
class SessionConfig:
    require_profile_binding: bool = key(
        False, rules.flag(), "refuse learners that do not name this configuration's hash"
    )
    expected_contract: str | None = key(None, rules.contract(), "the one session contract to accept")
    handshake_timeout_s: float = _seconds(10.0, "until a new socket must have sent its first frame")
    write_timeout_s: float = _seconds(60.0, "until a socket that accepts no byte is closed")
    idle_timeout_s: float = _seconds(60.0, "until a learner whose heartbeats stopped is closed")
    max_pending_handshakes: int = key(64, rules.whole(1, 65536), "sockets that may wait with their first frame")


@dataclass
class SecurityConfig:
    hmac_key_file: str | None = key(
        None, rules.path("to read"), "HELLO authentication; one trailing newline is dropped"
    )
    tls_cert: str | None = key(None, rules.path("to read"), "certificate chain, PEM")
    tls_key: str | None = key(None, rules.path("to read"), "private key, PEM")
    tls_client_ca: str | None = key(None, rules.path("to read"), "authority client certificates must come from")


@dataclass
class BudgetConfig:
    learner_steps: int | None = key(None, rules.whole(1, U64_MAX), "benchmark: local steps of every learner")


@dataclass
class SyncerConfig:
    """The schema at the door. ``outer.lr``, ``outer.momentum`` and ``merge.delta_correction`` come from the preset."""

    learners: int = key(REQUIRED, rules.whole(1, U32_MAX), "size of the fleet; ids 0 to learners - 1")
    total_steps: int = key(REQUIRED, rules.whole(1, U64_MAX), "outer steps, one fragment each")
    listen: ListenConfig = field(default_factory=ListenConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    svd: SvdConfig = field(default_factory=SvdConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    final: FinalConfig = field(default_factory=FinalConfig)
    tape: TapeConfig = field(default_factory=TapeConfig)
    session: SessionConfig = field(default_factory=SessionConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    progress: bool | str = key("auto", rules.word(Progress), "live progress in a terminal; off = plain log lines")


def _walk(config: DataclassInstance, prefix: str = "") -> Iterator[tuple[str, object, Rule]]:
    """(dotted key, value, rule) of every key of a schema object, in the order of declaration."""
    for entry in fields(config):
        name, value = prefix + entry.name, getattr(config, entry.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _walk(value, name + ".")
        else:
            yield name, value, entry.metadata["rule"]


@dataclass(frozen=True)
class Keys(Generic[S_co]):
    """Every key of one command: ``schema`` declares them, ``conf/<primary>.yaml`` is where composing begins."""

    schema: type[S_co]
    primary: str

    @cached_property
    def defaults(self) -> dict[str, object]:
        """Dotted key -> default, ``???`` where there is none."""
        return {name: value for name, value, _ in _walk(self.schema())}

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """Dotted key -> rule, in the order of declaration."""
        return {name: rule for name, _, rule in _walk(self.schema())}

    @cached_property
    def sections(self) -> tuple[str, ...]:
        """The first parts of dotted keys."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.rules if "." in name))

    def given(self, config: DataclassInstance) -> dict[str, object]:
        """Dotted key -> value as it was composed."""
        return {name: value for name, value, _ in _walk(config)}

    def missing(self, name: str) -> ValueError:
        rule = self.rules[name]
        return ValueError(f"{name} is missing: it must be given, {rule.legal} ({rule.meaning})")

    def parsed(self, config: DataclassInstance) -> Values:
        """Raises ValueError for the first value that is not legal by itself."""
        return {name: self._parsed(name, value, rule) for name, value, rule in _walk(config)}

    def _parsed(self, name: str, value: object, rule: Rule) -> object:
        if value == REQUIRED:
            raise self.missing(name)
        if value is None and self.defaults[name] is None:
            return None
        try:
            return rule.parse(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise wrong(name, value, rule.legal) from error


AnyKeys: TypeAlias = Keys[Any]  # of whatever command
SYNCER = Keys(SyncerConfig, "config")


# ----------------------------------------------------------------------------------------------------- validation


def validate(config: SyncerConfig) -> SyncerPolicy:
    """Check every value, alone and together, and resolve what null stands for.

    Raises ValueError, one line, naming the key, the value and the legal range.
    """
    values = SYNCER.parsed(config)
    _check_relations(values)
    check_files(values)
    check_tls(values)
    return _policy(values, read_hmac_key(values[HMAC_KEY]))


def warnings(policy: SyncerPolicy) -> list[str]:
    """What is legal but probably not meant; sentences for the log."""
    found = []
    if policy.session.require_profile_binding and policy.checkpoint.resume == "false":
        found.append(
            "session.require_profile_binding=true with checkpoint.resume=false: resuming later changes the profile, "
            "and bound learners will be refused; a run that may be restarted starts with checkpoint.resume=auto"
        )
    host, security = policy.listen.host, policy.security
    if security.hmac_key is None and security.tls_client_ca is None and not _is_loopback(host):
        found.append(
            f"NOT PROTECTED: listen.host={host} is not loopback and learners are not authenticated: whoever reaches "
            f"the port can join the run, read the model and change it; set security.hmac_key_file, or "
            f"security.tls_cert, .tls_key and .tls_client_ca"
        )
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_relations(values: Values) -> None:
    learners, quorum = values["learners"], values["schedule.quorum"]
    if quorum is not None and quorum > learners:
        raise wrong("schedule.quorum", quorum, f"null or an integer from 1 to learners, {learners}")
    for name, needed in _NEUTRAL.items():
        if values[name] == needed:
            continue
        if values["checkpoint.path"] is None:
            raise wrong(name, values[name], f"{shown(needed)} while checkpoint.path is null")
        if values["budget.learner_steps"] is not None and name != "budget.learner_steps":
            raise wrong(name, values[name], f"{shown(needed)} while budget.learner_steps is given")


# --------------------------------------------------------------------------------------------------------- policy


def _policy(values: Values, hmac_key: bytes | None) -> SyncerPolicy:
    if values["schedule.quorum"] is None:
        values["schedule.quorum"] = values["learners"] // 2 + 1
    if values["final.ack_timeout_s"] is None:
        values["final.ack_timeout_s"] = values["schedule.quorum_timeout_s"]
    values["merge.iso_backend"] = IsoBackend[values["merge.iso_backend"].upper().replace("-", "_")]
    values["merge.iso_scale"] = IsoScale[values["merge.iso_scale"].upper()]
    values["security.hmac_key"] = hmac_key

    def section(policy: type[P], name: str) -> P:
        return policy(**{entry.name: values[f"{name}.{entry.name}"] for entry in fields(policy)})

    return SyncerPolicy(
        learners=values["learners"],
        total_steps=values["total_steps"],
        listen=section(policies.ListenPolicy, "listen"),
        schedule=section(policies.SchedulePolicy, "schedule"),
        merge=section(policies.MergePolicy, "merge"),
        outer=section(policies.OuterPolicy, "outer"),
        svd=section(policies.SvdPolicy, "svd"),
        checkpoint=section(policies.CheckpointPolicy, "checkpoint"),
        final=section(policies.FinalPolicy, "final"),
        session=section(policies.SessionPolicy, "session"),
        security=section(policies.SecurityPolicy, "security"),
        tape_path=values["tape.path"],
        budget_learner_steps=values["budget.learner_steps"],
        progress=values["progress"],
    )


def profile_record(policy: SyncerPolicy) -> ProfileRecord:
    """The record of this configuration; ``.hash`` is what a profile-bound HELLO must carry."""
    values = asdict(policy)
    values["merge"]["iso_scale"] = policy.merge.iso_scale.name.lower()
    return record_of(values | {"budget.learner_steps": policy.budget_learner_steps})
