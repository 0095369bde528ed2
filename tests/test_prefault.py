"""storage.prefault: pages are there before anything is written, and what is in them stays."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from ecrm.errors import UsageError
from ecrm.storage.base import lazy_zeros
from ecrm.storage.prefault import Prefault


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_BYTES = 2 << 20


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, which begins at a page, whose pages the system has handed out, as mincore(2) says."""
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), there) == 0, ctypes.get_errno()
    return mmap.PAGESIZE * sum(flag & 1 for flag in there)


def huge(tensor: torch.Tensor) -> int:
    """Bytes of huge pages in the mapping that the tensor lies in, as /proc/self/smaps says."""
    address, found = tensor.data_ptr(), False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            bounds, _, _ = line.partition(" ")
            if "-" in bounds:
                first, last = (int(bound, 16) for bound in bounds.split("-"))
                found = first <= address < last
            elif found and line.startswith("AnonHugePages:"):
                return 1024 * int(line.split()[1])
    raise AssertionError("no mapping holds it")


@pytest.mark.parametrize("beside", [True, False])
def test_all_pages_are_there_and_rows_stay(beside):
    rows = lazy_zeros(5000, 1029)  # ends within a page, and is more than one piece
    rows[7] = 3.0
    assert resident(rows) < 0.5 * rows.nbytes
    pages = Prefault()
    if beside:
        pages.beside([rows]).join(60)
    else:
        pages.all_of([rows])
    assert resident(rows) >= rows.nbytes
    assert torch.equal(rows[7], torch.full((1029,), 3.0)) and int(rows.count_nonzero()) == 1029


@pytest.mark.skipif(not HUGE.exists() or "[madvise]" not in HUGE.read_text(), reason="this system does not hand out huge pages to those that ask, and to no others")
def test_pages_of_the_start_are_huge_and_those_of_a_takeover_are_not():
    """Of a takeover the first steps touch a row here and there: each would have 2 MiB cleared."""
    start, taken = lazy_zeros(4 * HUGE_BYTES), lazy_zeros(4 * HUGE_BYTES)
    pages = Prefault()
    pages.all_of([start])
    assert huge(start) >= start.nbytes - 2 * HUGE_BYTES
    before = huge(taken)  # of a neighbour in the same mapping
    pages.beside([taken]).join(60)
    assert huge(taken) == before and resident(taken) == taken.nbytes


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
        assert resident(rows) >= rows.nbytes
        del rows


def test_memory_that_the_system_cannot_hand_out_is_one_clear_error():
    memory = mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ)
    with pytest.warns(UserWarning, match="not writable"):
        rows = torch.frombuffer(memory, dtype=torch.uint8)
    with pytest.raises(UsageError, match="storage.prefault: the system cannot hand out 1,048,576 bytes ahead .*set storage.prefault=false"):
        Prefault().all_of([rows])
    assert Prefault().beside([rows]).join(60) is None  # nothing is said: pages come as they are written
