"""What a seed means: the fleet, its configuration, its network, and how often things go wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass

from syncer.config.policy import SyncerPolicy
from tests.sim.disk import CHECKPOINT
from tests.support.coordinator_desk import outer_policy, syncer_policy
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

WHOLE = 4096  # a slice that holds any message of this small world


@dataclass(frozen=True)
class LearnerPlan:
    """One learner: how fast it steps, when its data ends, how it joins."""

    step_s: float
    tokens: int
    steps: int | None  # None: it trains until the run is finished
    joins_at: float
    waits_for_start: bool


@dataclass(frozen=True)
class Chances:
    """Probabilities of trouble at the moments that matter; all zero is a quiet world."""

    cut: float = 0.0  # a connection, at a dangerous moment
    half_open: float = 0.0  # of cuts: one side notices late
    kill: float = 0.0  # a learner process
    freeze: float = 0.0  # SIGSTOP of a learner
    stall: float = 0.0  # a stream that delivers nothing for a while
    crash: float = 0.0  # the syncer, between two effects
    tear: float = 0.0  # the syncer, in the middle of a write
    disk_full: float = 0.0  # a write
    interrupt: float = 0.0  # SIGTERM to the syncer
    deadline: float = 0.0  # an answer arrives at its deadline, or a tick beside it
    final: float = 0.0  # a cut or a crash in the middle of the final cut
    silly: float = 0.0  # a learner says something that must not count: another generation, attempt, base, or again


@dataclass(frozen=True)
class Scenario:
    """Everything a seed decides beforehand."""

    seed: int
    policy: SyncerPolicy
    layout: Layout
    dtype: WireDType
    alpha: float
    streams: int
    bytes_level: bool  # real encode, slices, readers; else whole messages travel
    slice_bytes: int
    kernel_bytes: int  # a socket's buffers: a slice or two of this small world
    pooled: bool  # merges end later, in any order
    merge_s: float
    save_s: float
    latency_s: float
    learners: tuple[LearnerPlan, ...]
    chances: Chances
    faults: int  # at most so many
    calm_at: float  # from here on nothing goes wrong any more
    never_back: int | None = None  # this learner, once killed after the start, stays away
    power_cuts: bool = True  # a crash loses what was not synced; else the process alone dies


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    count = rng.choice([1, 2, 2, 2, 3, 3, 4])
    quorum = rng.randint(1, count)
    every = rng.choice([1, 1, 1, 2, 3, 8, 8, 0])
    quiet = rng.random() < 0.05
    lonely = count > 1 and quorum < count and every > 0
    never_back = rng.randrange(count) if lonely and rng.random() < 0.4 else None
    outer = outer_policy(rng.choice([((1, 0.7),), ((1, 1.0),), ((1, 0.9), (4, 0.3))]), rng.choice([0.0, 0.5, 0.9]))
    policy = syncer_policy(
        count,
        rng.randint(3, 14),
        ack_timeout_s=240 if never_back is None else 90,
        every=every,
        path=str(CHECKPOINT),
        mark_final=rng.random() < 0.7,
        outer=outer,
        correction=rng.random() < 0.4,
        quorum=quorum,
        quorum_timeout_s=rng.randint(3, 12),
        start_grace_s=rng.choice([0.5, 4.0, 40.0]),
        pipeline=rng.randint(1, 3),
        sync_interval_steps=rng.choice([0.0, 0.0, 2.0, 6.0]),
        min_round_interval_ms=rng.choice([0, 0, 400]),
        grace_ms=rng.choice([0, 300, 1000, 2500]),
    )
    dtype = rng.choice(list(WireDType))
    # Where messages travel in pieces, their tensors must outweigh their heads, as they do in the real world; under q4,
    # whose blocks are large, they would not.
    slice_bytes = WHOLE if dtype is WireDType.Q4 else rng.choice([40, 100, WHOLE])
    fast, latency_s = rng.choice([0.1, 0.3]), rng.choice([0.001, 0.05, 0.3])
    return Scenario(
        seed=seed,
        policy=policy,
        layout=_layout(rng, 6 if slice_bytes < WHOLE else 1),
        dtype=dtype,
        alpha=rng.choice([0.0, 0.0, 0.5]),
        streams=rng.choice([0, 1, 2, 3]),
        bytes_level=rng.random() < 0.5,
        slice_bytes=slice_bytes,
        kernel_bytes=150 if latency_s < 0.1 else 1500,
        pooled=rng.random() < 0.3,
        merge_s=rng.choice([0.0, 0.01, 0.5, 3.0, 6.0]),
        save_s=rng.choice([0.0, 0.05, 1.5]),
        latency_s=latency_s,
        learners=tuple(_learner(rng, fast) for _ in range(count)),
        chances=Chances() if quiet else _chances(rng, never_back),
        faults=0 if quiet else rng.choice([2, 6, 12]),
        calm_at=rng.choice([15.0, 40.0, 80.0]),
        never_back=never_back,
        power_cuts=rng.random() < 0.7,
    )


def _learner(rng: random.Random, fast: float) -> LearnerPlan:
    return LearnerPlan(
        step_s=fast * rng.choice([1.0, 1.0, 1.3, 6.0]),
        tokens=rng.choice([1, 7, 1000]),
        steps=rng.choice([None, None, None, 5, 40]),
        joins_at=rng.choice([0.0, 0.0, 0.1, 5.0]),
        waits_for_start=rng.random() < 0.8,
    )


def _chances(rng: random.Random, never_back: int | None) -> Chances:
    """Each seed likes some kinds of trouble and leaves others alone."""

    def some(*values: float) -> float:
        return rng.choice([0.0, *values])

    return Chances(
        cut=some(0.02, 0.1),
        half_open=rng.choice([0.0, 0.5]),
        kill=some(0.01, 0.05),
        freeze=some(0.02),
        stall=some(0.02, 0.1),
        crash=some(0.01, 0.04) if never_back is None else 0.04,
        tear=some(0.05, 0.2),
        disk_full=some(0.02),
        interrupt=some(0.05),
        deadline=some(0.1, 0.3),
        final=some(0.1, 0.4),
        silly=some(0.05, 0.2),
    )


def _layout(rng: random.Random, smallest: int) -> Layout:
    """1 to 4 fragments of 1 to 3 small tensors each, every merge mode."""

    def side() -> int:
        return smallest + rng.randint(0, 2)

    fragments = []
    for f in range(rng.randint(1, 4)):
        mode = rng.choice(list(MergeMode))
        shapes = [(side(), side()) for _ in range(rng.randint(1, 3))]
        if mode is not MergeMode.ISO and rng.random() < 0.5:
            shapes[0] = (side() * side(),)
        fragments.append(Fragment(mode, tuple(Tensor(f"f{f}.t{i}", shape) for i, shape in enumerate(shapes))))
    return Layout(tuple(fragments))
