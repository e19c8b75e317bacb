"""``python -m yeto_torch.run``: a syncer and N learners of your own script on this machine.

    python -m yeto_torch.run --learners 2 total_steps=400 -- train.py --epochs 3

The script is an ordinary training script that wraps its optimizer; address, learner id and run id reach it through the
YETO_* environment. With ``--nproc-per-learner 2`` a learner is two rank processes with torchrun's environment. This
module is the command line alone; ``fleet`` runs the processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from yeto_torch.launcher.fleet import start
from yeto_torch.launcher.folder import RunFolder, new_run_dir
from yeto_torch.launcher.launch import Launch, Secrets, key_of
from yeto_torch.wire.errors import RunError

CONFIGURATION = 2
_SECRETS = {"hmac_key_file": "--hmac-key-file", "tls_cert": "--tls-cert", "tls_key": "--tls-key", "tls_ca": "--tls-ca"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: the first failure's, 130 when interrupted, 2 for a wrong command."""
    try:
        launch = parse(list(sys.argv[1:] if argv is None else argv))
    except ValueError as error:
        return _complain(str(error))

    try:
        outcome = start(launch, _Printer(), _note)
    except RunError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"run folder {launch.folder.path}: {error.strerror or error}")
    if outcome.failure is not None:
        first = outcome.failure
        _note(f"first failure: {first.name}, exit code {first.code}; its last lines were")
        for text in first.tail:
            print(f"    {text}", file=sys.stderr)
    if outcome.note:
        _note(outcome.note)
    if outcome.code == 0:
        _note(f"complete: {launch.folder.path}")
    return outcome.code


class _Printer:
    """Prefixes and prints the children's lines. Once nobody reads them any more the launch ends as if interrupted."""

    def __init__(self) -> None:
        self._read = True

    def __call__(self, name: str, text: str) -> None:
        if not self._read:
            return
        try:
            print(f"[{name}] {text}", flush=True)
        except BrokenPipeError:
            self._read = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at exit
            signal.raise_signal(signal.SIGINT)


def _note(text: str) -> None:
    print(f"[run] {text}", file=sys.stderr, flush=True)


def _complain(text: str) -> int:
    print(f"yeto_torch.run: error: {text}", file=sys.stderr)
    return CONFIGURATION


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(argv: list[str]) -> Launch:
    """The command line as a Launch. Raises ValueError with one sentence."""
    parser = _Parser(
        prog="python -m yeto_torch.run",
        usage="%(prog)s --learners N [options] total_steps=T [key=value ...] -- script.py [args ...]",
        description="A syncer and N learners of your script on this machine; one Ctrl-C stops all.",
        epilog="key=value goes to the syncer (python -m syncer --cfg job lists the keys); -- -m module works too.",
        allow_abbrev=False,
    )
    add, protect = parser.add_argument, parser.add_argument_group("protection").add_argument
    add("--learners", type=int, required=True, metavar="N", help="how many learners to start")
    add("--nproc-per-learner", type=int, default=1, metavar="K", help="processes of a learner, as torchrun starts them")
    add("--run-dir", type=Path, metavar="D", help="default: runs/<time>; the same folder again resumes")
    add("--max-restarts", type=int, default=0, metavar="K", help="restart a failed learner, K times each")
    add("--grace-s", type=float, default=30.0, metavar="S", help="time to end after Ctrl-C (default 30)")
    protect("--hmac-key-file", type=Path, metavar="F", help="the fleet's shared key (default: YETO_HMAC_KEY_FILE)")
    protect("--tls-cert", type=Path, metavar="F", help="TLS: the syncer's certificate, for 127.0.0.1")
    protect("--tls-key", type=Path, metavar="F", help="its private key")
    protect("--tls-ca", type=Path, metavar="F", help="whom learners trust (default: the certificate)")
    add("overrides", nargs="*", metavar="key=value")
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_intermixed_args(argv[:split])
    command = argv[split + 1 :]
    _check(options, command)
    secrets = _secrets(options)
    folder = RunFolder((options.run_dir or new_run_dir(Path("runs"))).absolute())
    return Launch(
        folder,
        options.learners,
        tuple(command),
        tuple(options.overrides),
        options.max_restarts,
        options.grace_s,
        secrets,
        options.nproc_per_learner,
    )


def _check(options: argparse.Namespace, command: list[str]) -> None:
    if options.learners < 1:
        raise ValueError(f"--learners {options.learners}: must be at least 1")
    if options.nproc_per_learner < 1:
        raise ValueError(f"--nproc-per-learner {options.nproc_per_learner}: must be at least 1")
    if options.max_restarts < 0:
        raise ValueError(f"--max-restarts {options.max_restarts}: must be at least 0")
    if not 0 < options.grace_s < float("inf"):
        raise ValueError(f"--grace-s {options.grace_s}: must be a positive number of seconds")
    for override in options.overrides:
        if "=" not in override:
            raise ValueError(f"{override!r} is not key=value; the script goes behind --")
        if key_of(override) in ("learners", "listen.address_file"):
            raise ValueError(f"{override!r}: the launcher sets {key_of(override)} itself")
    if "total_steps" not in map(key_of, options.overrides):
        raise ValueError("total_steps=T is missing: the number of outer steps of the run")
    if not command or command == ["-m"]:
        raise ValueError("no script: put it behind --, as in -- train.py --epochs 3")
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise ValueError(f"no such script: {command[0]}")


def _secrets(options: argparse.Namespace) -> Secrets:
    """From the flags, or else from the syncer's own keys: what it is given the learners need too."""
    given = {key_of(override): override.partition("=")[2].strip("'\"") for override in options.overrides}
    paths: dict[str, Path | None] = {}
    for name, flag in _SECRETS.items():
        path: Path | None = getattr(options, name)
        if path is None:
            text = given.get(f"security.{name}")
            path = Path(text) if text and text != "null" else None
        elif f"security.{name}" in given:
            raise ValueError(f"{flag} and security.{name}: one of them is enough")
        if path is not None and not path.is_file():
            raise ValueError(f"{flag} {path}: no such file")
        paths[name] = path and path.absolute()
    variable = os.environ.get("YETO_HMAC_KEY_FILE")
    if variable and paths["hmac_key_file"] is None:
        paths["hmac_key_file"] = Path(variable).absolute()
    for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_ca", "tls_cert")):
        if paths[name] is not None and paths[other] is None:
            raise ValueError(f"{_SECRETS[name]} {paths[name]}: {_SECRETS[other]} is missing")
    return Secrets(*paths.values())


if __name__ == "__main__":
    sys.exit(main())
