"""Commands of a few ``key=value`` words, which need no Hydra: their words, and their exit code.

Must not know what a key means.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from yeto_torch.wire.errors import StateError


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
