"""The speed of the line to a ``doctor --listen``, over as many streams as a learner uses.

    we        PUSH ... PUSH      for some seconds; the other end says in PULL_REQ how many bytes it has
    they      BCAST ... BCAST    for as many milliseconds as our HEARTBEAT names; then in PULL_REQ how many bytes

Both directions are counted at the receiver: nothing counts that has only reached a buffer. The HELLO has an id that
every syncer refuses, so that nothing but a ``doctor --listen`` can be measured by mistake.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from threading import Condition

from yeto_torch.doctor.plan import Rates
from yeto_torch.doctor.probe import PATIENCE_S, STRANGER_ID
from yeto_torch.doctor.pump import DTYPE, MESSAGE_BYTES, Pump, layout_for
from yeto_torch.wire.constants import HASH_BYTES, Direction
from yeto_torch.wire.errors import LocalError, PeerError
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import BcastFragment, DataHello, Heartbeat, Hello, Message, PullReq, PushFragment, encode
from yeto_torch.wire.transport.group import Closed, Group
from yeto_torch.wire.transport.sockets import clock, dial, send_parts
from yeto_torch.wire.transport.tls import ClientTls

UP, DOWN = 0, 1  # the fragment that a PULL_REQ names tells which count it carries
_SLOW_S = 60.0  # for what is still under way on a slow line


def measure(address: tuple[str, int], tls: ClientTls | None, key: bytes | None, streams: int, seconds: float) -> Rates:
    """Bytes a second in each direction, measured for ``seconds``. Raises OSError saying why it cannot be done."""
    meter = _Meter(address, tls, key, streams)
    try:
        meter.attach(address, tls, streams)
        return Rates(meter.up(seconds), meter.down(seconds))
    finally:
        meter.close()


class _Meter:
    """The dialling end. Everything behind ``_changed`` is written by the group's threads."""

    def __init__(self, address: tuple[str, int], tls: ClientTls | None, key: bytes | None, streams: int) -> None:
        self._changed = Condition()
        self._counts: dict[int, int] = {}  # what the other end has told
        self._received, self._last = 0, 0.0
        self._closed: Closed | None = None
        layout = layout_for(streams)
        self._fragments, self._generation = len(layout), secrets.randbelow(2**64 - 1) + 1
        hello = Hello(STRANGER_ID, self._generation, DTYPE, layout, bytes(HASH_BYTES), bytes(HASH_BYTES), None, streams)
        control = dial(*address, PATIENCE_S, tls)
        send_parts(control, encode(hello, key), PATIENCE_S)
        limits = GroupLimits(layout, DTYPE, Direction.TO_LEARNER)
        self._group = Group(
            control, limits, streams, on_message=self._on_message, on_closed=self._on_closed, name="doctor"
        )
        self._group.start()

    def attach(self, address: tuple[str, int], tls: ClientTls | None, streams: int) -> None:
        """Open the data streams."""
        for index in range(streams):
            data = dial(*address, PATIENCE_S, tls)
            send_parts(data, encode(DataHello(STRANGER_ID, self._generation, index)), PATIENCE_S)
            try:
                self._group.attach(index, data)
            except LocalError:  # refused meanwhile; ``_closed`` knows why
                data.close()
                return

    def up(self, seconds: float) -> float:
        values, started = bytes(MESSAGE_BYTES), clock()

        def push(fragment: int) -> Message:
            return PushFragment(STRANGER_ID, fragment, 1, 1, 0, 1, 1, 1, values)

        sent = Pump(self._group, push, self._fragments, seconds).wait(seconds + _SLOW_S)
        self._wait(lambda: 0 < sent <= self._counts.get(UP, 0), _SLOW_S)
        return sent / max(clock() - started, 1e-9)

    def down(self, seconds: float) -> float:
        with self._changed:
            started, self._received = clock(), 0
        self._group.send(Heartbeat(STRANGER_ID, max(1, round(1000 * seconds))))
        self._wait(lambda: 0 < self._counts.get(DOWN, 2**64) <= self._received, seconds + 2 * _SLOW_S)
        return self._received / max(self._last - started, 1e-9)

    def close(self) -> None:
        self._group.close()
        self._group.join(PATIENCE_S)

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: done() or self._closed is not None, timeout_s)
            if done():
                return
            raise ConnectionError(self._closed.reason if self._closed else f"not measured within {timeout_s:g} s")

    def _on_message(self, message: Message, now: float) -> None:
        with self._changed:
            if isinstance(message, PullReq):
                if message.fragment not in (UP, DOWN):
                    raise PeerError(f"it counts what nobody asked for ({message.fragment})")
                self._counts[message.fragment] = message.step
            elif isinstance(message, BcastFragment):
                self._received += len(message.data)
                self._last = now
            self._changed.notify_all()

    def _on_closed(self, closed: Closed) -> None:
        with self._changed:
            self._closed = closed
            self._changed.notify_all()
