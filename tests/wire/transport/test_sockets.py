"""The single-socket pieces against real sockets: dialling, first frames, refusals, writing, options."""

import socket
import struct
import threading
import time

import pytest

from tests.support.raw_sockets import (
    PATIENCE_S,
    SMALL_BUFFER,
    a_refusal_is_bounded,
    a_shutdown_wakes_both_sides,
    a_slow_reader_is_waited_for,
    in_thread,
    is_done,
    loopback,
    reset,
)
from tests.support.waiting import until
from tests.support.wire_by_hand import HELLO_G, frame, golden, same
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.messages import BcastFragment, Error, decode, encode
from yeto_torch.wire.transport import sockets
from yeto_torch.wire.transport.sockets import Stream, dial, read_first_frame, refuse, send_parts, tune


@pytest.fixture
def pair():
    near, far = loopback()
    far.settimeout(PATIENCE_S)
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def narrow():
    near, far = loopback(SMALL_BUFFER)
    far.settimeout(PATIENCE_S)
    yield near, far
    near.close()
    far.close()


def receive_all(sock: socket.socket) -> bytes:
    out = bytearray()
    while part := sock.recv(65536):
        out += part
    return bytes(out)


# ---------------------------------------------------------------------------------------------------- dial


def test_dial_connects_and_tunes():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = dial(*listener.getsockname(), timeout_s=5)
        assert sock.gettimeout() is None
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 30  # below what NAT forgets
        sock.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", r"127\.0\.0\.1: connection refused"), ("no-such-host.invalid", "does not resolve")],
)
def test_a_failed_dial_says_what_was_tried(host, why):
    port = free_port()
    with pytest.raises(ConnectionError, match=f"cannot reach {host}:{port}.*{why}"):
        dial(host, port, timeout_s=5)


def test_a_silent_address_is_given_up_in_time():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = []
    try:
        for _ in range(3):  # fill the accept queue; further connection requests go unanswered
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        begin = time.monotonic()
        with pytest.raises(ConnectionError, match=r"within 0\.3 s.*timed out"):
            dial(*listener.getsockname(), timeout_s=0.3)
        assert time.monotonic() - begin < 5
    finally:
        for sock in (listener, *fillers):
            sock.close()


def test_a_socket_that_met_itself_is_no_connection(monkeypatch):
    """Dialling a free local port may, rarely, connect a socket to itself; here it is made to."""

    class Narcissus(socket.socket):
        def connect(self, address):
            self.bind(address)
            super().connect(address)

    monkeypatch.setattr(sockets.socket, "socket", Narcissus)
    with pytest.raises(ConnectionError, match="refused"):
        dial("127.0.0.1", free_port(), timeout_s=5)


def test_tune_bears_sockets_that_are_not_tcp_or_gone():
    left, right = socket.socketpair()
    tune(left)
    right.close()
    left.close()
    tune(left)


# ---------------------------------------------------------------------------------------------------- first frame


def test_a_first_frame_is_read_and_nothing_behind_it(pair):
    near, far = pair
    hello = b"".join(encode(HELLO_G))
    far.sendall(hello + frame(6, bytes(12)))
    whole = read_first_frame(near, 5)
    assert same(decode(whole.kind, whole.payload), HELLO_G)
    assert near.recv(100) == frame(6, bytes(12))
    assert near.gettimeout() is None


def test_a_trickling_first_frame_is_read(pair):
    near, far = pair

    def trickle():
        for byte in golden("data_hello_frame"):
            far.sendall(bytes([byte]))

    thread = in_thread(trickle)
    assert read_first_frame(near, PATIENCE_S).kind == 8
    thread.join()


def test_bytes_do_not_extend_the_deadline(pair):
    near, far = pair
    stop = threading.Event()

    def drip():
        far.sendall(frame(1, length=10_000))
        while not stop.wait(0.02):
            far.sendall(b"\0")

    thread = in_thread(drip)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.3 s"):
        read_first_frame(near, 0.3)
    assert 0.25 < time.monotonic() - begin < 5
    stop.set()
    thread.join()


