"""The outbox: order, replacement, holding, striping, bounds; and random use against what must always hold."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.raw_sockets import raw
from yeto_torch.wire.constants import SLICE_BYTES, MessageType
from yeto_torch.wire.errors import LocalError, PeerError
from yeto_torch.wire.messages import (
    BcastFragment,
    Error,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    PullReq,
    Shutdown,
)
from yeto_torch.wire.transport.outbox import Job, Outbox

HOLD = 2.0


def outbox(streams: int = 0, attached: int | None = None) -> Outbox:
    box = Outbox(streams)
    box.start(HOLD)
    for index in range(streams if attached is None else attached):
        box.attach(index)
    return box


def text(job: Job | None) -> bytes:
    assert job is not None
    return b"".join(job.parts)


def drain(box: Outbox, stream: int = 0, now: float = 0.0) -> list[bytes]:
    out = []
    while (job := box.take(stream, now)) is not None:
        out.append(text(job))
        box.done(job)
    return out


def bcast(fragment: int, version: int, nbytes: int = 8) -> BcastFragment:
    return BcastFragment(fragment, version, bytes(nbytes))


def envelope(frame: bytes) -> tuple[int, int, int]:
    """(msg_id, total, offset) of a CHUNK."""
    assert frame[4] == MessageType.CHUNK
    return struct.unpack_from("<QQQ", frame, 13)


def test_stream_0_is_first_in_first_out_but_for_heartbeats():
    box = outbox()
    queue = [PullReq(0, 1, 1), bcast(0, 1), PullReq(1, 2, 1), FinalManifest(2, (1, 2)), bcast(1, 1), Shutdown()]
    for message in queue:
        box.put(message)
    box.put(Heartbeat(0, 7))
    assert drain(box) == [raw(Heartbeat(0, 7)), *map(raw, queue)]
    assert not box.pending()


def test_a_newer_message_takes_the_place_of_a_queued_one():
    box, sent = outbox(), []
    for version, message in enumerate([bcast(0, 1), PullReq(0, 1, 1), bcast(1, 1), bcast(0, 2), PullReq(0, 1, 2)]):
        box.put(message, lambda v=version: sent.append(v))
    box.put(Heartbeat(0, 1), lambda: sent.append("old beat"))
    box.put(Heartbeat(0, 2), lambda: sent.append("beat"))
    out = []
    while (job := box.take(0, 0.0)) is not None:
        out.append(text(job))
        if (on_sent := box.done(job)) is not None:
            on_sent()
    assert out == list(map(raw, [Heartbeat(0, 2), bcast(0, 2), PullReq(0, 1, 2), bcast(1, 1)]))
    assert sent == ["beat", 3, 4, 2]


def test_what_has_begun_is_not_replaced():
    box = outbox()
    box.put(bcast(0, 1))
    job = box.take(0, 0.0)
    box.put(bcast(0, 2))
    assert text(job) == raw(bcast(0, 1))
    box.done(job)
    assert drain(box) == [raw(bcast(0, 2))]


def test_types_and_fragments_do_not_replace_each_other():
    box = outbox()
    messages = [bcast(0, 1), bcast(1, 1), FinalFragment(0, 1, b""), FinalFragment(1, 1, b""), PullReq(0, 1, 1)]
    for message in messages:
        box.put(message)
    assert drain(box) == list(map(raw, messages))


def test_bulk_is_held_until_every_stream_is_attached():
    box = outbox(2, attached=1)
    box.put(bcast(0, 1))
    box.put(PullReq(0, 1, 1))
    assert box.next_deadline(0.0) == HOLD
    assert box.refill(1.0) == set()
    assert drain(box, 0, 1.0) == [raw(PullReq(0, 1, 1))]
    assert box.pending()
    box.attach(1)
    assert box.next_deadline(1.0) is None
    assert box.refill(1.0) == {1}
    assert envelope(text(box.take(1, 1.0))) == (0, len(raw(bcast(0, 1))), 0)


def test_after_the_wait_only_attached_streams_are_used():
    box = outbox(4, attached=0)
    box.attach(2)
    box.attach(0)
    for fragment in range(4):
        box.put(bcast(fragment, 1))
    assert box.refill(HOLD - 0.01) == set()
    assert box.refill(HOLD) == {1, 3}
    assert [envelope(frame)[0] for stream in (1, 3) for frame in drain(box, stream, HOLD)] == [0, 1]
    assert box.refill(HOLD) == {1, 3}
    assert [envelope(frame)[0] for stream in (1, 3) for frame in drain(box, stream, HOLD)] == [2, 3]
    assert drain(box, 0, HOLD) == []


def test_with_no_stream_attached_bulk_goes_plain_in_its_order():
    box = outbox(3, attached=0)
    queue = [PullReq(0, 1, 1), bcast(0, 1), PullReq(1, 2, 1)]
    for message in queue:
        box.put(message)
    assert drain(box, 0, 0.0) == [raw(queue[0]), raw(queue[2])]
    assert not box.has_plain(0.0)
    assert box.has_plain(HOLD)
    box.put(queue[0])
    assert drain(box, 0, HOLD) == [raw(queue[1]), raw(queue[0])]
    box.attach(1)  # a straggler serves what follows
    box.put(bcast(1, 5))
    assert box.refill(HOLD) == {2}
    assert drain(box, 0, HOLD) == []


def test_without_declared_streams_nothing_is_held():
    box = outbox(0)
    box.put(bcast(0, 1))
    assert box.next_deadline(0.0) is None
    assert drain(box) == [raw(bcast(0, 1))]


@pytest.mark.parametrize("index", [-1, 2, 255])
def test_a_stream_that_was_not_declared_cannot_attach(index):
    with pytest.raises(PeerError, match=f"data stream {index}"):
        outbox(2, attached=0).attach(index)


def test_a_stream_attaches_once():
    box = outbox(2)
    with pytest.raises(PeerError, match="already"):
        box.attach(1)


def test_large_messages_are_striped_round_robin_across_messages():
    box = outbox(3)
    box.put(bcast(0, 1, 3 * SLICE_BYTES))  # 4 slices: streams 1 2 3 1
    box.put(bcast(1, 1, 8))  # then 2
    box.refill(0.0)
    assert [len(drain(box, stream)) for stream in (1, 2, 3)] == [2, 1, 1]
    assert box.refill(0.0) == {2}


def test_slicing_waits_for_a_writer_so_that_messages_stay_replaceable():
    box, sent = outbox(1), []
    for fragment in range(6):
        box.put(bcast(fragment, 1), lambda f=fragment: sent.append((f, 1)))
    assert box.refill(0.0) == {1}
    job = box.take(1, 0.0)
    for fragment in range(6):
        box.put(bcast(fragment, 2), lambda f=fragment: sent.append((f, 2)))
    versions = []
    while job is not None:
        versions.append(struct.unpack_from("<IQ", text(job), 37 + 13))
        if (on_sent := box.done(job)) is not None:
            on_sent()
        box.refill(0.0)
        job = box.take(1, 0.0)
    # One was on its way when the second round came; the five others were replaced in place, and 0 queued again.
    assert versions == [(0, 1), (1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (0, 2)]
    assert sent == versions


@pytest.mark.parametrize(
    ("nbytes", "messages"),
    [(8, 2 * 4), (SLICE_BYTES - 25, 4), (SLICE_BYTES // 2, 2 * 4), (3 * SLICE_BYTES, 4)],
)
def test_a_stalled_stream_bounds_what_is_sliced(nbytes, messages):
    """Stream 1 never gets a writer, the others are swift: at most ``messages`` are then sliced and unsent."""
    box = outbox(4)
    data = bytes(nbytes)
    for fragment in range(200):
        box.put(BcastFragment(fragment, 1, data))
    worst = 0
    for _ in range(200):
        box.refill(0.0)
        for stream in (2, 3, 4):
            drain(box, stream)
        worst = max(worst, len(box._lanes[1]))
    assert box.refill(0.0) == set()
    assert 1 <= worst <= messages
    assert box._sliced_bytes <= 4 * SLICE_BYTES + nbytes + 100
    while box.pending():  # and it all goes once the stream is served again
        box.refill(0.0)
        for stream in (1, 2, 3, 4):
            drain(box, stream)


def test_one_message_larger_than_the_bound_still_goes():
    box, sent = outbox(2), []
    box.put(bcast(0, 1, 40 * SLICE_BYTES), lambda: sent.append(1))
    box.refill(0.0)
    frames = 0
    for stream in (1, 2):
        while (job := box.take(stream, 0.0)) is not None:
            frames += 1
            assert job.nbytes <= 37 + SLICE_BYTES
            if (on_sent := box.done(job)) is not None:
                on_sent()
    assert frames == 41
    assert sent == [1]


def test_the_last_word_follows_what_is_half_sent_and_replaces_all_else():
    box = outbox(1)
    for message in (bcast(0, 1, 2 * SLICE_BYTES), PullReq(0, 1, 1), Heartbeat(0, 1)):
        box.put(message)
    box.refill(0.0)
    half_data, half_control = box.take(1, 0.0), box.take(0, 0.0)
    box.put(bcast(1, 1))
    box.last_word(Error("no"))
    assert box.pending()
    assert text(half_control) == raw(Heartbeat(0, 1))
    box.done(half_control)
    assert drain(box) == [raw(Error("no"))]
    assert not box.pending(), "a stalled data stream must not hold the last word"
    assert box.done(half_data) is None
    assert drain(box, 1) == []


def test_a_writer_has_one_frame_at_a_time():
    box = outbox(1)
    box.put(PullReq(0, 1, 1))
    box.put(bcast(0, 1))
    box.refill(0.0)
    for stream in (0, 1):
        assert box.take(stream, 0.0) is not None
        with pytest.raises(LocalError):
            box.take(stream, 0.0)


# ---------------------------------------------------------------------------------------------------- random use


actions = st.lists(
    st.one_of(
        st.tuples(st.just("bulk"), st.integers(0, 3), st.sampled_from([0, 9, 40, 100])),
        st.tuples(st.just("pull"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("beat"), st.just(0), st.just(0)),
        st.tuples(st.just("take"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("done"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("attach"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("time"), st.integers(0, 1), st.just(0)),
    ),
    max_size=60,
)


@given(streams=st.integers(0, 4), actions=actions)
@settings(max_examples=300)
def test_every_newest_message_leaves_exactly_once(streams, actions):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("yeto_torch.wire.chunks.SLICE_BYTES", 32)
        patch.setattr("yeto_torch.wire.transport.outbox.SLICE_BYTES", 32)
        _random_use(streams, actions)


class Driver:
    """Uses an outbox as writers would, and keeps what was put, what was reported sent, and the frames."""

    def __init__(self, streams: int) -> None:
        self.box, self.streams, self.now = outbox(streams, attached=0), streams, 0.0
        self.working: dict[int, Job] = {}
        self.put: dict[tuple[str, int], list[int]] = {}
        self.sent: list[int] = []
        self.wire: list[tuple[int, bytes]] = []

    def act(self, number: int, what: str, index: int, size: int) -> None:
        match what:
            case "take":
                self.take(index)
            case "done":
                self.done(index)
            case "time":
                self.now += index
            case "attach":
                if index < self.streams and index + 1 not in self.box._lanes:
                    self.box.attach(index)
            case _:
                bulk, pull = BcastFragment(index, number, bytes(size)), PullReq(index, number, 1)
                message = {"bulk": bulk, "pull": pull, "beat": Heartbeat(0, number)}[what]
                self.put.setdefault((what, index), []).append(number)
                self.box.put(message, lambda: self.sent.append(number))

    def take(self, stream: int) -> None:
        if stream in self.working or (stream and stream not in self.box._lanes):
            return
        self.box.refill(self.now)
        if (job := self.box.take(stream, self.now)) is not None:
            self.working[stream] = job
            self.wire.append((stream, text(job)))
            assert job.nbytes == len(self.wire[-1][1])

    def done(self, stream: int) -> None:
        if (job := self.working.pop(stream, None)) is not None and (on_sent := self.box.done(job)) is not None:
            on_sent()


def _random_use(streams: int, actions: list) -> None:
    driver = Driver(streams)
    for number, action in enumerate(actions):
        driver.act(number, *action)
    driver.now = max(driver.now, HOLD)
    box, sent = driver.box, driver.sent
    for _ in range(1000):
        if not box.pending():
            break
        for stream in range(5):
            driver.take(stream)
            driver.done(stream)
    assert not box.pending()
    assert box._sliced_messages == box._sliced_bytes == 0
    assert len(sent) == len(set(sent))
    for numbers in driver.put.values():
        assert numbers[-1] in sent
        assert [n for n in sent if n in numbers] == sorted(n for n in sent if n in numbers)
    _check_wire(driver.wire, sent)


def _check_wire(wire: list[tuple[int, bytes]], sent: list[int]) -> None:
    """Every message is complete on the wire, control on stream 0, CHUNKs elsewhere."""
    whole, parts = 0, {}
    for stream, frame in wire:
        if frame[4] == MessageType.CHUNK:
            assert stream > 0
            msg_id, total, offset = envelope(frame)
            parts.setdefault((msg_id, total), []).append((offset, len(frame) - 37))
        else:
            assert stream == 0
            whole += 1
    for (_, total), ranges in parts.items():
        assert sorted(ranges) == [(offset, min(32, total - offset)) for offset in range(0, total, 32)]
    assert sorted(msg_id for msg_id, _ in parts) == list(range(len(parts)))
    assert whole + len(parts) == len(sent)


def test_a_message_goes_at_once_only_where_nothing_is_before_it():
    box = outbox(0)
    assert b"".join(box.at_once(PullReq(0, 1, 1), 0.0)) == raw(PullReq(0, 1, 1))
    assert not box.pending(), "the sender has it, or what is left of it"
    job = box.begun([memoryview(b"rest")])
    assert (text(job), job.nbytes, box.pending()) == (b"rest", 4, True)
    assert box.at_once(PullReq(1, 2, 1), 0.0) is None
    box.put(PullReq(1, 2, 1))
    assert box.done(job) is None
    assert box.at_once(Heartbeat(0, 1), 0.0) is None, "something waits"
    assert drain(box) == [raw(PullReq(1, 2, 1))]


def test_bulk_goes_at_once_only_where_it_goes_plain():
    declared, plain = outbox(1), outbox(0)
    assert declared.at_once(bcast(0, 1), 0.0) is None
    assert declared.at_once(PullReq(0, 1, 1), 0.0) is not None
    assert b"".join(plain.at_once(bcast(0, 1), 0.0)) == raw(bcast(0, 1))
