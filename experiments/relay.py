"""A relay in front of a syncer that counts what passes, in either direction. It changes nothing and decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType

_PIECE = 1 << 16


class Relay:
    """Listens on a free port of this machine and leads to ``target`` ("host:port"), on a thread of its own.

    Attributes:
        address: where learners dial.
        up, down: bytes towards the syncer and back, so far.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.up = self.down = 0
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listening.set()
        await self._over.wait()  # the runner then cancels what still runs
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the end of the relay is the end of what it carries
            await self._carry(reader, writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(self._pump(reader, there_writer, True), self._pump(there_reader, writer, False))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_up: bool) -> None:
        try:
            while data := await source.read(_PIECE):
                if is_up:
                    self.up += len(data)
                else:
                    self.down += len(data)
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass  # the other end sees it too
        finally:
            target.close()
