"""TLS over real sockets: who is trusted, what a failed handshake says, and that bytes pass as they do without it.

Source: rulings §2.9; docs/quickstart.md, "Over the internet".
"""

import random
import select
import socket
import ssl
import threading
import time

import pytest

from tests.support.certificates import Authority
from tests.support.raw_sockets import (
    LAYOUT,
    PATIENCE_S,
    SMALL_BUFFER,
    Recorder,
    a_refusal_is_bounded,
    a_shutdown_wakes_both_sides,
    a_slow_reader_is_waited_for,
    in_thread,
    is_done,
    loopback,
)
from tests.support.waiting import until
from tests.support.wire_by_hand import HELLO_G, frame, limits_to, same
from yeto_torch.wire.constants import Direction, WireDType
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.messages import BcastFragment, Error, Heartbeat, PushFragment, decode, encode
from yeto_torch.wire.transport import sockets
from yeto_torch.wire.transport.group import Group
from yeto_torch.wire.transport.sockets import Stream, dial, read_first_frame, refuse, send_parts
from yeto_torch.wire.transport.tls import (
    ClientTls,
    NotTlsError,
    TlsError,
    TlsFileError,
    TlsSocket,
    client_context,
    server_context,
)


class World:
    """Two authorities and what they signed; none of it ever changes."""

    def __init__(self, folder):
        self.folder = folder
        self.ours, self.theirs = Authority(folder, "ours"), Authority(folder, "theirs")
        self.server = self.ours.issue("server", "127.0.0.1", "localhost", "syncer.example", "fe80::1")
        self.client, self.stranger = self.ours.issue("client"), self.theirs.issue("client")

    def accepting(self, pair=None, client_ca=None):
        pair = pair or self.server
        return server_context(pair.cert, pair.key, client_ca)

    def dialling(self, name="127.0.0.1", ca=None, own=None):
        return ClientTls(client_context(ca or self.ours.ca, own and own.cert, own and own.key), name)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("certificates"))


class Meeting:
    """Both ends of one connection while they shake hands: what each got, or the error it met."""

    def __init__(self, server, client, buffer=None):
        self.near, self.far = loopback(buffer)
        self.client = self.server = None
        accepting = threading.Thread(target=self._accept, args=(server,), daemon=True)
        accepting.start()
        try:
            self.client = client.connect(self.near, PATIENCE_S)
        except TlsError as error:
            self.client = error
        accepting.join(PATIENCE_S)
        assert not accepting.is_alive()

    def _accept(self, context):
        secured = TlsSocket(self.far, context, server_side=True)
        try:
            secured.handshake(PATIENCE_S)
            self.server = secured
        except TlsError as error:
            self.server = error

    def close(self):
        self.near.close()
        self.far.close()


@pytest.fixture
def meet(world):
    """Makes meetings of two ends and closes them."""
    made = []

    def meet(server=None, client=None, buffer=None):
        made.append(Meeting(server or world.accepting(), client or world.dialling(), buffer))
        return made[-1]

    yield meet
    for meeting in made:
        meeting.close()


@pytest.fixture
def pair(meet):
    meeting = meet()
    return meeting.client, meeting.server


@pytest.fixture
def narrow(meet):
    meeting = meet(buffer=SMALL_BUFFER)
    return meeting.client, meeting.server


def exactly(sock, count):
    sock.settimeout(PATIENCE_S)
    out, room = bytearray(), memoryview(bytearray(100_000))
    while len(out) < count:
        got = sock.recv_into(room[: count - len(out)])
        assert got, f"closed after {len(out)} of {count} bytes"
        out += room[:got]
    return bytes(out)


def at_end(sock):
    sock.settimeout(PATIENCE_S)
    return sock.recv_into(bytearray(1)) == 0


# ---------------------------------------------------------------------------------------------------- files


def test_files_that_cannot_serve_are_told_apart(world):
    cert, key = world.server.cert, world.server.key
    junk, nothing = world.folder / "junk", world.folder / "nothing"
    junk.write_text("not PEM at all\n")
    locked = world.ours.issue("locked", passphrase=b"sesame")
    wrong = [
        ((nothing, key), "cert", "readable"),
        ((world.folder, key), "cert", "readable"),
        ((junk, key), "cert", "PEM"),
        ((key, key), "cert", "certificate"),
        ((cert, nothing), "key", "readable"),
        ((cert, junk), "key", "PEM"),
        ((cert, cert), "key", "private key"),
        ((cert, world.client.key), "key", "another one"),
        ((locked.cert, locked.key), "key", "passphrase"),
        ((cert, key, nothing), "ca", "readable"),
        ((cert, key, junk), "ca", "PEM"),
    ]
    for arguments, which, legal in wrong:
        with pytest.raises(TlsFileError) as caught:
            server_context(*arguments)
        assert caught.value.which == which
        assert legal in caught.value.legal
        assert "BEGIN" not in str(caught.value)
    for arguments, which in [((junk,), "ca"), ((world.ours.ca, junk, key), "cert"), ((None, cert, junk), "key")]:
        with pytest.raises(TlsFileError) as caught:
            client_context(*arguments)
        assert caught.value.which == which


