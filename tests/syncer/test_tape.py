"""The event tape: whole lines or none, torn ends cut off, foreign files left alone, superseded merges dropped."""

import errno
import json
import os
import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.tape import Tape, merges, read_tape
from yeto_torch.wire.errors import LocalError, StateError


def clock():
    return 1234.5


def start(step):
    return {"event": "start", "step": step, "time": 1}


def merge(step, **more):
    return {"step": step, "fragment": 0, "time": 1, **more}


def lines(*objects):
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in objects)


def test_lines_are_appended_one_object_each_with_a_time(tmp_path):
    path = tmp_path / "tape.jsonl"
    tape = Tape(path, clock)
    tape.event("start", step=0, note="two\nlines\u2028and an end")
    tape.write(merge(1, rejected={"duplicate": 2}, grace_ms=None))
    tape.write({"step": 2, "expected_members": [{"id": 0, "generation": 2**64 - 1}]})
    tape.close()
    tape.close()
    tape.write({"step": 3})
    text = path.read_text()
    assert text.endswith("\n")
    assert [json.loads(line) for line in text.splitlines()] == list(read_tape(path))
    assert list(read_tape(path)) == [
        {"event": "start", "step": 0, "note": "two\nlines\u2028and an end", "time": 1234.5},
        merge(1, rejected={"duplicate": 2}, grace_ms=None),
        {"step": 2, "expected_members": [{"id": 0, "generation": 2**64 - 1}], "time": 1234.5},
    ]


def test_each_line_is_on_the_file_when_write_returns(tmp_path):
    tape = Tape(tmp_path / "tape.jsonl")
    for step in range(3):
        tape.write({"step": step})
        assert len(list(read_tape(tmp_path / "tape.jsonl"))) == step + 1
    tape.close()


def test_a_line_is_one_write(tmp_path, monkeypatch):
    tape, real, sizes = Tape(tmp_path / "tape.jsonl"), os.write, []

    def counting(fd, data):
        sizes.append(len(data))
        return real(fd, data)

    monkeypatch.setattr("syncer.tape.os.write", counting)
    tape.write({"step": 1, "filler": "x" * 300_000})
    monkeypatch.undo()
    tape.close()
    assert len(sizes) == 1


def test_without_a_path_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tape = Tape(None)
    tape.event("start", step=0)
    tape.write({"step": 1})
    tape.close()
    assert not list(tmp_path.iterdir())


def test_a_second_process_appends(tmp_path):
    path = tmp_path / "tape.jsonl"
    for step in (1, 2):
        tape = Tape(path)
        tape.write(merge(step))
        tape.close()
    assert list(read_tape(path)) == [merge(1), merge(2)]


def test_a_tape_cut_anywhere_keeps_its_whole_lines_and_goes_on(tmp_path):
    path, whole = tmp_path / "tape.jsonl", lines(start(0), merge(1, text="ü\n"), merge(2))
    for length in range(len(whole) + 1):
        data = whole[:length]
        kept = data[: data.rfind(b"\n") + 1]
        path.write_bytes(data)
        assert lines(*read_tape(path)) == kept  # readers see it so already
        tape = Tape(path)
        assert path.read_bytes() == kept
        tape.write(merge(9))
        tape.close()
        assert list(read_tape(path))[-1] == merge(9)
        assert path.read_bytes().startswith(kept)


