"""Every way a group ends: violations, lost sockets, ERROR, close from any thread, failing callbacks, no leaks."""

import errno
import gc
import struct
import threading
import time
import weakref
from pathlib import Path

import pytest

from tests.support.raw_sockets import LAYOUT, PATIENCE_S, SMALL_BUFFER, Recorder, Rig, loopback, raw, reset
from tests.support.waiting import until
from tests.support.wire_by_hand import chunk, frame, limits_to
from yeto_torch.wire.constants import Direction, MessageType
from yeto_torch.wire.errors import LocalError, PeerError
from yeto_torch.wire.messages import (
    BcastFragment,
    Error,
    FinalAck,
    Heartbeat,
    InitParams,
    PullReq,
    PushFragment,
    Shutdown,
)
from yeto_torch.wire.transport import group as module
from yeto_torch.wire.transport.group import Group
from yeto_torch.wire.transport.sockets import Stream

UP, DOWN = Direction.TO_SYNCER, Direction.TO_LEARNER
M = MessageType
CLOSED_HERE = "closed here"


def push(fragment: int, nbytes: int | None = None, where: int | None = None) -> PushFragment:
    nbytes = LAYOUT.numels[fragment] * 4 if nbytes is None else nbytes
    return PushFragment(0, fragment if where is None else where, 1, 1, 0, 5, 5, 50, bytes(nbytes))


# ---------------------------------------------------------------------------------------------------- violations

BAD_FRAMES = {
    "magic": (b"\0" * 13, "magic"),
    "an HTTP request": (b"GET / HTTP/1.1\r\n\r\n", "magic"),
    "unknown type": (frame(99), "type 99"),
    "other direction": (raw(Shutdown()), "SHUTDOWN"),
    "too long": (frame(M.HEARTBEAT, length=13), "at most 12"),
    "too short": (frame(M.HEARTBEAT, bytes(11)), "expected 12"),
    "a push of attempt 0": (frame(M.PUSH_FRAGMENT, bytes(48 + 40)), "attempt 0"),
    "a push of too few bytes": (raw(push(1, 3996)), "expected 4000"),
    "a push of too many bytes": (raw(push(1, 4004)), "expected 4000"),
    "an unknown fragment": (raw(push(0, where=3)), "fragment 3"),
    "control in a CHUNK": (chunk(0, 25, 0, raw(Heartbeat(0, 1))), "inside CHUNK"),
    "overlapping chunks": (chunk(0, 100, 0, b"ab") + chunk(0, 100, 1, b"bc"), "overlaps"),
    "an ERROR to the syncer": (raw(Error("x")), "ERROR"),
}


@pytest.mark.parametrize("stream", [0, 2])
@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_violation_ends_the_group_and_says_so_to_the_peer(rig, name, stream):
    group, recorder, peer = rig.group(2)
    bad, why = BAD_FRAMES[name]
    peer.say(bad, stream)
    closed = recorder.wait_closed()
    assert isinstance(closed.violation, PeerError)
    assert why in str(closed.violation)
    assert str(closed.violation) in closed.reason
    assert ("data stream 1" if stream else "control stream") in closed.reason
    assert group.closed
    assert peer.frames(0) == [(M.ERROR, str(closed.violation).encode())]
    peer.socks[0].close()
    assert peer.frames(1) == peer.frames(2) == []
    assert not recorder.messages


def test_nothing_after_a_violation_is_used(rig):
    _, recorder, peer = rig.group(1)
    peer.say(raw(Heartbeat(0, 1)) + frame(99) + raw(Heartbeat(0, 2)))
    recorder.wait_closed()
    peer.say(raw(push(0)), 1)
    assert peer.frames(0)
    assert recorder.messages == [Heartbeat(0, 1)]
    assert recorder.late == []


def test_control_frames_belong_on_stream_0(rig):
    _, recorder, peer = rig.group(1)
    peer.say(raw(Heartbeat(0, 1)), 1)
    assert "HEARTBEAT on data stream 0" in str(recorder.wait_closed().violation)


def test_a_learner_closes_without_a_word(rig):
    _, recorder, peer = rig.group(1, inbound=DOWN)
    peer.say(raw(Heartbeat(0, 1)))
    assert isinstance(recorder.wait_closed().violation, PeerError)
    assert peer.frames(0) == peer.frames(1) == []


