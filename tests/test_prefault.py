"""storage.prefault: pages are there before anything is written, and what is in them stays."""

from __future__ import annotations

import mmap

import pytest
import torch

from ecrm.errors import UsageError
from ecrm.storage.base import lazy_zeros
from ecrm.storage.prefault import Prefault


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that the tensor lies in which the system has handed out, as /proc/self/smaps says."""
    address, found = tensor.data_ptr(), False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            bounds, _, _ = line.partition(" ")
            if "-" in bounds:
                first, last = (int(bound, 16) for bound in bounds.split("-"))
                found = first <= address < last
            elif found and line.startswith("Rss:"):
                return 1024 * int(line.split()[1])
    raise AssertionError("no mapping holds it")


@pytest.mark.parametrize("beside", [True, False])
def test_all_pages_are_there_and_rows_stay(beside):
    rows = lazy_zeros(5000, 1029)  # ends within a page, and is more than one piece
    rows[7] = 3.0
    before = resident(rows)
    pages = Prefault()
    if beside:
        pages.beside([rows]).join(60)
    else:
        pages.all_of([rows])
    assert resident(rows) - before > 0.99 * rows.nbytes - mmap.PAGESIZE
    assert torch.equal(rows[7], torch.full((1029,), 3.0)) and int(rows.count_nonzero()) == 1029


def test_what_is_known_is_not_done_again():
    old, new = lazy_zeros(100, 4), lazy_zeros(100, 4)
    pages = Prefault()
    pages.all_of([old])
    assert pages.beside([old]) is None
    assert pages.beside([old, new]) is not None
    assert pages.beside([old, new, torch.empty(0)]) is None


def test_what_takes_the_place_of_something_dropped_is_new():
    pages = Prefault()
    for _ in range(20):  # memory of the same size comes back at the same address
        rows = lazy_zeros(3000, 129)
        pages.beside([rows]).join(60)
        assert resident(rows) > 0.99 * rows.nbytes - mmap.PAGESIZE
        del rows


def test_memory_that_the_system_cannot_hand_out_is_one_clear_error():
    memory = mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ)
    with pytest.warns(UserWarning, match="not writable"):
        rows = torch.frombuffer(memory, dtype=torch.uint8)
    with pytest.raises(UsageError, match="storage.prefault: the system cannot hand out 1,048,576 bytes ahead .*set storage.prefault=false"):
        Prefault().all_of([rows])
    assert Prefault().beside([rows]).join(60) is None  # nothing is said: pages come as they are written
