"""Two hundred random conversations: any mix of plain and sliced, any cuts, any socket, bytes in any portions."""

import random
import threading

import pytest

from tests.support.raw_sockets import LAYOUT, PATIENCE_S, Rig
from tests.support.wire_by_hand import chunks, limits_to
from yeto_torch.wire.constants import Direction
from yeto_torch.wire.messages import (
    BcastFragment,
    FinalFragment,
    Heartbeat,
    InitParams,
    Message,
    PullReq,
    PushFragment,
    encode,
    is_bulk,
)

UP, DOWN = Direction.TO_SYNCER, Direction.TO_LEARNER


def random_message(rng: random.Random, number: int, inbound: Direction) -> Message:
    fragment = rng.choice([0, 0, 0, 1, 1, 2])
    data = rng.randbytes(4 * LAYOUT.numels[fragment])
    if inbound is UP:
        return rng.choice(
            [
                Heartbeat(0, number),
                InitParams(fragment, data),
                PushFragment(0, fragment, number + 1, 1, 0, 5, 5, number, data),
            ]
        )
    return rng.choice(
        [
            PullReq(fragment, number + 1, 1),
            BcastFragment(fragment, number, data),
            FinalFragment(fragment, number, data),
        ]
    )


def frozen(message: Message) -> tuple:
    fields = {name: getattr(message, name) for name in message.__dataclass_fields__}
    return (message.TYPE, *(bytes(value) if name == "data" else value for name, value in fields.items()))


def spread(rng: random.Random, messages: list[Message], streams: int) -> list[list[bytes]]:
    """Every message as frames on sockets: control on stream 0, bulk plain or in random slices anywhere.

    Nothing bounds how many sliced messages are open at once, so all of them together stay within what is legal.
    """
    left = limits_to(UP, LAYOUT).max_reserved_bytes
    lines: list[list[bytes]] = [[] for _ in range(1 + streams)]
    for msg_id, message in enumerate(messages):
        raw = b"".join(encode(message))
        if not is_bulk(message):
            lines[0].append(raw)
        elif rng.random() < 0.4 or len(raw) > left:
            lines[rng.randrange(1 + streams)].append(raw)
        else:
            cuts = sorted({rng.randrange(1, len(raw)) for _ in range(rng.choice([0, 1, 3, 12]))})
            pieces = chunks(raw, msg_id, cuts)
            rng.shuffle(pieces)
            left -= len(raw)
            for piece in pieces:
                lines[rng.randrange(1 + streams)].append(piece)
    return lines


def say(rng: random.Random, peer, stream: int, raw: bytes) -> None:
    """Send in random portions."""
    at = 0
    while at < len(raw):
        size = rng.choice([1, 7, 13, 100, 5_000, 60_000, 10**6])
        peer.say(raw[at : at + size], stream)
        at += size


@pytest.mark.parametrize("block", range(20))
def test_whatever_is_legal_arrives_whole_and_once(block):
    for seed in range(10 * block, 10 * block + 10):
        rng = random.Random(seed)
        streams, inbound = rng.choice([0, 1, 2, 4]), rng.choice([UP, DOWN])
        messages = [random_message(rng, number, inbound) for number in range(rng.choice([1, 5, 20]))]
        rig = Rig()
        _, recorder, peer = rig.group(streams, inbound=inbound)
        lines = spread(rng, messages, streams)
        speakers = [
            threading.Thread(target=say, args=(random.Random(f"{seed} {s}"), peer, s, b"".join(line)))
            for s, line in enumerate(lines)
        ]
        for speaker in speakers:
            speaker.start()
        got = recorder.wait_messages(len(messages))
        for speaker in speakers:
            speaker.join(PATIENCE_S)
        assert sorted(map(frozen, got), key=repr) == sorted(map(frozen, messages), key=repr), f"seed {seed}"
        control = [m for m in messages if not is_bulk(m)]
        assert [m for m in got if not is_bulk(m)] == control, f"seed {seed}"
        rig.finish()
        assert not recorder.late, f"seed {seed}"


@pytest.mark.parametrize("block", range(5))
def test_two_groups_understand_each_other(block):
    """What one group sends the other receives: nothing is replaced here, each key is sent once."""
    for seed in range(10 * block, 10 * block + 10):
        rng = random.Random(1000 + seed)
        streams = rng.choice([0, 1, 3])
        rig = Rig()
        syncer, up, learner, down = rig.couple(streams)
        sent = {UP: {}, DOWN: {}}
        for number in range(12):
            for inbound, group in ((UP, learner), (DOWN, syncer)):
                message = random_message(rng, number, inbound)
                key = (message.TYPE, getattr(message, "fragment", None))
                if key not in sent[inbound]:
                    sent[inbound][key] = message
                    group.send(message)
        for inbound, recorder in ((UP, up), (DOWN, down)):
            got = recorder.wait_messages(len(sent[inbound]))
            assert sorted(map(frozen, got), key=repr) == sorted(map(frozen, sent[inbound].values()), key=repr)
        rig.finish()