def test_a_callback_may_find_the_violation(rig):
    def on_message(*_):
        raise PeerError("PUSH of learner 7 on the connection of learner 0")

    recorder = Recorder()
    _, _, peer = rig.group(0, on_message=on_message, on_closed=recorder.on_closed)
    peer.say(raw(Heartbeat(7, 1)))
    assert "learner 7" in str(recorder.wait_closed().violation)
    assert peer.frames() == [(M.ERROR, b"PUSH of learner 7 on the connection of learner 0")]


def test_too_many_partial_messages(rig):
    """A stalled stream brings an honest learner here: a bare close, so that it dials again."""
    _, recorder, peer = rig.group(1)
    for number in range(65):
        peer.say(chunk(number, 101, 0, b"x"), number % 2)
    assert "64 partial" in str(recorder.wait_closed().violation)
    assert peer.frames(0) == peer.frames(1) == []


# ---------------------------------------------------------------------------------------------------- ERROR


def test_an_error_reaches_a_peer_that_never_stopped_sending(rig):
    """Unread bytes in our buffer must not turn our close into a reset that eats the text."""
    gate = rig.gate()
    group, _, peer = rig.group(1, on_message=lambda *_: gate.wait(PATIENCE_S))
    stop = threading.Event()

    def flood(stream):
        piece = raw(push(2)) * 4
        try:
            while not stop.is_set():
                peer.say(piece, stream)
        except OSError:
            return

    writers = [threading.Thread(target=flood, args=(stream,)) for stream in (0, 1)]
    for writer in writers:
        writer.start()
    until(lambda: group.bytes_received > 100_000)  # both readers are blocked and the buffers fill
    group.close(error="enough")
    assert peer.frames(0) == [(M.ERROR, b"enough")]
    stop.set()
    peer.close()
    for writer in writers:
        writer.join(PATIENCE_S)
        assert not writer.is_alive()


def test_an_error_follows_what_is_half_sent(rig):
    group, _, peer = rig.group(0, buffer=SMALL_BUFFER)
    group.send(BcastFragment(2, 1, bytes(400_000)))
    until(lambda: group.bytes_sent > 0)
    group.send(PullReq(0, 1, 1))
    group.close(error="over", linger_s=PATIENCE_S)
    assert not group.send(PullReq(1, 1, 1))
    assert [kind for kind, _ in peer.frames()] == [M.BCAST_FRAGMENT, M.ERROR]


def test_an_error_does_not_wait_for_stalled_data_streams(rig):
    group, _, peer = rig.group(1, buffer=SMALL_BUFFER)
    group.send(BcastFragment(2, 1, bytes(400_000)))
    until(lambda: peer.readable(1) == [1])
    begin = time.monotonic()
    group.close(error="over", linger_s=600)
    assert peer.frames(0) == [(M.ERROR, b"over")]
    peer.close()
    assert group.join(PATIENCE_S)
    assert time.monotonic() - begin < PATIENCE_S


def test_an_error_does_not_need_the_data_streams(rig):
    text = "x" * 60_000
    group, _, peer = rig.group(1, buffer=SMALL_BUFFER, name="half-lost")
    group.send(BcastFragment(2, 1, bytes(400_000)))
    until(lambda: peer.readable(1) == [1])
    group.close(error=text, linger_s=PATIENCE_S)
    until(lambda: peer.readable(0) == [0])
    reset(peer.socks[1])
    until(lambda: not {"half-lost-write-1", "half-lost-read-1"} & {thread.name for thread in threading.enumerate()})
    assert peer.frames(0) == [(M.ERROR, text.encode())]


def test_a_peer_that_never_reads_its_error_is_bounded(rig):
    group, recorder, _ = rig.group(1, buffer=SMALL_BUFFER)
    group.send(BcastFragment(2, 1, bytes(400_000)))
    group.close(error="x" * 60_000, linger_s=0.3)
    recorder.wait_closed()
    assert group.join(PATIENCE_S)


def test_a_group_that_never_started_says_its_error(rig):
    group, recorder, peer = rig.group(1, start=False)
    group.close(error="too late")
    assert peer.frames() == [(M.ERROR, b"too late")]
    peer.close()
    assert recorder.wait_closed().reason == f"{CLOSED_HERE}: too late"
    group.start()
    assert group.join(PATIENCE_S)


def test_the_learner_is_told_why(rig):
    syncer, up, learner, down = rig.couple(2)
    syncer.close(error="another run is in session")
    closed = down.wait_closed()
    assert closed.peer_error == "another run is in session"
    assert closed.peer_error in closed.reason
    assert closed.violation is None
    assert up.wait_closed().reason == f"{CLOSED_HERE}: another run is in session"
    assert syncer.join(PATIENCE_S)
    assert learner.join(PATIENCE_S)


