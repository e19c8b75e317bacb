"""One child process of the pool: start it, exchange matrices with it, kill it, say how it ended.

One thread talks to a child; any thread may kill it. Whatever it does that it must not is a StateError whose text goes
on after the worker's name. It must not know jobs, deadlines or other children.

Source: v4 §SVD pool (the directly owned Python child); rulings §8.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from syncer.config.policy import IsoScale
from syncer.svd import framing
from syncer.svd.framing import Request, Status
from yeto_torch.wire.errors import StateError

WORKER = (sys.executable, "-P", "-m", "syncer.svd.worker")
_PIPE_BYTES = 1 << 20  # asked for, not needed: fewer switches between the two ends
_PROBE, _PROBE_TOLERANCE = 2.0, 1e-5
_EXIT_S = 1.0  # a child whose pipe has closed is given so long to end by itself, for the sake of its exit code


class Child:
    """A running child. Raises StateError if ``command`` cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        self._requests = 0
        self._signals = threading.Lock()
        self._reaping = False  # from now on its number may become somebody else's: no more signals
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=_environment(),
                process_group=0,  # a Ctrl-C in the terminal is ours to answer
            )
        except OSError as error:
            raise StateError(f"could not be started: {error}") from error
        self._to, self._from = (pipe.fileno() for pipe in (self._process.stdin, self._process.stdout) if pipe)
        _widen(self._to, self._from)

    @property
    def pid(self) -> int:
        return self._process.pid

    def probe(self) -> None:
        """Return once the child has answered a 1 x 1 matrix rightly."""
        answer = float(self.exchange(torch.tensor([[_PROBE]]), IsoScale.MEAN))
        if abs(answer - _PROBE) > _PROBE_TOLERANCE:
            raise StateError(f"answered the readiness probe {_PROBE} with {answer}")

    def exchange(self, matrix: Tensor, scale: IsoScale) -> Tensor:
        """Send a matrix and wait for its answer.

        Args:
            matrix: [rows, cols] f32 on any device.

        Returns:
            [rows, cols] f32 on the CPU, finite.
        """
        host = matrix.detach().cpu().contiguous()
        request = Request(self._requests, scale, *host.shape)
        self._requests += 1
        try:
            framing.send(self._to, framing.request_header(request), host.numpy().data.cast("B"))
            result = self._receive(request)
        except (EOFError, BrokenPipeError) as error:
            raise StateError(self._ending()) from error
        if not bool(torch.isfinite(result).all()):
            raise StateError(f"answered a {request.rows} x {request.cols} matrix with values that are not finite")
        return result

    def idle_until(self, fd: int) -> None:
        """Wait until ``fd`` is readable. A child that ends or speaks meanwhile has failed."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._from, select.POLLIN)
        if fd in {ready for ready, _ in poll.poll()}:
            return
        raise StateError("sent a frame that nobody asked for" if os.read(self._from, 1) else self._ending())

    def kill(self) -> None:
        """SIGKILL to the child and whatever it started; from any thread."""
        with self._signals:
            if not self._reaping:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Kill, wait for the end, close the pipes; the last call of the thread that talks to it."""
        self.kill()
        with self._signals:
            self._reaping = True
        with self._process:
            self._process.wait()

    def _receive(self, request: Request) -> Tensor:
        header = bytearray(framing.HEADER_BYTES)
        framing.receive(self._from, header)
        status, payload_bytes = framing.parse_reply(header, request)
        if status is Status.FAILED:
            text = bytearray(payload_bytes)
            framing.receive(self._from, text)
            raise StateError(f"failed: {text.decode(errors='replace')}")
        result = torch.empty(request.rows, request.cols, dtype=torch.float32)
        framing.receive(self._from, result.numpy().data.cast("B"))
        return result

    def _ending(self) -> str:
        """How a child whose pipe has closed came to its end."""
        with self._signals:
            self._reaping = True
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            with self._signals:
                self._reaping = False
            return "closed its pipe"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _environment() -> dict[str, str]:
    """The child finds this very package, wherever we were started from; its threads are its own."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # found anyway, and not before the standard library
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else str(root)
    return environment


def _widen(*fds: int) -> None:
    if sys.platform == "linux":
        import fcntl

        for fd in fds:
            with contextlib.suppress(OSError):  # the user's share of pipe memory is used up
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
