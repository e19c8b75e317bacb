"""``python -m yeto_torch.doctor`` against real syncers, other programs, and its own other end."""

import http.server
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

import yeto_torch.doctor.__main__ as doctor
from tests.support.certificates import Authority
from tests.support.processes import ROOT, child_environment
from tests.support.real_learners import SCRIPT
from tests.support.relay import Proxy
from tests.support.waiting import WAIT_S
from yeto_torch.doctor.listener import Listener
from yeto_torch.doctor.meter import _Meter
from yeto_torch.doctor.probe import LISTENER, Said, ask
from yeto_torch.wire.constants import MAGIC, MessageType
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.messages import Error, PullReq, decode_hello, encode
from yeto_torch.wire.transport.sockets import read_first_frame
from yeto_torch.wire.transport.tls import server_context

KEY = b"the key of this fleet"


@pytest.fixture
def examine(capsys):
    """Runs the doctor; returns its exit code and its lines as {check: (verdict, text)}."""

    def run(*argv):
        code = doctor.main([str(word) for word in argv])
        out = capsys.readouterr().out
        assert KEY.decode() not in out
        found = {}
        for line in out.splitlines():
            if match := re.fullmatch(r"(ok|FAIL) +(name|reach|TLS|protocol|key|round trip|rate|plan) +(.*)", line):
                found[match[2]] = (match[1], match[3])
            else:
                assert re.fullmatch(r" +-> \S.*", line), line
                check = list(found)[-1]
                assert found[check][0] == "FAIL"
                found[check] += (line.strip()[3:],)
        assert all(len(entry) == 3 for entry in found.values() if entry[0] == "FAIL")  # each with its cure
        assert code == int(any(entry[0] == "FAIL" for entry in found.values()))
        return code, found

    return run


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "fleet.key"
    path.write_bytes(KEY + b"\n")
    return path


def wrong(found):
    """(check, what it says, the cure) of the one that failed, which is the last."""
    *before, (check, entry) = found.items()
    assert all(verdict[0] == "ok" for _, verdict in before)
    assert entry[0] == "FAIL"
    return check, entry[1], entry[2]


def test_a_syncer_that_waits_for_its_fleet_and_a_session_that_is_not_disturbed(processes, examine, key_file):
    """The doctor before the run, and in the middle of it: nothing but refused connections in the log comes of it."""
    syncer = processes.syncer(
        f"security.hmac_key_file={key_file}", "schedule.sync_interval_steps=0", learners=2, total_steps=100_000
    )
    plan = ("--parameters", "30e6", "--step-time-s", "0.4")
    arguments = ("--syncer", syncer.address, "--hmac-key-file", key_file)
    code, found = examine(*arguments, *plan)
    assert code == 0
    assert list(found) == ["name", "reach", "protocol", "key", "round trip", "rate", "plan"]
    assert found["protocol"][1] == "version 4, a syncer for 2 learners"
    assert found["key"][1] == "needed, and ours is the right one"
    assert re.match(r"at least \S+ MB/s up .*--listen \d+ in its place$", found["rate"][1])
    # 2 learners, 30e6 values, 4 bytes in all for bf16, half of 24 steps of 0.4 s
    assert "bf16 50 MB/s" in found["plan"][1]

    environment = {"YETO_SYNCER": syncer.address, "YETO_RUN_ID": "r", "YETO_HMAC_KEY_FILE": str(key_file)}
    learners = [
        processes.start(f"learner {i}", [SCRIPT, "{}"], environment | {"YETO_LEARNER_ID": str(i)}) for i in range(2)
    ]
    for learner in learners:
        learner.wait_for(r"^step \d+$")
    told = len(syncer.lines)
    before = syncer.tape.read_text().splitlines()
    assert examine(*arguments)[0] == 0
    assert examine("--syncer", syncer.address)[0] == 1
    step = json.loads(syncer.tape.read_text().splitlines()[-1])["step"]
    for learner in learners:  # they go on
        learner.wait_for(rf"^step ({'|'.join(str(step + n) for n in range(5, 40))})$", start=len(learner.lines) - 1)
    news = [json.loads(line) for line in syncer.tape.read_text().splitlines()[len(before) :]]
    assert news
    assert not [line for line in news if "event" in line]
    assert all(line["responded"] == [0, 1] for line in news[1:])
    assert sum("refused a connection: " in line for line in syncer.lines[told:]) == 4
    assert not [line for line in syncer.lines[told:] if re.search(r"joined|\) left: |expired", line)]
    syncer.signal(signal.SIGINT)
    assert syncer.wait() == 130


