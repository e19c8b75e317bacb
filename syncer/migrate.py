"""``python -m syncer.migrate``: an audited V1 or V2 checkpoint becomes V3.

Decides: nothing. Whoever runs it vouches for what the old file does not record: the layout's fingerprint, the session
contract and, for V1, the iso backend. Each value must be given; one that contradicts the file is refused.
Must not know: any default for those values.

Source: v4 §Checkpoints (an old one becomes V3 with values that are given, never guessed); rulings §7.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from syncer.checkpoint.files import read_checkpoint, write_checkpoint
from syncer.config.plain_command import key_values, run_command
from syncer.config.policy import IsoBackend
from yeto_torch.wire.errors import StateError

USAGE = (
    "python -m syncer.migrate checkpoint=PATH fingerprint=64_HEX_DIGITS backend=scalar|torch-svd "
    "contract=64_HEX_DIGITS output=PATH"
)


def migrate(argv: Sequence[str]) -> None:
    """The command. Raises ValueError for wrong arguments, StateError for files that cannot be migrated."""
    values = key_values(argv, ("checkpoint", "fingerprint", "backend", "contract", "output"))
    fingerprint, contract = _digest("fingerprint", values), _digest("contract", values)
    backends = {backend.key: backend for backend in IsoBackend}
    if values["backend"] not in backends:
        raise ValueError(f"backend: {values['backend']!r} is not one of {', '.join(backends)}")
    backend = backends[values["backend"]]
    source, target = values["checkpoint"], values["output"]
    if os.path.lexists(target):
        raise StateError(f"output {target}: exists already, and a migration overwrites nothing")
    snapshot = read_checkpoint(source)
    if snapshot.version == 3:
        raise StateError(f"checkpoint {source}: is V3 already")
    if snapshot.backend is not None and snapshot.backend != backend:
        raise StateError(
            f"checkpoint {source}: records iso backend {IsoBackend(snapshot.backend).key}, not {backend.key}"
        )
    migrated = replace(snapshot, version=3, backend=int(backend), fingerprint=fingerprint, contract=contract)
    write_checkpoint(target, migrated)
    print(f"{target}: V3 at step {snapshot.step}, migrated from V{snapshot.version}")


def _digest(key: str, values: dict[str, str]) -> bytes:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", values[key]):
        raise ValueError(f"{key}: {values[key]!r} is not 64 hexadecimal digits")
    return bytes.fromhex(values[key])


if __name__ == "__main__":
    sys.exit(run_command(migrate, USAGE, sys.argv[1:]))
