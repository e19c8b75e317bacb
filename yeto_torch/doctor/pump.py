"""A stream of bulk messages over a connection group: how the speed of a line is measured, in either direction.

It keeps a few messages of 256 KiB on their way, over all data streams, until its time is up. They are the protocol's
own messages on the protocol's own transport, so what is measured is what a run gets. It must not know which side it
is on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Condition

from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout
from yeto_torch.wire.messages import Message
from yeto_torch.wire.transport.group import Group
from yeto_torch.wire.transport.sockets import clock

MESSAGE_BYTES = 256 * 1024
DTYPE = WireDType.BF16
_PER_STREAM = 2  # messages on their way; each is one slice


def layout_for(streams: int) -> WireLayout:
    """One fragment per message that may be on its way."""
    fragments = _PER_STREAM * max(1, streams)
    return WireLayout((WireFragment(MergeMode.AVG, (MESSAGE_BYTES // 2,)),) * fragments)


class Pump:
    """Sends on a started ``group`` until ``seconds`` are over; ``make`` gives the message of a fragment."""

    def __init__(self, group: Group, make: Callable[[int], Message], fragments: int, seconds: float) -> None:
        self._group, self._make = group, make
        self._until = clock() + seconds
        self._changed = Condition()
        self._under_way = fragments
        self._sent = 0
        for fragment in range(fragments):
            self._next(fragment)

    def wait(self, timeout_s: float) -> int:
        """Bytes handed to the kernel, once nothing is under way any more. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._under_way == 0 or self._group.closed, timeout_s):
                raise TimeoutError(f"the line took only {self._sent} bytes in {timeout_s:g} s")
            return self._sent

    def _next(self, fragment: int) -> None:
        if clock() < self._until and self._group.send(self._make(fragment), partial(self._left, fragment)):
            return
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _left(self, fragment: int) -> None:
        with self._changed:
            self._sent += MESSAGE_BYTES
        self._next(fragment)
