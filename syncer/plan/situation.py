"""What a plan is made for: the model, the machines, the network, and the settings of the run.

Rates are measured ones and can be given; the defaults are those of one core of a slow server, which copies 5.5 GB of
f32 values a second (``docs/scaling.md`` says how they were found, and how to find another machine's).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from syncer.config.keys import MergeConfig, OuterConfig, ScheduleConfig, SyncerConfig, validate
from syncer.config.policy import SyncerPolicy
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout

SCHEDULE = ScheduleConfig()  # the defaults
NEVER = 10**9  # outer steps: a plan watches a run that goes on
# In answers: reading the momentum, and the outer step, on whose way the broadcast is made.
MERGE_ANSWERS, OUTER_ANSWERS = 0.5, 1.5
ROUND_ANSWERS = MERGE_ANSWERS + OUTER_ANSWERS
_F32 = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chooses. ``quorum`` None = majority; ``interval`` is H, inner steps between two syncs."""

    wire_dtype: WireDType = WireDType.BF16
    fragments: int = 8
    interval: float = SCHEDULE.sync_interval_steps
    quorum: int | None = None
    pipeline: int = SCHEDULE.pipeline


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
        merge_rate: f32 bytes per second that the syncer's actor adds to a merge: what one answer more costs. All that a
            round takes whoever answers, the outer step and the broadcast's bytes included, is as much as
            ``ROUND_ANSWERS`` answers.
        message_s: what the syncer spends on a pull, an answer or a broadcast of one learner, however short.
        exchange_rate: f32 bytes per second that a learner subtracts or adopts on its training thread.
        encode_rate: f32 bytes per second that a learner packs into four bits beside it; f32 and bf16 need no packing.
    """

    parameters: int
    learners: int
    step_s: float
    link: float
    syncer_link: float
    latency_s: float = 0.02
    mtbf_s: float | None = None
    repair_s: float = 300.0
    speeds: tuple[float, ...] = ()
    merge_rate: float = 3e9
    message_s: float = 0.19e-3
    exchange_rate: float = 3.5e9
    encode_rate: float = 2e9

    def speed(self, learner: int) -> float:
        return self.speeds[learner] if self.speeds else 1.0


def layout_of(situation: Situation, settings: Settings) -> WireLayout:
    """As many fragments as wanted, as equal as whole numbers can be."""
    count = min(settings.fragments, situation.parameters)
    base, more = divmod(situation.parameters, count)
    return WireLayout(tuple(WireFragment(MergeMode.AVG, (base + (f < more),)) for f in range(count)))


def syncer_bytes(situation: Situation, settings: Settings) -> int:
    """Memory the syncer's tensors take when every answer of every round in flight is there.

    Parameters and momentum; per round in flight the answers as bytes and decoded (bf16 stays bf16 with compiled loops),
    a merged gradient and a broadcast.
    """
    layout = layout_of(situation, settings)
    decoded, bulk = layout.max_nbytes(WireDType.F32), layout.max_nbytes(settings.wire_dtype.bulk)
    wire = layout.max_nbytes(settings.wire_dtype)
    answer = wire + (wire if settings.wire_dtype is WireDType.BF16 else decoded)
    in_flight = min(settings.pipeline, len(layout))
    return 2 * _F32 * situation.parameters + in_flight * (situation.learners * answer + decoded + bulk)


def learner_bytes(situation: Situation, settings: Settings) -> int:
    """Memory a learner takes beyond its model: the anchors in the broadcasts' dtype, and two fragments in f32."""
    layout = layout_of(situation, settings)
    return settings.wire_dtype.bulk.nbytes(situation.parameters) + 2 * layout.max_nbytes(WireDType.F32)


def policy_of(situation: Situation, settings: Settings) -> SyncerPolicy:
    """The policy of a syncer with these settings and the defaults of everything else; nothing is merged by it."""
    merge = MergeConfig(delta_correction="none", iso_backend="scalar")
    plain = validate(SyncerConfig(situation.learners, NEVER, merge=merge, outer=OuterConfig(lr=1.0, momentum=0.0)))
    schedule = replace(
        plain.schedule,
        quorum=settings.quorum or plain.schedule.quorum,
        pipeline=settings.pipeline,
        sync_interval_steps=settings.interval,
    )
    return replace(plain, schedule=schedule)
