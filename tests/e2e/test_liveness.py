"""Peers that say nothing or read nothing: closed in time, and at nobody else's expense.

Source: rulings §1.4, §6.8.
"""

import socket
import time

import numpy as np
import pytest

from tests.support.scripted_learner import ScriptedLearner, random_values
from tests.support.waiting import until
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.messages import BcastFragment, Heartbeat, Hello, encode
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

SMALL = Layout((Fragment(MergeMode.AVG, (Tensor("a", (4,)),)),))
LARGE = Layout((Fragment(MergeMode.AVG, (Tensor("a", (4_000_000,)),)),))
SLACK_S = 3.0  # a busy machine may be late, never early
KEYS = ("schedule.quorum=1", "schedule.sync_interval_steps=0", "schedule.grace_ms=0", "schedule.pipeline=1")


def dial(syncer, *messages, receive_buffer=None):
    """A socket that has said these messages and does nothing by itself."""
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    host, port = syncer.address.split(":")
    sock.settimeout(20)
    sock.connect((host, int(port)))
    for message in messages:
        sock.sendall(b"".join(encode(message)))
    return sock


def hello(learner_id, layout, generation=7, streams=0):
    fingerprint = layout.fingerprint
    return Hello(learner_id, generation, WireDType.F32, layout.wire, fingerprint, fingerprint, None, streams)


def ended(sock):
    """Has the other side closed, whatever it said before?"""
    try:
        while sock.recv(1 << 20):
            pass
    except ConnectionResetError:
        return True
    return True


@pytest.fixture
def sockets():
    opened = []
    yield opened
    for sock in opened:
        sock.close()


def test_silence_counts_only_after_a_heartbeat(processes, sockets):
    syncer = processes.syncer(*KEYS, "session.idle_timeout_s=1", learners=3, total_steps=9)
    quiet, beating = dial(syncer, hello(1, SMALL)), dial(syncer, hello(2, SMALL), Heartbeat(2, 1))
    sockets += [quiet, beating]
    beaten_at = time.monotonic()
    assert ended(beating)
    assert 0.9 < time.monotonic() - beaten_at < 1 + SLACK_S
    until(lambda: syncer.events("leave"), "it left")
    (left,) = syncer.events("leave")
    assert left["id"] == 2
    quiet.settimeout(0.5)
    with pytest.raises(TimeoutError):
        quiet.recv(1)


def test_a_peer_that_does_not_read_is_closed_and_holds_nobody_up(processes, sockets):
    syncer = processes.syncer(*KEYS, "session.write_timeout_s=1", learners=2, total_steps=9)
    stalled = dial(syncer, hello(1, LARGE), receive_buffer=4096)
    sockets.append(stalled)
    zero = ScriptedLearner(syncer.address, 0, LARGE)
    zero.init(random_values(LARGE, 1))
    zero.next(BcastFragment, version=0)
    sent_at = time.monotonic()
    for step in (1, 2):
        zero.answer(zero.pull(step=step), np.zeros(4_000_000, np.float32))
        zero.next(BcastFragment, version=step)
    until(lambda: syncer.events("leave"), "the stalled one is gone")
    assert 0.9 < time.monotonic() - sent_at < 1 + 2 * SLACK_S
    (left,) = syncer.events("leave")
    assert left["id"] == 1
    assert "stalled" in left["reason"]
    zero.pull(step=3)


def test_strangers_that_say_nothing_keep_nobody_out(processes, sockets):
    syncer = processes.syncer(*KEYS, "session.max_pending_handshakes=3", learners=1, total_steps=9)
    strangers = [dial(syncer) for _ in range(9)]
    sockets += strangers
    for sock in strangers[:6]:  # the oldest make room
        assert ended(sock)
    peer = ScriptedLearner(syncer.address, 0, SMALL, streams=4)
    peer.init(random_values(SMALL, 1))
    peer.pull(step=1)
