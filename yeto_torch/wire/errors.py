"""Every way a peer, a file or we ourselves can be wrong.

Four families under ``YetoError``; the family says who must act. Wrong user configuration is not here: it
raises ``ValueError`` naming the key.

* pure
"""

from __future__ import annotations

from yeto_torch.wire.constants import MessageType


class YetoError(Exception):
    """Root of every error this project raises on purpose, but for ``ValueError`` on configuration."""


class PeerError(YetoError):
    """The peer broke the protocol. Its group is closed; nothing later from it is used.

    ``kind`` is the type of the message that was wrong, where one can be named.
    """

    def __init__(self, sentence: str, kind: MessageType | None = None) -> None:
        super().__init__(sentence)
        self.kind = kind


class CongestedError(PeerError):
    """More is under way than we hold for one peer.

    An honest learner gets here when one of its streams stalls while the others go on, and a fresh connection may do
    better: the syncer closes the group without the ERROR that would end the learner's run.
    """


class LocalError(YetoError):
    """We called the treaty wrongly. A bug of ours, never the peer's fault."""


class StateError(YetoError):
    """A file or a child process is not what it must be (checkpoint, marker, layout file, worker)."""


class RunError(YetoError):
    """The run cannot go on. The message is the sentence the user reads."""


class RefusedError(RunError):
    """The syncer sent ERROR on the control stream: a retry cannot help. Carries the syncer's own text."""


class ConnectionLostError(RunError):
    """No syncer could be reached in time, or more often than ``max_reconnects`` allows."""


class NonFiniteError(RunError):
    """A local parameter is not finite (or beyond 2^100), so its delta must not be pushed."""
