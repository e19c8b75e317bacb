"""``python -m syncer.report``: a run's event tape as one page that needs nothing else to be looked at.

Decides: the command line, and that the page appears whole or not at all. What a run was like is for ``facts`` to say.
Must not know: rounds, pictures, HTML.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from syncer.checkpoint.files import write_atomically
from syncer.tape import read_tape
from yeto_torch.wire.errors import StateError

_NEEDED = ("jinja2", "matplotlib")


def main(argv: Sequence[str]) -> int:
    """0; or one line on stderr and 1 when the tape or the page's place is wrong, 2 when the arguments are."""
    arguments = _arguments(argv)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(f"the report needs {' and '.join(missing)}: pip install 'yeto-torch[report]'", file=sys.stderr)
        return 1
    try:
        report(arguments.tape, arguments.output)
    except StateError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{arguments.output}: the report of {arguments.tape}")
    return 0


def report(tape: Path, output: Path) -> None:
    """Write the page about ``tape`` to ``output``. Raises StateError when a tape is not one, or shows nothing."""
    from syncer.report.columns import columns_of  # the libraries of an extra, and a second
    from syncer.report.facts import facts_of
    from syncer.report.page import page_of

    if output.exists() and not output.is_file() and not output.is_dir():  # /dev/null itself would be replaced
        raise StateError(f"report {output}: not a regular file, name another")
    try:
        facts = facts_of(columns_of(read_tape(tape)))
    except StateError as error:
        text = str(error)
        raise StateError(text if text.startswith("tape ") else f"tape {tape}: {text}") from error
    except RecursionError as error:
        raise StateError(f"tape {tape}: not a tape: a line is nested too deeply") from error
    name = tape.resolve().parent.name if tape.stem == "tape" else tape.stem  # a run folder calls every tape so
    write_atomically(output, [page_of(facts, name).encode(errors="replace")], "report")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m syncer.report", description=(__doc__ or "").partition(": ")[2].partition("\n")[0]
    )
    parser.add_argument("tape", type=Path, help="the event tape: tape.path of the syncer, tape.jsonl in a run folder")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the page (default: report.html)"
    )
    arguments = parser.parse_args(argv)
    if os.path.realpath(arguments.output) == os.path.realpath(arguments.tape):
        parser.error(f"-o {arguments.output} would overwrite the tape, name another file")
    return arguments


if __name__ == "__main__":
    gc.disable()  # nothing here makes cycles, and a long tape is millions of objects to walk over in vain
    sys.exit(main(sys.argv[1:]))
