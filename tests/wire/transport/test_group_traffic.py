"""A group carries messages: order, striping, replacement, heartbeats, stream wait, slow and blocked peers."""

import struct
import threading
import time
import weakref

import pytest

from tests.support.raw_sockets import LAYOUT, PATIENCE_S, SMALL_BUFFER, raw
from tests.support.waiting import until
from tests.support.wire_by_hand import chunks, frame, plain_layout, same
from yeto_torch.wire.constants import SLICE_BYTES, Direction, MessageType
from yeto_torch.wire.messages import (
    BcastFragment,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    InitParams,
    PullReq,
    PushFragment,
    Shutdown,
)

UP, DOWN = Direction.TO_SYNCER, Direction.TO_LEARNER
M = MessageType
WIDE = plain_layout(*[100_000] * 8)


def bcast(fragment: int, version: int = 1, layout=LAYOUT) -> BcastFragment:
    nbytes = layout.numels[fragment] * 4
    return BcastFragment(fragment, version, bytes([version % 256]) * nbytes)


def push(fragment: int, step: int = 1) -> PushFragment:
    return PushFragment(0, fragment, step, 1, 0, 5, 5, 50, bytes([step % 256]) * (LAYOUT.numels[fragment] * 4))


# ---------------------------------------------------------------------------------------------------- memory


def test_plain_messages_half_way_are_limited_like_sliced_ones(rig):
    """2 pipeline + all fragments, twice: ten of the largest here, whatever the number of sockets that bring them."""
    group, recorder, peer = rig.group(12)
    head = frame(M.PUSH_FRAGMENT, b"", length=48 + 400_000)
    for stream in range(10):
        peer.say(head + b"x", stream)
        until(lambda n=stream: group._slices._table._held == (n + 1) * 400_061)
    peer.say(head, 10)
    assert "4400671 bytes" in recorder.wait_closed().reason
    assert not recorder.messages


def test_messages_that_nobody_takes_are_limited_and_those_taken_are_not(rig):
    gate = rig.gate()

    def busy(message, now):
        gate.wait(PATIENCE_S)
        recorder.on_message(message, now)

    group, recorder, peer = rig.group(12, on_message=busy)
    for stream in range(10):
        peer.say(raw(push(2)) if stream % 2 else b"".join(chunks(raw(push(2)), stream, [7])), stream)
    until(lambda: group._slices._table._held == 10 * 400_061)
    gate.set()
    recorder.wait_messages(10)
    for stream in range(12):
        peer.say(raw(push(2)), stream)
    recorder.wait_messages(22)
    until(lambda: group._slices._table._held == 0)
    gate.clear()
    for stream in range(10):
        peer.say(raw(push(2)), stream)
    until(lambda: group._slices._table._held == 10 * 400_061)
    peer.say(b"".join(chunks(raw(push(2)), 77, [7])), 10)
    until(lambda: group.closed)
    gate.set()
    assert "would take" in recorder.wait_closed().reason


def test_a_quiet_socket_keeps_nothing_of_its_last_message(rig):
    large = plain_layout(5_000_000)  # large enough for a mapping of its own, which a weak reference can watch
    kept = []
    group, _, peer = rig.group(layout=large, on_message=lambda message, _: kept.append(weakref.ref(message.data.obj)))
    peer.say(frame(M.INIT_PARAMS, bytes(4 + 20_000_000)))
    until(lambda: len(kept) == 1 and kept[0]() is None)
    assert not group.closed


def test_a_group_that_ends_gives_back_what_was_half_way(rig):
    group, recorder, peer = rig.group(2)
    inner = raw(push(2))
    for stream in (0, 1):
        peer.say(chunks(inner, stream, [100_000])[0], stream)
        peer.say(frame(9, b"", length=24 + 50_000) + struct.pack("<QQQ", stream, len(inner), 200_000), stream)
    until(lambda: group._slices._table.reserved_bytes == 2 * len(inner))
    peer.say(frame(77), 2)
    recorder.wait_closed()
    assert group._slices._table.reserved_bytes == 0
    for stream in (0, 1):  # what was begun may still come, and is nothing any more
        peer.say(bytes(50_000) + b"".join(chunks(inner, 9 + stream, [5])), stream)
    assert peer.frames(0)[-1][0] == M.ERROR
    assert not recorder.messages


# ---------------------------------------------------------------------------------------------------- both ways


