"""Checkpoints and markers on disk: durable, whole under every crash and failure, and tidy after a kill."""

import contextlib
import dataclasses
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from syncer.checkpoint.files import (
    marker_path,
    read_checkpoint,
    read_marker,
    remove_marker,
    remove_stale_temporaries,
    write_atomically,
    write_checkpoint,
    write_marker,
)
from syncer.checkpoint.format import FragmentRecord
from tests.support.checkpoint_bytes import V1, V2, V3, V3_BARE, VECTORS, content, damaged, f32, golden_snapshot
from tests.support.fake_disk import FakeDisk, PowerCutError
from yeto_torch.wire.errors import LocalError, StateError

TARGET = Path("/disk/state.ckpt")
OLD = V3
NEXT = dataclasses.replace(
    golden_snapshot(),
    step=4,
    fragments=(FragmentRecord(3, f32(1.5, -2), f32(0.25, 0)), FragmentRecord(4, f32(5), f32(-2))),
)
PLAIN_WRITE = ["create", *["write"] * 10, "sync", "close", "replace", "sync_directory"]


def new_bytes() -> bytes:
    disk = FakeDisk({})
    write_checkpoint(TARGET, NEXT, disk)
    return disk.files[TARGET]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# Reading and writing


def test_a_checkpoint_is_written_and_read(tmp_path):
    path = tmp_path / "state.ckpt"
    write_checkpoint(path, golden_snapshot())
    assert path.read_bytes() == V3
    assert content(read_checkpoint(path)) == content(golden_snapshot())
    write_checkpoint(str(path), NEXT)
    assert content(read_checkpoint(str(path))) == content(NEXT)
    assert names(tmp_path) == ["state.ckpt"]


@pytest.mark.parametrize("data", [V1, V2, V3_BARE, V3_BARE + V3[5:37], V3])
def test_every_format_is_read(tmp_path, data):
    path = tmp_path / "state.ckpt"
    path.write_bytes(data)
    assert content(read_checkpoint(path))[2] == content(golden_snapshot())[2]


def test_what_was_read_can_be_written_into(tmp_path):
    path = tmp_path / "state.ckpt"
    path.write_bytes(V3)
    params = memoryview(read_checkpoint(path).fragments[0].params)
    params.cast("f")[0] = 7.0
    assert bytes(params) == f32(7, -2)


def test_a_folder_of_damaged_files_is_refused_file_by_file(tmp_path):
    folder = dict(damaged())
    for name, data in folder.items():
        (tmp_path / name).write_bytes(data)
    tracemalloc.start()
    try:
        for name, data in folder.items():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(StateError) as caught:
                read_checkpoint(tmp_path / name)
            allocated = tracemalloc.get_traced_memory()[1] - before
            assert str(caught.value).startswith(f"checkpoint {tmp_path / name}: "), name
            assert "\n" not in str(caught.value), name
            assert allocated < len(data) + 65536, f"{name}: {allocated} bytes"
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(StateError, match="No such file"):
        read_checkpoint(tmp_path / "none")
    with pytest.raises(StateError, match="not a regular file"):
        read_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError, match="not a regular file"):
        read_checkpoint(tmp_path / "pipe")


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(StateError, match=r"checkpoint .*/none/state.ckpt: cannot be written: No such file"):
        write_checkpoint(tmp_path / "none" / "state.ckpt", NEXT)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_mode_respects_the_umask(tmp_path, umask):
    previous = os.umask(umask)
    try:
        write_checkpoint(tmp_path / "state.ckpt", NEXT)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "state.ckpt").stat().st_mode) == 0o666 & ~umask


def test_a_snapshot_that_cannot_be_written_touches_nothing(tmp_path):
    with pytest.raises(LocalError):
        write_checkpoint(tmp_path / "state.ckpt", dataclasses.replace(NEXT, contract=None))
    assert names(tmp_path) == []


# Crashes and failures


def crashes(write, files, **kwargs):
    """(operations done, disk) for a power cut before each operation of ``write`` and after its last."""
    whole = FakeDisk(files, **kwargs)
    write(whole)
    for count in range(len(whole.operations) + 1):
        disk = FakeDisk(files, cut_at=count, **kwargs)
        with contextlib.suppress(PowerCutError):
            write(disk)
        assert len(disk.operations) == count
        yield count, disk


def test_the_order_of_operations_is_the_durable_one():
    disk = FakeDisk({TARGET: OLD})
    write_checkpoint(TARGET, NEXT, disk)
    assert disk.operations == PLAIN_WRITE
    assert list(disk.files) == [TARGET]
    assert disk.open_files == 0