def test_the_key(processes, examine, key_file, tmp_path):
    locked = processes.syncer(f"security.hmac_key_file={key_file}", learners=1, total_steps=9)
    code, found = examine("--syncer", locked.address)
    check, text, cure = wrong(found)
    assert (code, check, text) == (1, "key", "this syncer wants a key")
    assert "--hmac-key-file" in cure
    other = tmp_path / "other.key"
    other.write_bytes(b"another key")
    check, text, cure = wrong(examine("--syncer", locked.address, "--hmac-key-file", other)[1])
    assert (check, text) == ("key", "this syncer has another key")
    assert "copy the file" in cure
    (tmp_path / "open").mkdir()
    unlocked = processes.syncer(learners=1, total_steps=9, folder=tmp_path / "open")
    check, text, cure = wrong(examine("--syncer", unlocked.address, "--hmac-key-file", key_file)[1])
    assert (check, text) == ("key", "we have one, but this syncer has none")
    assert "security.hmac_key_file" in cure
    assert examine("--syncer", unlocked.address)[1]["key"] == (
        "ok",
        "none is needed: whoever reaches the port may join",
    )


def test_tls(processes, examine, tmp_path):
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server, client = ours.issue("syncer", "127.0.0.1"), ours.issue("learner")
    security = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": ours.ca}
    syncer = processes.syncer(*(f"security.{k}={v}" for k, v in security.items()), learners=1, total_steps=9)
    address = ("--syncer", syncer.address)
    mine = ("--tls-cert", client.cert, "--tls-key", client.key)
    code, found = examine(*address, "--tls-ca", ours.ca, *mine)
    assert code == 0
    assert found["TLS"] == ("ok", "1.3, and the certificate is accepted as that of 127.0.0.1")

    check, text, cure = wrong(examine(*address)[1])
    assert (check, text) == ("TLS", "this syncer speaks TLS only")
    assert "--tls-ca" in cure
    check, text, cure = wrong(examine(*address, "--tls-ca", theirs.ca, *mine)[1])
    assert check == "TLS"
    assert "certificate is not accepted" in text
    assert "--tls-ca must be" in cure
    check, text, cure = wrong(examine(*address, "--tls-ca", ours.ca)[1])
    assert (check, text) == ("TLS", "TLS: the other side requires a client certificate")
    assert "--tls-cert and --tls-key" in cure
    (tmp_path / "plain").mkdir()
    plain = processes.syncer(learners=1, total_steps=9, folder=tmp_path / "plain")
    check, text, cure = wrong(examine("--syncer", plain.address, "--tls-ca", ours.ca)[1])
    assert check == "TLS"
    assert "does not speak it" in text
    assert "leave out --tls-ca" in cure


def test_a_name_that_does_not_resolve_and_a_port_where_nobody_listens(examine):
    check, text, cure = wrong(examine("--syncer", "no-such-host.invalid:29400")[1])
    assert check == "name"
    assert text.startswith("no-such-host.invalid does not resolve")
    assert cure
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    check, text, cure = wrong(examine("--syncer", f"127.0.0.1:{port}")[1])
    assert check == "reach"
    assert "connection refused" in text
    assert f"listen.port={port}" in cure
    assert "firewall" in cure


