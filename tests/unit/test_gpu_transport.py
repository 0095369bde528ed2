"""Between ranks on GPUs: pinned and lent memory, copies, and a GPU that fails, without one."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import torch

from ecrm.base.allocate import ZerosOn, lazy_zeros
from ecrm.device import pinned
from ecrm.device.copies import coming, copies_of, on_device
from ecrm.device.pinned import Arena, lend, pieces
from ecrm.device.pulse import Pulse, Unanswered
from ecrm.process.gpu import GpuPulse, fault_in_words, is_lost
from ecrm.protection.backup import BackupRows
from ecrm.testing import imitated_gpu as imitation
from ecrm.testing.imitated_gpu import imitated_gpu
from ecrm.transport.alone import LoneTransport
from ecrm.transport.message import Picked, matrix_on
from ecrm.transport.shared_memory import SharedMemory
from ecrm.transport.staged import StagedTransport


def is_registered(gpu, address):
    """Whether memory of the host is registered with the GPU, from its beginning."""
    if gpu.is_imitated:
        return address in imitation.registered
    memory = torch.frombuffer((ctypes.c_uint8 * 1).from_address(address), dtype=torch.uint8)
    return memory.is_pinned()


def test_an_arena_keeps_its_memory_up_to_a_limit():
    arena = Arena(most=10_000)
    first = arena.like([torch.zeros(3, 5), torch.zeros(0), torch.zeros(7, dtype=torch.int64)])
    assert [(each.shape, each.dtype) for each in first] == [
        ((3, 5), torch.float32),
        ((0,), torch.float32),
        ((7,), torch.int64),
    ]
    assert first[2].data_ptr() - first[0].data_ptr() == 128
    (second,) = arena.like([torch.zeros(20)])
    assert second.data_ptr() == first[0].data_ptr()
    (large,) = arena.like([torch.zeros(5000)])
    assert large.shape == (5000,)
    assert len(arena._memory) <= 10_000


def test_pinned_memory_has_a_limit_and_is_counted_while_it_is_used(gpu):
    before = pinned._in_use
    with gpu.used():
        memory = pinned.pinned(1000)
        assert gpu.is_imitated or memory.is_pinned()
        view = memory.numpy()[10:]
        del memory
        assert pinned._in_use == before + 1024
        assert len(pinned.pinned(5000, most=before + 2000)) == 5000  # ordinary memory
        assert pinned._in_use == before + 1024
        del view
    assert pinned._in_use == before


def test_lent_memory_is_registered_as_it_is_copied_and_no_longer_before_it_goes(monkeypatch):
    """The bytes of each registration, which a real GPU does not tell."""
    monkeypatch.setattr(pinned, "CHUNK", 4096)
    with imitated_gpu() as device:
        memory = np.arange(10_000, dtype=np.uint8)
        start = memory.ctypes.data
        lend(memory, read_only=True)
        assert start not in imitation.registered
        part = torch.frombuffer(memory, dtype=torch.uint8, offset=4000, count=5000)
        assert list(pieces(device, part)) == [slice(0, 96), slice(96, 4192), slice(4192, 5000)]
        assert {
            address - start: size
            for address, size in imitation.registered.items()
            if 0 <= address - start < 10_000
        } == {0: 4096, 4096: 4096, 8192: 10_000 - 8192}
        assert on_device(device, part).cpu().tolist() == part.tolist()
        copies_of(device).wait()
        del memory
        assert start in imitation.registered, "a view is left"
        del part
        assert not any(0 <= address - start < 10_000 for address in imitation.registered)


def test_what_a_dead_rank_lent_can_be_copied_and_is_registered_until_nothing_uses_it(gpu):
    owner, reader = SharedMemory(2), SharedMemory(2)
    with gpu.used() as device:
        staged = StagedTransport(LoneTransport(), device)
        lent = owner.allocate(300, 8)
        lent += 7
        assert reader.accept("here", {1: owner.offer("here")}) == [1]
        offset = owner.offset(lent)
        start = reader.memory_of(1).ctypes.data
        came = torch.frombuffer(
            reader.memory_of(1), dtype=torch.float32, offset=offset, count=300 * 8
        ).view(300, 8)
        del lent, owner  # it has died
        reader.keep([0])
        values, picked = matrix_on(device, Picked(came, torch.tensor([5, 299])), 2)
        assert picked is None and values.cpu().tolist() == [[7.0] * 8] * 2
        assert (on_device(device, came).cpu() == 7).all()
        assert is_registered(gpu, start)
        del came
        assert is_registered(gpu, start), "a copy may still read it"
        staged.shrink()
        if gpu.is_imitated:  # else it is unmapped by now
            assert start not in imitation.registered


def test_what_was_lent_and_is_freed_is_registered_no_more(monkeypatch):
    monkeypatch.setattr(pinned, "CHUNK", 4096)
    owner = SharedMemory(2)
    start = owner.memory.ctypes.data

    def registered():
        return sorted(
            (address - start) // 4096
            for address in imitation.registered
            if 0 <= address - start < 1 << 20
        )

    with imitated_gpu() as device:
        kept, freed = owner.allocate(4096, dtype=np.uint8), owner.allocate(10_000, dtype=np.uint8)
        copies_of(device).to_host([(torch.ones(4096, dtype=torch.uint8, device=device), kept)])
        on_device(device, freed)
        copies_of(device).wait()
        assert registered() == [0, 1, 2, 3]
        del freed
        owner.completed()
        assert registered() == [0, 1, 2, 3], "others may still read it"
        owner.completed()
        assert registered() == [0]
        assert kept.tolist() == [1] * 4096


def test_lent_memory_that_is_long_unused_is_registered_no_more(monkeypatch):
    """Who reads memory of another rank is not told that it was freed there."""
    monkeypatch.setattr(pinned, "UNUSED", 5)
    memory = np.zeros(100, np.uint8)
    start = memory.ctypes.data
    with imitated_gpu() as device:
        lend(memory, read_only=True)
        for _ in range(20):
            on_device(device, torch.from_numpy(memory))
            copies_of(device).wait()
            assert start in imitation.registered
        for _ in range(10):
            copies_of(device).wait()
        assert start not in imitation.registered
        assert on_device(device, torch.from_numpy(memory)).cpu().tolist() == [0] * 100
        assert start in imitation.registered


@pytest.fixture
def across_chunks(monkeypatch):
    """Makes lent memory of so many bytes that reaches over several chunks."""
    monkeypatch.setattr(pinned, "CHUNK", 64)
    kept = []

    def make(size):
        kept.append(np.zeros(size, np.uint8))
        lend(kept[-1], read_only=False)
        return torch.from_numpy(kept[-1])

    return make


def test_a_plain_copy_out_of_a_chunk_is_refused_and_one_in_pieces_is_not(across_chunks):
    memory = across_chunks(200)
    with imitated_gpu() as device:
        here = on_device(device, memory[:100])
        copies_of(device).wait()
        for mistake in (
            lambda: memory[:100].to(device),
            lambda: memory[100:].to(device),
            lambda: here.copy_(memory[20:120], non_blocking=True),
            lambda: memory[:100].copy_(here),
        ):
            with pytest.raises(imitation.RegisteredInPart, match="of registered memory"):
                mistake()
        copies_of(device).to_host([(here + 7, memory[20:120])])
        copies_of(device).wait()
        assert on_device(device, memory[10:130]).cpu().tolist() == [0] * 10 + [7] * 100 + [0] * 10


def test_records_for_a_backup_lie_across_chunks(across_chunks):
    records = across_chunks(160).view(5, 32)
    records += torch.arange(5, dtype=torch.uint8).view(5, 1)
    with imitated_gpu() as device:
        held = BackupRows(9, 32, missing=False, allocate=ZerosOn(device))
        on_device(device, records[1])  # part of it is registered already
        held.put(torch.arange(5), records)
        assert held.read(torch.arange(5)).cpu().tolist() == records.tolist()


def test_small_messages_pin_nothing():
    with imitated_gpu() as device:
        copies_of(device).wait()
        before, source = pinned._in_use, torch.rand(9000, 8)
        few, _ = matrix_on(device, Picked(source, torch.tensor([3, 8999])), 2)
        on_device(device, torch.arange(100))
        assert pinned._in_use == before
        many, _ = matrix_on(device, Picked(source, torch.arange(9000)), 9000)
        assert pinned._in_use >= before + 9000 * 8 * 4
        assert torch.equal(few.cpu(), source[[3, 8999]]) and torch.equal(many.cpu(), source)


class Lending(LoneTransport):
    """Memory that is lent comes back as a view, as from MPI."""

    def __init__(self) -> None:
        self.lent: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []

    def allocate_shared(self, *shape, dtype=np.float32):
        self.lent.append(super().allocate_shared(*shape, dtype=dtype))
        return self.lent[-1]

    def share(self, tensors):
        self.given = list(tensors)
        return super().share(tensors)


def test_what_lies_in_memory_lent_on_a_gpu_is_staged_in_its_twin(gpu):
    inner = Lending()
    with gpu.used() as device:
        staged = StagedTransport(inner, device)
        buffer = staged.lend_on_device(10, 4)
        buffer[2:5] = 3.0
        other = torch.ones(4, device=device)
        staged.exchange({0: [(1,), buffer[2:5], Picked(buffer, torch.tensor([4])), other]})
        (twin,) = inner.lent
        _, part, picked, apart = inner.given
        assert part.data_ptr() == twin.data_ptr() + 2 * 16 and part.tolist() == [[3.0] * 4] * 3
        assert picked.source.data_ptr() == twin.data_ptr() and picked.source.shape == (10, 4)
        assert not 0 <= apart.data_ptr() - twin.data_ptr() < twin.nbytes
        del buffer
        assert not staged._twins


def test_large_messages_are_received_in_pinned_memory(gpu):
    with gpu.used() as device:
        staged, before = StagedTransport(LoneTransport(), device), pinned._in_use
        small, large = staged.receive_memory(100), staged.receive_memory(1 << 20)
        assert pinned._in_use == before + (1 << 20)
        assert (len(small), len(large)) == (100, 1 << 20)


def test_memory_lent_in_pieces_is_copied_both_ways(monkeypatch, gpu):
    monkeypatch.setattr(pinned, "CHUNK", 4096)
    lent = lazy_zeros(10_000, dtype=np.uint8).numpy()  # begins at a page, as shared memory does
    with gpu.used() as device:
        lend(lent, read_only=False)
        host = torch.from_numpy(lent)
        host[:] = torch.arange(10_000) % 251
        copies = copies_of(device)
        there = on_device(device, host[100:9000])
        copies.wait()
        assert is_registered(gpu, lent.ctypes.data)
        there += 1
        copies.to_host([(there[:5000], host[4000:9000])])
        copies.wait()
        assert host[4000:9000].tolist() == [(at % 251 + 1) for at in range(100, 5100)]
        assert host[:4000].tolist() == [at % 251 for at in range(4000)]
        del host, lent


def test_what_an_imitated_gpu_copies_to_the_host_is_there_after_the_wait():
    with imitated_gpu() as device:
        there = torch.arange(5, device=device)
        early, ordinary = coming(there), coming(there, torch.empty(5, dtype=torch.int64))
        assert early.tolist() == [early[0]] * 5 and early[0] < 0
        assert ordinary.tolist() == [0, 1, 2, 3, 4], "torch waits for what is not pinned"
        there += 1
        copies_of(device).wait()
        assert early.tolist() == [1, 2, 3, 4, 5], "changed before it was copied"


def test_memory_that_changes_before_an_imitated_gpu_has_read_it_is_noticed():
    with imitated_gpu() as device:
        here = pinned.pinned(100).zero_()
        on_device(device, here)
        copies_of(device).wait()
        here[7] = 1
        on_device(device, here)
        here[7] = 2
        with pytest.raises(imitation.ChangedUnderCopy, match="100 bytes of the host were changed"):
            copies_of(device).wait()
        copies_of(device).wait()


def test_a_guard_gives_up_a_gpu_that_does_not_answer_and_no_other():
    now = [0.0]
    pulse = Pulse(2.0)
    guard = Unanswered(pulse, lambda: now[0])
    now[0] = 100.0
    assert not guard.look(), "nobody has asked"
    with imitated_gpu() as device:
        gpu = GpuPulse(device, pulse, rank=0)
        assert (pulse.asked, pulse.answered) == (1, 1)
        pulse.ask()
        assert (pulse.asked, pulse.answered) == (2, 2)
        now[0] = 200.0
        assert not guard.look()
        try:
            imitation.fail_from_now_on("hang")
            gpu.ask()
            assert (pulse.asked, pulse.answered) == (3, 2)
        finally:
            imitation.works_again()
        now[0] = 201.9
        assert not guard.look()
        gpu.ask()
        assert pulse.answered == 4
        assert not guard.look()
        pulse.question()
        now[0] = 300.0
        assert not guard.look(), "the guard had no core itself"
        now[0] = 301.9
        assert not guard.look()
        now[0] = 302.0
        assert guard.look()


def test_a_gpu_answers_and_its_answer_lies_in_memory_of_the_guard(gpu):
    pulse = Pulse(2.0)
    with gpu.used() as device:
        GpuPulse(device, pulse, rank=0)
        pulse.ask()
        if not gpu.is_imitated:
            torch.cuda.synchronize()
    assert (pulse.asked, pulse.answered) == (2, 2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("memory", "its GPU has no memory left: CUDA out of memory. Tried to allocate 2.00 MiB"),
        ("lost", "its GPU is lost: CUDA error: an imitated GPU has fallen off the bus"),
    ],
)
def test_an_error_of_a_gpu_is_told_in_one_line(kind, words):
    with imitated_gpu() as device:
        here = torch.zeros(1, device=device)
        try:
            imitation.fail_from_now_on(kind)
            with pytest.raises(RuntimeError) as raised:
                here.add_(1)
        finally:
            imitation.works_again()
    assert fault_in_words(raised.value).startswith(words)
    assert is_lost(raised.value) == (kind == "lost")


def test_other_errors_are_not_the_gpus():
    assert fault_in_words(RuntimeError("no CUDA here")) is None
    older = RuntimeError("CUDA error: unspecified launch failure\nadvice, on more lines")
    assert fault_in_words(older) == "its GPU is lost: CUDA error: unspecified launch failure"


FORKS = """
import sys
import ecrm.process.guard as guard
from ecrm.cli.commands import main

def forks(*_, **__):
    print("torch there:", "torch" in sys.modules)
    sys.exit(9)

guard.guard = forks
sys.exit(main())
"""


ALONE = ("cluster.layout=colocated", "cluster.servers=1", "cluster.trainers=1", "cluster.spares=0")


@pytest.mark.parametrize("what", ["tiny", "train.py"])
def test_a_rank_forks_from_its_guard_before_there_is_torch(tmp_path, criteo_rows, what):
    """A process that forks with CUDA has no use of it in its child. Spares come the same way."""
    (tmp_path / "train.py").write_text("import torch\n")
    sets = [*ALONE, "protection.name=none", "storage.device=cuda"]
    if what == "tiny":
        sets.append(f"data.path={criteo_rows}")
    words = ("train", what, *(word for each in sets for word in ("--set", each)))
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.stdout, done.returncode) == ("torch there: False\n", 9), done.stderr
