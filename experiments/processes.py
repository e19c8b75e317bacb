"""Real processes of an experiment: a syncer, learners, ranks; each in a group of its own, none left behind.

Decides how they are started and when they count as started: by the line they print. It must not know what is measured.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from yeto_torch.launcher.processes import Child, Children, Exited, Line

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0
STARTED = "started"  # what a learner or rank prints when it is about to train


@contextmanager
def children() -> Iterator[Children]:
    """Whatever happens inside, every process is gone behind it."""
    started = Children()
    try:
        yield started
    finally:
        started.kill()


def start_module(to: Children, name: str, module: str, *arguments: str, **env: str) -> Child:
    """``python -m module arguments``, on one thread."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env
    return to.start(name, [sys.executable, "-m", module, *arguments], environment)


def start_syncer(to: Children, *keys: str) -> str:
    """A syncer on a free port; its address, once it listens."""
    child = start_module(to, "syncer", "syncer", "listen.port=0", "merge.device=cpu", "progress=off", *keys)
    return wait_for(to, child, r"syncer listening on (\S+)")[1]


def start_learner(to: Children, number: int, address: str, **options: Any) -> Child:
    """A paced learner (``experiments.paced``)."""
    told = json.dumps(options)
    return start_module(
        to, f"learner {number}", "experiments.paced", told, YETO_SYNCER=address, YETO_LEARNER_ID=str(number)
    )


def wait_for(to: Children, child: Child, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
    """The next line of ``child`` with ``pattern``; other children's lines before it pass unseen.

    Raises RuntimeError when the child ends before it, or it does not come in time.
    """
    deadline = time.monotonic() + timeout_s
    while (event := to.next_event(deadline - time.monotonic())) is not None:
        if isinstance(event, Line) and event.child is child and (match := re.search(pattern, event.text)):
            return match
        if isinstance(event, Exited) and event.child is child:
            raise RuntimeError(
                f"{child.name} ended with {event.code} before it said {pattern!r}: {list(child.tail)[-5:]}"
            )
    raise RuntimeError(f"{child.name} did not say {pattern!r} within {timeout_s:g} s: {list(child.tail)[-5:]}")
