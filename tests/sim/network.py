"""A network that behaves as TCP does: it delays, splits, stalls and cuts, but never loses or repeats a living byte.

A ``Connection`` is one group: 1 + S streams, each a pipe in both directions. Within a pipe order is kept; streams
overtake each other as they like. Its two ``End``s have what the transport's group offers: ``send``, ``close`` and two
callbacks.

Here whole messages travel; in ``wire`` everything is real but the sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tests.sim.world import World
from yeto_torch.wire.messages import Error, Hello, Message, is_bulk

EOF = object()


class Pipe:
    """One direction of one stream: first in, first out, each thing in its own time.

    ``deliver`` is called with each item. A closed gate (a peer that does not read yet) or a stall holds everything up.
    """

    def __init__(self, world: World, latency_s: float, deliver: Callable[[Any], None]) -> None:
        self._world, self._latency_s, self._deliver = world, latency_s, deliver
        self._items: deque[tuple[Any, float]] = deque()
        self._stalled_until = 0.0
        self._pumping = self._sealed = self._open = False
        self.on_delivered: Callable[[], None] = lambda: None  # there is room again

    def put(self, item: Any, not_before: float = 0.0) -> None:
        """Send something; ``not_before`` is the earliest moment of its arrival."""
        if self._sealed:
            return
        delay_s = self._latency_s * self._world.rng.choice([0.5, 1.0, 1.0, 3.0])
        if self._world.rng.random() < (0.02 if isinstance(item, bytes) else 0.15):
            delay_s += self._world.rng.uniform(0.0, 0.6)  # a retransmission
        self._items.append((item, max(self._world.now + delay_s, not_before)))
        self._pump()

    def open(self) -> None:
        """The peer reads from now on."""
        self._open = True
        self._pump()

    def stall(self, seconds: float) -> None:
        self._stalled_until = max(self._stalled_until, self._world.now + seconds)

    def lose_tail(self) -> None:
        """Of what is under way only some first part will arrive."""
        for _ in range(self._world.rng.randint(0, len(self._items))):
            self._items.pop()

    def seal(self) -> None:
        """Nothing more is taken."""
        self._sealed = True

    def end(self) -> None:
        """Nothing arrives any more."""
        self._sealed = True
        self._items.clear()

    def _pump(self) -> None:
        if self._items and self._open and not self._pumping:
            self._pumping = True
            self._world.at(max(self._items[0][1], self._stalled_until), self._turn)

    def _turn(self) -> None:
        self._pumping = False
        if self._items and max(self._items[0][1], self._stalled_until) <= self._world.now:
            item, _ = self._items.popleft()
            self._deliver(item)
            self.on_delivered()
        self._pump()

    @property
    def pending_bytes(self) -> int:
        """Bytes under way, where bytes travel."""
        return sum(len(item) for item, _ in self._items if item is not EOF)


class End:
    """One side of a connection, as its owner sees it.

    Attributes:
        on_message: called with each message, in the order of its stream.
        on_closed: called once, with (reason, text of an ERROR); not when the owner itself closes.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self.name = connection, name
        self.on_message: Callable[[Message], None] = lambda _: None
        self.on_closed: Callable[[str, str | None], None] = lambda _reason, _error: None
        self.closed = False

    def send(self, message: Message, on_sent: Callable[[], None] | None = None, not_before: float = 0.0) -> None:
        """Queue a message; dropped when this side is closed. ``not_before`` may delay its arrival."""
        if not self.closed:
            self._connection.send(self, message, on_sent, not_before)

    def close(self, error: str | None = None, *, flush: bool = False) -> None:
        """End the group: at once, after telling the peer why, or once all that is queued has gone out."""
        if not self.closed:
            self._connection.close(self, error, flush=flush)

    def take(self, message: Message) -> None:
        """Something has arrived."""
        if self.closed:
            return
        if isinstance(message, Error):
            self.shut(f"the peer sent ERROR: {message.text}", message.text)
        else:
            self.on_message(message)

    def shut(self, reason: str, error: str | None = None) -> None:
        """This side is over and its owner hears of it."""
        if not self.closed:
            self.closed = True
            self.on_closed(reason, error)


class Connection:
    """One connection group. The syncer's side reads nothing but HELLO before ``admit``."""

    def __init__(self, world: World, streams: int, latency_s: float) -> None:
        self.world, self.streams = world, streams
        self.learner, self.syncer = End(self, "learner"), End(self, "syncer")
        self.pipes = {  # by receiving end
            end: [Pipe(world, latency_s, self.receiver(end, stream)) for stream in range(streams + 1)]
            for end in (self.learner, self.syncer)
        }
        for pipe in self.pipes[self.learner]:
            pipe.open()

    def other(self, end: End) -> End:
        return self.syncer if end is self.learner else self.learner

    def hello(self, hello: Hello, arrived: Callable[[Hello], None]) -> None:
        """The learner's first frame; ``arrived`` is the syncer's listener."""
        self.world.after(self.world.rng.uniform(0.0, 0.05), self._hello, hello, arrived)

    def _hello(self, hello: Hello, arrived: Callable[[Hello], None]) -> None:
        if not self.syncer.closed:
            arrived(hello)

    def admit(self) -> None:
        """The syncer reads from now on."""
        for pipe in self.pipes[self.syncer]:
            pipe.open()

    # Faults

    def stall(self, seconds: float) -> None:
        """Some streams deliver nothing for a while."""
        for pipes in self.pipes.values():
            for pipe in pipes:
                if self.world.rng.random() < 0.5:
                    pipe.stall(seconds)

    def stall_towards(self, end: End, seconds: float) -> None:
        """One side does not read for a while."""
        for pipe in self.pipes[end]:
            pipe.stall(seconds)

    def cut(self, *, late: End | None = None, late_s: float = 0.0) -> None:
        """The line dies. Both sides notice soon, ``late`` only after ``late_s``."""
        for end in (self.learner, self.syncer):
            for pipe in self.pipes[end]:
                pipe.lose_tail()
                pipe.seal()
            self.world.after(late_s if end is late else self.world.rng.uniform(0.0, 0.3), self._notice, end)

    def _notice(self, end: End) -> None:
        for pipe in self.pipes[end]:
            pipe.end()
        end.shut("the line was cut")

    # Sending and closing

    def send(self, end: End, message: Message, on_sent: Callable[[], None] | None, not_before: float) -> None:
        stream = self.world.rng.randint(1, self.streams) if self.streams and is_bulk(message) else 0
        self.pipes[self.other(end)][stream].put(message, not_before)
        if on_sent is not None:
            self.world.after(0.0, self.sent, end, on_sent)

    def sent(self, end: End, on_sent: Callable[[], None]) -> None:
        """The kernel has the last byte."""
        if not end.closed:
            on_sent()

    def close(self, end: End, error: str | None, *, flush: bool) -> None:
        end.closed = True
        for pipe in self.pipes[end]:
            pipe.end()
        control, *data = self.pipes[self.other(end)]
        if not flush and self.world.rng.random() < 0.3:  # a reset overtakes what the kernel still had to send
            for pipe in data if error is not None else [control, *data]:
                pipe.lose_tail()
        if error is not None:
            control.put(self.encoded(Error(error)))
        control.put(EOF)
        for pipe in (control, *data):
            pipe.seal()

    def encoded(self, message: Message) -> Any:
        """What travels."""
        return message

    def receiver(self, end: End, stream: int) -> Callable[[Any], None]:
        """What to do with what comes out of a pipe."""
        del stream

        def deliver(item: Any) -> None:
            if item is EOF:
                end.shut("the peer closed the connection")
            else:
                end.take(item)

        return deliver
