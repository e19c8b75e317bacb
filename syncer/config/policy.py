"""Frozen policies: the syncer's configuration once it is validated and resolved.

``keys.py`` builds them, every other room reads them. They have no defaults: those stand with the keys alone. A null
quorum has become the majority, a null acknowledgement timeout the quorum timeout. Times are in the unit their name
ends with.

* pure
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, TypeAlias

from yeto_torch.wire.profile import Correction, Guard, OnLoss

if TYPE_CHECKING:
    from pathlib import Path

Resuming: TypeAlias = Literal["false", "true", "auto"]
Progress: TypeAlias = Literal["auto", "off"]

DRIVE_LIMIT = 1.25
"""Where the band of the outer step's drive ends: beyond, ``outer.guard=cap`` lowers momentum."""

WARNED_DRIVE = 1.42
"""Beyond it the syncer warns. The preset ``balanced`` reaches 1.4 where a fleet goes steadily, which is no fault."""


class IsoBackend(IntEnum):
    """Who computes the SVD of an iso merge; the value is the checkpoint's backend byte."""

    SCALAR = 0
    TORCH_SVD = 1

    @property
    def key(self) -> str:
        """The word people type: ``scalar`` or ``torch-svd``."""
        return self.name.lower().replace("_", "-")


class IsoScale(IntEnum):
    """What every nonzero singular value of an iso merge becomes."""

    MEAN = 0
    """The mean of all min(rows, cols) singular values."""
    NORM = 1
    """The one value that keeps the Frobenius norm of the average."""


@dataclass(frozen=True, slots=True)
class ListenPolicy:
    host: str
    port: int
    address_file: Path | None


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    quorum: int
    quorum_timeout_s: int
    start_grace_s: float
    on_loss: OnLoss
    loss_after_s: float
    pipeline: int
    sync_interval_steps: float
    min_round_interval_ms: int
    grace_ms: int
    grace_gamma: float
    grace_tau: float


@dataclass(frozen=True, slots=True)
class MergePolicy:
    delta_correction: Correction
    iso_backend: IsoBackend
    iso_scale: IsoScale
    device: str
    max_norm_ratio: float | None


@dataclass(frozen=True, slots=True)
class OuterPolicy:
    """``lr`` as (first step, value) pairs, ascending, the first at step 1; a constant is one pair."""

    lr: tuple[tuple[int, float], ...]
    momentum: float
    guard: Guard

    def lr_at(self, step: int) -> float:
        """The outer learning rate of round ``step``."""
        value = self.lr[0][1]
        for first, lr in self.lr:
            if step < first:
                break
            value = lr
        return value


@dataclass(frozen=True, slots=True)
class SvdPolicy:
    devices: tuple[str, ...]
    queue_capacity: int
    startup_timeout_s: float
    request_timeout_s: float
    drain_timeout_s: float


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    path: Path | None
    every: int
    resume: Resuming
    mark_final: bool

    @property
    def periodic(self) -> bool:
        """Is the state saved while the run goes on?"""
        return self.path is not None and self.every > 0


@dataclass(frozen=True, slots=True)
class FinalPolicy:
    ack_timeout_s: int
    state_path: Path | None
    layout_path: Path | None


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    require_profile_binding: bool
    expected_contract: bytes | None
    handshake_timeout_s: float
    write_timeout_s: float
    idle_timeout_s: float
    max_pending_handshakes: int


@dataclass(frozen=True, slots=True)
class SecurityPolicy:
    hmac_key: bytes | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None

    def __repr__(self) -> str:  # a key must not reach a log by way of a repr
        return f"SecurityPolicy(hmac={'set' if self.hmac_key else 'none'}, tls_cert={self.tls_cert})"


@dataclass(frozen=True, slots=True)
class SyncerPolicy:
    """Everything ``python -m syncer`` was told."""

    learners: int
    total_steps: int
    listen: ListenPolicy
    schedule: SchedulePolicy
    merge: MergePolicy
    outer: OuterPolicy
    svd: SvdPolicy
    checkpoint: CheckpointPolicy
    final: FinalPolicy
    session: SessionPolicy
    security: SecurityPolicy
    tape_path: Path | None
    budget_learner_steps: int | None
    progress: Progress