@pytest.mark.parametrize("name", ["", ".leading.dot", "a\0b"])
def test_a_server_name_that_can_be_no_name(name, world):
    with pytest.raises(ValueError, match="is no host name"):
        world.dialling(name)


# ---------------------------------------------------------------------------------------------------- trust


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "syncer.example", "fe80::1"])
def test_names_and_addresses_of_the_certificate_are_accepted(name, meet, world):
    meeting = meet(client=world.dialling(name))
    assert isinstance(meeting.client, TlsSocket)
    assert meeting.client._tls.version() == "TLSv1.3"
    send_parts(meeting.client, [b"hello"], PATIENCE_S)
    assert exactly(meeting.server, 5) == b"hello"


def test_a_server_that_is_not_trusted_is_refused_with_the_reason(meet, world):
    expired = world.ours.issue("expired", "127.0.0.1", age_days=9)
    for server, client, told in [
        (None, world.dialling("other.example"), "Hostname mismatch"),
        (None, world.dialling("127.0.0.2"), "IP address mismatch"),
        (None, world.dialling(ca=world.theirs.ca), "unable to get local issuer certificate"),
        (world.accepting(expired), None, "expired"),
    ]:
        meeting = meet(server, client)
        assert "TLS: the other side's certificate is not accepted" in str(meeting.client)
        assert told in str(meeting.client)
        assert "TLS: the other side does not accept our certificate" in str(meeting.server), "the alert arrived"


def test_system_authorities_do_not_know_ours(meet):
    meeting = meet(client=ClientTls(client_context(), "127.0.0.1"))
    assert "not accepted" in str(meeting.client)


def test_a_client_certificate_is_required_where_an_authority_is_named(meet, world):
    server = world.accepting(client_ca=world.ours.ca)
    meeting = meet(server, world.dialling(own=world.client))
    send_parts(meeting.server, [b"welcome"], PATIENCE_S)
    assert exactly(meeting.client, 7) == b"welcome"
    for own, here, there in [
        (None, "shows no client certificate", "requires a client certificate"),
        (world.stranger, "certificate is not accepted", "does not accept our certificate"),
    ]:
        meeting = meet(server, world.dialling(own=own))
        assert here in str(meeting.server)
        with pytest.raises(TlsError, match=f"TLS: the other side {there}"):  # TLS 1.3 tells a client when it reads
            exactly(meeting.client, 1)
        with pytest.raises(TlsError, match=there):  # and again, for whoever asks later
            exactly(meeting.client, 1)


def test_older_versions_are_refused_on_both_sides(meet, world):
    old = world.dialling()
    old.context.minimum_version = ssl.TLSVersion.TLSv1_2
    old.context.maximum_version = ssl.TLSVersion.TLSv1_2
    meeting = meet(client=old)
    assert "TLS: both sides must speak version 1.3" in str(meeting.server)
    assert "TLS: both sides must speak version 1.3" in str(meeting.client)
    server = world.accepting()
    server.minimum_version = server.maximum_version = ssl.TLSVersion.TLSv1_2
    meeting = meet(server)
    assert "TLS: both sides must speak version 1.3" in str(meeting.server)


# ---------------------------------------------------------------------------------------------------- no TLS there


@pytest.mark.parametrize("said", [b"".join(encode(HELLO_G)), b"GET / HTTP/1.1\r\n", b"\0"])
def test_who_does_not_speak_tls_is_recognised_by_the_first_byte(said, world):
    near, far = loopback()
    far.sendall(said)
    with pytest.raises(NotTlsError, match="TLS: the other side does not speak it"):
        TlsSocket(near, world.accepting(), server_side=True).handshake(PATIENCE_S)
    far.close()
    near.close()


def test_tls_at_a_plain_port_is_told_on_both_sides(world):
    near, far = loopback()
    told = []

    def plain_syncer():
        with pytest.raises(PeerError) as caught:
            read_first_frame(far, PATIENCE_S)
        told.append(str(caught.value))
        refuse(far, told[0])

    thread = in_thread(plain_syncer)
    with pytest.raises(NotTlsError, match="TLS: the other side does not speak it"):
        world.dialling().connect(near, PATIENCE_S)
    near.close()
    thread.join(PATIENCE_S)
    assert told == ["the peer speaks TLS, but this port does not"]


