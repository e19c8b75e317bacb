"""A child of the pool: ``python -m syncer.svd.worker --device cpu``.

Reads matrices from stdin, makes their spectrum flat on its device, writes them to stdout (``framing``); it ends with
stdin. It decides nothing and keeps nothing between requests. It must not load Hydra, and torch only once it is sure
not to outlive its parent: asking the kernel for that comes first.

Source: v4 §SVD pool (the child's side); rulings §8.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys

from syncer.config.policy import IsoScale
from syncer.svd import framing
from yeto_torch.wire.errors import RunError, StateError

_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m syncer.svd.worker", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", required=True, help="cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of torch; 0 = its own choice")
    options = parser.parse_args()
    _belong_to_parent()
    replies = _keep_stdout_for_replies()
    import torch

    if options.threads > 0:
        torch.set_num_threads(options.threads)
    try:
        with torch.inference_mode():
            _serve(sys.stdin.fileno(), replies, options.device)
    except (StateError, OSError, RuntimeError) as error:  # RuntimeError: torch, out of memory
        print(f"syncer.svd.worker {options.device}: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(source: int, sink: int, device: str) -> None:
    """Answer requests until the source ends. Raises StateError on a malformed one."""
    import torch

    from syncer.merge.iso import flatten_spectrum

    header = bytearray(framing.HEADER_BYTES)
    while True:
        try:
            framing.receive(source, header)
        except EOFError:
            return
        request = framing.parse_request(header)
        host = torch.empty(request.rows, request.cols, dtype=torch.float32)
        try:
            framing.receive(source, host.numpy().data.cast("B"))
            keeps_norm = request.scale is IsoScale.NORM
            result = flatten_spectrum(host.to(device), torch.float32, keeps_norm=keeps_norm).cpu().contiguous()
        except EOFError:
            return  # the parent died in the middle of a matrix
        except (RunError, RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            framing.send(sink, framing.failure_frame(request, _one_line(error)))
            continue
        framing.send(sink, framing.matrix_header(request), result.numpy().data.cast("B"))
        del host, result  # nothing is held while waiting for the next


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _belong_to_parent() -> None:
    """Die with the parent, also in the middle of a decomposition (Linux; elsewhere when stdin ends), and only with it:
    a signal to the whole terminal or service is the parent's to answer, who may still need a result."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep_stdout_for_replies() -> int:
    """A private descriptor for replies; what anything else prints goes to stderr."""
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


if __name__ == "__main__":
    sys.exit(main())
