"""Records of experiments as if they had been run, with results that a test decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.records import Records
from experiments.specs import Job, Scale, jobs_of


def made_up(names: Sequence[str], result_of: Callable[[Job], dict[str, Any]]) -> Records:
    """A record of every run of these experiments, in memory."""
    records = Records(None)
    for name in names:
        while missing := [job for job in jobs_of(name, Scale(), records) if job.key not in records.by_key]:
            for job in missing:
                told = {"wall_seconds": 30.0, "commit": "abc1234", "versions": {"python": "3.11"}}
                made = {"key": job.key, "kind": job.kind, "config": job.config, "result": result_of(job)}
                records.append(made | told)
    return records


def write(records: Records, path: Path) -> None:
    """The file that ``Records`` reads."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records.by_key.values()), encoding="utf-8")