def test_dial_names_the_address_and_closes_what_it_opened(world):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer():
            sock, _ = listener.accept()
            refuse(sock, "plain words")

        thread = in_thread(answer)
        with pytest.raises(TlsError, match=rf"cannot reach 127\.0\.0\.1:{port} securely: TLS: .* does not speak it"):
            dial("127.0.0.1", port, PATIENCE_S, world.dialling())
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the socket was left open"


def test_dial_with_tls_gives_a_tuned_socket(world):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        got = []

        def answer():
            sock, _ = listener.accept()
            secured = TlsSocket(sock, world.accepting(), server_side=True)
            secured.handshake(PATIENCE_S)
            got.append(read_first_frame(secured, PATIENCE_S))
            secured.close()

        thread = in_thread(answer)
        sock = dial(*listener.getsockname(), PATIENCE_S, world.dialling())
        assert sock.tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        send_parts(sock, encode(HELLO_G), PATIENCE_S)
        thread.join(PATIENCE_S)
        assert same(decode(got[0].kind, got[0].payload), HELLO_G)
        sock.close()


# ---------------------------------------------------------------------------------------------------- time


def test_a_handshake_has_one_deadline_whatever_trickles_in(world):
    near, far = loopback()
    stop = threading.Event()

    def drip():
        far.sendall(b"\x16\x03\x01\x40\x00")  # a record of 16 KiB is announced
        while not stop.wait(0.02):
            far.sendall(b"\0")

    thread = in_thread(drip)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no TLS handshake within 0\.3 s"):
        TlsSocket(near, world.accepting(), server_side=True).handshake(0.3)
    assert 0.25 < time.monotonic() - begin < 5
    stop.set()
    thread.join()
    near.close()
    far.close()


def test_dial_gives_a_silent_server_no_more_than_its_timeout(world):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begin = time.monotonic()
        with pytest.raises(ConnectionError, match="no TLS handshake within") as caught:
            dial(*listener.getsockname(), 0.3, world.dialling())
        assert time.monotonic() - begin < 5
        assert not isinstance(caught.value, TlsError), "worth another attempt"


def test_a_peer_that_leaves_during_the_handshake_is_a_lost_connection(world):
    near, far = loopback()
    far.sendall(b"\x16\x03\x01")
    far.close()
    with pytest.raises(ConnectionResetError, match="during the TLS handshake"):
        TlsSocket(near, world.accepting(), server_side=True).handshake(PATIENCE_S)
    near.close()


def test_a_shutdown_ends_a_handshake(world):
    near, far = loopback()
    met = []

    def shake():
        try:
            TlsSocket(near, world.accepting(), server_side=True).handshake(600)
        except OSError as error:
            met.append(error)

    thread = in_thread(shake)
    far.sendall(b"\x16")
    near.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_S)
    assert len(met) == 1
    near.close()
    far.close()


def test_reading_waits_as_long_as_it_was_told(pair):
    near, far = pair
    near.settimeout(0.05)
    with pytest.raises(TimeoutError):
        near.recv_into(bytearray(1))
    assert near.gettimeout() == 0.05
    with pytest.raises(BlockingIOError):
        near.recv_into(bytearray(1), 0, socket.MSG_DONTWAIT)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        read_first_frame(near, 0.2)
    assert time.monotonic() - begin < 5
    assert near.gettimeout() is None
    send_parts(far, [b"x"], PATIENCE_S)
    assert near.recv_into(bytearray(9)) == 1


def test_the_write_timeout_counts_from_the_last_byte_accepted(narrow):
    near, far = narrow
    far.settimeout(PATIENCE_S)
    room = bytearray(2_000)  # slower than one batch of ciphertext per timeout
    a_slow_reader_is_waited_for(Stream(0, near), lambda: far.tcp.recv_into(room), pace_s=0.05)


# ---------------------------------------------------------------------------------------------------- bytes


def test_bytes_arrive_whole_whatever_the_portions_both_ways_at_once(meet):
    """One thread reads and one writes at each end, through small and ordinary kernel buffers."""
    for seed, buffer in enumerate([None, SMALL_BUFFER, None]):
        meeting = meet(buffer=buffer)
        rng = random.Random(seed)
        sizes = [rng.choice([1, 13, 1000, 16_384, 16_385, 300_000]) for _ in range(25)]
        ends = (meeting.client, meeting.server)
        sent = [[rng.randbytes(size) for size in rng.sample(sizes, len(sizes))] for _ in ends]
        got = [b"", b""]

        def write(end, parts, rng=rng):
            stream = Stream(0, end)
            at = 0
            while at < len(parts):
                count = rng.randrange(1, 6)
                stream.write(parts[at : at + count], PATIENCE_S)
                at += count

        def read(index, ends=ends, sent=sent, got=got):
            got[index] = exactly(ends[index], sum(map(len, sent[1 - index])))

        threads = [in_thread(write, end, parts) for end, parts in zip(ends, sent, strict=True)]
        threads += [in_thread(read, index) for index in range(2)]
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert got == [b"".join(sent[1]), b"".join(sent[0])], f"seed {seed}"


