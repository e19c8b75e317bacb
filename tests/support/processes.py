"""Real processes for tests: syncers, learners and anything else, each in a session of its own, with a deadline on
every wait and nothing left behind.

``Processes`` starts them, warm (forked from an interpreter that has imported torch) or cold (a fresh interpreter, as a
user's shell would). Output of both streams is collected line by line; ``wait_for`` waits for a line, ``wait`` for the
end.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from syncer.tape import merges, read_tape
from tests.support.waiting import WAIT_S

ROOT = Path(__file__).resolve().parent.parent.parent


class Running:
    """One child process and what it has said so far."""

    def __init__(self, name: str, pid: int, output: int) -> None:
        self.name, self.pid = name, pid
        self.lines: list[str] = []
        self.code: int | None = None
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(output,), name=f"output of {name}", daemon=True)
        self._reader.start()

    def _read(self, output: int) -> None:
        with open(output, encoding="utf-8", errors="replace") as pipe:
            for line in pipe:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()

    def ended(self, code: int) -> None:
        """Whoever reaps the child says so here; the rest of its output is taken first."""
        self._reader.join(WAIT_S)
        with self._changed:
            self.code = code
            self._changed.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = WAIT_S, start: int = 0) -> re.Match[str]:
        """The first line from number ``start`` on in which ``pattern`` is found; fails when the process ends before."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(pattern, start) or self.code is not None, timeout_s)
            found = self._find(pattern, start)
        assert found is not None, f"{self.name} did not say {pattern!r} within {timeout_s:g} s{self.told()}"
        return found

    def _find(self, pattern: str, start: int) -> re.Match[str] | None:
        return next((match for line in self.lines[start:] if (match := re.search(pattern, line))), None)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Its exit code; negative when a signal ended it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.code is not None, timeout_s), (
                f"{self.name} did not end within {timeout_s:g} s{self.told()}"
            )
        assert self.code is not None
        return self.code

    def signal(self, number: int) -> None:
        """To its whole process group."""
        with suppress(ProcessLookupError):
            if self.code is None:
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.signal(signal.SIGKILL)
        self.wait()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def told(self) -> str:
        return f"; exit code {self.code}; it said:\n{self.text}\n"


class Syncer(Running):
    """A ``python -m syncer``."""

    folder: Path
    address: str

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def tape(self) -> Path:
        return self.folder / "tape.jsonl"

    def merges(self) -> list[dict[str, Any]]:
        """The merge lines that hold."""
        return merges(self.tape)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The tape's other lines of that name, all starts together."""
        return [line for line in read_tape(self.tape) if line.get("event") == name]


class Processes:
    """Starts processes in ``folder`` and ends all of them in ``close``."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        self.folder, self._zygote = folder, zygote
        self._all: list[Running] = []

    def start(
        self, name: str, argv: list[str], env: dict[str, str] | None = None, *, cold: bool = False, kind: Any = Running
    ) -> Any:
        """``python argv...``; with ``cold`` in a fresh interpreter, else forked from the warm one."""
        environment = child_environment() | (env or {})
        reading, writing = os.pipe()
        try:
            start = _start_cold if cold else self._zygote.start
            running = start(lambda pid: kind(name, pid, reading), argv, environment, self.folder, writing)
        finally:
            os.close(writing)
        self._all.append(running)
        return running

    def syncer(
        self,
        *overrides: str,
        learners: int,
        total_steps: int,
        folder: Path | None = None,
        port: int = 0,
        cold: bool = False,
        listening: bool = True,
    ) -> Syncer:
        """A syncer with checkpoint and tape in ``folder``, on a free port; returns once it listens."""
        folder = folder or self.folder
        address_file = folder / "address"
        address_file.unlink(missing_ok=True)
        keys = {
            "learners": learners,
            "total_steps": total_steps,
            "listen.port": port,
            "listen.address_file": address_file,
            "merge.device": "cpu",
            "checkpoint.path": folder / "checkpoint",
            "tape.path": folder / "tape.jsonl",
            "final.state_path": folder / "model.safetensors",
        }
        chosen = {override.partition("=")[0] for override in overrides}
        argv = ["-m", "syncer", *(f"{k}={v}" for k, v in keys.items() if k not in chosen), *overrides]
        syncer: Syncer = self.start("syncer", argv, cold=cold, kind=Syncer)
        syncer.folder = folder
        if listening:
            syncer.address = syncer.wait_for(r"syncer listening on (\S+)$")[1]
            assert address_file.read_text() == syncer.address + "\n"
        return syncer

    def close(self) -> None:
        for running in self._all:
            running.signal(signal.SIGKILL)
        for running in self._all:
            running.wait()
            print(f"---- {running.name}, exit code {running.code}", *running.lines, sep="\n")  # shown when a test fails


def child_environment() -> dict[str, str]:
    """What every child gets: the checkout on its path, one thread per process, no YETO_* of ours."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("YETO_")}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


Make = Callable[[int], Running]


def _start_cold(make: Make, argv: list[str], env: dict[str, str], cwd: Path, output: int) -> Running:
    child = subprocess.Popen(
        [sys.executable, *argv],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    running = make(child.pid)
    threading.Thread(target=lambda: running.ended(child.wait()), name=f"end of {running.name}", daemon=True).start()
    return running


class Zygote:
    """This side of ``fork_server.py``. Children may be started from any thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=child_environment(), cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()
        self._line = ours
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._last_pid: int | None = None
        self._children: dict[int, Running] = {}
        self._codes: dict[int, int] = {}
        self._listener = threading.Thread(target=self._listen, name="zygote", daemon=True)
        self._listener.start()

    def start(self, make: Make, argv: list[str], env: dict[str, str], cwd: Path, output: int) -> Running:
        request = json.dumps({"argv": argv, "env": env, "cwd": str(cwd)}).encode()
        with self._starting:
            with self._changed:
                self._last_pid = None
            socket.send_fds(self._line, [request], [output])
            with self._changed:
                assert self._changed.wait_for(lambda: self._last_pid is not None, WAIT_S), "the zygote does not answer"
                assert self._last_pid is not None
                pid = self._last_pid
                running = self._children[pid] = make(pid)
                code = self._codes.pop(pid, None)
        if code is not None:
            self._end(pid, code)
        return running

    def _listen(self) -> None:
        with self._line.makefile("r") as answers:
            for text in answers:
                answer = json.loads(text)
                with self._changed:
                    if "pid" in answer:
                        self._last_pid = answer["pid"]
                        self._changed.notify_all()
                        continue
                    if answer["ended"] not in self._children:  # faster than its own announcement
                        self._codes[answer["ended"]] = answer["code"]
                        continue
                self._end(answer["ended"], answer["code"])

    def _end(self, pid: int, code: int) -> None:
        running = self._children.pop(pid)
        threading.Thread(target=running.ended, args=(code,), name=f"end of {running.name}", daemon=True).start()

    def close(self) -> None:
        self._line.shutdown(socket.SHUT_RDWR)
        self._process.wait(WAIT_S)
        self._listener.join(WAIT_S)
        self._line.close()


def overriding(defaults: Mapping[str, str], overrides: Sequence[str]) -> list[str]:
    """``key=value`` words for a syncer: the defaults that are not overridden, then the overrides."""
    chosen = {override.partition("=")[0] for override in overrides}
    return [*(f"{key}={value}" for key, value in defaults.items() if key not in chosen), *overrides]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def processes(tmp_path: Path, zygote: Zygote) -> Iterator[Processes]:
    """Starts processes in ``tmp_path``; none of them outlives the test."""
    processes = Processes(tmp_path, zygote)
    yield processes
    processes.close()
