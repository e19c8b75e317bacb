"""The syncer's end of ``wire``: a process that takes pushes, and sends broadcasts when a heartbeat asks for them."""

from __future__ import annotations

import socket
from threading import Thread

from benchmarks.raw import Raw
from benchmarks.wire import FRAGMENTS, STREAMS, Tally, layout_of
from benchmarks.worker import Parent
from yeto_torch.wire.constants import Direction, WireDType
from yeto_torch.wire.layout import WireLayout
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import BcastFragment, Heartbeat, Message, PullReq, PushFragment
from yeto_torch.wire.transport.group import Group
from yeto_torch.wire.transport.sockets import tune


class SyncerEnd:
    """The syncer's connection group."""

    def __init__(self, listener: socket.socket, layout: WireLayout, dtype: WireDType) -> None:
        self._data = memoryview(bytes(b"\x01" * layout.nbytes(0, dtype)))
        self._pushes = Tally(lambda: self._group.send(PullReq(0, 1, 1)))
        self._group = Group(
            _accept(listener),
            GroupLimits(layout, dtype, Direction.TO_SYNCER, pipeline=FRAGMENTS),
            STREAMS,
            on_message=self._received,
            on_closed=lambda _: None,
            name="bench syncer",
        )
        self._group.start()
        for index in range(STREAMS):
            self._group.attach(index, _accept(listener))

    def _received(self, message: Message, _now: float) -> None:
        if isinstance(message, PushFragment):
            self._pushes.count()
        elif isinstance(message, Heartbeat):
            for fragment in range(FRAGMENTS):
                self._group.send(BcastFragment(fragment, 1, self._data))


def _accept(listener: socket.socket) -> socket.socket:
    sock, _ = listener.accept()
    tune(sock)
    return sock


def main() -> None:
    parent = Parent()
    layout = layout_of(parent.settings["numel"])
    listener = socket.create_server(("127.0.0.1", 0), backlog=2 * STREAMS)
    parent.say(listener.getsockname()[1])
    groups = []
    for question in parent.questions():
        if question["ask"] == "raw":
            raw = Raw(_accept(listener), [_accept(listener) for _ in range(STREAMS)], question["nbytes"])
            Thread(target=raw.serve, daemon=True).start()
        else:
            groups.append(SyncerEnd(listener, layout, WireDType[question["dtype"]]))


if __name__ == "__main__":
    main()
