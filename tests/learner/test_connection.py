"""Dialling, losing the connection, finding it again, being turned away: over real sockets."""

import gc
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch

from tests.support.joined_learner import (
    await_session,
    flat,
    gradients,
    heard,
    join,
    model_of,
    pulled,
    vector,
    zero_gradients,
)
from tests.support.scripted_syncer import WAIT_S, ScriptedSyncer
from yeto_torch import ConnectionLostError, PeerError, RefusedError, YetoOuterOptimizer
from yeto_torch.learner.effects import Respond
from yeto_torch.learner.link import Link, Outgoing
from yeto_torch.learner.session import Session
from yeto_torch.wire import messages
from yeto_torch.wire.constants import Direction, MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.transport.sockets import dial

pytestmark = pytest.mark.usefixtures("quick_redial")


def one(value=1.0):
    return model_of(x=vector(value))


def step(optimizer, model, gradient=0.0):
    gradients(model, (torch.full_like(p, gradient) for p in model.parameters()))
    optimizer.step()


def anchored(optimizer, group, model, version=0, value=0.0):
    group.broadcast(0, version, vector(value))
    heard(optimizer, x=(0, version))
    step(optimizer, model)


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---------------------------------------------------------------------------------------------- waiting for the start


def test_the_constructor_returns_when_every_fragment_has_its_first_anchor(syncer, caplog, monkeypatch):
    monkeypatch.setattr("yeto_torch.learner.learner._SAY_EVERY_S", 0.02)
    model = model_of(a=vector(1, 2), b=vector(3))
    made = []
    thread = threading.Thread(
        target=lambda: made.append(join(syncer, model, wait_for_start=True, fragments=2)), daemon=True
    )
    thread.start()
    group = syncer.group(0)
    group.pull(0, 1)  # early, and no reason to spin or to answer
    group.broadcast(0, 0, vector(7, 8))
    deadline = time.monotonic() + WAIT_S
    while "the first weights of fragment 1 of 2" not in caplog.text:
        assert time.monotonic() < deadline
        thread.join(0.01)
    assert not made
    group.broadcast(1, 0, vector(9))
    thread.join(WAIT_S)
    assert (model.a.tolist(), model.b.tolist()) == ([7, 8], [9])
    assert made[0]._learner.local_step == 0
    made[0].close()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (lambda: f"127.0.0.1:{closed_port()}", "refused"),
        (lambda: "no-such-host.invalid:29400", "does not resolve"),
    ],
    ids=["nobody listens", "no such name"],
)
def test_where_nobody_is_the_constructor_says_what_was_tried_in_time(address, words):
    where, model = address(), one()
    inner = torch.optim.SGD(model.parameters())
    begun = time.monotonic()
    with pytest.raises(ConnectionLostError) as error:
        YetoOuterOptimizer(inner, model, syncer=where, learner_id=1, run_id="r", connect_timeout_s=0.6)
    assert time.monotonic() - begun < 5
    assert words in str(error.value)
    assert where in str(error.value)
    assert "connect_timeout_s" in str(error.value)


def test_a_syncer_that_never_starts_is_a_timeout_that_says_what_is_missing(syncer):
    with pytest.raises(ConnectionLostError, match="still waiting for the first weights of fragment 0"):
        join(syncer, one(), wait_for_start=True, connect_timeout_s=0.3)
    assert syncer.group(0).wait_closed()


def test_a_failure_is_logged_with_its_cause_once_at_first(caplog):
    model = one()
    with pytest.raises(ConnectionLostError):
        YetoOuterOptimizer(
            torch.optim.SGD(model.parameters()),
            model,
            syncer=f"127.0.0.1:{closed_port()}",
            learner_id=1,
            run_id="r",
            connect_timeout_s=1.0,
        )
    said = [r.message for r in caplog.records if "no connection to the syncer" in r.message]
    assert len(said) == 1
    assert "refused" in said[0]


def test_max_reconnects_ends_the_training_loop(syncer):
    model = one()
    optimizer = join(syncer, model, max_reconnects=2)
    syncer.group(0)
    syncer.down()
    await_session(optimizer, lambda s: s.failure is not None)
    with pytest.raises(ConnectionLostError, match="max_reconnects"):
        step(optimizer, model)
    optimizer.close()


# ---------------------------------------------------------------------------------------------- losing it


