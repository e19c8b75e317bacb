"""What a local fleet is started with: commands and environments of its children, from one description.

Decides what the launcher sets and what the user may override. It starts nothing.

Source: v4 §Checkpoints (the launcher enables the final marker).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from yeto_torch.launcher.folder import RunFolder
from yeto_torch.launcher.processes import python_environment


@dataclass(frozen=True, slots=True)
class Secrets:
    """Files that protect the fleet, as the syncer's keys and as the learners' environment."""

    hmac_key: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None

    @property
    def keys(self) -> dict[str, str]:
        """For the syncer."""
        files = {"hmac_key_file": self.hmac_key, "tls_cert": self.tls_cert, "tls_key": self.tls_key}
        return {f"security.{name}": str(path) for name, path in files.items() if path is not None}

    @property
    def environment(self) -> dict[str, str]:
        """For the learners; a certificate that nobody else has signed is its own authority."""
        files = {"YETO_HMAC_KEY_FILE": self.hmac_key, "YETO_TLS_CA": self.tls_ca or self.tls_cert}
        return {name: str(path) for name, path in files.items() if path is not None}


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start."""

    folder: RunFolder
    learners: int  # how many; their ids are 0 to learners - 1
    command: tuple[str, ...]  # of one learner, for the Python interpreter: a script or ``-m module``, and its arguments
    overrides: tuple[str, ...] = ()  # ``key=value`` for the syncer; they win over the launcher's own
    max_restarts: int = 0  # how often each learner may be started again after it failed
    grace_s: float = 30.0  # how long an interrupted child may take to end before it is killed
    secrets: Secrets = Secrets()
    nproc_per_learner: int = 1  # how many rank processes a learner is

    def syncer_command(self) -> list[str]:
        """``python -m syncer`` with the run folder's files, under the user's own keys."""
        own = {
            "listen.port": "0",
            "checkpoint.path": str(self.folder.checkpoint),
            "checkpoint.mark_final": "true",
            "checkpoint.resume": "auto",
            "tape.path": str(self.folder.tape),
            "final.state_path": str(self.folder.state),
            "final.layout_path": str(self.folder.layout),
            "progress": "off",
        }
        chosen = {key_of(override) for override in self.overrides}
        keys = {"learners": str(self.learners), "listen.address_file": str(self.folder.address)}
        keys |= {key: value for key, value in (own | self.secrets.keys).items() if key not in chosen}
        return [sys.executable, "-m", "syncer", *(f"{k}={_quoted(v)}" for k, v in keys.items()), *self.overrides]

    def gpus_of(self, learner: int, gpus: Sequence[str]) -> dict[str, str]:
        """An equal share of ``gpus`` for each learner, at least one per rank; learners share where they are too few."""
        share = max(self.nproc_per_learner, len(gpus) // self.learners)
        if len(gpus) < share:
            return {}
        first = learner % (len(gpus) // share) * share
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + share])}

    def environment(self, run_id: str) -> dict[str, str]:
        """What every child gets on top of our own environment."""
        return {
            "PYTHONFAULTHANDLER": "1",  # a crash in native code has a traceback too
            **python_environment(sharing=self.learners * self.nproc_per_learner),
            "YETO_LEARNERS": str(self.learners),
            "YETO_RUN_ID": run_id,
            "YETO_RUN_DIR": str(self.folder.path),
            **self.secrets.environment,
        }


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; none where nothing says so.

    CUDA counts from 0 what it finds, whatever the files are called: a container may hold ``nvidia3`` alone.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    found = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return [str(number) for number in range(len(found))]


def key_of(override: str) -> str:
    """The key of one Hydra override."""
    return override.lstrip("+~").partition("=")[0]


def _quoted(value: str) -> str:
    """A value that Hydra's override grammar takes as it is: spaces and brackets included, no letter but ASCII is plain.

    Backslashes count only before an interpolation, before a quote and at the end.
    """
    if re.fullmatch(r"[A-Za-z0-9_./:-]*", value):
        return value
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    value = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", value) + "'"