@pytest.fixture
def strange():
    """Starts a server that treats every connection as ``handle`` does; its port."""
    listeners = []

    def start(handle):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run():
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock, suppress(OSError):
                    handle(sock)

        threading.Thread(target=run, daemon=True).start()
        return listener.getsockname()[1]

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_other_programs_on_the_port(examine, strange):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    check, text, cure = wrong(examine("--syncer", f"127.0.0.1:{server.server_port}")[1])
    server.shutdown()
    server.server_close()
    assert check == "protocol"
    assert cure
    assert "no syncer" in text or "without a word" in text

    port = strange(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n") or sock.recv(1 << 16))
    check, text, cure = wrong(examine("--syncer", f"127.0.0.1:{port}")[1])
    assert check == "protocol"
    assert "it answers b'SSH-2.0-OpenS'" in text
    assert "another program" in cure

    port = strange(lambda sock: sock.recv(10))
    check, text, cure = wrong(examine("--syncer", f"127.0.0.1:{port}")[1])
    assert check == "protocol"
    assert cure


def test_what_a_stranger_says_neither_ends_the_doctor_nor_steers_the_terminal(examine, strange):
    def says(raw):
        header = struct.pack("<IBQ", MAGIC, MessageType.ERROR, len(raw))
        return strange(lambda sock: (read_first_frame(sock, WAIT_S), sock.sendall(header + raw), sock.recv(1)))

    check, text, _ = wrong(examine("--syncer", f"127.0.0.1:{says(bytes([0xFF] * 9))}")[1])
    assert check == "protocol"
    assert "ERROR text is not UTF-8" in text
    found = examine("--syncer", f"127.0.0.1:{says(b'no version' + bytes([27]) + b'[2J' + b'x' * 60_000)}")[1]
    check, text, _ = wrong(found)
    assert check == "protocol"
    assert text.startswith("no version\N{REPLACEMENT CHARACTER}[2Jxxx")
    assert len(text) <= 1000


def test_the_other_end_of_a_measurement_may_be_anybody(examine, strange):
    """Counts of things that nobody asked for end it, before they fill the memory."""

    def handle(sock):
        if read_first_frame(sock, WAIT_S).payload[6:14] == bytes(8):  # the question of generation 0
            sock.sendall(b"".join(map(bytes, encode(Error(f"{LISTENER}: nobody")))))
        else:
            sock.sendall(b"".join(map(bytes, encode(PullReq(7, 1, 1)))))
        while sock.recv(1 << 16):
            pass

    port = strange(handle)
    check, text, cure = wrong(examine("--syncer", f"127.0.0.1:{port}", "--streams", "0", "--seconds", "0.2")[1])
    assert check == "rate"
    assert "counts what nobody asked for" in text
    assert cure


def test_the_hello_is_one_that_no_syncer_may_admit(strange):
    """Whatever the number of learners, and even for a syncer that did not look at the id."""
    seen = []

    def handle(sock):
        payload = read_first_frame(sock, WAIT_S).payload
        for learners in (1, 2**32 - 1, None):
            with pytest.raises(PeerError) as caught:
                decode_hello(payload, learners)
            seen.append(str(caught.value))

    port = strange(handle)
    assert ask(("127.0.0.1", port), None, None).said is Said.SILENT
    assert seen == [
        "learner id 4294967295 is not one of 0 to 0 (the syncer's learners=1)",
        "learner id 4294967295 is not one of 0 to 4294967294 (the syncer's learners=4294967295)",
        "connection generation 0: it must be nonzero",
    ]


# ------------------------------------------------------------------ the other end of a measurement


@pytest.fixture
def listen():
    listeners = []

    def start(**arguments):
        listener = Listener("127.0.0.1", 0, **arguments)
        listeners.append((listener, threading.Thread(target=listener.serve)))
        listeners[-1][1].start()
        return listener.address

    yield start
    for listener, thread in listeners:
        listener.close()
        thread.join(WAIT_S)


@pytest.mark.parametrize("streams", [0, 1, 4])
def test_the_line_is_measured_over_as_many_streams_as_a_learner_has(listen, examine, streams):
    plan = ("--parameters", "1e6", "--step-time-s", "0.4", "--learners", "2")
    code, found = examine("--syncer", listen(), "--streams", streams, "--seconds", "0.3", *plan)
    assert code == 0
    match = re.fullmatch(rf"(\S+) MB/s up, (\S+) MB/s down, measured over {streams} streams", found["rate"][1])
    assert match
    assert min(float(match[1]), float(match[2])) > 1  # loopback
    assert found["plan"][1].startswith("wire_dtype=bf16, schedule.sync_interval_steps=24: all 2 learners")


def test_a_narrow_line_is_measured_as_narrow(listen, examine):
    """Through a proxy of 4 MB/s; what only reached a buffer must not count."""
    big = ("--parameters", "30e6", "--step-time-s", "0.1", "--learners", "40")
    with Proxy(listen(), rate=4_000_000, record=False) as proxy:
        code, found = examine("--syncer", proxy.address, "--seconds", "0.4", *big)
    up, down = map(float, re.match(r"(\S+) MB/s up, (\S+) MB/s down", found["rate"][1]).groups())
    assert 2 < up < 5
    assert 2 < down < 5
    assert code == 1
    assert found["plan"][0] == "FAIL"
    assert "H above 500 is too long" in found["plan"][2]


def test_a_caller_that_stays_keeps_nobody_out_for_long(listen, examine, monkeypatch):
    monkeypatch.setattr("yeto_torch.doctor.listener._ALL_S", 0.5)
    address = listen()
    host, port = address.split(":")
    staying = _Meter((host, int(port)), None, None, 0)
    try:
        with pytest.raises(ConnectionError):
            staying._wait(lambda: False, WAIT_S)
        monkeypatch.setattr("yeto_torch.doctor.listener._ALL_S", WAIT_S)
        assert examine("--syncer", address, "--seconds", "0.2")[0] == 0
    finally:
        staying.close()


def test_with_tls_and_a_key_and_who_has_neither(listen, examine, key_file, tmp_path):
    authority = Authority(tmp_path, "ours")
    server = authority.issue("syncer", "127.0.0.1")
    address = listen(key=KEY, tls=server_context(server.cert, server.key))
    whole = ("--syncer", address, "--tls-ca", authority.ca, "--seconds", "0.2")
    code, found = examine(*whole, "--hmac-key-file", key_file)
    assert code == 0
    assert found["key"][1] == "needed, and ours is the right one"
    assert found["rate"][1].endswith("measured over 4 streams, TLS included")
    assert wrong(examine(*whole)[1])[:2] == ("key", "this syncer wants a key")
    assert wrong(examine("--syncer", address)[1])[:2] == ("TLS", "this syncer speaks TLS only")


def test_a_learner_that_comes_too_early_is_told_so(listen, processes):
    environment = {"YETO_SYNCER": listen(), "YETO_LEARNER_ID": "0", "YETO_RUN_ID": "r"}
    learner = processes.start("learner", [SCRIPT, "{}"], environment)
    assert learner.wait() == 1
    learner.wait_for("yeto_torch.doctor --listen: no syncer is here, only the other end of a measurement")


def test_the_commands_as_they_are_typed():
    listener = subprocess.Popen(
        [sys.executable, "-m", "yeto_torch.doctor", "--listen", "0", "--host", "127.0.0.1"],
        cwd=ROOT,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = re.match(r"doctor listening on (\S+); Ctrl-C ends it", listener.stdout.readline())[1]
        done = subprocess.run(
            [sys.executable, "-m", "yeto_torch.doctor", "--seconds", "0.2"],
            cwd=ROOT,
            env=child_environment() | {"YETO_SYNCER": address},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert len(done.stdout.splitlines()) == 6
        listener.send_signal(signal.SIGINT)
        assert listener.wait(WAIT_S) == 0
    finally:
        listener.kill()
        listener.wait()
        listener.stdout.close()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "--syncer: not given"),
        (["--syncer", "host"], "must be 'host:port'"),
        (["--syncer", "h:1", "--parameters", "1e6"], "the plan needs both"),
        (["--syncer", "h:1", "--parameters", "-1"], "'-1' must be a number above 0"),
        (["--syncer", "h:1", "--learners", "0"], "'0' must be a whole number from 1"),
        (["--syncer", "h:1", "--hmac-key-file", "no/such/file"], "--hmac-key-file='no/such/file': cannot be read"),
        (["--syncer", "h:1", "--tls-ca", "no/such/file"], "tls ca='no/such/file': must be a readable file"),
        (["--listen", "70000"], "'70000' must be a whole number from 0 to 65535"),
        (["--listen", "0", "--tls-cert", "x"], "--tls-cert and --tls-key: must be given together"),
        (["--listen", "0", "--tls-cert", "x", "--tls-key", "y"], "--tls-cert x: must be a readable file"),
    ],
)
def test_wrong_arguments_are_exit_code_2(argv, sentence, capsys):
    with pytest.raises(SystemExit) as caught:
        doctor.main(argv)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err
