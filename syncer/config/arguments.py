"""The command line that Hydra-configured commands share: key=value words, files of the user's own, --cfg, --help.

Decides what stands where on it; every error is a ValueError of one line. Must not know what a key means.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from syncer.config.compose import PRESETS, S, as_yaml, compose, typed_as
from syncer.config.keys import AnyKeys, Keys
from syncer.config.rules import shown


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """A wrong command line is a configuration error like any other: one line, no usage text."""
        raise ValueError(f"command line: {message} (--help shows what is known)")


def configured(argv: list[str], prog: str, description: str, keys: Keys[S]) -> S | None:
    """What the command line asks for, typed but not validated; None if it asked to see it, and has. --help exits.

    Raises ValueError, one line.
    """
    arguments = _parse(argv, prog, description, keys)
    config = compose(arguments.overrides, arguments.config_dir, arguments.config_name, keys)
    if arguments.cfg:
        print(as_yaml(config, arguments.resolve, keys), end="")
        return None
    return typed_as(keys, config)


def _parse(argv: list[str], prog: str, description: str, keys: AnyKeys) -> argparse.Namespace:
    parser = _Parser(
        prog=prog,
        description=description,
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
        parser.epilog = _key_table(keys)
        parser.print_help()
        parser.exit()
    if arguments.resolve and not arguments.cfg:
        parser.error("--resolve goes with --cfg job")
    return arguments


def _key_table(keys: AnyKeys) -> str:
    lines = [
        f"preset={'|'.join(PRESETS)}",
        "    a named regime of outer.*, merge.* and schedule.*; single keys override it (default: balanced)",
    ]
    for key, rule in keys.rules.items():
        undefined = "(from the preset)" if "." in key else "(required)"
        told = undefined if keys.defaults[key] == "???" else shown(keys.defaults[key])
        lines += [f"{key}={told}", f"    {rule.meaning}: {rule.legal}"]
    return "keys and their defaults:\n  " + "\n  ".join(lines)