@pytest.mark.parametrize("streams", [0, 1, 3])
def test_messages_go_both_ways_and_are_counted(rig, streams):
    syncer, up, learner, down = rig.couple(streams)
    to_learner = [PullReq(1, 1, 1), *(bcast(f) for f in range(3)), FinalFragment(2, 3, bytes(400_000))]
    to_learner += [FinalManifest(3, (1, 2, 3)), Shutdown()]
    to_syncer = [*(InitParams(f, bytes(4 * LAYOUT.numels[f])) for f in range(3)), push(2), Heartbeat(0, 4)]
    for message in to_learner:
        syncer.send(message)
    for message in to_syncer:
        learner.send(message)
    got_down, got_up = down.wait_messages(len(to_learner)), up.wait_messages(len(to_syncer))
    for got, sent in ((got_down, to_learner), (got_up, to_syncer)):
        assert len(got) == len(sent)
        assert all(any(same(a, b) for b in got) for a in sent)
    control = [m for m in got_down if m.TYPE in (M.PULL_REQ, M.FINAL_MANIFEST, M.SHUTDOWN)]
    assert control == [to_learner[0], *to_learner[-2:]]
    assert (syncer.bytes_sent, learner.bytes_sent) == (learner.bytes_received, syncer.bytes_received)
    assert not syncer.pending()
    assert not learner.pending()
    assert not syncer.closed


def test_messages_are_stamped_on_arrival(rig):
    group, recorder, peer = rig.group()
    begin = time.monotonic()
    assert group.last_received_at <= begin
    peer.say(raw(Heartbeat(0, 1)))
    recorder.wait_messages(1)
    assert begin <= recorder.stamps[0] == group.last_received_at <= time.monotonic()
    seen = group.last_received_at
    peer.say(raw(Heartbeat(0, 2))[:5])  # any byte is a sign of life
    until(lambda: group.last_received_at > seen)
    assert group.bytes_received == 25 + 5


def test_without_streams_everything_is_plain_and_in_order(rig):
    group, _, peer = rig.group(0)
    queue = [PullReq(0, 1, 1), bcast(0), PullReq(1, 2, 1), bcast(2), Shutdown()]
    for message in queue:
        group.send(message)
    assert peer.exactly(sum(len(raw(m)) for m in queue)) == b"".join(map(raw, queue))


def test_with_streams_small_bulk_too_is_sliced_and_dealt_in_turn(rig):
    group, _, peer = rig.group(3, layout=WIDE)
    for fragment in range(7):
        group.send(bcast(fragment, 1, WIDE))
    group.send(PullReq(0, 1, 1))
    assert peer.frame(0) == (M.PULL_REQ, struct.pack("<IQI", 0, 1, 1))
    for turn in range(7):
        kind, payload = peer.frame(1 + turn % 3)
        msg_id, total, offset = struct.unpack_from("<QQQ", payload)
        assert (kind, msg_id, total, offset) == (M.CHUNK, turn, len(payload) - 24, 0)
        assert payload[24:] == raw(bcast(turn, 1, WIDE))
    assert peer.readable() == []


