"""Processes of a measurement: syncers and workers, started, asked, and none left behind.

Everything runs on one thread of computation (OMP_NUM_THREADS=1), our side and the other alike: two processes that each
take all cores measure the scheduler. How a process is started is the caller's; the default is a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
WAIT_S = 300.0  # for an answer; a round of the slowest rival at full size takes a fraction


class Process(Protocol):
    """A started process; ``kill`` also waits for its end."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...


Launch = Callable[[str, Sequence[str], Path], Process]
"""(name, arguments of the interpreter, folder for its output) -> the running process."""


class _Child:
    def __init__(self, command: Sequence[str], output: Path) -> None:
        with output.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment(),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def environment() -> dict[str, str]:
    """Ours, less YETO_*, with one thread per process and this checkout on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("YETO_")}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path} | ONE_THREAD


def launch(name: str, arguments: Sequence[str], folder: Path, python: str = sys.executable) -> Process:
    """A fresh interpreter; its output goes into ``folder``."""
    return _Child([python, *arguments], folder / f"{name}.log")


class Worker:
    """A worker as the measuring process sees it."""

    def __init__(self, name: str, listener: socket.socket, told: Callable[[], str], process: Process) -> None:
        self.name, self.process, self._told = name, process, told
        self._listener = listener
        self._socket: socket.socket | None = None
        self._lines: Any = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> Any:
        """Wait for it to connect and to say that it is ready; what it says with that."""
        self._socket = self._accept()
        self._socket.settimeout(WAIT_S)
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        return self.answer()

    def tell(self, question: str, **details: Any) -> None:
        """Ask without waiting, so that several can be asked at once."""
        self._lines.write(json.dumps({"ask": question, **details}) + "\n")
        self._lines.flush()

    def answer(self) -> Any:
        """The answer to the oldest question; raises RuntimeError with the worker's output when it died instead."""
        line = ""
        with contextlib.suppress(OSError):
            line = self._lines.readline()
        if not line:
            raise RuntimeError(f"{self.name} did not answer\n{self._told()}")
        return json.loads(line)

    def ask(self, question: str, **details: Any) -> Any:
        self.tell(question, **details)
        return self.answer()

    def _accept(self) -> socket.socket:
        self._listener.settimeout(1.0)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and _alive(self.pid):
            with contextlib.suppress(TimeoutError):
                return self._listener.accept()[0]
        raise RuntimeError(f"{self.name} did not start\n{self._told()}")

    def close(self) -> None:
        for handle in (self._lines, self._socket, self._listener):
            if handle is not None:
                with contextlib.suppress(OSError):
                    handle.close()


class Syncer:
    """A running ``python -m syncer``, which may not listen yet."""

    def __init__(self, file: Path, process: Process, told: Callable[[], str]) -> None:
        self.process, self._file, self._told = process, file, told

    @property
    def pid(self) -> int:
        return self.process.pid

    @cached_property
    def address(self) -> str:
        """``host:port``, once it listens; only its file tells."""
        deadline = time.monotonic() + WAIT_S
        while not self._file.exists():
            if time.monotonic() > deadline or not _alive(self.pid):
                raise RuntimeError(f"the syncer did not listen\n{self._told()}")
            time.sleep(0.01)
        return self._file.read_text(encoding="utf-8").strip()


class Stage:
    """Everything one measurement starts; leaving it ends everything.

    Attributes:
        folder: a temporary one on the disk of this checkout.
    """

    def __init__(self, start: Launch = launch) -> None:
        self._start = start
        self._processes: list[Process] = []
        self._workers: list[Worker] = []

    def __enter__(self) -> Stage:
        results = ROOT / "benchmarks" / "results"
        results.mkdir(exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="run-", dir=results)
        self.folder = Path(self._folder.name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self._workers:
            worker.close()
        for process in self._processes:
            process.kill()
        self._folder.cleanup()

    def syncer(self, learners: int, **keys: Any) -> Syncer:
        """Start a syncer that merges as fast as answers come, waits for everybody, and never ends by itself."""
        name = f"syncer-{len(self._processes)}"
        file = self.folder / f"{name}.address"
        settings = {
            "learners": learners,
            "total_steps": 1_000_000_000,
            "listen.port": 0,
            "listen.address_file": file,
            "schedule.quorum": learners,
            "schedule.sync_interval_steps": 0,
            "schedule.grace_ms": 0,
            "session.write_timeout_s": 3600,
            "session.idle_timeout_s": 3600,
            "merge.device": "cpu",
        }
        settings |= {key.replace("__", "."): value for key, value in keys.items()}
        words = [f"{key}={value}" for key, value in settings.items()]
        process = self._launch(name, ["-m", "syncer", *words])
        return Syncer(file, process, lambda: self._said(name))

    def worker(self, module: str, python: str | None = None, **settings: Any) -> Worker:
        """``python -m module`` with these settings; call ``ready`` on it. ``python``: a rival's interpreter."""
        listener = socket.create_server(("127.0.0.1", 0))
        name = f"{module.rpartition('.')[2]}-{len(self._processes)}"
        arguments = ["-m", module, str(listener.getsockname()[1]), json.dumps(settings)]
        process = self._launch(name, arguments, python)
        worker = Worker(name, listener, lambda: self._said(name), process)
        self._workers.append(worker)
        return worker

    def _launch(self, name: str, arguments: Sequence[str], python: str | None = None) -> Process:
        if python is None:
            process = self._start(name, arguments, self.folder)
        else:
            process = launch(name, arguments, self.folder, python)
        self._processes.append(process)
        return process

    def _said(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text(encoding="utf-8", errors="replace")[-4000:] if log.exists() else ""


def _alive(pid: int) -> bool:
    """False for a process that has ended, reaped or not (Linux; elsewhere the deadline decides)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc/self").exists()
