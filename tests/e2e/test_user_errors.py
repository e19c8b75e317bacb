"""What goes wrong before a run begins, as a user sees it: one clear line, the right exit code, nothing left behind.

Source: docs/syncer.md, exit codes and configuration; rulings §2.8, §5.14.
"""

import re
import socket
import time
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from tests.support.real_learners import SCRIPT, start_script
from tests.support.scripted_learner import ScriptedLearner, random_values
from yeto_torch import Layout, YetoOuterOptimizer
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.errors import ConnectionLostError, RefusedError
from yeto_torch.wire.model_layout import Fragment, Tensor


def one_line(running):
    """The one line the process said for itself, without its log's time and level; its exit code must be an error's."""
    assert running.wait() in (1, 2), running.told()
    said = [line for line in running.lines if "profile hash" not in line and "NOT PROTECTED" not in line]
    assert len(said) == 1, running.told()
    assert "Traceback" not in running.text
    return re.sub(r"^\d\d:\d\d:\d\d ERROR ", "", said[0])


# ------------------------------------------------------------------------------------------ the syncer's command line


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["schedule.bananas=1"], "schedule.bananas: unknown key"),
        (["schedule.quorum=3"], "schedule.quorum=3: must be null or an integer from 1 to learners, 2"),
        (
            ["checkpoint.path={folder}/none/checkpoint"],
            "checkpoint.path={folder}/none/checkpoint: must be in an existing",
        ),
        (
            ["checkpoint.path={folder}/file/checkpoint"],
            "checkpoint.path={folder}/file/checkpoint: must be in an existing",
        ),
        (["tape.path={folder}"], "tape.path={folder}: must be a file, but it is a folder"),
        (["merge.device=cuda:99"], "merge.device='cuda:99': this machine has"),
    ],
)
def test_a_configuration_that_cannot_work_is_one_line_and_exit_code_2(processes, overrides, told):
    (processes.folder / "file").touch()
    before = set(processes.folder.iterdir())
    overrides = [text.format(folder=processes.folder) for text in overrides]
    syncer = processes.syncer(*overrides, learners=2, total_steps=3, listening=False)
    line = one_line(syncer)
    assert syncer.code == 2
    assert re.sub(r"^syncer: ", "", line).startswith("configuration error: " + told.format(folder=processes.folder))
    assert set(processes.folder.iterdir()) == before


def test_what_cannot_be_opened_is_one_line_and_exit_code_1(processes):
    def failing(*overrides, **files):
        for name, content in files.items():
            (processes.folder / name).write_bytes(content)
        syncer = processes.syncer(*overrides, learners=2, total_steps=3, listening=False)
        line = one_line(syncer)
        assert syncer.code == 1
        for name, content in files.items():  # nothing that was there is touched
            assert (processes.folder / name).read_bytes() == content
            (processes.folder / name).unlink()
        return line

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = failing(f"listen.port={port}")
    assert line.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    assert "listen.port (0 = any free port)" in line
    assert failing("listen.host=192.0.2.1").startswith("cannot listen on 192.0.2.1:0: ")
    assert "no-such-host.invalid" in failing("listen.host=no-such-host.invalid")
    assert "checkpoint.resume=true" in failing("checkpoint.resume=true")
    line = failing("checkpoint.resume=auto", checkpoint=b"\x80\x5a\x70\xd1 and then something else")
    assert line.startswith(f"checkpoint {processes.folder}/checkpoint: ")
    line = failing("checkpoint.resume=true", checkpoint=b"PK\x03\x04 not one of ours, but long enough to be looked at")
    assert "not a checkpoint" in line
    notes = processes.folder / "notes"
    line = failing(f"tape.path={notes}", notes=b"some notes\nof mine\n")
    assert line.startswith(f"tape {notes}: not a tape")
    assert not (processes.folder / "address").exists()


# ------------------------------------------------------------------------------------------ a learner without a syncer


