"""Learners of several ranks as real processes."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.processes import Processes, Running

DEADLINES = {"wire_dtype": "f32", "connect_timeout_s": 60, "final_timeout_s": 60}
SCRIPT = str(Path(__file__).with_name("rank.py"))


def start_island(
    processes: Processes,
    address: str,
    learner_id: int = 0,
    *,
    ranks: int = 2,
    environments: tuple[dict[str, str], ...] = ({}, {}),
    **options: Any,
) -> list[Running]:
    """The ranks of one learner; ``options`` are those of ``rank.py``."""
    rendezvous = processes.folder / f"rendezvous-{uuid.uuid4().hex}"  # a file: no port can be taken by somebody else
    started = []
    for rank in range(ranks):
        settings = {"seed": learner_id, **options, "rank": rank, "world": ranks, "rendezvous": str(rendezvous)}
        settings["out"] = str(out(processes, learner_id, rank))
        settings["optimizer"] = {**DEADLINES, **options.get("optimizer", {})}
        name = f"learner {learner_id}.{rank}"
        env = {"YETO_SYNCER": address, "YETO_LEARNER_ID": str(learner_id), "YETO_RUN_ID": "island"}
        env |= environments[rank] if rank < len(environments) else {}
        started.append(processes.start(name, [SCRIPT, json.dumps(settings)], env))
    return started


def raised(ranks: list[Running]) -> list[str]:
    """What ended each rank, as ``Class: sentence``; every one must have failed."""
    assert [rank.wait() for rank in ranks] == [1] * len(ranks), "".join(rank.told() for rank in ranks)
    return [rank.wait_for(r"^raised (.*)")[1] for rank in ranks]


def out(processes: Processes, learner_id: int, rank: int) -> Path:
    return processes.folder / f"final-{learner_id}-{rank}.npz"


def results(processes: Processes, learners: int = 2, ranks: int = 2) -> list[list[np.ndarray]]:
    """The final parameters of every rank."""
    files = [out(processes, learner, rank) for learner in range(learners) for rank in range(ranks)]
    return [list(np.load(file).values()) for file in files]