def test_every_power_cut_and_every_loss_leaves_the_old_file_or_the_new_one():
    new, seen = new_bytes(), {}
    for count, disk in crashes(lambda disk: write_checkpoint(TARGET, NEXT, disk), {TARGET: OLD}):
        seen[count] = disk.survivors(TARGET)
        assert seen[count] <= {OLD, new}, f"torn after {disk.operations}"
    replaced, done = PLAIN_WRITE.index("replace"), len(PLAIN_WRITE)
    assert all(seen[count] == {OLD} for count in range(replaced + 1))
    assert seen[done - 1] == {OLD, new}
    assert seen[done] == {new}  # once the call returns, nothing can take it back


def test_every_power_cut_of_the_first_write_leaves_no_file_or_the_new_one():
    new = new_bytes()
    for _, disk in crashes(lambda disk: write_checkpoint(TARGET, NEXT, disk), {}):
        assert disk.survivors(TARGET) <= {None, new}


class _NoSync(FakeDisk):
    def sync(self, _):
        self._operation("sync")


class _NoDirectorySync(FakeDisk):
    def sync_directory(self, _):
        self._operation("sync_directory")


def test_the_crash_test_bites():
    forgetful = _NoSync({TARGET: OLD})
    write_checkpoint(TARGET, NEXT, forgetful)
    torn = forgetful.survivors(TARGET) - {OLD, new_bytes()}
    assert len(torn) > 200  # prefixes and holes
    nameless = _NoDirectorySync({TARGET: OLD})
    write_checkpoint(TARGET, NEXT, nameless)
    assert OLD in nameless.survivors(TARGET)


@pytest.mark.parametrize("number", range(len(PLAIN_WRITE)))
def test_every_failing_operation_leaves_one_whole_file_and_no_other(number):
    disk = FakeDisk({TARGET: OLD}, fail_at=number)
    with pytest.raises(StateError) as caught:
        write_checkpoint(TARGET, NEXT, disk)
    assert str(caught.value) == f"checkpoint {TARGET}: cannot be written: No space left on device"
    expected = new_bytes() if PLAIN_WRITE[number] == "sync_directory" else OLD
    assert disk.files == {TARGET: expected}
    assert disk.open_files == 0


@pytest.mark.parametrize("longest", [1, 7, 64])
def test_short_writes_are_continued(longest):
    disk = FakeDisk({TARGET: OLD}, longest_write=longest)
    write_checkpoint(TARGET, NEXT, disk)
    assert disk.files == {TARGET: new_bytes()}
    assert disk.survivors(TARGET) == {new_bytes()}


def test_an_interrupt_while_parts_are_made_leaves_the_old_file_alone(tmp_path):
    (tmp_path / "out").write_bytes(b"old")

    def parts():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "out", parts(), "output")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out").read_bytes() == b"old"


# The marker


def test_the_marker_is_the_golden_one(tmp_path):
    path = tmp_path / "state.ckpt"
    assert read_marker(path) is None
    write_marker(path, 17)
    assert (tmp_path / "state.ckpt.final").read_bytes() == bytes.fromhex(VECTORS["marker_17"]["hex"])
    assert read_marker(path) == 17
    write_marker(path, 2**64 - 1)
    assert read_marker(path) == 2**64 - 1
    remove_marker(path)
    remove_marker(path)
    assert names(tmp_path) == []


def test_every_power_cut_while_marking_leaves_a_whole_marker_or_none():
    marker = marker_path(TARGET)
    golden = bytes.fromhex(VECTORS["marker_17"]["hex"])
    for count, disk in crashes(lambda disk: write_marker(TARGET, 17, disk), {TARGET: OLD}):
        assert disk.survivors(marker) <= {None, golden}
        assert disk.survivors(TARGET) == {OLD}
        if count == 6:
            assert disk.survivors(marker) == {golden}


def test_a_removed_marker_does_not_come_back():
    marker = marker_path(TARGET)
    disk = FakeDisk({TARGET: OLD, marker: b"old"})
    remove_marker(TARGET, disk)
    assert disk.operations == ["remove", "sync_directory"]
    assert disk.survivors(marker) == {None}
    failing = FakeDisk({TARGET: OLD, marker: b"old"}, fail_at=0)
    with pytest.raises(StateError, match=r"final marker .*\.final: cannot be removed: No space"):
        remove_marker(TARGET, failing)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"YETO_FINAL_V1\nglobal_step=17",
        b"YETO_FINAL_V1\nglobal_step=17\n\n",
        b"YETO_FINAL_V1\nglobal_step=017\n",
        b"YETO_FINAL_V1\nglobal_step=-1\n",
        b"YETO_FINAL_V2\nglobal_step=17\n",
        b"YETO_FINAL_V1\r\nglobal_step=17\r\n",
        b"YETO_FINAL_V1\nglobal_step=18446744073709551616\n",
        b"YETO_FINAL_V1\nglobal_step=" + b"1" * 4096,
    ],
)
def test_another_file_is_not_taken_for_a_marker(tmp_path, data):
    (tmp_path / "state.ckpt.final").write_bytes(data)
    with pytest.raises(StateError, match=r"final marker .*state\.ckpt\.final: not a marker"):
        read_marker(tmp_path / "state.ckpt")