def no_one_there():
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_an_unreachable_syncer_is_told_within_the_connect_timeout(caplog):
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)  # the first one imports much

    def failure(address):
        started = time.monotonic()
        with pytest.raises(ConnectionLostError) as caught:
            YetoOuterOptimizer(inner, model, syncer=address, learner_id=0, run_id="errors", connect_timeout_s=0.5)
        assert 0.5 <= time.monotonic() - started < 5
        assert "\n" not in str(caught.value)
        return str(caught.value)

    address = no_one_there()
    told = failure(address)
    assert f"syncer {address}" in told
    assert "within 0.5 s (connect_timeout_s)" in told
    assert "connection refused" in told
    assert any("connection refused); trying again" in record.message for record in caplog.records)  # said at once
    told = failure("no-such-host.invalid:29400")
    assert "the name does not resolve" in told
    assert "no-such-host.invalid:29400" in told
    with ExitStack() as stack:  # a host that does not answer: its queue of connections is full
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        port = silent.getsockname()[1]
        assert f"syncer 127.0.0.1:{port}, still waiting for a connection to the syncer" in failure(f"127.0.0.1:{port}")
    with pytest.raises(ValueError, match=r"syncer='127\.0\.0\.1': must be 'host:port'"):
        YetoOuterOptimizer(inner, model, syncer="127.0.0.1", learner_id=0)


def test_a_script_without_a_syncer_ends_with_the_reason_as_its_last_word(processes):
    address = no_one_there()
    script = start_script(processes, address, 0, optimizer={"run_id": "alone", "connect_timeout_s": 0.3})
    assert script.wait() == 1
    assert re.fullmatch(rf".*ConnectionLostError: the fleet did not start .*{address}.*refused.*", script.lines[-1])
    wrong = processes.start("learner", [SCRIPT, "{}"], {"YETO_SYNCER": "here", "YETO_LEARNER_ID": "0"})
    assert wrong.wait() == 1
    assert wrong.lines[-1].startswith("ValueError: syncer='here': must be 'host:port'")


# ------------------------------------------------------------------------------------------ the wrong learner


def test_learners_of_another_model_or_run_are_refused_with_the_reason_and_disturb_nobody(processes):
    """Equal sizes under other names, other sizes, another run, another dtype: four refusals, one run that goes on."""
    syncer = processes.syncer("schedule.sync_interval_steps=0", learners=2, total_steps=2)
    layout = Layout((Fragment(MergeMode.RDA, (Tensor("weight", (2, 3)), Tensor("bias", (2,)))),))
    first = ScriptedLearner(syncer.address, 0, layout, contract=b"\x0a" * 32)
    first.init(random_values(layout, 1))
    syncer.wait_for("learner 0 .* joined")  # it is this one that fixes the session

    def refusal(model, contract, **config):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        started = time.monotonic()
        with pytest.raises(RefusedError) as caught:
            YetoOuterOptimizer(
                inner,
                model,
                syncer=syncer.address,
                learner_id=1,
                contract=contract,
                fragments=1,
                streams=0,
                connect_timeout_s=60,
                **config,
            )
        assert time.monotonic() - started < 10
        text = str(caught.value)
        assert "\n" not in text
        return text

    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.heaviness = nn.Parameter(torch.zeros(2, 3))
            self.bias = nn.Parameter(torch.zeros(2))

    same = b"\x0a" * 32
    theirs = first.layout.fingerprint.hex()[:12]
    assert theirs in (told := refusal(Renamed(), same, wire_dtype="f32"))
    assert "the sizes are equal but tensor names, order or shapes differ" in told
    assert "another model" in (told := refusal(nn.Linear(5, 2), same, wire_dtype="f32"))
    assert "12 values in 1 fragment" in told
    other = b"\x0b" * 32
    told = refusal(nn.Linear(3, 2), other, wire_dtype="f32")
    assert "another run" in told
    assert same.hex()[:12] in told
    assert other.hex()[:12] in told
    assert "wire dtype bf16, this session uses f32" in refusal(nn.Linear(3, 2), same, wire_dtype="bf16")

    second = ScriptedLearner(syncer.address, 1, layout, contract=same)
    for peer in (first, second):
        peer.serve(lambda _peer, pull: random_values(layout, pull.step)[0])
    assert syncer.wait() == 0
    refused = [line for line in syncer.events("reject") if line["what"] == "hello"]
    assert [line["id"] for line in refused] == [1, 1, 1, 1]
    assert [line["reason"] for line in refused] == [
        re.sub(r"^.* (refused a hello of learner 1: )", "", line)
        for line in syncer.lines
        if "refused a hello of learner 1: " in line
    ]
