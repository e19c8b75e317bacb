"""No rival but a limit: the f32 bytes of a whole round through a hub, over raw sockets, and nothing computed.

Rank 0 is the hub. Every other rank sends it the whole tensor and receives one as long, both ways at once, as a flow of
rounds does. Memory stays, and its pages are there. What a coordinator does on top of this takes longer than this.
"""

from __future__ import annotations

import socket
from threading import Thread

from benchmarks.model import Matrices
from benchmarks.rivals.common import serve

STREAMS = 4


class Star:
    def __init__(self, numel: int, rank: int, world: int, folder: str) -> None:  # noqa: ARG002  # as every rival
        self._is_hub, self._leaves = rank == 0, world - 1
        self._share = 4 * Matrices(numel).numel // STREAMS
        self._listener = socket.create_server(("127.0.0.1", 0)) if self._is_hub else None
        self._sockets: list[socket.socket] = []

    def address(self) -> str | None:
        return str(self._listener.getsockname()[1]) if self._listener else None

    def meet(self, at: str | None) -> None:
        if self._listener:
            self._sockets = [self._listener.accept()[0] for _ in range(STREAMS * self._leaves)]
        else:
            self._sockets = [socket.create_connection(("127.0.0.1", int(at or 0))) for _ in range(STREAMS)]
        self._sent, self._received = ([bytearray(b"\1") * self._share for _ in self._sockets] for _ in range(2))

    def prepare(self) -> None:
        pass

    def sync(self) -> None:
        threads = [
            Thread(target=sock.sendall, args=(data,)) for sock, data in zip(self._sockets, self._sent, strict=True)
        ]
        threads += [Thread(target=_fill, args=pair) for pair in zip(self._sockets, self._received, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _fill(sock: socket.socket, memory: bytearray) -> None:
    left = memoryview(memory)
    while left:
        count = sock.recv_into(left)
        if not count:
            raise ConnectionResetError("the other end has gone")
        left = left[count:]


if __name__ == "__main__":
    serve(Star)