def test_silence_after_some_bytes_has_the_same_deadline(pair):
    near, far = pair
    late = threading.Timer(0.8, far.sendall, [frame(1, length=10_000)])
    late.start()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        read_first_frame(near, 1.0)
    assert time.monotonic() - begin < 1.6
    late.join()


@pytest.mark.parametrize("sent", [0, 1, 13, 28])
def test_a_socket_that_closes_early_is_a_lost_connection(pair, sent):
    near, far = pair
    far.sendall(golden("data_hello_frame")[:sent])
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="before its first frame"):
        read_first_frame(near, PATIENCE_S)


@pytest.mark.parametrize("raw", [b"GET / HTTP/1.1\r\n", frame(3, bytes(16)), frame(8, length=17)])
def test_a_wrong_first_frame_is_a_violation(pair, raw):
    near, far = pair
    far.sendall(raw)
    with pytest.raises(PeerError):
        read_first_frame(near, PATIENCE_S)


# ---------------------------------------------------------------------------------------------------- refuse


def test_a_refusal_arrives_although_the_peer_keeps_sending(pair):
    near, far = pair
    stop = threading.Event()

    def flood():
        try:
            while not stop.is_set():
                far.sendall(bytes(65536))
        except OSError:
            return

    writer = in_thread(flood)
    until(lambda: len(near.recv(65536, socket.MSG_PEEK)) > 0)
    closer = in_thread(refuse, near, "no, thank you")
    expected = b"".join(encode(Error("no, thank you")))
    got = b""
    while len(got) < len(expected):
        got += far.recv(len(expected) - len(got))
    assert got == expected
    assert far.recv(1) == b""
    stop.set()
    writer.join()
    far.close()
    is_done(closer, near)


def test_a_refusal_of_a_peer_that_does_not_read_is_bounded(narrow, monkeypatch):
    near, far = narrow
    monkeypatch.setattr(sockets, "REFUSAL_S", 0.2)
    a_refusal_is_bounded(near)
    assert far.recv(1)


def test_a_refusal_of_a_peer_that_is_gone_is_silent(pair):
    near, far = pair
    reset(far)
    refuse(near, "hello?")
    assert near.fileno() == -1


# ---------------------------------------------------------------------------------------------------- stream


def test_parts_are_written_in_order_across_full_buffers(narrow):
    near, far = narrow
    parts = [bytes([i % 256]) * size for i, size in enumerate([1, 0, 200_000, 13, 0, 77_777, *range(40)])]
    stream = Stream(2, near)
    writer = in_thread(stream.write, parts, PATIENCE_S)
    total = sum(map(len, parts))
    got = bytearray()
    while len(got) < total:
        got += far.recv(5_000)
    writer.join()
    assert bytes(got) == b"".join(parts)
    assert stream.bytes_sent == total
    assert str(stream) == "data stream 1"


def test_a_tensor_is_written_from_where_it_lies(pair):
    near, far = pair
    values = memoryview(struct.pack("<4f", 1, 2, 3, 4)).cast("f")
    send_parts(near, encode(BcastFragment(0, 1, values)), PATIENCE_S)
    near.shutdown(socket.SHUT_WR)
    assert receive_all(far)[25:] == values.tobytes()


def test_the_write_timeout_counts_from_the_last_byte_accepted(narrow):
    near, far = narrow
    a_slow_reader_is_waited_for(Stream(0, near), lambda: far.recv(100_000), pace_s=0.02)


def test_a_shutdown_wakes_a_stalled_writer_and_a_reader(narrow):
    stream = Stream(0, narrow[0])
    a_shutdown_wakes_both_sides(stream, stalled=lambda: stream.bytes_sent > 0)


def test_lingering_ends_with_the_peer_or_the_deadline(pair):
    near, far = pair
    stream = Stream(0, near)
    far.sendall(bytes(100_000))
    begin = time.monotonic()
    stream.linger(begin + 0.2)
    assert 0.15 < time.monotonic() - begin < 5
    assert far.recv(1) == b""
    far.close()
    stream.linger(time.monotonic() + 600)  # the end of the peer is enough
