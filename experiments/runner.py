"""Runs what is not recorded yet: worker processes take jobs, one record each.

Decides the order and who runs what beside what. A worker is a process of its own that reads jobs and writes results as
JSON lines. A run that fails ends everything with its own message: a gap in the records is never silent.
"""

from __future__ import annotations

import contextlib
import json
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.records import Record, Records
from experiments.specs import ALONE, Job

ROOT = Path(__file__).resolve().parent.parent
_END_S = 20.0  # for a worker that was asked to end


def run_all(jobs: Sequence[Job], records: Records, workers: int) -> None:
    """Make every run that has no record. Raises RuntimeError when one fails; what was finished stays recorded."""
    wanted = {job.key: job for job in jobs}
    missing = [wanted[key] for key in records.missing(wanted)]
    print(f"{len(wanted)} runs, {len(wanted) - len(missing)} recorded already", file=sys.stderr, flush=True)
    _run([job for job in missing if job.kind not in ALONE], records, workers)
    _run([job for job in missing if job.kind in ALONE], records, 1)


def work(lines: Any, out: Any) -> None:
    """A worker's life: a job a line in, a result a line out, until there are no more."""
    from experiments.kinds import run_job

    for line in lines:
        job = Job(**json.loads(line))
        started = time.monotonic()
        result = run_job(job)
        told = {"result": result, "wall_seconds": round(time.monotonic() - started, 2)}
        print(json.dumps(told, allow_nan=False), file=out, flush=True)


def _run(jobs: Sequence[Job], records: Records, workers: int) -> None:
    waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[Record | Exception] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    processes = [_worker() for _ in range(min(workers, len(jobs)))]
    for process in processes:
        waiting.put(None)
        threading.Thread(target=_feed, args=(process, waiting, done), daemon=True).start()
    head = _circumstances() if jobs else {}
    try:
        for number in range(1, len(jobs) + 1):
            found = done.get()
            if isinstance(found, Exception):
                raise found
            records.append(found | head)
            print(f"{number}/{len(jobs)}  {_said(found)}", file=sys.stderr, flush=True)
    except BaseException:
        for process in processes:
            process.send_signal(signal.SIGINT)  # it ends the processes that it has started
        raise
    finally:
        for process in processes:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _worker() -> subprocess.Popen[str]:
    """In a group of its own, so that a Ctrl-C reaches us alone and it hears of it once."""
    command = [sys.executable, "-m", "experiments", "work"]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )


def _feed(process: subprocess.Popen[str], waiting: Any, done: Any) -> None:
    """One worker's thread: hand it a job, take its result."""
    assert process.stdin is not None
    assert process.stdout is not None
    while (job := waiting.get()) is not None:
        try:
            process.stdin.write(json.dumps({"kind": job.kind, "config": job.config}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            done.put(RuntimeError(f"the run {job.kind} {job.config} failed; its traceback is above"))
            return
        done.put({"key": job.key, "kind": job.kind, "config": job.config, **json.loads(line)})


def _circumstances() -> dict[str, Any]:
    """What a record must tell beside its run."""
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
        "machine": platform.machine(),
        "time": round(time.time()),
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _said(record: Record) -> str:
    shown = {name: value for name, value in record["result"].items() if isinstance(value, int | float)}
    seed = record["config"].get("seed")
    told = ", ".join(f"{name} {value:.5g}" for name, value in list(shown.items())[:3])
    return f"{record['kind']} {record['key']} seed {seed}: {told} ({record['wall_seconds']:.0f} s)"