@pytest.mark.parametrize("end", ["fin", "reset"])
def test_the_reason_is_heard_although_the_data_sockets_close_first(rig, end):
    _, recorder, peer = rig.group(2, inbound=DOWN)
    for sock in peer.socks[1:]:
        sock.close() if end == "fin" else reset(sock)
    peer.say(raw(Error("go away")))
    peer.socks[0].close()
    assert recorder.wait_closed().peer_error == "go away"


def test_the_last_frame_is_heard_although_the_data_sockets_close_first(rig):
    _, recorder, peer = rig.group(2)
    for sock in peer.socks[1:]:
        sock.close()
    peer.say(raw(FinalAck(9)))
    peer.socks[0].close()
    recorder.wait_closed()
    assert recorder.messages == [FinalAck(9)]


def test_an_error_on_a_data_stream_is_only_a_lost_group(rig):
    _, recorder, peer = rig.group(2, inbound=DOWN)
    peer.say(raw(Error("stream 1 is a duplicate")), 2)
    closed = recorder.wait_closed()
    assert closed.peer_error is None
    assert closed.violation is None
    assert "stream 1 is a duplicate" in closed.reason


def test_a_learner_never_says_error(rig):
    group, _, peer = rig.group(0, inbound=DOWN)
    group.send(FinalAck(1))
    group.close(error="cannot be said", linger_s=PATIENCE_S)
    assert peer.frames() == [(M.FINAL_ACK, raw(FinalAck(1))[13:])]


# ---------------------------------------------------------------------------------------------------- lost sockets


@pytest.mark.parametrize("half", [False, True], ids=["between frames", "inside a frame"])
@pytest.mark.parametrize("end", ["fin", "reset"])
@pytest.mark.parametrize("stream", [0, 1, 3])
@pytest.mark.parametrize("inbound", [UP, DOWN])
def test_losing_any_socket_ends_the_group_soon(rig, inbound, stream, end, half):
    _, recorder, peer = rig.group(3, inbound=inbound)
    if half:
        peer.say(raw(push(1))[:30] if inbound is UP else raw(BcastFragment(1, 1, bytes(4000)))[:30], stream)
    begin = time.monotonic()
    sock = peer.socks[stream]
    sock.close() if end == "fin" else reset(sock)
    closed = recorder.wait_closed()
    assert time.monotonic() - begin < 5
    assert (f"data stream {stream - 1}" if stream else "control stream") in closed.reason
    assert closed.violation is None
    assert closed.peer_error is None
    for other in set(range(4)) - {stream}:
        assert peer.at_end(other)


def test_a_peer_lost_while_we_write(rig):
    group, recorder, peer = rig.group(1, buffer=SMALL_BUFFER)
    group.send(BcastFragment(2, 1, bytes(400_000)))
    until(lambda: peer.readable(1) == [1])
    reset(peer.socks[1])
    assert "data stream 0" in recorder.wait_closed().reason


def test_a_send_that_fails_half_way_is_not_begun_again(rig, monkeypatch):
    """Also where the socket would go on: a second beginning behind half a frame would be nonsense to the peer."""
    group, recorder, peer = rig.group(1)
    whole = raw(PullReq(1, 7, 1))

    write_some, calls = Stream._write_some, []

    def fail_once(stream, views):
        calls.append(len(views[0]))
        if len(calls) == 1:
            stream._sock.send(views[0][:5])
            views[0] = views[0][5:]
            return True
        if len(calls) == 2:
            raise OSError(errno.ENOBUFS, "no buffer space")
        return write_some(stream, views)

    monkeypatch.setattr(Stream, "_write_some", fail_once)
    assert group.send(PullReq(1, 7, 1))
    assert "lost while writing: no buffer space" in recorder.wait_closed().reason.lower()
    peer.socks[0].settimeout(PATIENCE_S)
    got = b""
    while part := peer.socks[0].recv(4096):
        got += part
    assert got == whole[:5]


# ---------------------------------------------------------------------------------------------------- closing


def test_closing_flushes_what_is_queued_when_told_to(rig):
    group, recorder, peer = rig.group(2, buffer=SMALL_BUFFER)
    for fragment in range(3):
        group.send(BcastFragment(fragment, 1, bytes(4 * LAYOUT.numels[fragment])))
    group.send(Shutdown())
    group.close(linger_s=PATIENCE_S)
    assert recorder.wait_closed().reason == CLOSED_HERE
    got = [struct.unpack_from("<Q", peer.frame(stream)[1])[0] for stream in (1, 2, 1)]
    assert got == [0, 1, 2]
    assert peer.frames(0) == [(M.SHUTDOWN, b"")]
    assert peer.readable(1, 2) == []  # the data sockets stay until the peer has read the last frame of stream 0
    peer.socks[0].close()
    assert peer.at_end(1)
    assert group.join(PATIENCE_S)


