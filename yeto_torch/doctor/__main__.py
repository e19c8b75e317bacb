"""``python -m yeto_torch.doctor``: can a learner on this machine take part, and how should the fleet be set up?

Decides: the command line and the exit code (0 all is well, 1 a check failed, 2 wrong arguments). What is checked and
what the cures are is ``diagnosis``' to say. Must not know: sockets, the protocol.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from yeto_torch.config import parse_address
from yeto_torch.doctor.checks import Patient, examine
from yeto_torch.security import client_tls, read_key, tls_from
from yeto_torch.wire.constants import MAX_STREAMS
from yeto_torch.wire.transport.tls import TlsFileError, server_context


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.listen is not None:
            return _listen(arguments)
        patient = _patient(arguments)
    except ValueError as error:
        parser.error(str(error))
    wrong = 0
    for finding in examine(patient):
        print(f"{'ok' if finding.cure is None else 'FAIL':<5} {finding.name:<11} {_plain(finding.text)}", flush=True)
        if finding.cure is not None:
            wrong += 1
            print(f"      {'':<11} -> {finding.cure}", flush=True)
    return 1 if wrong else 0


def _plain(text: str) -> str:
    """On one line, and nothing that would steer the terminal: some of it is a stranger's."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text[:1000])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m yeto_torch.doctor", description="Checks before a run.")
    add = parser.add_argument
    add("--syncer", metavar="HOST:PORT", help="what to check (default: YETO_SYNCER)")
    add("--listen", metavar="PORT", type=_whole(0, 65535), help="be the measured end, where the syncer will be")
    add("--host", default="0.0.0.0", help="with --listen: the address to listen on (default: all)")
    add("--hmac-key-file", metavar="FILE", help="the fleet's key (default: YETO_HMAC_KEY_FILE)")
    add("--tls", action="store_true", help="dial with TLS and the system's authorities")
    add("--tls-ca", metavar="FILE", help="dial with TLS and this authority (default: YETO_TLS_CA)")
    add("--tls-cert", metavar="FILE", help="our certificate (default: YETO_TLS_CERT)")
    add("--tls-key", metavar="FILE", help="its private key (default: YETO_TLS_KEY)")
    add("--streams", type=_whole(0, MAX_STREAMS), default=4, help="data sockets of a learner (default: 4)")
    add("--seconds", type=_positive(30), default=3.0, help="of measuring, per direction (default: 3)")
    add("--parameters", type=_positive(1e15), help="trainable parameters of the model, for the plan")
    add("--step-time-s", type=_positive(1e6), help="seconds of one step of a learner, for the plan")
    add("--learners", type=_whole(1, 2**32 - 1), help="for the plan (default: what the syncer says)")
    return parser


def _patient(arguments: argparse.Namespace) -> Patient:
    text = arguments.syncer or os.environ.get("YETO_SYNCER")
    if not text:
        raise ValueError("--syncer: not given; pass HOST:PORT or set YETO_SYNCER")
    address = parse_address(text)
    files = {name: getattr(arguments, f"tls_{name}") for name in ("ca", "cert", "key")}
    given = {name: path for name, path in files.items() if path is not None}
    tls = tls_from(os.environ, given or (True if arguments.tls else None))
    if (arguments.parameters is None) != (arguments.step_time_s is None):
        raise ValueError("--parameters and --step-time-s: the plan needs both")
    fleet = arguments.parameters, arguments.step_time_s, arguments.learners
    return Patient(address, client_tls(tls, address[0]), _key(arguments), arguments.streams, arguments.seconds, *fleet)


def _key(arguments: argparse.Namespace) -> bytes | None:
    path, name = arguments.hmac_key_file, "--hmac-key-file"
    if path is None:
        path, name = os.environ.get("YETO_HMAC_KEY_FILE"), "YETO_HMAC_KEY_FILE"
    return read_key(name, path) if path else None


def _listen(arguments: argparse.Namespace) -> int:
    from yeto_torch.doctor.listener import Listener

    tls = None
    if arguments.tls_cert is not None or arguments.tls_key is not None:
        if arguments.tls_cert is None or arguments.tls_key is None:
            raise ValueError("--tls-cert and --tls-key: must be given together")
        try:
            ca = Path(arguments.tls_ca) if arguments.tls_ca is not None else None
            tls = server_context(Path(arguments.tls_cert), Path(arguments.tls_key), ca)
        except TlsFileError as error:
            raise ValueError(f"--tls-{error}") from error
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        listener = Listener(arguments.host, arguments.listen, _key(arguments), tls)
    except OSError as error:
        print(f"cannot listen on {arguments.host}:{arguments.listen}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"doctor listening on {listener.address}; Ctrl-C ends it", flush=True)
    try:
        listener.serve()
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
    return 0


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {low} to {high}")
        return int(text)

    return parse


def _positive(high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, at most {high:g}")
        return value

    return parse


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
