"""Who may enter, over real processes and real sockets: TLS, keys, profiles, contracts, replays, and outliers.

Source: docs/quickstart.md, "Over the internet"; SECURITY.md; rulings §2.
"""

import json
import re
import socket
import time

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.certificates import Authority
from tests.support.real_learners import SCRIPT, Learner, same_weights, training, wait_all
from tests.support.scripted_learner import ScriptedLearner, random_values
from tests.support.toy_model import toy
from yeto_torch import YetoOuterOptimizer
from yeto_torch.fragments import build_layout
from yeto_torch.wire.constants import HEADER_BYTES, Direction, MergeMode, MessageType, WireDType
from yeto_torch.wire.errors import ConnectionLostError, RefusedError
from yeto_torch.wire.frames import FrameReader
from yeto_torch.wire.limits import GroupLimits
from yeto_torch.wire.messages import Hello, decode, encode
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor, contract_hash

WAIT_S = 60.0
FAST = "schedule.sync_interval_steps=0"
KEY = b"a secret that nobody may ever read anywhere"


def told(kind, address, **config):
    """What a learner that may not enter is told; at once, not after its connect timeout."""
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"run_id": "run", "streams": 1, "connect_timeout_s": WAIT_S} | config
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        YetoOuterOptimizer(inner, model, syncer=address, learner_id=0, **arguments)
    assert time.monotonic() - started < WAIT_S / 2
    assert "\n" not in str(caught.value)
    assert KEY.decode() not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """An authority and what it signed, somebody else's authority, and a key file."""
    folder = tmp_path_factory.mktemp("secrets")
    authority, stranger = Authority(folder, "ours"), Authority(folder, "theirs")
    (folder / "key").write_bytes(KEY + b"\n")
    return {
        "ca": authority.ca,
        "server": authority.issue("syncer", "127.0.0.1"),
        "client": authority.issue("learner"),
        "their_ca": stranger.ca,
        "their_client": stranger.issue("learner"),
        "key": folder / "key",
    }


def test_a_fleet_behind_tls_client_certificates_and_a_key_and_who_stays_outside(world, processes):
    server, client, theirs = world["server"], world["client"], world["their_client"]
    security = {
        "tls_cert": server.cert,
        "tls_key": server.key,
        "tls_client_ca": world["ca"],
        "hmac_key_file": world["key"],
    }
    syncer = processes.syncer(FAST, *(f"security.{k}={v}" for k, v in security.items()), learners=2, total_steps=12)
    tls = {"ca": world["ca"], "cert": client.cert, "key": client.key}
    address = syncer.address

    assert "this syncer speaks TLS only" in told(RefusedError, address)
    assert "TLS: the other side requires a client certificate" in told(ConnectionLostError, address, tls=world["ca"])
    stranger = tls | {"cert": theirs.cert, "key": theirs.key}
    assert "TLS: the other side does not accept our cert" in told(ConnectionLostError, address, tls=stranger)
    distrustful = tls | {"ca": world["their_ca"]}
    assert "TLS: the other side's certificate is not accepted" in told(ConnectionLostError, address, tls=distrustful)
    other_name = tls | {"server_hostname": "syncer.example"}
    assert "Hostname mismatch" in told(ConnectionLostError, address, tls=other_name)
    for key in (None, b"another key", KEY + b"\n"):
        assert "give the learner the same hmac_key" in told(RefusedError, address, tls=tls, hmac_key=key)
    for said in (
        "does not speak it",
        "shows no client certificate",
        "is not accepted",
        "does not accept our certificate",
    ):
        syncer.wait_for(f"refused a connection: TLS: .*{said}")
    syncer.wait_for("refused a connection: HELLO is not signed with this syncer's key")

    variables = {"YETO_TLS_CA": world["ca"], "YETO_TLS_CERT": client.cert, "YETO_TLS_KEY": client.key}
    variables |= {
        "YETO_HMAC_KEY_FILE": world["key"],
        "YETO_SYNCER": address,
        "YETO_LEARNER_ID": 0,
        "YETO_RUN_ID": "run",
    }
    out = processes.folder / "learner.npz"
    script = processes.start(
        "learner 0", [SCRIPT, json.dumps({"out": str(out)})], {k: str(v) for k, v in variables.items()}
    )
    with training(Learner(address, 1, run_id="run", streams=3, tls=tls, hmac_key=KEY)) as learners:
        results = wait_all(list(learners))
    assert (syncer.wait(), script.wait()) == (0, 0), syncer.told()
    with np.load(out) as saved:
        assert same_weights(results[0], [saved[name] for name in saved.files])
    spoken = [syncer.text, script.text, syncer.tape.read_text(), syncer.checkpoint.read_bytes().decode("latin-1")]
    assert not [text for text in spoken if KEY.decode() in text or "PRIVATE KEY" in text]
    assert "NOT PROTECTED" not in syncer.text


def test_a_plain_syncer_tells_whoever_brings_tls_or_a_key(world, processes):
    syncer = processes.syncer(FAST, "listen.host=0.0.0.0", learners=2, total_steps=2)
    assert re.search(r"WARNING NOT PROTECTED: listen\.host=0\.0\.0\.0 .*security\.hmac_key_file", syncer.text)
    address = syncer.address.replace("0.0.0.0", "127.0.0.1")
    message = told(ConnectionLostError, address, tls=world["ca"])
    assert f"cannot reach {address} securely: TLS: the other side does not speak it" in message
    assert "YETO_TLS_CA" in message
    syncer.wait_for("refused a connection: the peer speaks TLS, but this port does not")
    for profile in (None, bytes(32)):
        assert "hmac_key" in told(RefusedError, address, hmac_key=KEY, profile=profile)
    assert not syncer.events("join"), "none of them pinned anything"


