"""Stats: one learner's numbers at a moment. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of one learner.

    Attributes:
        global_step: the newest outer step whose result this learner has taken over.
        versions: adopted version of each fragment.
        pushes: answers handed to the network.
        bytes_sent, bytes_received: over all connections, framing included.
        merges: broadcasts adopted, the first ones included.
        stall_seconds: time the training thread spent in step boundaries.
        reconnects: connections after the first.
        connected: is there one now?

    In a learner of several ranks every rank shows the numbers of rank 0 as of the last exchange; ``stall_seconds`` is
    its own.
    """

    global_step: int = 0
    versions: tuple[int, ...] = ()
    pushes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    merges: int = 0
    stall_seconds: float = 0.0
    reconnects: int = 0
    connected: bool = False
