"""The rival of ``wire``: bytes over a number of plain sockets, one thread each, from and into memory that stays."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from threading import Thread

PUSH, BCAST, DONE = b"p", b"b", b"d"


class Raw:
    """One end of ``1 + len(data)`` connected sockets.

    Args:
        control: carries single bytes.
        data: carry equal shares of ``nbytes``.
    """

    def __init__(self, control: socket.socket, data: Sequence[socket.socket], nbytes: int) -> None:
        self._control, self._data = control, data
        share = nbytes // len(data)
        self._memory = [memoryview(bytearray(b"\x01" * share)) for _ in data]

    def push(self) -> None:
        """The learner's part of a PUSH: send all, hear that it is there."""
        self._control.sendall(PUSH)
        self._each(lambda sock, memory: sock.sendall(memory))
        if self._control.recv(1) != DONE:
            raise RuntimeError("the other end of the raw sockets has gone")

    def bcast(self) -> None:
        """The learner's part of a BCAST: ask, receive all."""
        self._control.sendall(BCAST)
        self._each(_fill)

    def serve(self) -> None:
        """The other end, until the learner closes."""
        while ask := self._control.recv(1):
            if ask == PUSH:
                self._each(_fill)
                self._control.sendall(DONE)
            else:
                self._each(lambda sock, memory: sock.sendall(memory))

    def close(self) -> None:
        for sock in (self._control, *self._data):
            sock.close()

    def _each(self, work: Callable[[socket.socket, memoryview], object]) -> None:
        threads = [Thread(target=work, args=pair) for pair in zip(self._data, self._memory, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _fill(sock: socket.socket, memory: memoryview) -> None:
    while memory:
        count = sock.recv_into(memory)
        if not count:
            return
        memory = memory[count:]
