"""One connection group: 1 + S sockets of one generation, on either side.

It carries messages between the callbacks of its owner and the sockets, and turns every way a group can end into one
``Closed``. It must not know what the messages mean; ``outbox`` decides what goes out, ``frames``, ``limits`` and
``chunks`` what may come in.

    threads    | per socket one reader and one writer; one more while the group ends. All are daemons and all end.
    OPEN       | frames go both ways
    LINGERING  | on_closed was or is being called; what is queued (or ERROR alone) goes out, what comes in is dropped
    DEAD       | the sockets are shut down, the threads leave

Any violation, any lost socket, any failing callback ends the whole group.

Source: v4 §Streams and chunks (1 + S sockets of one generation); rulings §1.1, §1.8, §1.10.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Lock, Thread

from yeto_torch.wire.buffers import Buffer, Spare
from yeto_torch.wire.chunks import Reassembler
from yeto_torch.wire.constants import BULK_TYPES, HEADER_BYTES, Direction
from yeto_torch.wire.errors import CongestedError, LocalError, PeerError
from yeto_torch.wire.frames import Frame, FrameReader
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import BulkMessage, Error, Message, decode
from yeto_torch.wire.transport.outbox import Job, Outbox
from yeto_torch.wire.transport.sockets import REFUSAL_S, Socket, Stream, clock, tune, why

log = logging.getLogger(__name__)

# A closed data socket waits this long for the control stream, whose last frame may say why the peer closes.
_LAST_WORD_S = 0.3
# on_closed waits this long for on_message calls still running, so that what they hand on comes before it.
_CALLBACK_S = 1.0
_SHORT_BYTES = 256 * 1024  # a longer message is worth waking a writer for
# A learner lets go of one anchor as it adopts the next, and has little memory to spare.
_SPARE = Spare(2)


def _is_short(message: Message) -> bool:
    return not isinstance(message, BulkMessage) or len(memoryview(message.data).cast("B")) <= _SHORT_BYTES


@dataclass(frozen=True, slots=True)
class Closed:
    """Why a group ended: one sentence, and what ended it if that was one of these."""

    reason: str
    violation: PeerError | None = None  # what the peer did wrong
    peer_error: str | None = None  # the text of an ERROR frame on the control stream
    error: OSError | None = None  # what a lost socket said


class _SharedSlices:
    """The group's reassembly table behind a lock: reserve, receive without the lock, commit, release once handled.

    A message counts against the group's memory from its first byte until its owner has taken it, sliced or not.

    A learner judges a chunk once all of it is there: to it a violation ends the run, while a connection lost inside of
    a chunk, whatever that would have become, is dialled again. The syncer judges as early as it can.
    """

    def __init__(self, limits: GroupLimits, spare: Spare) -> None:
        self._lock = Lock()
        self._room = spare.allocate
        self._table = Reassembler(limits.max_inner, limits.max_partials, limits.max_reserved_bytes, self._room)
        self._patient = limits.inbound is Direction.TO_LEARNER
        self._bad: dict[int, PeerError] = {}
        self._dropped = False

    def reserve(self, msg_id: int, total: int, offset: int, size: int) -> memoryview:
        with self._lock:
            if self._dropped:
                return memoryview(bytearray(size))  # read and forgotten
            try:
                return self._table.reserve(msg_id, total, offset, size)
            except PeerError as violation:
                if not self._patient:
                    raise
                self._bad[msg_id] = violation
                return memoryview(bytearray(size))  # at most one slice per socket, and nobody reads it

    def commit(self, msg_id: int, size: int) -> memoryview | None:
        with self._lock:
            if self._dropped:
                return None
            if msg_id in self._bad:
                raise self._bad[msg_id]
            whole = self._table.commit(msg_id, size)
            if whole is not None:
                self._table.keep(len(whole))
            return whole

    def hold(self, nbytes: int) -> memoryview:
        """Memory for the payload of a bulk message that comes in one piece."""
        with self._lock:
            self._table.hold(HEADER_BYTES + nbytes)
        return self._room(nbytes)

    def release(self, frame: Frame) -> None:
        """``frame`` has been handed on."""
        if frame.kind in BULK_TYPES:
            with self._lock:
                self._table.release(HEADER_BYTES + len(frame.payload))

    def drop(self) -> None:
        """The group is ending: give the memory back now, whatever its last words take."""
        with self._lock:
            self._dropped = True
            self._table.drop()


class _Line:
    """One socket inside the group: the stream, its threads, and what wakes its writer."""

    def __init__(self, stream: Stream, lock: Lock) -> None:
        self.stream = stream
        self.work = Condition(lock)
        self.threads: list[Thread] = []
        self.half_sent: list[Job] = []  # at most one, begun by the sender and to be ended by the writer
        self.failed: Exception | None = None  # what the sender met, for the writer to raise


class Group:
    """A connection group that sends and receives messages.

    Args:
        control: the connected socket of stream 0, past HELLO. The group owns it from here on.
        limits: what may come in.
        num_streams: data streams that HELLO declared (S).
        on_message: called with (message, monotonic seconds of arrival) on a reader thread. Bulk lengths are already
            checked. It may block, which holds back that socket only. A PeerError it raises is a violation.
        on_closed: called once, after which no on_message begins. One that is still running is waited for, shortly.
        write_timeout_s: a socket that accepts no byte for so long while some wait ends the group.
        stream_wait_s: how long bulk waits for declared data streams to attach.
        spare: lends the memory of received messages.
        name: for logs and thread names.
    """

    def __init__(
        self,
        control: Socket,
        limits: GroupLimits,
        num_streams: int,
        *,
        on_message: Callable[[Message, float], None],
        on_closed: Callable[[Closed], None],
        write_timeout_s: float = 60.0,
        stream_wait_s: float = 2.0,
        spare: Spare = _SPARE,
        name: str = "",
    ) -> None:
        self.limits, self.name = limits, name or "group"
        self._on_message, self._on_closed = on_message, on_closed
        self._write_timeout_s, self._stream_wait_s = write_timeout_s, stream_wait_s
        self._lock = Lock()
        self._changed = Condition(self._lock)  # closing, flushed, or a callback returned
        self._slices = _SharedSlices(limits, spare)
        self._outbox = Outbox(num_streams)
        self._lines: dict[int, _Line] = {}
        self._started = False
        self._callbacks = 0
        self._closing: Closed | None = None
        self._deadline = 0.0  # end of the linger
        self._dead = False
        self._closer = Thread(target=self._finish, name=f"{self.name}-close", daemon=True)
        self._add_line(0, control)

    # ------------------------------------------------------------------------------------------ the owner's calls

    def start(self) -> None:
        """Start reading and sending. Raises RuntimeError when the system gives no threads at all: the group is closed
        then, and so are its sockets.
        """
        with self._lock:
            if self._closing is not None or self._started:
                return
            try:
                self._closer.start()  # already now: an interpreter that is going down starts no threads
            except RuntimeError as error:
                self._closing, self._dead = Closed(f"no thread for {self.name}: {error}"), True
                for line in self._lines.values():
                    line.stream.close()
                raise
            self._started = True
            self._outbox.start(clock() + self._stream_wait_s)
            missing = [self._start_line(line) for line in self._lines.values()]
        self._end_without_threads(missing)

    def attach(self, index: int, sock: Socket) -> None:
        """Add data stream ``index`` (0-based), past its DATA_HELLO; the group owns ``sock`` unless this raises.

        Raises PeerError when the index is out of range or taken, LocalError when the group is closed.
        """
        with self._lock:
            if self._closing is not None:
                raise LocalError(f"{self.name} is closed: {self._closing.reason}")
            self._outbox.attach(index)
            line = self._add_line(index + 1, sock)
            if not self._started:
                return
            missing = [self._start_line(line)]
            self._kick()
        self._end_without_threads(missing)

    def send(self, message: Message, on_sent: Callable[[], None] | None = None) -> bool:
        """Queue a message; never blocks. False when the group is closed and the message was dropped.

        A short one goes out at once, on the calling thread, where nothing is before it: waking a writer costs more.

        A queued message of the same type and fragment is replaced, and its ``on_sent`` never called. ``on_sent`` is
        called on a writer thread when the kernel has the last byte.
        """
        with self._lock:
            if self._closing is not None:
                return False
            if on_sent is None and self._started and _is_short(message) and self._send_now(message):
                return True
            self._outbox.put(message, on_sent)
            self._kick()
            return True

    def close(self, error: str | None = None, linger_s: float = 0.0, reason: str = "closed here") -> None:
        """End the group; returns at once, from any thread, callbacks included. A closing group is left to its end.

        With ``error`` an ERROR goes out behind nothing but what is half-sent, and the sockets stay open until the
        peer had the chance to read it (``linger_s`` or 2 s). With ``linger_s`` alone all that is queued goes out
        first. With neither the sockets close now. ``reason`` is what the owner is told when there is no ``error``.
        """
        self._end(Closed(f"closed here: {error}" if error else reason), error, linger_s)

    def pending(self) -> bool:
        """Is anything queued or half-sent?"""
        with self._lock:
            return self._outbox.pending()

    def join(self, timeout_s: float) -> bool:
        """Wait until a closed group has ended its threads and closed its sockets; False after ``timeout_s``."""
        with self._lock:
            if not self._changed.wait_for(lambda: self._closing is not None, timeout_s):
                return False
        self._closer.join(timeout_s)
        return not self._closer.is_alive()

    @property
    def closed(self) -> bool:
        """True as soon as the end has begun."""
        return self._closing is not None

    @property
    def bytes_sent(self) -> int:
        return sum(line.stream.bytes_sent for line in tuple(self._lines.values()))

    @property
    def bytes_received(self) -> int:
        return sum(line.stream.bytes_received for line in tuple(self._lines.values()))

    @property
    def last_received_at(self) -> float:
        """Monotonic seconds of the newest byte on any socket; of its opening before the first."""
        return max(line.stream.last_received_at for line in tuple(self._lines.values()))

    # ------------------------------------------------------------------------------------------ reading

    def _read(self, line: _Line) -> None:
        stream = line.stream
        try:
            for frame, now in stream.frames(FrameReader(self.limits, self._slices, self._slices.hold)):
                going_on = self._accept(stream, frame, now)
                self._slices.release(frame)
                del frame  # the next one may be long in coming
                if not going_on:
                    stream.discard()
                    return
            self._lost(stream, f"the peer closed {stream}")
        except PeerError as violation:
            last_word = None if isinstance(violation, CongestedError) else str(violation)
            self._end(Closed(f"violation on {stream}: {violation}", violation), last_word)
            with suppress(OSError):
                stream.discard()
        except OSError as error:
            self._lost(stream, f"{stream} was lost while reading: {why(error)}", error)
        except MemoryError as error:
            self._end(Closed(f"{stream}: {str(error) or 'out of memory'}"))
        except Exception as error:
            log.exception("%s: reading %s failed", self.name, stream)
            self._end(Closed(f"internal error while reading {stream}: {error!r}"))

    def _accept(self, stream: Stream, frame: Frame, now: float) -> bool:
        """Hand one frame on; False when the group is closing."""
        message = decode(frame.kind, frame.payload)
        if isinstance(message, BulkMessage):
            self.limits.check_bulk(message)
        elif isinstance(message, Error):
            text = None if stream.index else message.text
            self._end(Closed(f"the peer sent ERROR on {stream}: {message.text}", peer_error=text))
            return False
        elif stream.index:
            raise PeerError(f"{frame.kind.name} on {stream}: control frames belong on stream 0")
        with self._lock:
            if self.closed:
                return False
            self._callbacks += 1
        try:
            self._on_message(message, now)
        finally:
            with self._lock:
                self._callbacks -= 1
                if self._closing is not None:  # before, nobody waits for it; a wake-up costs as much as a message
                    self._changed.notify_all()
        return True

    def _lost(self, stream: Stream, reason: str, error: OSError | None = None) -> None:
        """A socket is gone. The control stream may hold the peer's last word, so it speaks first."""
        if stream.index:
            with self._lock:
                self._changed.wait_for(lambda: self._closing is not None, _LAST_WORD_S)
        self._end(Closed(reason, error=error))

    # ------------------------------------------------------------------------------------------ writing

    def _send_now(self, message: Message) -> bool:
        """Send on stream 0 without waiting, if that is free; what does not go out now is left to its writer.

        Where it fails the writer says so, and nothing goes out behind it: half the message may be on its way.
        """
        line = self._lines[0]
        parts: Sequence[Buffer] | None = None
        with suppress(Exception):  # the writer will meet it, too
            parts = self._outbox.at_once(message, clock())
        if parts is None:
            return False
        try:
            parts = line.stream.write_now(parts)
        except Exception as error:  # noqa: BLE001  # raised again where it is answered
            line.failed = error
        if parts:
            line.half_sent.append(self._outbox.begun(parts))
            line.work.notify()
        return True

    def _write(self, line: _Line) -> None:
        stream = line.stream
        try:
            while (job := self._next_job(line)) is not None:
                if line.failed is not None:
                    raise line.failed
                stream.write(job.parts, self._write_timeout_s)
                with self._lock:
                    on_sent = self._outbox.done(job)
                    if self._closing is not None:
                        self._changed.notify_all()
                if on_sent is not None:
                    on_sent()
        except TimeoutError as error:
            self._unsendable(stream)
            self._end(Closed(f"{stream} is stalled: {why(error)}"))
        except OSError as error:
            self._unsendable(stream)
            self._lost(stream, f"{stream} was lost while writing: {why(error)}", error)
        except Exception as error:
            log.exception("%s: writing %s failed", self.name, stream)
            self._end(Closed(f"internal error while writing {stream}: {error!r}"))

    def _unsendable(self, stream: Stream) -> None:
        """Nothing more can go out on this socket; there is nothing left to linger for if it was needed."""
        with self._lock:
            if self._closing is not None and not (stream.index and self._outbox.ended):
                self._die()
                self._changed.notify_all()

    def _next_job(self, line: _Line) -> Job | None:
        """Wait for the next frame of this stream; None when the group is dead."""
        index = line.stream.index
        with self._lock:
            while not self._dead:
                if line.half_sent:
                    return line.half_sent.pop()
                now = clock()
                self._kick(now)
                job = self._outbox.take(index, now)
                if job is not None:
                    return job
                deadline = None if index else self._outbox.next_deadline(now)
                line.work.wait(None if deadline is None else deadline - now)
        return None

    def _kick(self, now: float | None = None) -> None:
        """Wake the writers that have something to do."""
        if not self._started:
            return
        now = clock() if now is None else now
        for index in self._outbox.refill(now):
            self._lines[index].work.notify()
        if self._outbox.has_plain(now) or self._outbox.next_deadline(now) is not None:
            self._lines[0].work.notify()

    # ------------------------------------------------------------------------------------------ the end

    def _end(self, closed: Closed, error: str | None = None, linger_s: float = 0.0) -> None:
        """Begin the end, once. ``error`` is dropped on the learner's side: only the syncer says ERROR."""
        if self.limits.inbound is not Direction.TO_SYNCER:
            error = None
        elif error is not None:
            linger_s = linger_s or REFUSAL_S
        with self._lock:
            if self._closing is not None:
                return
            self._closing = closed
            self._slices.drop()
            self._deadline = clock() + linger_s
            if error is not None:
                self._outbox.last_word(Error(error))
            if not self._started:
                self._start_closing()
            if linger_s > 0:
                self._kick()
            else:
                self._die()
            self._changed.notify_all()

    def _start_closing(self) -> None:
        """A group that ends before it started still has its last words."""
        self._started = True
        self._outbox.start(clock())
        self._closer.start()
        for line in self._lines.values():
            self._start_thread(line, "write", self._write)

    def _end_without_threads(self, missing: list[str | None]) -> None:
        for error in filter(None, missing):
            self._end(Closed(f"no thread for {self.name}: {error}"))

    def _die(self) -> None:
        self._dead = True
        for line in self._lines.values():
            line.stream.shutdown()
            line.work.notify_all()

    def _finish(self) -> None:
        """The closer thread: tell the owner, see the last bytes out, end the threads, close the sockets."""
        with self._lock:
            while (closed := self._closing) is None:
                self._changed.wait()
            self._changed.wait_for(lambda: self._callbacks == 0, _CALLBACK_S)
        try:
            self._on_closed(closed)
        except Exception:
            log.exception("%s: on_closed failed", self.name)
        with self._lock:
            over = self._changed.wait_for(lambda: self._dead or not self._outbox.pending(), self._deadline - clock())
        if over and not self._dead:
            self._lines[0].stream.linger(self._deadline)
        with self._lock:
            self._die()
        for line in self._lines.values():
            for thread in line.threads:
                thread.join()
            line.stream.close()

    # ------------------------------------------------------------------------------------------ lines

    def _add_line(self, index: int, sock: Socket) -> _Line:
        tune(sock, self._write_timeout_s)
        line = self._lines[index] = _Line(Stream(index, sock), self._lock)
        return line

    def _start_line(self, line: _Line) -> str | None:
        """Start both threads; what the system said if it refused."""
        try:
            self._start_thread(line, "write", self._write)
            self._start_thread(line, "read", self._read)
        except RuntimeError as error:
            return str(error)
        return None

    def _start_thread(self, line: _Line, what: str, loop: Callable[[_Line], None]) -> None:
        thread = Thread(target=loop, args=(line,), name=f"{self.name}-{what}-{line.stream.index}", daemon=True)
        thread.start()
        line.threads.append(thread)
