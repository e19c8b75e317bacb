"""Every message: golden bytes, a second encoder, exact lengths, round trips, and HELLO's order of checks."""

import hashlib
import hmac
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.wire_by_hand import CASES, HELLO_G, LAYOUT_G, frame, golden, same
from yeto_torch.wire.constants import BULK_TYPES, MessageType, WireDType
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.messages import (
    BcastFragment,
    BudgetDone,
    DataHello,
    Error,
    FinalAck,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    Hello,
    InitParams,
    PullReq,
    PushFragment,
    Shutdown,
    decode,
    decode_hello,
    encode,
    is_bulk,
)

u16, u32, u64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
positive32, positive64 = st.integers(1, 2**32 - 1), st.integers(1, 2**64 - 1)
data = st.binary(max_size=64)
messages = st.one_of(
    st.builds(DataHello, u32, u64, u16),
    st.builds(InitParams, u32, data),
    st.builds(PullReq, u32, positive64, positive32),
    st.builds(PushFragment, u32, u32, u64, positive32, u64, u64, positive32, u64, data),
    st.builds(BcastFragment, u32, u64, data),
    st.builds(FinalFragment, u32, u64, data),
    st.builds(Heartbeat, u32, u64),
    st.just(Shutdown()),
    st.builds(Error, st.text(max_size=80)),
    st.builds(FinalManifest, u64, st.lists(u64, max_size=9).map(tuple)),
    st.builds(FinalAck, u64),
    st.builds(BudgetDone, u64),
    st.builds(
        Hello,
        u32,
        positive64,
        st.sampled_from(WireDType),
        st.just(LAYOUT_G.wire),
        st.binary(min_size=32, max_size=32),
        st.binary(min_size=32, max_size=32),
        st.none() | st.binary(min_size=32, max_size=32),
        st.integers(0, 256),
    ),
)


def payload_of(raw: bytes) -> memoryview:
    return memoryview(raw)[13:]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_encode_writes_and_decode_reads_exactly_these_bytes(case):
    assert b"".join(encode(case.message)) == case.raw
    assert same(decode(case.message.TYPE, payload_of(case.raw)), case.message)


@pytest.mark.parametrize("case", [case for case in CASES if not is_bulk(case.message)], ids=str)
def test_a_control_payload_has_one_length_only(case):
    payload = bytes(payload_of(case.raw))
    if case.message.TYPE is MessageType.ERROR:
        return  # free text; its own test is below
    for wrong in [payload[:size] for size in range(len(payload))] + [payload + b"\0"]:
        with pytest.raises(PeerError):
            decode(case.message.TYPE, memoryview(wrong))


@pytest.mark.parametrize("case", [case for case in CASES if is_bulk(case.message)], ids=str)
def test_a_bulk_payload_has_at_least_its_head(case):
    head = len(payload_of(case.raw)) - len(case.message.data)
    for size in range(head):
        with pytest.raises(PeerError):
            decode(case.message.TYPE, payload_of(case.raw)[:size])
    assert len(decode(case.message.TYPE, payload_of(case.raw)[:head]).data) == 0


@given(messages)
def test_decode_undoes_encode(message):
    raw = b"".join(encode(message))
    magic, kind, length = struct.unpack_from("<IBQ", raw)
    assert (magic, kind, length) == (0xD170C0DE, message.TYPE, len(raw) - 13)
    assert same(decode(message.TYPE, payload_of(raw)), message)


@given(st.sampled_from(sorted(set(MessageType) - {MessageType.CHUNK})), st.binary(max_size=200))
def test_random_payloads_are_one_message_or_a_peer_error(kind, payload):
    try:
        message = decode(kind, memoryview(payload))
    except PeerError:
        return
    assert bytes(payload) == b"".join(encode(message))[13:]


def test_a_chunk_is_not_a_message():
    with pytest.raises(PeerError, match="CHUNK"):
        decode(MessageType.CHUNK, memoryview(bytes(25)))


def test_tensor_bytes_are_never_copied():
    tensor = bytearray(32)
    _, part = encode(BcastFragment(0, 1, tensor))
    payload = bytearray(12 + 32)
    message = decode(MessageType.BCAST_FRAGMENT, memoryview(payload))
    tensor[0], payload[12] = 7, 9
    assert part[0] == 7
    assert message.data[0] == 9