def test_what_comes_while_closing_is_dropped_and_does_not_block_the_peer(rig):
    group, recorder, peer = rig.group(1)
    group.send(Shutdown())
    group.close(linger_s=PATIENCE_S)
    recorder.wait_closed()
    for stream in (0, 1):
        peer.say(raw(push(2)) * 30, stream)  # more than the kernel would hold for a group that does not read
    assert peer.frames() == [(M.SHUTDOWN, b"")]
    peer.close()
    assert group.join(PATIENCE_S)
    assert recorder.messages == []
    assert recorder.late == []


def test_closing_at_once_is_at_once(rig):
    group, recorder, peer = rig.group(2, buffer=SMALL_BUFFER)
    group.send(BcastFragment(2, 1, bytes(400_000)))
    begin = time.monotonic()
    group.close()
    assert group.closed
    assert not group.send(PullReq(0, 1, 1))
    assert recorder.wait_closed().reason == CLOSED_HERE
    assert group.join(PATIENCE_S)
    assert time.monotonic() - begin < 5
    assert peer.frames(0) == []


def test_the_first_close_decides(rig):
    group, recorder, peer = rig.group(0)
    group.close(error="first")
    group.close()
    group.close(error="second", linger_s=9)
    assert peer.frames() == [(M.ERROR, b"first")]
    peer.close()
    assert recorder.wait_closed().reason == f"{CLOSED_HERE}: first"


def test_a_flush_that_can_no_longer_succeed_ends(rig):
    group, _, peer = rig.group(1, buffer=SMALL_BUFFER)
    group.send(BcastFragment(2, 1, bytes(400_000)))
    until(lambda: peer.readable(1) == [1])
    group.close(linger_s=600)
    for sock in peer.socks:
        reset(sock)
    assert group.join(PATIENCE_S)


@pytest.mark.parametrize("where", ["on_message", "on_sent", "on_closed", "threads", "reader and writer"])
def test_close_from_every_thread(rig, where):
    recorder, box = Recorder(), []

    def on_message(message, now):
        recorder.on_message(message, now)
        if where in ("on_message", "reader and writer"):
            box[0].close(error="from on_message" if where == "on_message" else None)
            box[0].join(0)

    def on_closed(closed):
        recorder.on_closed(closed)
        if where == "on_closed":
            box[0].close()

    group, _, peer = rig.group(2, on_message=on_message, on_closed=on_closed)
    box.append(group)
    close_on_sent = group.close if where in ("on_sent", "reader and writer") else None
    group.send(PullReq(0, 1, 1), close_on_sent)
    peer.say(raw(Heartbeat(0, 1)))
    if where == "threads":
        threads = [threading.Thread(target=group.close, args=(error,)) for error in ("a", None, "b", None) * 5]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    elif where == "on_closed":
        peer.close()
    recorder.wait_closed()
    peer.close()
    assert group.join(PATIENCE_S)
    assert len(recorder.closed) == 1
    assert recorder.late == []


def test_on_closed_comes_behind_a_running_on_message(rig):
    gate, order = rig.gate(), []

    def on_message(*_):
        order.append("enter")
        gate.wait(PATIENCE_S)
        order.append("leave")

    group, _, peer = rig.group(0, on_message=on_message, on_closed=lambda _: order.append("closed"))
    peer.say(raw(Heartbeat(0, 1)) + raw(Heartbeat(0, 2)))
    until(lambda: order == ["enter"])
    group.close()
    assert peer.at_end()  # the peer need not wait for the callback
    gate.set()
    assert group.join(PATIENCE_S)
    assert order == ["enter", "leave", "closed"]


def test_a_callback_that_never_returns_does_not_hide_the_end(rig, monkeypatch):
    monkeypatch.setattr(module, "_CALLBACK_S", 0.1)
    gate, recorder = rig.gate(), Recorder()
    group, _, peer = rig.group(0, on_message=lambda *_: gate.wait(PATIENCE_S), on_closed=recorder.on_closed)
    peer.say(raw(Heartbeat(0, 1)))
    until(lambda: group._callbacks == 1)
    group.close()
    recorder.wait_closed()


# ---------------------------------------------------------------------------------------------------- our own faults