@pytest.mark.parametrize(
    ("whole", "tail"),
    [
        (b"", bytes(4096)),
        (lines(merge(1)), bytes(4096)),
        (lines(merge(1)), b"\xff\xfe of another file's block"),
        (lines(merge(1)), b'{"whole": "but for its newline"}'),
    ],
    ids=["zeros-alone", "zeros", "garbage", "object"],
)
def test_whatever_a_power_cut_left_behind_the_last_newline_is_cut_off(tmp_path, whole, tail):
    path = tmp_path / "tape.jsonl"
    path.write_bytes(whole + tail)
    Tape(path).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "data",
    [
        b"some notes\n",
        b"some notes without an end",
        b"[1, 2]\n",
        b"17\n",
        b"\n",
        b'"text"\n',
        lines(merge(1)) + b"not json\n" + lines(merge(2)),
        lines(merge(1)) + b"not json\n" + b'{"step": 2',
        lines(merge(1)) + b"\xff\xfe\n",
        b'{\n "learners": 2\n}\n',
        b'{"learners": 2}',
        b"[" * 100_000 + b"\n",
        bytes(range(256)),
    ],
    ids=lambda data: repr(data[:24]),
)
def test_a_file_that_is_no_tape_is_refused_untouched(tmp_path, data):
    path = tmp_path / "notes"
    path.write_bytes(data)
    with pytest.raises(StateError, match=f"tape {path}: not a tape: ") as caught:
        Tape(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == data


def test_what_cannot_be_a_tape_at_all_is_refused(tmp_path):
    with pytest.raises(StateError, match="not a regular file"):
        Tape(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError, match="not a regular file"):
        Tape(tmp_path / "pipe")
    with pytest.raises(StateError, match=r"tape .*/none/tape: cannot be opened: No such file"):
        Tape(tmp_path / "none" / "tape")
    with pytest.raises(StateError, match=r"tape .*/none: No such file"):
        list(read_tape(tmp_path / "none"))


def test_a_reader_names_the_line_it_cannot_read(tmp_path):
    path = tmp_path / "tape.jsonl"
    path.write_bytes(lines(merge(1)) + b"oops\n")
    with pytest.raises(StateError, match="line 2 is not a JSON object"):
        merges(path)


def test_values_that_are_not_json_are_our_own_error_and_leave_no_trace(tmp_path):
    tape = Tape(tmp_path / "tape.jsonl")
    for bad in (float("nan"), float("inf"), b"bytes", {1, 2}):
        with pytest.raises(LocalError, match="does not go on a tape"):
            tape.write({"step": 1, "gnorm": bad})
    tape.write(merge(1))
    tape.close()
    assert list(read_tape(tmp_path / "tape.jsonl")) == [merge(1)]


def test_an_error_of_the_disk_is_a_state_error(tmp_path, monkeypatch):
    tape = Tape(tmp_path / "tape.jsonl")
    tape.write(merge(1))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("syncer.tape.os.write", full)
    with pytest.raises(StateError, match=r"tape .*tape\.jsonl: cannot be written: No space left on device"):
        tape.write(merge(2))
    monkeypatch.undo()
    tape.write(merge(2))
    tape.close()
    assert list(read_tape(tmp_path / "tape.jsonl")) == [merge(1), merge(2)]


_FULL_DISK = """
import resource, signal, sys
from syncer.tape import Tape
from yeto_torch.wire.errors import StateError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
tape = Tape(sys.argv[1])
written = 0
try:
    while True:
        tape.write({"step": written + 1, "filler": "x" * 100})
        written += 1
except StateError as error:
    print(written, error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on file sizes")
def test_a_line_the_disk_takes_half_of_is_taken_back(tmp_path, root):
    path = tmp_path / "tape.jsonl"
    command = [sys.executable, "-c", _FULL_DISK, str(path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    written, _, error = done.stdout.partition(" ")
    assert "cannot be written: the disk took" in error
    assert path.read_bytes().endswith(b"\n")
    assert len(list(read_tape(path))) == int(written) > 1


@pytest.mark.parametrize(
    ("entries", "steps"),
    [
        ([], []),
        ([start(0), merge(1), merge(2)], [1, 2]),
        ([merge(1), merge(2)], [1, 2]),
        ([start(0), merge(1), merge(2), merge(3), start(2), merge(3), merge(4)], [1, 2, 3, 4]),
        ([start(0), merge(1), merge(2), merge(3), start(1)], [1]),
        ([start(0), merge(1), merge(2), start(0), merge(1)], [1]),
        ([start(0), merge(1), merge(2), start(2), {"event": "join", "time": 1}, merge(3)], [1, 2, 3]),
        ([start(0), merge(1), merge(2), {"event": "end", "step": 0, "time": 1}], [1, 2]),
        ([merge(1), merge(2), {"event": "start", "time": 1}], [1, 2]),
    ],
)
def test_a_start_supersedes_the_merges_beyond_its_step(tmp_path, entries, steps):
    path = tmp_path / "tape.jsonl"
    path.write_bytes(lines(*entries) + b'{"step": 9')
    assert [entry["step"] for entry in merges(path)] == steps


def test_the_later_line_of_a_repeated_step_is_the_one_kept(tmp_path):
    path = tmp_path / "tape.jsonl"
    path.write_bytes(lines(start(0), merge(1), merge(2, gnorm=1.0), start(1), merge(2, gnorm=2.0)))
    assert merges(path) == [merge(1), merge(2, gnorm=2.0)]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=6))
def test_whatever_the_restarts_the_steps_kept_are_each_once_and_in_order(tmp_path_factory, runs):
    """Each run commits some steps; the next starts from a checkpoint at or before its last commit."""
    entries, step, truth = [], 0, {}
    for number, (commits, lost) in enumerate(runs):
        step = max(0, step - lost)
        entries.append(start(step))
        truth = {s: n for s, n in truth.items() if s <= step}
        for _ in range(commits):
            step += 1
            entries.append(merge(step, run=number))
            truth[step] = number
    path = tmp_path_factory.mktemp("tape") / "tape.jsonl"
    path.write_bytes(lines(*entries))
    assert {entry["step"]: entry["run"] for entry in merges(path)} == truth
    assert [entry["step"] for entry in merges(path)] == sorted(truth)
