"""Bytes of real processes, counted by a relay at their sockets, against a formula and against gradient exchange.

Decides what the formula holds: the bulk messages alone, each with its frames. What the count has beyond it (pulls,
heartbeats, handshakes) is what the two per cent of the margin are for. It must not know margins.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from experiments.configs import Fleet
from experiments.merging import layout_for
from experiments.processes import children, start_learner, start_syncer
from experiments.relay import Relay
from experiments.specs import Wire
from experiments.tasks import make_task
from experiments.world import BCAST_HEAD, PUSH_HEAD
from syncer.plan.network import framed_bytes
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.layout import WireLayout

F32, BF16 = 4, 2
RUN_S = 600.0


def count_bytes(config: Wire) -> dict[str, Any]:
    """Bytes of all learners together, up and down; and per learner and local step what gradients would cost."""
    dtype = WireDType[config.wire.upper()]
    layout = _layout(config)
    with ExitStack() as stack:
        processes = stack.enter_context(children())
        address = start_syncer(
            processes,
            f"learners={config.learners}",
            f"total_steps={config.rounds}",
            f"schedule.quorum={config.learners}",
            f"schedule.sync_interval_steps={config.interval}",
        )
        relays = [stack.enter_context(Relay(address)) for _ in range(config.learners)]
        optimizer = {"wire_dtype": config.wire, "fragments": config.fragments, "run_id": "bytes"}
        started = [
            start_learner(processes, i, relay.address, step_s=config.step_s, seed=config.seed, optimizer=optimizer)
            for i, relay in enumerate(relays)
        ]
        told = _ends(processes, started)
        up, down = sum(relay.up for relay in relays), sum(relay.down for relay in relays)
    formula_up, formula_down = formula(layout, dtype, config.learners, config.rounds)
    steps = sum(line["steps"] for line in told) / config.learners
    numel = sum(layout.numels)
    return {
        "up": up,
        "down": down,
        "formula_up": formula_up,
        "formula_down": formula_down,
        "deviation": 100 * ((up + down) / (formula_up + formula_down) - 1),
        "told_up": sum(line["bytes_sent"] for line in told),
        "told_down": sum(line["bytes_received"] for line in told),
        "steps": steps,
        "interval": config.fragments * steps / config.rounds,
        "per_step": steady(layout, dtype, config.interval),
        "ddp_f32": ddp(numel, config.learners, F32),
        "ddp_bf16": ddp(numel, config.learners, BF16),
    }


def formula(layout: WireLayout, dtype: WireDType, learners: int, rounds: int) -> tuple[int, int]:
    """Bytes (up, down) of a whole run of all learners: first weights, every answer and broadcast, the final cut.

    The last round is not broadcast: the final cut holds it.
    """
    fragments = range(len(layout))
    bulk = [framed_bytes(BCAST_HEAD + layout.nbytes(f, dtype.bulk)) for f in fragments]
    push = [framed_bytes(PUSH_HEAD + layout.nbytes(f, dtype)) for f in fragments]
    final = [framed_bytes(BCAST_HEAD + layout.nbytes(f, WireDType.F32)) for f in fragments]
    turns = [f % len(layout) for f in range(rounds)]
    up = learners * sum(push[f] for f in turns) + sum(bulk)
    return up, learners * (sum(bulk) + sum(bulk[f] for f in turns[:-1]) + sum(final))


def steady(layout: WireLayout, dtype: WireDType, interval: int) -> float:
    """Bytes per learner and local step, sent and received, while the run goes on: every fragment once in H steps."""
    once = sum(
        framed_bytes(PUSH_HEAD + layout.nbytes(f, dtype)) + framed_bytes(BCAST_HEAD + layout.nbytes(f, dtype.bulk))
        for f in range(len(layout))
    )
    return once / interval


def ddp(numel: int, learners: int, width: int) -> float:
    """The same of a ring all-reduce of the gradient at every step, without any framing."""
    return 2 * 2 * (learners - 1) / learners * width * numel


def _layout(config: Wire) -> WireLayout:
    shapes = [(name, tuple(p.shape)) for name, p in make_task("char", 0).model().named_parameters()]
    fleet = Fleet(config.learners, config.interval, config.fragments, config.wire)
    return layout_for(fleet, shapes, None).wire


def _ends(processes: Any, learners: list[Any]) -> list[dict[str, int]]:
    """The last line of each learner, whose order of ending is theirs."""
    told: dict[str, dict[str, int]] = {}
    while len(told) < len(learners):
        event = processes.next_event(RUN_S)
        if event is None:
            raise RuntimeError(f"the run did not end within {RUN_S:g} s")
        text = getattr(event, "text", None)
        if text is not None and event.child in learners and text.startswith("{"):
            told[event.child.name] = json.loads(text)
        elif text is None and event.child in learners and event.child.name not in told:
            raise RuntimeError(f"{event.child.name} failed: {list(event.child.tail)[-5:]}")
    return list(told.values())