@pytest.mark.parametrize("how", ["group", "one data socket", "inside a frame", "ERROR on a data socket"])
def test_a_lost_connection_is_dialled_again_with_a_fresh_generation(syncer, how):
    model = one()
    optimizer = join(syncer, model, streams=2)
    group = syncer.group(0)
    anchored(optimizer, group, model, 3, 5.0)
    group.pull(0, 4)
    pulled(optimizer, 0, 4)
    if how == "group":
        group.cut_off()
    elif how == "one data socket":
        group.data[1].shutdown(socket.SHUT_RDWR)
    elif how == "ERROR on a data socket":
        group.data[0].sendall(messages.encode(messages.Error("a data socket too many"))[0])
    else:
        group.data[0].sendall(messages.encode(messages.Heartbeat(1, 1))[0][:7])
        group.control.shutdown(socket.SHUT_RDWR)
    again = syncer.group(1)
    assert again.hello.generation not in (0, group.hello.generation)
    assert again.is_whole
    again.broadcast(0, 3, vector(5.0))  # the same truth as before: nothing moves, nothing restarts
    heard(optimizer, x=(0, 3))
    step(optimizer, model, 1.0)
    assert again.maybe(messages.PushFragment, 0.2) is None  # the old generation's pull is forgotten
    again.pull(0, 4, attempt=2)
    pulled(optimizer, 0, 4, 2)
    step(optimizer, model, 1.0)
    push = again.push(attempt=2)
    assert (push.base_version, push.c_steps) == (3, 2)
    assert again.delta(push).item() == pytest.approx(-0.2)
    assert optimizer.stats.reconnects == 1
    optimizer.close()


def test_a_syncer_that_was_set_back_is_followed_with_a_warning(syncer, caplog):
    model = one()
    optimizer = join(syncer, model, merge_alpha=0.5)
    anchored(optimizer, syncer.group(0), model, 9, 5.0)
    step(optimizer, model, 1.0)
    syncer.group(0).cut_off()
    again = syncer.group(1)
    again.broadcast(0, 6, vector(-3.0))
    heard(optimizer, x=(0, 6))
    step(optimizer, model, 1.0)
    assert model.x.item() == -3.0  # overwritten, not blended
    assert "from version 9 to 6" in caplog.text
    again.broadcast(0, 5, vector(100.0))
    again.pull(0, 7)
    pulled(optimizer, 0, 7)
    step(optimizer, model, 1.0)
    assert again.push(step=7).base_version == 6
    optimizer.close()


def test_training_goes_on_while_there_is_nobody(syncer):
    model = one()
    optimizer = join(syncer, model)
    anchored(optimizer, syncer.group(0), model)
    syncer.down()
    await_session(optimizer, lambda s: s.generation is None)
    for _ in range(50):
        step(optimizer, model, 1.0)
    assert model.x.item() == pytest.approx(-5.0, abs=1e-4)
    assert not optimizer.stats.connected
    with ScriptedSyncer(port=syncer.port) as back:
        group = back.group(0)
        group.broadcast(0, 0, vector(0.0))
        heard(optimizer, x=(0, 0))
        group.pull(0, 1)
        pulled(optimizer, 0, 1)
        step(optimizer, model, 1.0)
        push = group.push(step=1)
        assert push.c_steps == 51  # nothing of the outage is lost
        assert group.delta(push).item() == pytest.approx(-5.1, abs=1e-4)
        optimizer.close()


def test_an_unread_socket_holds_back_no_step_and_memory_stays_bounded(monkeypatch):
    """The first answer is read and then nobody reads; the second, larger than the kernel's buffers, gets stuck."""
    monkeypatch.setattr("yeto_torch.learner.link.HEARTBEAT_S", 3600.0)
    size = 4_000_000
    with ScriptedSyncer(receive_bytes=8192) as syncer:
        model = model_of(x=torch.zeros(size))
        optimizer = join(syncer, model)
        group = syncer.group(0)
        group.broadcast(0, 0, torch.zeros(size))
        heard(optimizer, x=(0, 0))
        zero_gradients(model)
        optimizer.step()
        with group.changed:  # holds the scripted syncer's reader in its callback
            for number in range(1, 8):
                group.pull(0, number)
                pulled(optimizer, 0, number)
                begun = time.monotonic()
                optimizer.step()
                assert time.monotonic() - begun < 2.0
            assert len(optimizer._learner.link._outbox) <= 1
            assert optimizer.stats.pushes <= 2  # the others were replaced before anybody spent time on encoding them
        assert group.push(step=7).c_steps == 7  # the newest of those that waited went out
        optimizer.close()


def test_an_answer_for_a_generation_that_is_gone_is_dropped(syncer):
    model = one()
    optimizer = join(syncer, model)
    group = syncer.group(0)
    anchored(optimizer, group, model)
    stale = Respond(messages.PullReq(0, 1, 1), group.hello.generation ^ 1, 0, b"", local_step=1, c_steps=1, c_tokens=1)
    optimizer._learner.link.submit(Outgoing(stale, None))
    assert group.maybe(messages.PushFragment, 0.2) is None
    optimizer._learner.link.submit(Outgoing(replace(stale, generation=group.hello.generation), None))
    assert group.next(messages.PushFragment).step == 1
    optimizer.close()


class Recorder:
    """A group whose writer has not got to anything yet."""

    def __init__(self):
        self.sent = []

    def send(self, message, _on_sent=None):
        self.sent.append(message)
        return True


