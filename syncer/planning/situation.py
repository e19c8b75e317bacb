"""What a plan is made for: the model, the machines, the network, and the settings of the run.

Rates are measured ones and can be given; the defaults are what one core of an ordinary machine does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from syncer.policy import (
    CheckpointPolicy,
    FinalPolicy,
    IsoBackend,
    ListenPolicy,
    MergePolicy,
    OuterPolicy,
    SchedulePolicy,
    SecurityPolicy,
    SessionPolicy,
    SvdPolicy,
    SyncerPolicy,
)
from yeto_torch.protocol.constants import MergeMode, WireDType
from yeto_torch.protocol.layout import WireFragment, WireLayout

NEVER = 10**9  # outer steps: a plan watches a run that goes on


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chooses. ``quorum`` None = majority; ``interval`` is H, inner steps between two syncs."""

    wire_dtype: WireDType = WireDType.BF16
    fragments: int = 8
    interval: float = 24.0
    quorum: int | None = None
    pipeline: int = 2


@dataclass(frozen=True, slots=True)
class Situation:
    """What the user has.

    Attributes:
        parameters: of the model.
        step_s: seconds per inner step, per learner (the fastest one's, if ``speeds`` differ).
        speeds: of each learner relative to 1; a learner of 0.5 takes twice as long.
        link, syncer_link: bytes per second of each learner's and of the syncer's line, each way.
        latency_s: one way.
        mtbf_s: mean time between failures of one learner; None = none fails.
        repair_s: until it is back.
        merge_rate: f32 bytes per second that the syncer decodes, merges and encodes.
        exchange_rate: f32 bytes per second that a learner subtracts or adopts on its training thread.
        encode_rate: f32 bytes per second that a learner encodes beside it.
    """

    parameters: int
    learners: int
    step_s: float
    link: float
    syncer_link: float
    latency_s: float = 0.02
    mtbf_s: float | None = None
    repair_s: float = 300.0
    speeds: tuple[float, ...] = field(default=())
    merge_rate: float = 1.5e9
    exchange_rate: float = 4e9
    encode_rate: float = 1e9

    def speed(self, learner: int) -> float:
        return self.speeds[learner] if self.speeds else 1.0

    @property
    def slowest_step_s(self) -> float:
        return self.step_s / min(self.speeds, default=1.0)


def layout_of(situation: Situation, settings: Settings) -> WireLayout:
    """As many fragments as wanted, as equal as whole numbers can be."""
    count = min(settings.fragments, situation.parameters)
    base, more = divmod(situation.parameters, count)
    return WireLayout(tuple(WireFragment(MergeMode.AVG, (base + (f < more),)) for f in range(count)))


def policy_of(situation: Situation, settings: Settings) -> SyncerPolicy:
    """The policy of a syncer with these settings and the defaults of everything else."""
    return SyncerPolicy(
        learners=situation.learners,
        total_steps=NEVER,
        listen=ListenPolicy(),
        schedule=SchedulePolicy(
            settings.quorum or situation.learners // 2 + 1,
            pipeline=settings.pipeline,
            sync_interval_steps=settings.interval,
        ),
        merge=MergePolicy("none", IsoBackend.SCALAR),
        outer=OuterPolicy(),
        svd=SvdPolicy(),
        checkpoint=CheckpointPolicy(),
        final=FinalPolicy(900),
        session=SessionPolicy(),
        security=SecurityPolicy(),
    )
