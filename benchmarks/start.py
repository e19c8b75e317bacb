"""From ``python -m syncer`` to its open port, against ``import torch``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.harness import Figure, Size, Target, alternate, both, ratios, seconds
from benchmarks.stage import ROOT, Launch, environment, launch

LISTENING = "syncer listening on"
WORDS = ("-m", "syncer", "learners=1", "total_steps=1", "listen.port=0", "merge.device=cpu")


def measure(size: Size, _start: Launch = launch) -> Iterator[Figure]:
    """Fresh interpreters on both sides, whatever the other figures use."""
    ours, theirs = alternate(size.of(5, 3, 1), seconds(_listen), seconds(_import))
    yield Figure(
        "python -m syncer until it listens",
        'python -c "import torch"',
        "x",
        Target(2, 1.3),
        ratios(ours, theirs),
        both(ours, theirs),
    )


def _listen() -> None:
    with subprocess.Popen(
        [sys.executable, *WORDS], env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if LISTENING in line:
                break
        process.kill()
    if not said or LISTENING not in said[-1]:
        raise RuntimeError(f"the syncer did not listen:\n{''.join(said)}")


def _import() -> None:
    subprocess.run([sys.executable, "-c", "import torch"], env=environment(), cwd=ROOT, check=True)
