"""Reading and writing 200 MiB take the arrays themselves and hardly any memory more."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoint_bytes import CONTRACT, FINGERPRINT

MIB = 1024 * 1024
NUMEL = 25 * MIB  # 100 MiB of parameters, 100 MiB of momentum

# The resident size is the process's own record of its peak; tracemalloc would not see what lies outside Python.
_MEASURE = """
import json, sys, tracemalloc
from pathlib import Path
from syncer.checkpoint.files import read_checkpoint, write_checkpoint

def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])

source, target, traced = sys.argv[1:]
if traced == "traced":
    tracemalloc.start()
    snapshot = read_checkpoint(source)
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    write_checkpoint(target, snapshot)
    print(json.dumps([read, tracemalloc.get_traced_memory()[1] - held]))
else:
    before = peak()
    snapshot = read_checkpoint(source)
    read = peak() - before
    before = peak()
    write_checkpoint(target, snapshot)
    print(json.dumps([read, peak() - before]))
"""


def sparse_checkpoint(path):
    """A V3 file of two fragments, all zeros, most of it holes."""
    half = NUMEL // 2
    offset = 0
    with path.open("wb") as file:
        file.write(struct.pack("<IB32sQI", 0xD1705A80, 1, FINGERPRINT, 2, 2))
        for version in (1, 2):
            file.write(struct.pack("<QQ", version, half))
            offset = file.seek(8 * half, 1)
        file.write(struct.pack("<I", 0) + FINGERPRINT + struct.pack("<I", 0x52544353) + CONTRACT)
    assert offset > 200 * MIB


def measure(tmp_path, root, how):
    source, target = tmp_path / "sparse.ckpt", tmp_path / "copy.ckpt"
    sparse_checkpoint(source)
    command = [sys.executable, "-c", _MEASURE, str(source), str(target), how]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size == source.stat().st_size
    target.unlink()
    return json.loads(done.stdout)


def test_python_allocates_the_arrays_and_at_most_one_piece(tmp_path, root):
    read, write = measure(tmp_path, root, "traced")
    assert 200 * MIB <= read <= 200 * MIB + 8 * MIB
    assert write <= 1 * MIB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
def test_the_process_grows_by_the_arrays_and_at_most_ten_mebibytes(tmp_path, root):
    read, write = measure(tmp_path, root, "resident")
    assert read <= 210 * MIB
    assert write <= 10 * MIB
