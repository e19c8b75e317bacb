"""``python -m syncer [key=value ...]``: command line -> configuration -> policy -> run; nothing else.

A wrong configuration is one line on stderr and exit code 2, before torch is imported, a socket opened or a file
touched. Must not know: how a configuration comes together (``compose.py``), what any key means (``config.py``), how a
run goes (``run.py``).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from typing import NoReturn

log = logging.getLogger("syncer")


def main(argv: list[str]) -> int:
    """Returns the exit code: 2 for a configuration error, else what the run returns."""
    for number in (signal.SIGINT, signal.SIGTERM):  # until run() installs its own: nothing is open yet, so just leave
        signal.signal(number, lambda *_: os._exit(130))
    from syncer.compose import as_yaml, compose, typed  # after the handlers: Hydra takes a while
    from syncer.config import profile_record, validate, warnings

    try:
        arguments = _arguments(argv)
        config = compose(arguments.overrides, arguments.config_dir, arguments.config_name)
        if arguments.cfg:
            print(as_yaml(config, arguments.resolve), end="")
            return 0
        policy = validate(typed(config))
        profile = profile_record(policy).hash
    except ValueError as error:
        print("syncer: configuration error:", " ".join(str(error).split()), file=sys.stderr)
        return 2

    _set_up_logging()
    for warning in warnings(policy):
        log.warning("%s", warning)
    log.info("profile hash %s", profile.hex())
    from syncer.run import run  # torch, seconds: not before the configuration is known to be right

    return run(policy, profile)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """A wrong command line is a configuration error like any other: one line, no usage text."""
        raise ValueError(f"command line: {message} (--help shows what is known)")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m syncer",
        description="The coordinator of a fleet of learners. Required: learners=M total_steps=T.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="see the list of keys below")
    add("-h", "--help", action="store_true", help="show this, and every key, then exit")
    add("-cd", "--config-dir", metavar="DIR", help="a folder with configurations and presets of your own")
    add("-cn", "--config-name", metavar="NAME", help="a file in DIR that is laid over the defaults")
    add("-c", "--cfg", choices=["job"], help="print the configuration as YAML, then exit")
    add("--resolve", action="store_true", help="with --cfg: interpolations replaced by their values")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.help:
        parser.epilog = _key_table()
        parser.print_help()
        parser.exit()
    if arguments.resolve and not arguments.cfg:
        parser.error("--resolve goes with --cfg job")
    return arguments


def _key_table() -> str:
    from syncer.compose import PRESETS
    from syncer.config import DEFAULTS, RULES
    from syncer.rules import shown

    lines = [
        f"preset={'|'.join(PRESETS)}",
        "    a named regime of outer.*, merge.* and schedule.*; single keys override it (default: balanced)",
    ]
    for key, rule in RULES.items():
        undefined = "(from the preset)" if "." in key else "(required)"
        told = undefined if DEFAULTS[key] == "???" else shown(DEFAULTS[key])
        lines += [f"{key}={told}", f"    {rule.meaning}: {rule.legal}"]
    return "keys and their defaults:\n  " + "\n  ".join(lines)


def _set_up_logging() -> None:
    """Plain lines on stderr; the messages scripts look for stand in them verbatim."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
