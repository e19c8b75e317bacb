"""What the session asks of the training thread, as values; their order in a list is the contract.

Payloads are opaque buffers here. Nothing in this file decides anything.

* pure
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.errors import YetoError
from yeto_torch.wire.messages import FinalManifest, PullReq


class Write(Enum):
    """What adopting a broadcast does to the parameters."""

    BLEND = auto()  # alpha * local + (1 - alpha) * global
    OVERWRITE = auto()  # a first anchor, or a syncer that was set back
    KEEP = auto()  # frozen: the anchor moves alone


@dataclass(frozen=True, slots=True)
class Adopt:
    """Bring a broadcast into the parameters; its raw bytes are the anchor from now on."""

    fragment: int
    version: int
    data: Buffer
    write: Write
    set_back_from: int | None = None  # our version, when the syncer's is not newer


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer ``pull``: local minus ``anchor``, or zeros."""

    pull: PullReq
    generation: int
    base_version: int
    anchor: Buffer
    local_step: int
    c_steps: int
    c_tokens: int
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Install:
    """Overwrite every parameter with the f32 cut, then call ``Session.installed`` with its manifest."""

    manifest: FinalManifest
    fragments: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise in the training loop."""

    error: YetoError


Effect = Adopt | Respond | Install | Fail
