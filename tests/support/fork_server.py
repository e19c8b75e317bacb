"""A warm interpreter that forks one real process per request: torch is imported once, not once per child.

Run as a script with the number of a connected Unix socket. Every request is one line of JSON (``argv``, ``env``,
``cwd``) with the descriptor for the child's output attached; the answer is the child's pid, and later its exit code. A
child leads a session of its own, has only the standard descriptors, runs its command as ``python`` would and ends
like any interpreter. When the socket closes, every child that is left is killed.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_REQUEST_BYTES = 1 << 20


def serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork on request. Returns the request in a child, None in the zygote once nobody asks any more."""
    alive: set[int] = set()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the test runner
    signal.set_wakeup_fd(wakes)
    while True:
        ready, _, _ = select.select([line, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(line, alive)
        if line in ready:
            text, descriptors, _, _ = socket.recv_fds(line, MAX_REQUEST_BYTES, 1)
            if not text:
                break
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for descriptor in (line.detach(), woken, wakes):
                    os.close(descriptor)
                return {**json.loads(text), "output": descriptors[0]}
            os.close(descriptors[0])
            alive.add(pid)
            _say(line, pid=pid)
    for pid in alive:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _reap(line: socket.socket, alive: set[int]) -> None:
    while alive:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        alive.discard(pid)
        _say(line, ended=pid, code=os.waitstatus_to_exitcode(status))


def _say(line: socket.socket, **fields: int) -> None:
    with suppress(OSError):  # nobody listens any more: the next turn sees the end
        line.sendall(json.dumps(fields).encode() + b"\n")


def run(request: dict[str, Any]) -> None:
    """Become the requested command."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (request["output"], 1), (request["output"], 2)):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    argv: list[str] = request["argv"]
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], request["cwd"]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    import hydra  # noqa: F401  # what makes a start slow; the first optimizer step imports torch's compiler
    import torch._dynamo  # noqa: F401

    import syncer.config.compose
    import syncer.run  # noqa: F401
    import tests.support.toy_model  # noqa: F401
    import yeto_torch.optimizer  # noqa: F401

    gc.freeze()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        run(asked)