def test_typed_buffers_are_sent_as_their_bytes():
    values = memoryview(struct.pack("<4f", 1, 2, 3, 4)).cast("f")
    assert b"".join(encode(InitParams(0, values))) == frame(2, bytes(4) + values.tobytes())


def test_bulk_is_what_carries_tensors():
    assert {case.message.TYPE for case in CASES if is_bulk(case.message)} == BULK_TYPES


@pytest.mark.parametrize(
    ("kind", "payload", "why"),
    [
        (MessageType.PULL_REQ, struct.pack("<IQI", 0, 0, 1), "step 0"),
        (MessageType.PULL_REQ, struct.pack("<IQI", 0, 1, 0), "attempt 0"),
        (MessageType.PUSH_FRAGMENT, struct.pack("<IIQIQQIQ", 0, 0, 1, 0, 0, 1, 1, 1), "attempt 0"),
        (MessageType.PUSH_FRAGMENT, struct.pack("<IIQIQQIQ", 0, 0, 1, 1, 0, 1, 0, 1), "c_steps 0"),
        (MessageType.FINAL_MANIFEST, struct.pack("<HQI", 2, 1, 0), "revision 2"),
        (MessageType.FINAL_MANIFEST, struct.pack("<HQIQ", 1, 1, 2**32 - 1, 0), "expected"),
        (MessageType.FINAL_ACK, struct.pack("<HQ", 0, 1), "revision 0"),
        (MessageType.ERROR, b"\xff\xfe", "UTF-8"),
        (MessageType.ERROR, bytes(65_537), "65536"),
        (MessageType.DATA_HELLO, struct.pack("<HIQH", 3, 0, 1, 0), "version 3"),
        (MessageType.DATA_HELLO, struct.pack("<H", 5), "version 5"),
    ],
)
def test_fields_that_no_honest_peer_sends(kind, payload, why):
    with pytest.raises(PeerError, match=why):
        decode(kind, memoryview(payload))


@pytest.mark.parametrize("filler", range(4))
@pytest.mark.parametrize("character", "aé€😀")
def test_a_long_error_is_cut_between_characters(filler, character):
    text = "x" * filler + character * 70_000
    payload = Error(text).payload()
    assert 65_532 < len(payload) <= 65_536
    assert text.startswith(payload.decode())


def test_an_error_with_a_lone_surrogate_is_still_sent():
    assert Error("a\udc80b").payload() == b"a?b"


# ---------------------------------------------------------------------------------------------------- HELLO


def hello_bytes(**changes) -> bytearray:
    return bytearray(replace(HELLO_G, **changes).payload())


def test_hello_matches_the_golden_bytes():
    raw = golden("hello_g")
    assert HELLO_G.payload() == raw
    assert hashlib.sha256(raw).hexdigest() == "415a288dcbb4f06b9d9a59e42469dcfb7e612090fab858c45bc15e67fc031992"
    assert decode_hello(memoryview(raw), learners=2) == HELLO_G


def test_the_profile_stands_before_the_stream_count():
    profile = bytes(range(32))
    raw = replace(HELLO_G, profile=profile).payload()
    assert raw == golden("hello_g")[:-2] + profile + golden("hello_g")[-2:]
    assert decode_hello(memoryview(raw)).profile == profile


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [
        (0, struct.pack("<H", 5), "version 5"),
        (2, struct.pack("<I", 2), "learner id 2"),
        (6, bytes(8), "generation 0"),
        (14, b"\0", "dtype 0"),
        (14, b"\4", "dtype 4"),
        (15, bytes(4), "0 fragments"),
        (15, struct.pack("<I", 26), "26 fragments"),
        (19, b"\3", "merge mode 3"),
        (20, bytes(4), "0 tensors"),
        (20, struct.pack("<I", 2**32 - 1), "4294967295 tensors"),
        (24, bytes(8), "0 values"),
        (66, struct.pack("<Q", 7), "matrix"),
        (-2, struct.pack("<H", 257), "257 data streams"),
    ],
)
def test_each_field_of_hello_is_checked(offset, value, why):
    raw = hello_bytes()
    at = offset % len(raw)
    raw[at : at + len(value)] = value
    with pytest.raises(PeerError, match=why):
        decode_hello(memoryview(raw), learners=2)


