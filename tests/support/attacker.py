"""A hostile peer for living syncers: bare sockets and bytes, and looks at a process from outside."""

from __future__ import annotations

import itertools
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.support.wire_by_hand import frame
from tests.wire.hostile import LAYOUT, Said, Scene, data_hello, hello
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.layout import WireLayout

WAIT_S = 30.0
_GENERATIONS = itertools.count(0x7000_0000_0000_0001)
ERROR, PULL, BCAST = 10, 3, 5


class Wire:
    """One socket that speaks bytes and understands frame borders."""

    def __init__(self, address: str, said: bytes = b"") -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), WAIT_S)
        self.say(said)

    def say(self, data: bytes) -> None:
        """All of it, or as much as the other side takes before it hangs up."""
        with suppress(ConnectionError):
            self.sock.sendall(data)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """(type, payload) until the other side closes. Raises TimeoutError when it does neither."""
        with suppress(ConnectionError), self.sock.makefile("rb") as stream:
            while len(head := stream.read(13)) == 13:
                magic, kind, length = struct.unpack("<IBQ", head)
                assert magic == 0xD170C0DE
                yield kind, stream.read(length)

    def next(self, kind: int) -> bytes:
        """The payload of the next frame of that type."""
        head, payload = b"", b""
        while not head or head[4] != kind:
            head = self._exactly(13)
            payload = self._exactly(struct.unpack_from("<Q", head, 5)[0])
        return payload

    def _exactly(self, count: int) -> bytes:
        out = bytearray()
        while len(out) < count:
            part = self.sock.recv(count - len(out))
            assert part, "the syncer hung up"
            out += part
        return bytes(out)

    def last_words(self) -> str | None:
        """The text of the ERROR in front of the end; None for an end without one."""
        text = None
        for kind, payload in self.frames():
            if kind == ERROR:
                text = payload.decode()
        return text

    def is_over(self) -> bool:
        """Has the other side closed by now?"""
        try:
            while select.select([self.sock], [], [], 0)[0]:
                if not self.sock.recv(1 << 16):
                    return True
        except ConnectionError:
            return True
        return False

    def reset(self) -> None:
        """Close so that the other side gets a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.sock.close()


class Intruder:
    """A whole connection group of the stranger, admitted: every fragment has been broadcast to it."""

    def __init__(
        self,
        address: str,
        dtype: WireDType,
        streams: int = 0,
        *,
        attach: int | None = None,
        layout: WireLayout = LAYOUT,
    ) -> None:
        self.scene = Scene(dtype, streams, next(_GENERATIONS))
        self.wires = [Wire(address, frame(1, hello(self.scene, layout=layout.encoded, count=len(layout))))]
        for index in range(streams if attach is None else attach):
            self.wires.append(Wire(address, data_hello(self.scene.generation, index)))
        self.wires[1 if streams else 0].next(9 if streams else BCAST)  # nothing comes before it is admitted

    @property
    def generation(self) -> int:
        return self.scene.generation

    def asked(self, step: int) -> tuple[int, int, int]:
        """(fragment, step, attempt) of the pull of this step."""
        while True:
            fragment, asked, attempt = struct.unpack("<IQI", self.wires[0].next(PULL))
            if asked == step:
                return fragment, asked, attempt

    def says(self, said: Said) -> None:
        for stream, data in said:
            self.wires[stream].say(data)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()


def fresh_generation() -> int:
    return next(_GENERATIONS)


def status(pid: int, field: str) -> int:
    """A number of /proc/PID/status: ``VmRSS`` and ``VmHWM`` in bytes, ``Threads`` as a count."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            number = int(value.split()[0])
            return 1024 * number if value.endswith("kB") else number
    raise KeyError(field)


def descriptors(pid: int) -> int:
    """Open files and sockets."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
