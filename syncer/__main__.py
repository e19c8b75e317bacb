"""``python -m syncer [key=value ...]``: command line -> configuration -> policy -> run; nothing else.

A wrong configuration is one line on stderr and exit code 2, before torch is imported, a socket opened or a file
touched. Must not know: how a configuration comes together (``compose.py``), what any key means (``keys.py``), how a
run goes (``run.py``).
"""

from __future__ import annotations

import logging
import os
import signal
import sys

log = logging.getLogger("syncer")

# Before numpy is imported: its BLAS would spread the sums of a merge over threads, which spin for milliseconds behind
# every one, on cores that others need, and add up in another order for every number of cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_DESCRIPTION = "The coordinator of a fleet of learners. Required: learners=M total_steps=T."


def main(argv: list[str]) -> int:
    """Returns the exit code: 2 for a configuration error, else what the run returns."""
    for number in (signal.SIGINT, signal.SIGTERM):  # until run() installs its own: nothing is open yet, so just leave
        signal.signal(number, lambda *_: os._exit(130))
    from syncer.config.arguments import configured  # after the handlers: Hydra takes a while
    from syncer.config.keys import SYNCER, profile_record, validate, warnings

    try:
        config = configured(argv, "python -m syncer", _DESCRIPTION, SYNCER)
        if config is None:
            return 0
        policy = validate(config)
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