def test_a_run_bound_to_its_configuration_and_contract(processes):
    """The YAML that the syncer prints lets a learner in; everything else is refused with what differs."""
    layout = toy_layout()
    contract = contract_hash(layout.fingerprint, "mine")
    keys = ["learners=1", "total_steps=4", FAST, "outer.momentum=0.25", "session.require_profile_binding=true"]
    keys += [f"session.expected_contract={contract.hex()}", "schedule.quorum=null", "checkpoint.path=bound.ckpt"]
    printed = processes.start("configuration", ["-m", "syncer", *keys, "--cfg", "job", "--resolve"])
    assert printed.wait() == 0
    yaml = "\n".join(printed.lines) + "\n"
    ours = {"fragments": 2, "wire_dtype": "f32"}
    syncer = processes.syncer(*keys, learners=1, total_steps=4)
    named = syncer.wait_for(r"profile hash ([0-9a-f]{64})$")[1]

    message = told(RefusedError, syncer.address, run_id="mine", **ours)
    assert "requires profile binding and the HELLO carries no profile" in message
    assert named[:12] in message
    changed = yaml.replace("momentum: 0.25", "momentum: 0.5")
    assert changed != yaml
    message = told(RefusedError, syncer.address, run_id="mine", profile=changed, **ours)
    assert re.search(rf"profile mismatch: the learner is bound to [0-9a-f]{{12}}, .* is {named[:12]}", message)
    message = told(RefusedError, syncer.address, run_id="another", profile=yaml, **ours)
    assert re.search(
        rf"contract mismatch: the learner's run is [0-9a-f]{{12}}, expected is {contract.hex()[:12]}", message
    )
    assert not syncer.events("join"), "none of them pinned anything"
    assert [line["reason"][:8] for line in syncer.events("reject")] == ["this syn", "profile ", "contract"]

    learner = Learner(syncer.address, 0, run_id="mine", profile=yaml, **ours)
    with training(learner):
        learner.result()
    assert syncer.wait() == 0, syncer.told()
    assert syncer.events("start")[0]["profile"] == named == learner.optimizer._learner.config.profile_hash.hex()


def toy_layout():
    """Of the learners' toy model in two fragments."""
    return build_layout(((name, tuple(p.shape)) for name, p in toy(0).named_parameters()), fragments=2)


def test_a_recorded_hello_displaces_nobody(world, processes):
    """Byte for byte the HELLO of a living learner, with its mac, on another connection; and after that one's end."""
    syncer = processes.syncer(FAST, f"security.hmac_key_file={world['key']}", learners=1, total_steps=3)
    layout = Layout((Fragment(MergeMode.AVG, (Tensor("w", (8,)),)),))
    wire = layout.wire
    recorded = b"".join(encode(Hello(0, 77, WireDType.F32, wire, layout.fingerprint, layout.fingerprint, None, 0), KEY))
    limits = GroupLimits(wire, WireDType.F32, Direction.TO_LEARNER)

    def say():
        host, _, port = syncer.address.rpartition(":")
        sock = socket.create_connection((host, int(port)), WAIT_S)
        sock.sendall(recorded)
        return sock

    def answer(sock):
        """The next frame, None at the end."""
        reader = FrameReader(limits)
        while count := sock.recv_into(reader.buffer()):
            frame = reader.received(count)
            if frame is not None:
                return frame
        return None

    living = say()
    syncer.wait_for("learner 0 .* joined")
    for _ in range(2):
        with say() as replay:
            error = answer(replay)
            assert error.kind is MessageType.ERROR
            assert "was admitted before" in decode(error.kind, error.payload).text
            assert answer(replay) is None
    living.settimeout(0.2)
    with pytest.raises(TimeoutError):  # nothing was said to it, and it is still there
        living.recv(HEADER_BYTES)
    living.settimeout(WAIT_S)
    assert not syncer.events("leave")
    living.close()
    syncer.wait_for("learner 0 .* left")
    with say() as replay:
        assert answer(replay).kind is MessageType.ERROR
    assert len(syncer.events("join")) == 1


def test_an_answer_a_million_times_too_long_is_left_out_and_told(processes):
    syncer = processes.syncer(
        FAST,
        "preset=direct",
        "merge.max_norm_ratio=1000",
        "schedule.quorum=3",
        "schedule.pipeline=1",
        learners=3,
        total_steps=4,
    )
    layout = Layout((Fragment(MergeMode.AVG, (Tensor("a", (50,)),)), Fragment(MergeMode.RDA, (Tensor("b", (30,)),))))
    peers = [ScriptedLearner(syncer.address, i, layout) for i in range(3)]
    start = random_values(layout, 1)
    peers[0].init(start)
    expected = [value.astype(np.float64) for value in start]
    for peer in peers:
        delta = 1e6 if peer.learner_id == 1 else 1.0
        peer.serve(
            lambda _, pull, factor=delta: (
                np.float32(factor * pull.step) * np.ones(layout.fragments[pull.fragment].numel, np.float32)
            )
        )
    _, final = peers[0].cut()
    assert syncer.wait() == 0, syncer.told()
    for step in range(1, 5):
        expected[(step - 1) % 2] += step
    for value, wanted in zip(final, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for line in syncer.merges():
        assert line["rejected"] == {"norm": 1}
        assert [entry["id"] for entry in line["left_out_members"]] == [1]
        assert line["left_out_members"][0]["norm"] == pytest.approx(1e6 * line["left_out_members"][0]["median_norm"])
        assert line["responded"] == [0, 1, 2]
        assert [entry["contribution"] for entry in line["responders"]] == [0.5, 0.0, 0.5]
    syncer.wait_for(r"refused a push of learner 1, step 1, attempt 1: norm 7\.07e\+06 exceeds 1000 times")