def test_what_is_decrypted_already_needs_no_more_from_the_network(pair):
    near, far = pair
    send_parts(near, [b"a whole record"], PATIENCE_S)
    assert exactly(far, 1) == b"a"
    readable, _, _ = select.select([far], [], [], 0)
    assert not readable, "the rest lies in TLS, not in the kernel"
    assert exactly(far, 13) == b" whole record"


def test_a_first_frame_leaves_what_follows_it(pair):
    near, far = pair
    send_parts(near, [b"".join(encode(HELLO_G)) + frame(6, bytes(12))], PATIENCE_S)
    whole = read_first_frame(far, PATIENCE_S)
    assert same(decode(whole.kind, whole.payload), HELLO_G)
    assert exactly(far, 25) == frame(6, bytes(12))


def test_nothing_readable_is_on_the_wire(meet):
    meeting = meet()
    send_parts(meeting.client, [b"plain secret " * 100], PATIENCE_S)
    room = bytearray(10_000)
    count = meeting.far.recv_into(room)
    assert count > 1300
    assert b"secret" not in room


def test_a_byte_changed_on_the_way_ends_the_connection(pair):
    near, far = pair
    near.tcp.sendall(b"\x17\x03\x03\x00\x30" + bytes(48))  # a record no key has made
    with pytest.raises(TlsError, match=r"TLS: .*bad record mac"):
        exactly(far, 1)


@pytest.mark.parametrize("politely", [True, False])
def test_an_end_with_or_without_goodbye_is_the_end(politely, pair):
    near, far = pair
    send_parts(near, [b"last"], PATIENCE_S)
    (near if politely else near.tcp).shutdown(socket.SHUT_WR)
    assert exactly(far, 4) == b"last"
    assert at_end(far)
    assert at_end(far)


# ---------------------------------------------------------------------------------------------------- the end


def test_a_refusal_arrives_although_the_peer_keeps_sending(pair):
    near, far = pair
    stop = threading.Event()

    def flood():
        stream = Stream(0, far)
        try:
            while not stop.is_set():
                stream.write([bytes(65536)], PATIENCE_S)
        except OSError:
            return

    writer = in_thread(flood)
    until(lambda: len(near.tcp.recv(65536, socket.MSG_PEEK)) > 0)
    closer = in_thread(refuse, near, "no, thank you")
    expected = b"".join(encode(Error("no, thank you")))
    assert exactly(far, len(expected)) == expected
    assert at_end(far)
    stop.set()
    writer.join(PATIENCE_S)
    far.close()
    is_done(closer, near)


def test_a_refusal_of_a_peer_that_does_not_read_is_bounded(narrow, monkeypatch):
    near, far = narrow
    monkeypatch.setattr(sockets, "REFUSAL_S", 0.2)
    a_refusal_is_bounded(near)
    assert far.tcp.recv(1)


def test_a_shutdown_wakes_a_stalled_writer_and_a_reader(narrow):
    near, _ = narrow
    a_shutdown_wakes_both_sides(Stream(0, near), stalled=lambda: bool(near._unsent))


# ---------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("streams", [0, 3])
def test_two_groups_understand_each_other(streams, meet):
    meetings = [meet() for _ in range(1 + streams)]
    groups, heard = [], []
    for side, inbound in (("server", Direction.TO_SYNCER), ("client", Direction.TO_LEARNER)):
        ends = [getattr(meeting, side) for meeting in meetings]
        recorder = Recorder()
        group = Group(
            ends[0],
            limits_to(inbound, LAYOUT, WireDType.F32),
            streams,
            on_message=recorder.on_message,
            on_closed=recorder.on_closed,
            name=side,
        )
        group.start()
        for index, end in enumerate(ends[1:]):
            group.attach(index, end)
        groups.append(group)
        heard.append(recorder)
    syncer, learner = groups
    values = [random.Random(f).randbytes(4 * n) for f, n in enumerate(LAYOUT.numels)]
    for fragment, data in enumerate(values):
        assert syncer.send(BcastFragment(fragment, 1, data))
        assert learner.send(PushFragment(0, fragment, 1, 1, 0, 1, 1, 1, data))
    assert learner.send(Heartbeat(0, 7))
    up, down = heard[0].wait_messages(4), heard[1].wait_messages(3)
    assert {m.fragment: bytes(m.data) for m in up if isinstance(m, PushFragment)} == dict(enumerate(values))
    assert {m.fragment: bytes(m.data) for m in down} == dict(enumerate(values))
    syncer.close("that is all", linger_s=PATIENCE_S)
    assert heard[1].wait_closed().peer_error == "that is all"
    for group in groups:
        group.close()
        assert group.join(PATIENCE_S)
    assert not [recorder.late for recorder in heard if recorder.late]
