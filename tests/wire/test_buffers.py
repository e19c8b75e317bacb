"""Memory that is lent again: never to two at once, whoever holds a view of it; and never more of it than allowed."""

import gc
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from yeto_torch.wire.buffers import LENT_BYTES, Spare

MIB = 1024 * 1024


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


@pytest.mark.parametrize("nbytes", [0, 1, LENT_BYTES - 1, LENT_BYTES, 3 * MIB + 5, 8 * MIB])
def test_a_view_is_writable_and_of_that_size(nbytes):
    view = Spare(1).allocate(nbytes)
    assert (view.nbytes, view.format, view.readonly, view.ndim) == (nbytes, "B", False, 1)
    view[:] = b"\1" * nbytes
    assert bytes(view[-3:]) == b"\1" * min(3, nbytes)


def test_what_came_back_is_lent_again():
    spare = Spare(1)
    view = spare.allocate(4 * MIB)
    first = address(view)
    assert len(spare) == 0
    del view
    assert len(spare) == 1
    again = spare.allocate(4 * MIB - 100)
    assert (address(again), len(spare)) == (first, 0)


@pytest.mark.parametrize(
    "hold",
    [
        lambda view: view[10:20],
        lambda view: view[MIB:].toreadonly().cast("I"),
        lambda view: np.frombuffer(view[10:], np.uint8)[5:].view(np.int8),
        lambda view: torch.frombuffer(view, dtype=torch.float32)[7:].view(torch.int32),
        lambda view: memoryview(np.frombuffer(view, np.uint8)),
    ],
    ids=["slice", "cast", "numpy", "torch", "through numpy"],
)
def test_any_view_of_it_keeps_it(hold):
    spare = Spare(4)
    held = hold(spare.allocate(2 * MIB))
    gc.collect()
    assert len(spare) == 0
    del held
    gc.collect()
    assert len(spare) == 1


def test_it_keeps_so_many_and_the_newest():
    spare = Spare(2)
    views = [spare.allocate(size * MIB) for size in (2, 4, 6)]
    addresses = [address(view) for view in views]
    while views:
        del views[0]  # in their order
    assert len(spare) == 2
    again = [spare.allocate(6 * MIB), spare.allocate(4 * MIB)]
    assert sorted(map(address, again)) == sorted(addresses[1:])


def test_a_much_larger_one_is_left_alone():
    spare = Spare(2)
    spare.allocate(64 * MIB)
    view = spare.allocate(2 * MIB)
    assert len(spare) == 1
    del view
    assert len(spare) == 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells the memory of a process")
def test_what_a_smaller_message_leaves_unused_goes_back():
    spare = Spare(1)
    view = spare.allocate(64 * MIB)
    view[:] = bytes(64 * MIB)
    del view
    full = resident_bytes()
    view = spare.allocate(40 * MIB)
    assert len(spare) == 0  # it is the same memory
    assert full - resident_bytes() > 20 * MIB
    del view
    view = spare.allocate(64 * MIB)
    view[-1] = 1  # and may be used to its end again
    assert len(spare) == 0


def test_threads_never_share():
    """Each fills what it was lent with its own number and finds nothing else in it."""
    spare, failures = Spare(2), []

    def work(number: int) -> None:
        seed = random.Random(number)
        mine = []
        for _ in range(300):
            view = np.frombuffer(spare.allocate(seed.choice([1, 1, 2]) * MIB + seed.randrange(9000)), np.uint8)
            view[::4096] = number
            mine.append(view)
            while len(mine) > seed.randrange(3):
                old = mine.pop(0)
                if not (old[::4096] == number).all():
                    failures.append(number)
                del old
            del view

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(spare) <= 2


@pytest.mark.parametrize("nbytes", [2**62, 2**64 - 1])
def test_absurd_sizes_are_memory_errors(nbytes):
    with pytest.raises(MemoryError, match=str(nbytes)):
        Spare(1).allocate(nbytes)