def test_a_large_message_arrives_whole_over_all_streams(rig):
    layout = plain_layout(5 * SLICE_BYTES // 4 + 7)
    group, _, peer = rig.group(2, layout=layout)
    tensor = bytes(range(251)) * (layout.numels[0] * 4 // 251 + 1)
    message = BcastFragment(0, 9, tensor[: layout.numels[0] * 4])
    sent = threading.Event()
    group.send(message, sent.set)
    got = {}
    for turn in range(6):
        _, payload = peer.frame(1 + turn % 2)
        msg_id, _, offset = struct.unpack_from("<QQQ", payload)
        assert (msg_id, offset) == (0, turn * SLICE_BYTES)
        got[offset] = payload[24:]
    assert b"".join(got[offset] for offset in sorted(got)) == raw(message)
    assert sent.wait(PATIENCE_S)
    until(lambda: not group.pending())


@pytest.mark.parametrize("stream", [0, 1, 2])
@pytest.mark.parametrize("cuts", [None, [], [1, 13, 14, 300]])
def test_bulk_is_accepted_plain_and_sliced_on_any_socket(rig, stream, cuts):
    _, recorder, peer = rig.group(2)
    message = push(1)
    peer.say(raw(message) if cuts is None else b"".join(reversed(chunks(raw(message), 4, cuts))), stream)
    assert same(recorder.wait_messages(1)[0], message)


def test_slices_of_one_message_may_come_on_different_sockets(rig):
    _, recorder, peer = rig.group(2)
    for number, piece in enumerate(chunks(raw(push(2)), 0, [1000, 50_000, 200_000, 399_999])):
        peer.say(piece, number % 3)
    assert same(recorder.wait_messages(1)[0], push(2))


# ---------------------------------------------------------------------------------------------------- slow peers


@pytest.mark.parametrize("streams", [0, 2])
def test_a_peer_that_does_not_read_gets_the_newest_only(rig, streams):
    group, recorder, peer = rig.group(streams, buffer=SMALL_BUFFER, layout=WIDE)
    sent = []
    for version in range(1, 101):
        for fragment in range(8):
            group.send(bcast(fragment, version, WIDE), lambda f=fragment, v=version: sent.append((f, v)))
    assert group.pending()
    newest = {}
    readers = [threading.Thread(target=_collect, args=(peer, s, newest)) for s in range(1 + streams)]
    for reader in readers:
        reader.start()
    until(lambda: not group.pending())
    group.close()  # what the kernel has is still delivered
    for reader in readers:
        reader.join()
    recorder.wait_closed()
    for fragment in range(8):
        versions = [v for f, v in sent if f == fragment]
        assert versions[-1] == 100
        assert len(versions) <= 2  # one was on its way, the rest was replaced by the newest
    assert group.bytes_sent < 25 * 400_000  # of 800 messages
    if not streams:
        assert sorted(newest) == sorted(sent)


def _collect(peer, stream: int, into: dict) -> None:
    for kind, payload in peer.frames(stream):
        if kind == M.BCAST_FRAGMENT:
            into[struct.unpack_from("<IQ", payload)] = len(payload)


def test_heartbeats_and_control_pass_a_stalled_bulk_transfer(rig):
    group, _, peer = rig.group(2, inbound=DOWN, buffer=SMALL_BUFFER)
    for fragment in (2, 1, 0):
        group.send(push(fragment))
    until(lambda: peer.readable(1) == [1])  # the transfer has begun, and nobody reads it
    group.send(Heartbeat(0, 1))
    assert peer.frame(0) == (M.HEARTBEAT, struct.pack("<IQ", 0, 1))
    assert group.pending()


def test_heartbeats_overtake_what_is_queued_on_stream_0(rig):
    group, _, peer = rig.group(0, inbound=DOWN, buffer=SMALL_BUFFER)
    group.send(push(2))
    until(lambda: group.bytes_sent > 0)
    for fragment in range(2):
        group.send(push(fragment))
    for step in range(1, 50):
        group.send(Heartbeat(0, step))
    kinds = [peer.frame() for _ in range(4)]
    assert [kind for kind, _ in kinds] == [M.PUSH_FRAGMENT, M.HEARTBEAT, M.PUSH_FRAGMENT, M.PUSH_FRAGMENT]
    assert kinds[1][1] == struct.pack("<IQ", 0, 49)


@pytest.mark.parametrize("streams", [0, 2])
def test_a_stalled_socket_ends_the_group_and_is_named(rig, streams):
    group, recorder, _ = rig.group(streams, buffer=SMALL_BUFFER, write_timeout_s=0.3)
    begin = time.monotonic()
    group.send(bcast(2))
    closed = recorder.wait_closed()
    assert time.monotonic() - begin > 0.25
    assert "0.3 s" in closed.reason
    assert ("data stream 0" if streams else "control stream") in closed.reason
    assert closed.violation is None
    assert closed.peer_error is None


def test_a_slow_peer_is_not_a_dead_one(rig):
    group, recorder, peer = rig.group(1, buffer=SMALL_BUFFER, write_timeout_s=0.4)
    sent = threading.Event()
    group.send(bcast(2), sent.set)
    begin, total = time.monotonic(), 0
    pace = threading.Event()
    while total < 400_000:
        total += len(peer.socks[1].recv(8_000))
        pace.wait(0.03)
    assert time.monotonic() - begin > 0.8  # several timeouts long
    assert sent.wait(PATIENCE_S)
    assert not recorder.closed


def test_an_idle_group_never_times_out(rig):
    group, recorder, peer = rig.group(1, write_timeout_s=0.05)
    threading.Event().wait(0.3)
    group.send(PullReq(0, 1, 1))
    assert peer.frame()[0] == M.PULL_REQ
    assert not recorder.closed


def test_a_blocked_callback_holds_back_its_socket_only(rig):
    gate, seen = rig.gate(), []

    def on_message(message, _):
        seen.append(message)
        if isinstance(message, InitParams):
            assert gate.wait(PATIENCE_S)

    group, _, peer = rig.group(2, on_message=on_message)
    peer.say(raw(InitParams(0, bytes(40))), 1)
    until(lambda: len(seen) == 1)
    peer.say(raw(push(1)), 1)  # behind the blocked one
    peer.say(raw(Heartbeat(0, 1)), 0)
    peer.say(raw(push(0)), 2)
    until(lambda: len(seen) == 3)
    assert {m.TYPE for m in seen} == {M.INIT_PARAMS, M.HEARTBEAT, M.PUSH_FRAGMENT}
    group.send(PullReq(0, 1, 1))
    assert peer.frame()[0] == M.PULL_REQ
    gate.set()
    until(lambda: len(seen) == 4)


# ---------------------------------------------------------------------------------------------------- attaching


def test_bulk_waits_for_its_streams_and_control_does_not(rig):
    group, _, peer = rig.group(2, attach=0, stream_wait_s=600)
    group.send(bcast(0))
    group.send(bcast(1))
    group.attach(1, group.spare[1])
    group.send(PullReq(0, 1, 1))
    assert peer.frame(0)[0] == M.PULL_REQ
    assert peer.readable() == []
    group.attach(0, group.spare[0])
    assert [struct.unpack_from("<Q", peer.frame(1 + turn)[1])[0] for turn in range(2)] == [0, 1]
    assert peer.readable(0) == []


def test_streams_that_did_not_come_are_not_waited_for_for_ever(rig):
    group, _, peer = rig.group(3, attach=0, stream_wait_s=0.3)
    begin = time.monotonic()
    group.attach(1, group.spare[1])
    for fragment in range(3):
        group.send(bcast(fragment))
    assert peer.readable(2, within_s=PATIENCE_S) == [2]
    assert time.monotonic() - begin > 0.25
    assert [struct.unpack_from("<Q", peer.frame(2)[1])[0] for _ in range(3)] == [0, 1, 2]
    assert peer.readable(0, 1, 3) == []
    group.attach(0, group.spare[0])
    group.send(bcast(0, 2))
    group.send(bcast(1, 2))
    assert peer.readable(1, within_s=PATIENCE_S) == [1]
    assert peer.readable(0, 3) == []


def test_with_no_stream_at_all_bulk_goes_on_stream_0(rig):
    group, _, peer = rig.group(2, attach=0, stream_wait_s=0.2)
    group.send(bcast(0))
    group.send(PullReq(0, 1, 1))
    assert [peer.frame()[0] for _ in range(2)] == [M.PULL_REQ, M.BCAST_FRAGMENT]
    group.attach(0, group.spare[0])
    group.send(bcast(1))
    assert peer.frame(1)[0] == M.CHUNK


def test_streams_may_attach_before_the_start(rig):
    group, recorder, peer = rig.group(1, start=False)
    group.send(bcast(0))
    peer.say(raw(push(0)), 1)
    assert peer.readable(0, 1) == []
    group.start()
    group.start()
    assert peer.frame(1)[0] == M.CHUNK
    recorder.wait_messages(1)


def test_frame_types_stay_what_they_are_on_the_wire(rig):
    """The bytes of one conversation, both ways, against a second encoder."""
    group, recorder, peer = rig.group(0)
    peer.say(frame(6, struct.pack("<IQ", 3, 17)))
    assert recorder.wait_messages(1) == [Heartbeat(3, 17)]
    group.send(FinalManifest(4, (2, 3, 4)))
    assert peer.frame() == (11, struct.pack("<HQIQQQ", 1, 4, 3, 2, 3, 4))


# ---------------------------------------------------------------------------------------------------- sent at once


def test_a_short_message_has_left_when_send_returns(rig):
    group, _, peer = rig.group(0)
    for message in (PullReq(0, 1, 1), bcast(1), Heartbeat(0, 1)):
        before = group.bytes_sent
        assert group.send(message)
        assert group.bytes_sent - before == len(raw(message))
        assert peer.exactly(len(raw(message))) == raw(message)


def test_bulk_of_a_group_with_data_streams_never_takes_the_short_cut(rig):
    group, _, peer = rig.group(1, stream_wait_s=PATIENCE_S)
    group.send(bcast(0))
    assert peer.frame(1)[0] == M.CHUNK
    assert not peer.readable(0)


def test_what_did_not_fit_is_ended_by_the_writer_before_anything_else(rig):
    """64 KiB into a socket that holds a few: the frames behind the half-sent one keep their order."""
    layout = plain_layout(*[16_000] * 3)
    group, _, peer = rig.group(0, buffer=SMALL_BUFFER, layout=layout)
    messages = [bcast(0, 1, layout), PullReq(0, 1, 1), bcast(1, 2, layout), PullReq(1, 2, 1)]
    for message in messages:
        assert group.send(message)
    assert group.pending()
    assert 0 < group.bytes_sent < len(raw(messages[0]))
    for message in messages:
        assert peer.exactly(len(raw(message))) == raw(message)
    until(lambda: not group.pending())


def test_a_short_message_on_a_lost_socket_ends_the_group_as_a_long_one_does(rig):
    group, recorder, _ = rig.group(0)
    with group._lock:  # no reader may say it first
        group._lines[0].stream._sock.shutdown(1)
    group.send(PullReq(0, 1, 1))
    assert "while writing" in recorder.wait_closed().reason
