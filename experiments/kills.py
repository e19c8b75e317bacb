"""The same SIGKILLs against a decoupled fleet and against synchronous training that restarts from its checkpoint.

Decides who is killed when: machine i fails after so many seconds *at work*, drawn once per seed for both sides, and is
started again ``repair`` later; how long a process then takes to start is part of both. Goodput is local steps whose
progress is in the model when the time is over, against what the machines would make. It must not know margins.

    decoupled     steps inside merged answers, by the syncer's tape
    synchronous   the last step the ranks reached; a death ends all of them, and all go on from the last checkpoint
                  (steps behind it count if the time is over before they were made again: in this side's favour)
"""

from __future__ import annotations

import heapq
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.processes import START_S, STARTED, children, start_learner, start_module, start_syncer
from experiments.specs import Kills
from syncer.tape import merges
from yeto_torch.launcher.processes import Child, Children, Exited, Line

FRAGMENTS = 4
NEVER = 10**9


def run_kills(config: Kills) -> dict[str, Any]:
    """Goodput of both sides, their ratio, and how many were killed."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        fleet, fleet_kills = _decoupled(config, Path(folder))
        ranks, rank_kills = _synchronous(config, Path(folder))
    return {
        "ratio": fleet / ranks,
        "decoupled": fleet,
        "synchronous": ranks,
        "kills_decoupled": fleet_kills,
        "kills_synchronous": rank_kills,
        "load": load,
    }


class Lives:
    """How long each machine works until it fails, again and again: seconds, the same for both sides."""

    def __init__(self, config: Kills) -> None:
        self._rng = [random.Random(1000 * config.seed + i) for i in range(config.learners)]
        self._rate = 1 / (config.up * config.step_s)

    def next(self, machine: int) -> float:
        return self._rng[machine].expovariate(self._rate)


def _decoupled(config: Kills, folder: Path) -> tuple[float, int]:
    tape, seconds = folder / "tape.jsonl", config.steps * config.step_s
    with children() as processes:
        keys = (f"learners={config.learners}", f"total_steps={NEVER}", f"tape.path={tape}")
        address = start_syncer(processes, *keys, f"schedule.sync_interval_steps={config.interval}")
        fleet = Fleet(config, processes, address)
        began, wall = fleet.await_start(), time.time()
        kills = fleet.run(began + seconds)
        merged = [line for line in merges(tape) if wall <= line["time"] <= wall + seconds]
    steps = sum(answer["c_steps"] for line in merged for answer in line["responders"])
    return steps / FRAGMENTS / (config.learners * config.steps), kills


class Fleet:
    """The learners of the decoupled side, killed and started again one by one."""

    def __init__(self, config: Kills, processes: Children, address: str) -> None:
        self._config, self._processes, self._address = config, processes, address
        self._lives = Lives(config)
        self._due: list[tuple[float, int, bool]] = []  # (when, machine, does it fail? else it is back)
        self._machines = [self._start(machine) for machine in range(config.learners)]

    def await_start(self) -> float:
        """When all are about to train: from here on they work."""
        began = _await_all(self._processes, self._machines, None)
        for machine in range(len(self._machines)):
            self._at_work(machine, began)
        return began

    def run(self, end: float) -> int:
        """Let time pass; how many were killed."""
        kills = 0
        while (now := time.monotonic()) < end:
            event = self._processes.next_event(min(end, self._due[0][0] if self._due else end) - now)
            _raise_if_ended(event)
            if isinstance(event, Line) and event.text == STARTED:
                self._at_work(self._machines.index(event.child), time.monotonic())
            while self._due and self._due[0][0] <= time.monotonic():
                kills += self._change(*heapq.heappop(self._due))
        return kills

    def _change(self, when: float, machine: int, fails: bool) -> bool:
        if fails:
            self._machines[machine].signal(signal.SIGKILL)
            heapq.heappush(self._due, (when + self._config.repair * self._config.step_s, machine, False))
        else:
            self._machines[machine] = self._start(machine)
        return fails

    def _at_work(self, machine: int, since: float) -> None:
        heapq.heappush(self._due, (since + self._lives.next(machine), machine, True))

    def _start(self, machine: int) -> Child:
        optimizer = {"fragments": FRAGMENTS, "run_id": "kills"}
        options = {"step_s": self._config.step_s, "seed": self._config.seed, "optimizer": optimizer}
        return start_learner(self._processes, machine, self._address, **options)


def _synchronous(config: Kills, folder: Path) -> tuple[float, int]:
    lives, kills, reached = Lives(config), 0, 0
    left = {rank: lives.next(rank) for rank in range(config.learners)}
    end: float | None = None
    while end is None or time.monotonic() < end:
        with children() as processes:
            ranks = [_rank(processes, config, folder, rank, kills) for rank in range(config.learners)]
            at_work = _await_all(processes, ranks, end)
            end = end or at_work + config.steps * config.step_s
            fails = min(left, key=lambda rank: left[rank])
            dies_at = at_work + left[fails]
            reached = _watch(processes, ranks[0], min(dies_at, end), reached)
            if dies_at < end:
                ranks[fails].signal(signal.SIGKILL)
                kills += 1
                left = {rank: seconds - (dies_at - at_work) for rank, seconds in left.items()}
                left[fails] = lives.next(fails)
        if dies_at < end:
            _pause(min(dies_at + config.repair * config.step_s, end))
    return reached / config.steps, kills


def _rank(processes: Children, config: Kills, folder: Path, rank: int, start: int) -> Child:
    told = {
        "rank": rank,
        "ranks": config.learners,
        "meeting": str(folder / f"meeting-{start}"),
        "step_s": config.step_s,
        "seed": config.seed,
        "checkpoint": str(folder / "checkpoint.safetensors"),
        "every": config.checkpoint_every,
    }
    return start_module(processes, f"rank {rank}", "experiments.ranks", json.dumps(told))


def _await_all(processes: Children, ranks: list[Child], end: float | None) -> float:
    """When every rank is about to train, or the time was over before."""
    waiting = set(range(len(ranks)))
    while waiting and (end is None or time.monotonic() < end):
        event = processes.next_event(START_S if end is None else max(0.0, end - time.monotonic()))
        _raise_if_ended(event)
        if event is None and end is None:
            raise RuntimeError(f"not all of {[child.name for child in ranks]} started within {START_S:g} s")
        if isinstance(event, Line) and event.text == STARTED and event.child in ranks:
            waiting.discard(ranks.index(event.child))
    return time.monotonic()


def _watch(processes: Children, first: Child, until: float, reached: int) -> int:
    """The step rank 0 has reached by then."""
    while (now := time.monotonic()) < until:
        event = processes.next_event(until - now)
        _raise_if_ended(event)
        if isinstance(event, Line) and event.child is first and event.text.startswith("step "):
            reached = int(event.text.split()[1])
    return reached


def _raise_if_ended(event: Any) -> None:
    """A process that ends by itself makes the figures worthless; one that we killed ended with SIGKILL."""
    if isinstance(event, Exited) and event.code != 128 + signal.SIGKILL:
        raise RuntimeError(f"{event.child.name} ended with {event.code}: {list(event.child.tail)[-5:]}")


def _pause(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))  # a repair takes its time
