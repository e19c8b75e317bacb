"""Frozen policies: the syncer's configuration once it is validated and resolved.

``config.py`` builds them from Hydra's YAML; every other room reads them. Nothing here is optional by accident:
a null quorum has become the majority, a null acknowledgement timeout the quorum timeout. Times are in the unit
their name ends with.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal

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
    host: str = "127.0.0.1"
    port: int = 29400
    address_file: Path | None = None


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    quorum: int
    quorum_timeout_s: int = 900
    start_grace_s: float = 60.0
    on_loss: Literal["continue", "stop"] = "continue"
    loss_after_s: float = 300.0
    pipeline: int = 2
    sync_interval_steps: float = 24.0
    min_round_interval_ms: int = 0
    grace_ms: int = 1000
    grace_gamma: float = 0.8
    grace_tau: float = 2.0


@dataclass(frozen=True, slots=True)
class MergePolicy:
    delta_correction: Literal["heloco", "heloco-normalized", "none"] = "heloco"
    iso_backend: IsoBackend = IsoBackend.TORCH_SVD
    iso_scale: IsoScale = IsoScale.MEAN
    device: str = "auto"
    max_norm_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class OuterPolicy:
    """``lr`` as (first step, value) pairs, ascending, the first at step 1; a constant is one pair."""

    lr: tuple[tuple[int, float], ...] = ((1, 0.7),)
    momentum: float = 0.5
    guard: Literal["off", "cap"] = "off"

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
    devices: tuple[str, ...] = ("auto",)
    queue_capacity: int = 16
    startup_timeout_s: float = 300.0
    request_timeout_s: float = 3540.0
    drain_timeout_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    path: Path | None = None
    every: int = 8
    resume: Literal["false", "true", "auto"] = "false"
    mark_final: bool = False

    @property
    def periodic(self) -> bool:
        """Is the state saved while the run goes on?"""
        return self.path is not None and self.every > 0


@dataclass(frozen=True, slots=True)
class FinalPolicy:
    ack_timeout_s: int
    state_path: Path | None = None
    layout_path: Path | None = None


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    require_profile_binding: bool = False
    expected_contract: bytes | None = None
    handshake_timeout_s: float = 10.0
    write_timeout_s: float = 60.0
    idle_timeout_s: float = 60.0
    max_pending_handshakes: int = 64


@dataclass(frozen=True, slots=True)
class SecurityPolicy:
    hmac_key: bytes | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None

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
    tape_path: Path | None = None
    budget_learner_steps: int | None = None
    progress: Literal["auto", "off"] = "auto"
