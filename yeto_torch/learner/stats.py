"""Stats: one learner's numbers at a moment. It decides nothing.

* pure
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of one learner.

    Attributes:
        global_step: the newest outer step whose result this learner has taken over.
        versions: adopted version of each fragment.
        pushes: answers handed to the network.
        bytes_sent: over all connections, framing included.
        bytes_received: the same.
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


def numbers_of(stats: Stats) -> tuple[int, ...]:
    """All of it but ``stall_seconds``, as whole numbers for another rank."""
    moved = stats.pushes, stats.bytes_sent, stats.bytes_received
    return stats.global_step, *moved, stats.merges, stats.reconnects, int(stats.connected), *stats.versions


def stats_of(numbers: Sequence[int], stall_s: float) -> Stats:
    """What ``numbers_of`` gave, with this rank's own stall."""
    step, pushes, sent, received, merges, reconnects, connected, *versions = numbers
    return Stats(step, tuple(versions), pushes, sent, received, merges, stall_s, reconnects, bool(connected))