def test_report_and_acknowledgement_are_queued_once_per_generation():
    """Queued twice, the first may be on the wire already: a duplicate report voids the experiment."""
    session = Session(1)
    layout = WireLayout((WireFragment(MergeMode.RDA, (1,)),))
    hello = messages.Hello(0, 1, WireDType.F32, layout, bytes(32), bytes(32), None, 0)
    link = Link(session, ("127.0.0.1", 1), hello, GroupLimits(layout, hello.dtype, Direction.TO_LEARNER))
    session.attached(5)
    session.freeze(3, 30)
    cut = messages.FinalManifest(1, (1,))
    for message in (cut, messages.FinalFragment(0, 1, bytes(4))):
        session.received(message)
    session.installed(cut)
    group = Recorder()
    for _ in range(3):
        link._send_control(group)
        assert not link._has_work()
    assert group.sent == [messages.FinalAck(1), messages.BudgetDone(3)]
    session.attached(6)  # the report had not left: it is due again
    link._send_control(group)
    assert group.sent[2:] == [messages.BudgetDone(3)]


# ---------------------------------------------------------------------------------------------- being turned away


@pytest.mark.parametrize("waiting", [True, False])
def test_error_is_terminal_and_raises_with_the_syncers_words(syncer, waiting):
    def refuse():
        syncer.group(0).error("run 12ab is not run 34cd")

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    model = one()
    if waiting:
        with pytest.raises(RefusedError, match="run 12ab is not run 34cd"):
            join(syncer, model, wait_for_start=True)
    else:
        optimizer = join(syncer, model)
        await_session(optimizer, lambda s: s.failure is not None)
        for _ in range(2):
            with pytest.raises(RefusedError, match="run 12ab is not run 34cd"):
                step(optimizer, model)
        optimizer.close()
    thread.join(WAIT_S)
    assert len(syncer.groups) == 1  # no second attempt


@pytest.mark.parametrize(
    "frame",
    [
        bytes.fromhex("dfc070d1") + bytes([5]) + (16).to_bytes(8, "little"),
        bytes.fromhex("dec070d1") + bytes([5]) + (1 << 40).to_bytes(8, "little"),
        bytes.fromhex("dec070d1") + bytes([4]) + (49).to_bytes(8, "little"),
        messages.encode(messages.Shutdown())[0],
    ],
    ids=["magic", "length", "a type for the syncer", "SHUTDOWN too early"],
)
def test_a_malformed_frame_ends_the_group_and_raises_in_the_training_loop(syncer, frame):
    model = one()
    optimizer = join(syncer, model)
    group = syncer.group(0)
    group.raw(frame)
    group.wait_closed()
    await_session(optimizer, lambda s: s.failure is not None)
    with pytest.raises(PeerError, match="the syncer broke the protocol"):
        step(optimizer, model)
    assert model.x.item() == 1.0
    assert len(syncer.groups) == 1
    optimizer.close()


def test_hello_is_signed(tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_bytes(b"the key\n")
    monkeypatch.setenv("YETO_HMAC_KEY_FILE", str(key))
    with ScriptedSyncer(mac_key=b"the key") as syncer:
        optimizer = join(syncer, one())
        assert syncer.group(0).hello.learner_id == 1
        optimizer.close()
        assert not syncer.refused


# ---------------------------------------------------------------------------------------------- leaving


def test_close_leaves_at_once_and_the_optimizer_trains_on_alone(syncer):
    model = one()
    with join(syncer, model) as optimizer:
        group = syncer.group(0)
        anchored(optimizer, group, model)
        group.pull(0, 1)
        pulled(optimizer, 0, 1)
        begun = time.monotonic()
    assert time.monotonic() - begun < 2.0
    group.wait_closed()
    step(optimizer, model, 1.0)
    assert flat(optimizer, model, 0).item() == pytest.approx(-0.1)
    optimizer.close()
    assert not optimizer.stats.connected
    assert optimizer.stats.bytes_received > 0


def test_who_leaves_while_dialling_says_no_hello_any_more(syncer, monkeypatch, caplog):
    """It would supersede whoever took its place, for good."""
    dialling, go_on = threading.Event(), threading.Event()

    def slow_dial(*arguments):
        dialling.set()
        assert go_on.wait(WAIT_S)
        return dial(*arguments)

    monkeypatch.setattr("yeto_torch.learner.link.dial", slow_dial)
    optimizer = join(syncer, one())
    assert dialling.wait(WAIT_S)
    optimizer.close()
    go_on.set()
    optimizer._learner.link._thread.join(WAIT_S)
    assert not optimizer._learner.link._thread.is_alive()
    assert not caplog.text
    with join(syncer, one()) as successor:
        await_session(successor, lambda session: session.generation is not None)
        assert syncer.group(0).hello.generation == successor._learner.link.session.generation


def test_an_optimizer_that_is_dropped_leaves(syncer):
    optimizer = join(syncer, one())
    group = syncer.group(0)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    group.wait_closed()


FORGOTTEN = """
import sys, torch
from yeto_torch import YetoOuterOptimizer
model = torch.nn.Linear(1, 1)
optimizer = YetoOuterOptimizer(
    torch.optim.SGD(model.parameters()), model, syncer=sys.argv[1], learner_id=1, run_id="r", wait_for_start=False
)
"""


def test_a_script_that_just_ends_leaves_no_process_hanging(syncer, root):
    done = subprocess.run(
        [sys.executable, "-c", FORGOTTEN, syncer.address], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
