"""storage.prefault: pages are there before anything is written, and what is in them stays."""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ecrm.base.allocate import lazy_zeros
from ecrm.base.errors import UsageError
from ecrm.engine.hooks import Hooks
from ecrm.placement.stripes import RowLayout, StripeShape
from ecrm.placement.tables import Table
from ecrm.process.ready import ReadyMemory
from ecrm.run.build_rank import hand_out
from ecrm.storage.prefault import Prefault
from ecrm.testing.simulate.oracle import Alone, truth_of
from ecrm.testing.simulate.workload import Workload, run_workload
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_BYTES = 2 << 20


def resident(tensor: torch.Tensor) -> int:
    """Returns how many bytes of a tensor are in pages that the system has handed out.

    The tensor begins at a page; mincore(2) tells.
    """
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert (
        libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), there) == 0
    ), ctypes.get_errno()
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


@pytest.mark.skipif(
    not HUGE.exists() or "[madvise]" not in HUGE.read_text(),
    reason="this system does not hand out huge pages to those that ask, and to no others",
)
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


def test_the_next_spares_have_memory_for_a_shard_ready_and_a_takeover_uses_it():
    """Two spares are ready at the start, the third when it has moved up."""
    tables = (Table("a", 3000, 16), Table("b", 2000, 8))
    workload = Workload(
        tables=tables,
        steps=24,
        servers=4,
        k=2,
        m=1,
        trainers=1,
        slots=1,
        spares=3,
        rebuild_rows_per_step=1024,
    )
    cluster = SimulatedCluster(workload.world_size, "ready", [PhaseFault(1, 4, "parity")])
    taken, ready = {rank: [] for rank in range(workload.world_size)}, {}

    def program(transport):
        rank, memory, threads = transport.rank, ReadyMemory(2), []

        def allocate(*shape, dtype=np.float32):
            waiting = len(memory.waiting)
            tensor = memory.allocate(*shape, dtype=dtype)
            if len(memory.waiting) < waiting:
                taken[rank].append(
                    (tensor.nbytes, resident(tensor) >= tensor.nbytes, bool(tensor.any()))
                )
            return tensor

        def started(engine):
            memory.start(engine)
            hooks.committed = lambda: threads.append(memory.committed(engine))
            ready[rank] = [bool(memory.waiting)]

        def finished(engine):
            if engine.step == workload.steps:
                for thread in filter(None, threads):
                    thread.join(60)
                assert all(resident(tensor) >= tensor.nbytes for tensor in memory.waiting)
                ready[rank].append(bool(memory.waiting))

        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(rank, step, name))
        return run_workload(
            workload, transport, hooks, after_start=started, after_step=finished, allocate=allocate
        )

    outcome = cluster.run(program)
    spares = [5, 6, 7]
    assert outcome.results[0].tables == truth_of(workload).tables
    assert [rank for rank in sorted(ready) if ready[rank][0]] == spares[:2]
    assert [rank for rank in sorted(ready) if ready[rank][-1]] == spares[1:]
    assert {rank for rank, blocks in taken.items() if blocks} == {spares[0]}
    assert all(there and not held for _, there, held in taken[spares[0]])
    layouts = [RowLayout(StripeShape(4, 2, 1), table.rows) for table in tables]
    assert sum(size for size, _, _ in taken[spares[0]]) == sum(
        # a float of Adagrad's, and whether updated
        (layout.data_rows_per_shard + layout.parity_rows_per_shard) * 4 * (table.dim + 2)
        for layout, table in zip(layouts, tables, strict=True)
    )


@pytest.mark.parametrize("joined", [False, True])
def test_a_rank_that_joins_lets_no_rank_wait_for_its_pages(joined):
    transport, started = Alone(), []
    transport.joined, transport.said_at_start = joined, ({0: None},) if joined else ()
    hand_out(transport, SimpleNamespace(start=started.append), "engine")
    assert started == ([] if joined else ["engine"])
    assert transport.said_at_start == (() if joined else ({0: None},))


def test_memory_that_the_system_cannot_hand_out_is_one_clear_error():
    memory = mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ)
    with pytest.warns(UserWarning, match="not writable"):
        rows = torch.frombuffer(memory, dtype=torch.uint8)
    with pytest.raises(
        UsageError,
        match="storage.prefault: the system cannot hand out 1,048,576 bytes ahead .*: set "
        "storage.prefault=false",
    ):
        Prefault().all_of([rows])
    # nothing is said: pages come as they are written
    assert Prefault().beside([rows]).join(60) is None


BUFFER = """
import ctypes, resource, torch
from ecrm.process.memory import have_free_memory, keep_freed_memory

ctypes.CDLL(None).prctl(41, {without_huge_pages}, 0, 0, 0)  # PR_SET_THP_DISABLE
keep_freed_memory()
{before}
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(32 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


def _faults(before: str, without_huge_pages: int) -> int:
    """Pages that the system hands out while a process fills its first large buffer."""
    program = BUFFER.format(before=before, without_huge_pages=without_huge_pages)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return int(run.stdout)


LARGE_IN_THE_HEAP = pytest.mark.skipif(
    platform.libc_ver() < ("glibc", "2.35"), reason="this C library gives 64 MB back at once"
)


@LARGE_IN_THE_HEAP
def test_a_first_buffer_is_made_of_memory_that_was_handed_out_ahead():
    assert 10 * _faults("have_free_memory(64 << 20)", without_huge_pages=1) < _faults(
        "", without_huge_pages=1
    )


@LARGE_IN_THE_HEAP
@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this system has no huge pages"
)
def test_buffers_lie_in_huge_pages():
    assert 2 * _faults("", without_huge_pages=0) < _faults("", without_huge_pages=1)