@pytest.mark.parametrize("stream", [0, 1])
def test_an_exception_of_on_message_is_logged_and_ends_the_group(rig, caplog, stream):
    def on_message(*_):
        raise ZeroDivisionError("a bug of ours")

    recorder = Recorder()
    _, _, peer = rig.group(1, on_message=on_message, on_closed=recorder.on_closed)
    peer.say(raw(push(0)), stream)
    closed = recorder.wait_closed()
    assert "a bug of ours" in closed.reason
    assert closed.violation is None
    assert peer.frames(0) == []
    assert "ZeroDivisionError" in caplog.text


def test_an_exception_of_on_sent_is_logged_and_ends_the_group(rig, caplog):
    group, recorder, _ = rig.group(0)
    group.send(PullReq(0, 1, 1), lambda: 1 // 0)
    assert "ZeroDivisionError" in recorder.wait_closed().reason
    assert "ZeroDivisionError" in caplog.text


def test_an_exception_of_on_closed_is_logged(rig, caplog):
    group, _, _ = rig.group(1, on_closed=lambda _: 1 // 0)
    group.close()
    assert group.join(PATIENCE_S)
    assert "ZeroDivisionError" in caplog.text


def test_a_message_that_cannot_be_encoded_ends_the_group(rig, caplog):
    group, recorder, _ = rig.group(0)
    group.send(PullReq(2**40, 1, 1))
    assert "internal error" in recorder.wait_closed().reason
    assert "struct.error" in caplog.text


def test_no_memory_for_a_message_is_a_reason(rig, monkeypatch):
    def refuse(*_):
        raise MemoryError("no memory for a message of 4061 bytes")

    monkeypatch.setattr("yeto_torch.wire.buffers.Spare.allocate", refuse)
    _, recorder, peer = rig.group(1)
    peer.say(chunk(0, 4061, 0, b"x"), 1)
    assert "no memory" in recorder.wait_closed().reason


def test_no_thread_for_a_socket_is_a_reason(rig, monkeypatch):
    group, recorder, _ = rig.group(1, start=False)
    start = threading.Thread.start

    def refuse_readers(thread):
        if "-read-" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_readers)
    group.start()
    assert "can't start new thread" in recorder.wait_closed().reason
    assert group.join(PATIENCE_S)


def test_attach_says_what_is_wrong(rig):
    group, recorder, peer = rig.group(2, attach=1)
    spare = group.spare[1]
    for index, why in [(2, "declared 2"), (-1, "declared 2"), (0, "already")]:
        with pytest.raises(PeerError, match=why):
            group.attach(index, spare)
    assert not recorder.closed
    group.attach(1, spare)  # still ours until it was accepted
    group.close()
    with pytest.raises(LocalError, match=CLOSED_HERE):
        group.attach(1, spare)
    assert peer.at_end(2)


# ---------------------------------------------------------------------------------------------------- leaks


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_of_many_groups():
    gc.collect()
    threads, files = set(threading.enumerate()), descriptors()
    for number in range(30):
        rig = Rig()
        group, recorder, peer = rig.group(number % 4, inbound=(UP, DOWN)[number % 2])
        group.send(PullReq(0, 1, 1))
        match number % 5:
            case 0:
                group.close(error="x")
            case 1:
                peer.say(b"\0" * 13)
            case 2:
                peer.close()
            case 3:
                group.close()
        rig.finish()
        assert len(recorder.closed) == 1
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert descriptors() == files


def test_threads_are_named_and_daemons(rig):
    group, _, _ = rig.group(1, name="learner-3")
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("learner-3-")]
    names = {"learner-3-read-0", "learner-3-write-0", "learner-3-read-1", "learner-3-write-1", "learner-3-close"}
    assert {thread.name for thread in mine} == names
    assert all(thread.daemon for thread in mine)
    assert group.name == "learner-3"


def test_a_group_is_collected_once_it_ended():
    near, far = loopback()
    group = Group(near, limits_to(UP, LAYOUT), 0, on_message=print, on_closed=lambda _: None)
    group.start()
    far.close()
    assert group.join(PATIENCE_S)
    gone = threading.Event()
    weakref.finalize(group, gone.set)
    del group
    gc.collect()
    assert gone.wait(PATIENCE_S)


def test_init_bytes_survive_the_end_of_the_group(rig):
    """A message handed on is the receiver's: closing frees nothing under it."""
    group, recorder, peer = rig.group(1)
    message = InitParams(1, bytes(range(250)) * 16)
    peer.say(raw(message), 1)
    (got,) = recorder.wait_messages(1)
    group.close()
    assert group.join(PATIENCE_S)
    assert bytes(got.data) == message.data
