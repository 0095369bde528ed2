"""Memory that ranks of a host lend one another, between real processes."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from ecrm.base.allocate import lazy_zeros
from ecrm.storage.prefault import Prefault
from ecrm.transport.shared_memory import OwnMemory, SharedMemory
from support.core_dumps import flags_of_mapping

RANKS = 2
LENDER = """
import json, sys, time
from ecrm.transport.shared_memory import SharedMemory
shared = SharedMemory(2)
memory = shared.allocate(1000, 300)
memory += 7
print(json.dumps([shared.offer("here"), shared.offset(memory[1:])]), flush=True)
for line in sys.stdin:
    memory[1:] += 1
    print("changed", flush=True)
"""


class Lender:
    """Another process, which shares a tensor of sevens, [1000, 300].

    `offset` is where its second row begins.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.offer, self.offset = json.loads(self._process.stdout.readline())

    def change(self) -> None:
        print(file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "changed\n"

    def die(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def lender():
    lender = Lender()
    yield lender
    lender.die()


def test_what_is_lent_is_read_where_it_lies_and_outlives_its_owner(lender):
    memory = SharedMemory(RANKS)
    assert memory.accept("here", {1: lender.offer}) == [1]
    lent = torch.frombuffer(
        memory.memory_of(1), dtype=torch.float32, offset=lender.offset, count=999 * 300
    )
    assert (lent == 7).all()
    lender.change()
    assert (lent == 8).all()
    lender.die()
    assert (lent == 8).all()
    memory.keep([0])
    assert memory.memory_of(1) is None and (lent == 8).all()


def test_core_dumps_leave_out_what_is_lent_and_tables(lender):
    """Its owner's mapping, a reader's, and memory that nobody is lent."""
    memory = SharedMemory(RANKS)
    memory.accept("here", {1: lender.offer})
    own, table, other = memory.allocate(1000), lazy_zeros(1000), torch.zeros(1 << 20)
    for part in (own, memory.ahead(4096), torch.from_numpy(memory.memory_of(1)), table):
        assert "dd" in flags_of_mapping(os.getpid(), part.data_ptr())
    assert "dd" not in flags_of_mapping(os.getpid(), other.data_ptr())


def test_whoever_reads_cannot_write(lender):
    program = """
import json, resource, sys
from ecrm.transport.shared_memory import SharedMemory
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
memory, offset = SharedMemory(2), int(sys.argv[2])
memory.accept("here", {1: json.loads(sys.argv[1])})
print(memory.memory_of(1)[offset], flush=True)
memory.memory_of(1)[offset] = 1
print("written")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(lender.offer), str(lender.offset)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.returncode) == ("0\n", -signal.SIGSEGV)


@pytest.mark.parametrize(
    "changed",
    [
        {"system": ["elsewhere", "", 0]},
        {"inode": 1},
        {"pid": 1 << 30},
        {"file": 999},
    ],
    ids=["another host", "another file", "no such process", "no such file"],
)
def test_what_cannot_be_had_is_not_accepted(lender, changed):
    memory = SharedMemory(RANKS)
    assert memory.accept("here", {1: {**lender.offer, **changed}, 2: {}}) == []
    assert memory.memory_of(1) is None and memory.accept("there", {1: lender.offer}) == []


def test_only_what_lies_in_it_is_lent():
    memory = SharedMemory(RANKS)
    first, second = memory.allocate(3, 5), memory.allocate(7, dtype=np.int64)
    assert (
        memory.offset(first[1:]) == memory.offset(first) + 20
        and memory.offset(second) >= memory.offset(first) + first.nbytes
    )
    assert second.dtype == torch.int64 and not second.any() and memory.offset(torch.ones(3)) is None
    assert memory.readers == frozenset()
    memory.share_with([1])
    assert memory.readers == {1}


def test_memory_is_given_back_once_all_others_are_past_the_exchange_after_the_next():
    memory = OwnMemory(RANKS)
    held, freed = memory.allocate(1 << 20), memory.allocate(1 << 20)
    held += 1
    freed += 1
    used = memory.bytes_used
    assert used >= 8 << 20
    memory.completed()
    del freed
    memory.completed()
    assert memory.bytes_used == used
    memory.completed()
    assert memory.bytes_used == used // 2 and (held == 1).all()


def test_memory_freed_before_a_shrink_is_given_back_two_exchanges_after_the_shrink():
    memory = SharedMemory(RANKS)
    freed = memory.allocate(1 << 20)
    freed += 1
    del freed
    memory.completed()
    memory.keep([0])
    used = memory.bytes_used
    memory.completed()
    assert memory.bytes_used == used >= 4 << 20, "a rank nearby may not have committed yet"
    memory.completed()
    assert memory.bytes_used < 1 << 20


def test_what_is_allocated_next_can_be_handed_out_by_the_system_before():
    memory = SharedMemory(RANKS)
    first = memory.allocate(100)
    Prefault().all_of([memory.ahead(4 << 20)])
    assert not first.any()
    used = memory.bytes_used
    assert used >= 4 << 20
    next_one, one_more = memory.allocate(1 << 19), memory.allocate(1 << 20)
    next_one += 1
    assert (
        memory.bytes_used == used
        and memory.offset(next_one) == memory.offset(first) + mmap.PAGESIZE
    )
    one_more += 1
    assert memory.bytes_used > used, "that is beyond it"


def test_no_more_than_there_is_room_for():
    memory = OwnMemory(RANKS)
    rest = memory.allocate(memory.size - (1 << 16), dtype=np.uint8)
    outside = memory.allocate(1 << 17, dtype=np.uint8)
    assert (
        memory.offset(rest) == 0 and memory.offset(outside) is None and outside.shape == (1 << 17,)
    )
    assert len(memory.ahead(1 << 20)) == 1 << 16


@pytest.mark.parametrize("limit", [4 << 30, 1 << 46], ids=["too little", "enough for this memory"])
def test_where_addresses_are_limited_nothing_is_lent(limit):
    program = (
        f"import resource; from ecrm.transport.shared_memory import SharedMemory; "
        f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); memory = SharedMemory(2);"
        "assert memory.offer('here') == {} and memory.offset(memory.allocate(4)) is None; "
        "memory.completed(); print('well')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "well\n", done.stderr