# Temporaries of killed writers

_STUCK_WRITER = """
import sys
from syncer.checkpoint.files import write_atomically

def parts():
    yield b"new bytes that nobody shall see"
    print("writing", flush=True)
    sys.stdin.read()
    yield b"the rest"

write_atomically(sys.argv[1], parts(), "checkpoint")
print("written", flush=True)
"""


@contextlib.contextmanager
def stuck_writer(path: Path, root: Path):
    """A process in the middle of a write; it finishes when its stdin is closed."""
    command = [sys.executable, "-c", _STUCK_WRITER, str(path)]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"writing\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def temporaries(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.tmp"))


def test_a_killed_writer_leaves_the_old_file_and_its_temporary_is_swept(tmp_path, root):
    path = tmp_path / "state.ckpt"
    path.write_bytes(V3)
    with stuck_writer(path, root) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert path.read_bytes() == V3
    left = temporaries(tmp_path)
    assert len(left) == 1
    assert remove_stale_temporaries(path) == left
    assert names(tmp_path) == ["state.ckpt"]


def test_a_living_writers_temporary_stays_and_its_write_succeeds(tmp_path, root):
    path = tmp_path / "state.ckpt"
    path.write_bytes(V3)
    with stuck_writer(path, root) as process:
        assert len(temporaries(tmp_path)) == 1
        assert remove_stale_temporaries(path) == []
        write_checkpoint(path, NEXT)  # two writers do not meet either: the last rename wins
        assert path.read_bytes() == new_bytes()
        output, _ = process.communicate(timeout=60)
        assert output == b"written\n"
    assert path.read_bytes() == b"new bytes that nobody shall seethe rest"
    assert names(tmp_path) == ["state.ckpt"]


def test_only_this_targets_temporaries_are_swept(tmp_path):
    stay = [
        ".other.ckpt.0123456789abcdef.tmp",
        ".state.ckpt.0123456789ABCDEF.tmp",
        ".state.ckpt.0123.tmp",
        ".stateXckpt.0123456789abcdef.tmp",
        "state.ckpt.0123456789abcdef.tmp",
        ".state.ckpt.bak.0123456789abcdef.tmp",
    ]
    go = [".state.ckpt.0123456789abcdef.tmp", ".state.ckpt.final.fedcba9876543210.tmp"]
    for name in (*stay, *go):
        (tmp_path / name).touch()
    (tmp_path / ".state.ckpt.aaaaaaaaaaaaaaaa.tmp").symlink_to(tmp_path / stay[0])
    assert [path.name for path in remove_stale_temporaries(tmp_path / "state.ckpt")] == go
    assert names(tmp_path) == sorted([*stay, ".state.ckpt.aaaaaaaaaaaaaaaa.tmp"])
    shutil.rmtree(tmp_path)
    assert remove_stale_temporaries(tmp_path / "state.ckpt") == []


def test_a_file_swept_before_it_was_locked_is_given_up_for_another(tmp_path, monkeypatch):
    path = tmp_path / "state.ckpt"
    swept = []

    def lock_too_late(*_):
        monkeypatch.undo()
        swept.extend(remove_stale_temporaries(path))

    monkeypatch.setattr("syncer.checkpoint.files.fcntl.flock", lock_too_late)
    write_checkpoint(path, NEXT)
    assert len(swept) == 1
    assert path.read_bytes() == new_bytes()
    assert names(tmp_path) == ["state.ckpt"]


# The page cache


def cached(path: Path, offset: int) -> bool:
    """Can a page of the file be had without the disk?"""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(4096)], offset, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError:
            pytest.skip("this file system does not tell what it holds in memory")


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux tells what it holds in memory")
def test_a_written_file_does_not_stay_in_memory(tmp_path):
    own = tmp_path / "own"
    own.write_bytes(bytes(2**20))
    assert cached(own, 8192)
    with own.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(own, 8192):
        pytest.skip("this file system lives in memory")
    target, part = tmp_path / "state.ckpt", memoryview(bytes(8 * 2**20))
    write_atomically(target, [b"head", *[part] * 10, b"tail"], "checkpoint")
    assert not any(cached(target, offset) for offset in range(8192, 80 * 2**20, 2**20))


@pytest.mark.parametrize("fails", [True, False], ids=["refused", "unknown"])
def test_advice_is_only_advice(tmp_path, monkeypatch, fails):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no advice here")

    if fails:
        monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    else:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    target, part = tmp_path / "state.ckpt", bytes(range(256)) * 8192
    write_atomically(target, [b"head", part], "checkpoint")
    assert target.read_bytes() == b"head" + part