def test_checks_come_in_order():
    """Everything is wrong at once; each repair uncovers the next complaint."""
    raw = hello_bytes()
    wrong = [(0, b"\5\0", "version"), (2, b"\2", "learner id"), (6, bytes(8), "generation"), (14, b"\0", "dtype")]
    wrong += [(15, bytes(4), "fragments"), (-1, b"\2", "data streams")]
    good = bytes(raw)
    for offset, value, _ in wrong:
        at = offset % len(raw)
        raw[at : at + len(value)] = value
    for offset, value, why in wrong:
        with pytest.raises(PeerError, match=why):
            decode_hello(memoryview(raw), learners=2)
        at = offset % len(raw)
        raw[at : at + len(value)] = good[at : at + len(value)]
    assert decode_hello(memoryview(raw), learners=2) == HELLO_G


@pytest.mark.parametrize("extra", [-66, -34, -33, -1, 1, 31, 33, 64])
def test_only_two_lengths_are_possible_behind_the_contract(extra):
    raw = bytes(hello_bytes())
    wrong = raw[:extra] if extra < 0 else raw + bytes(extra)
    with pytest.raises(PeerError):
        decode_hello(memoryview(wrong))


def test_a_hello_cut_anywhere_is_refused():
    raw = bytes(hello_bytes())
    for size in range(len(raw)):
        with pytest.raises(PeerError):
            decode_hello(memoryview(raw)[:size])


def test_a_signed_hello():
    key = b"k" * 7
    raw = encode(HELLO_G, key)[0][13:]
    body = HELLO_G.payload()
    assert raw == body + hmac.new(key, b"yeto-hello-mac-v1\0" + body, hashlib.sha256).digest()
    assert decode_hello(memoryview(raw), mac_key=key) == HELLO_G
    for position in range(len(raw)):
        forged = bytearray(raw)
        forged[position] ^= 1
        with pytest.raises(PeerError, match="not signed"):
            decode_hello(memoryview(forged), mac_key=key)
    for unsigned in (body, b"", raw[:-1]):
        with pytest.raises(PeerError, match="not signed"):
            decode_hello(memoryview(unsigned), mac_key=key)
    with pytest.raises(PeerError, match="not signed"):
        decode_hello(memoryview(raw), mac_key=b"other")


def test_a_signature_nobody_asked_for_is_explained():
    with pytest.raises(PeerError, match="hmac_key"):
        decode_hello(memoryview(encode(replace(HELLO_G, profile=bytes(32)), b"key")[0][13:]))


def test_a_mac_that_nobody_asked_for_is_guessed_at():
    """Without a profile the mac stands where one could be; its last bytes are then the number of streams."""
    signed = [memoryview(encode(HELLO_G, b"key %d" % number)[0])[13:] for number in range(600)]
    few = [raw for raw in signed if struct.unpack_from("<H", raw, len(raw) - 2)[0] <= 256]
    assert 0 < len(few) < 30
    for raw in signed:
        if raw in few:  # a profile that no syncer's configuration has: a mismatch, which admission words alike
            assert decode_hello(raw).profile == bytes(raw[-34:-2])
            continue
        with pytest.raises(PeerError, match=r"data streams.*hmac_key"):
            decode_hello(raw)


def test_macs_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(ours, theirs):
        compared.append((bytes(ours), bytes(theirs)))
        return True

    monkeypatch.setattr(hmac, "compare_digest", compare)
    body = encode(HELLO_G)[0][13:]
    assert decode_hello(memoryview(body + b"\xee" * 32), mac_key=b"key") == HELLO_G
    assert compared == [(hmac.new(b"key", b"yeto-hello-mac-v1\0" + body, hashlib.sha256).digest(), b"\xee" * 32)]


def test_only_hello_is_signed():
    assert encode(PullReq(2, 7, 1), b"key") == encode(PullReq(2, 7, 1))
