"""Bulk PUSH and BCAST between two processes, against raw sockets: as many streams, as many bytes, the same machine.

The measuring process is the learner, ``wire_peer`` the syncer; both use the product's connection group. A transfer is
one message per fragment, queued at once, and over when the last one is whole at the other side (which says so in a few
bytes). Encoding and decoding are not part of it: f32 and bf16 differ in their bytes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from threading import Event, Lock

from benchmarks.harness import Figure, Size, Target, alternate, both, ratios, seconds
from benchmarks.raw import Raw
from benchmarks.stage import WAIT_S, Launch, Stage, launch
from yeto_torch.wire.constants import Direction, MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import BcastFragment, Heartbeat, Message, PullReq, PushFragment
from yeto_torch.wire.transport.group import Closed, Group
from yeto_torch.wire.transport.sockets import tune

STREAMS = 4
FRAGMENTS = 8
TARGET = Target(0.7, 0.9, more_is_better=True)
DTYPES = (WireDType.F32, WireDType.BF16)


def layout_of(numel: int) -> WireLayout:
    """Fragments of ``numel`` values each."""
    return WireLayout((WireFragment(MergeMode.AVG, (numel,)),) * FRAGMENTS)


class Tally:
    """Calls ``then`` on every ``FRAGMENTS``-th ``count``, which any of the group's reader threads may make."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then, self._lock, self._seen = then, Lock(), 0

    def count(self) -> None:
        with self._lock:
            self._seen += 1
            full = self._seen % FRAGMENTS == 0
        if full:
            self._then()


class LearnerEnd:
    """The learner's connection group to ``wire_peer``."""

    def __init__(self, port: int, layout: WireLayout, dtype: WireDType) -> None:
        self._data = bytes(b"\x01" * layout.nbytes(0, dtype))
        self._done, self._reason = Event(), "no time left"
        self._broadcasts = Tally(self._done.set)
        self._group = Group(
            _dial(port),
            GroupLimits(layout, dtype, Direction.TO_LEARNER),
            STREAMS,
            on_message=self._received,
            on_closed=self._closed,
            name="bench learner",
        )
        self._group.start()
        for index in range(STREAMS):
            self._group.attach(index, _dial(port))

    def push(self) -> None:
        self._done.clear()
        for fragment in range(FRAGMENTS):
            self._group.send(PushFragment(0, fragment, 1, 1, 0, 1, 1, 1, self._data))
        self._wait()

    def bcast(self) -> None:
        self._done.clear()
        self._group.send(Heartbeat(0, 1))
        self._wait()

    def close(self) -> None:
        self._group.close()
        self._group.join(WAIT_S)

    def _received(self, message: Message, _now: float) -> None:
        if isinstance(message, BcastFragment):
            self._broadcasts.count()
        elif isinstance(message, PullReq):
            self._done.set()

    def _closed(self, closed: Closed) -> None:
        self._reason = closed.reason
        self._done.set()

    def _wait(self) -> None:
        if not self._done.wait(WAIT_S) or self._group.closed:
            raise RuntimeError(f"a transfer did not end: {self._reason}")


def measure(size: Size, start: Launch = launch) -> Iterator[Figure]:
    numel = size.of(4_000_000, 2_000_000, 10_000)
    layout = layout_of(numel)
    with Stage(start) as stage:
        peer = stage.worker("benchmarks.wire_peer", numel=numel)
        port = peer.ready()
        for dtype in DTYPES:
            nbytes = FRAGMENTS * layout.nbytes(0, dtype)
            peer.tell("raw", nbytes=nbytes)
            raw = Raw(_dial(port), [_dial(port) for _ in range(STREAMS)], nbytes)
            peer.tell("group", dtype=dtype.name)
            group = LearnerEnd(port, layout, dtype)
            with closing(raw), closing(group):
                for name in ("push", "bcast"):
                    ours, theirs = alternate(
                        size.of(15, 9, 2), seconds(getattr(group, name)), seconds(getattr(raw, name))
                    )
                    yield Figure(
                        f"{name.upper()} throughput, {dtype.name.lower()}, S = {STREAMS}, {nbytes / 2**20:.3g} MiB",
                        "raw sockets",
                        "x",
                        TARGET,
                        ratios(theirs, ours),
                        both(ours, theirs),
                    )


def _dial(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), WAIT_S)
    sock.settimeout(None)
    tune(sock)
    return sock
