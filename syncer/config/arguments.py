"""What stands where on a command line: of the commands that Hydra configures, and of those of a few plain words.

Every error is a ValueError of one line. Must not know what a key means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from yeto_torch.wire.errors import StateError

if TYPE_CHECKING:  # at run time only for --help: Hydra takes a while
    from syncer.config.keys import AnyKeys


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """A wrong command line is a configuration error like any other: one line, no usage text."""
        raise ValueError(f"command line: {message} (--help shows what is known)")


def parse(argv: list[str], prog: str, description: str, keys: Callable[[], AnyKeys]) -> argparse.Namespace:
    """``overrides``, ``config_dir``, ``config_name``, ``cfg``, ``resolve``; --help prints and exits.

    Raises ValueError, one line.
    """
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
        parser.epilog = _key_table(keys())
        parser.print_help()
        parser.exit()
    if arguments.resolve and not arguments.cfg:
        parser.error("--resolve goes with --cfg job")
    return arguments


def _key_table(keys: AnyKeys) -> str:
    from syncer.config.compose import PRESETS
    from syncer.config.rules import shown

    lines = [
        f"preset={'|'.join(PRESETS)}",
        "    a named regime of outer.*, merge.* and schedule.*; single keys override it (default: balanced)",
    ]
    for key, rule in keys.rules.items():
        undefined = "(from the preset)" if "." in key else "(required)"
        told = undefined if keys.defaults[key] == "???" else shown(keys.defaults[key])
        lines += [f"{key}={told}", f"    {rule.meaning}: {rule.legal}"]
    return "keys and their defaults:\n  " + "\n  ".join(lines)


def key_values(argv: Sequence[str], required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, str]:
    """``key=value`` words as a dict; the value is taken to the letter, so that a path or a digest is never a number.

    Raises ValueError naming the word or key that is wrong and the legal keys.
    """
    legal = [*required, *optional]
    values: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or key not in legal:
            raise ValueError(f"{word!r} is not one of {', '.join(f'{name}=…' for name in legal)}")
        if key in values or not value:
            raise ValueError(f"{key}: given {'twice' if key in values else 'without a value'}")
        values[key] = value
    for key in required:
        if key not in values:
            raise ValueError(f"{key}: missing, must be given as {key}=…")
    return values


def run_command(command: Callable[[Sequence[str]], None], usage: str, argv: Sequence[str]) -> int:
    """Run a command-line function: 0, or one line on stderr and 2 for wrong arguments, 1 for everything else known."""
    if set(argv) & {"-h", "--help"}:
        print(usage)
        return 0
    try:
        command(argv)
    except ValueError as error:
        print(f"{error} (usage: {usage})", file=sys.stderr)
        return 2
    except StateError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
