"""Rows on a GPU: the bits of the CPU, and no wait for it."""

import pytest
import torch

from ecrm.base.allocate import CPU, ZerosOn
from ecrm.device import copies as gpu_copies
from ecrm.device import pinned
from ecrm.device.copies import coming, on_device, on_host
from ecrm.kernels import dispatch
from ecrm.placement.initial_values import Uniform
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table, row_spaces
from ecrm.protection.backup import BackupRows
from ecrm.protection.parity import ParityRows
from ecrm.protection.routing import ROWS as ROWS_ASKED
from ecrm.protection.routing import ShardRequests
from ecrm.storage.base import NativeStore, without_padding
from ecrm.storage.hosted import HostedShard
from ecrm.storage.initial_rows import InitialRows
from ecrm.testing import imitated_gpu as imitation
from ecrm.testing.imitated_gpu import imitated_gpu
from ecrm.transport.message import Picked
from support.gpu_waits import waits_for_gpu

ROWS, DIM = 20, 8
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")


def shard(optimizer, initial, allocate=None, rows=ROWS):
    table = Table("a", rows - 2, DIM, initial=initial)  # two rows of padding
    (space,) = row_spaces([table])
    store = NativeStore(rows, DIM, SparseOptimizer(optimizer, 0.1), InitialRows(space, 5), allocate)
    options = {} if allocate is None else {"allocate": allocate}
    return HostedShard(store, rows, missing=False, **options)


def used(hosted, device):
    """Two steps, a lookup after each, and what is left of it as bytes."""
    found = []
    for step, rows in enumerate(([1, 4, 9], [4, 5, 9])):
        numbers = torch.tensor(rows)
        sums = hosted.gradient_space(len(rows), keep_delta=True)
        sums.zero_()
        sums[:, :DIM] = torch.arange(24.0).view(3, 8).sub(7).to(device)
        hosted.update(numbers, sums, True, step)
        found.append(hosted.lookup(torch.tensor([0, 4, 19, 5, 1])).clone())
    return found


def left(hosted, device, found):
    store = hosted.store
    deltas = [
        record
        for _, records in hosted.deltas_since_commit()
        for record in without_padding(records.cpu(), store.kept_bytes)
    ]
    return [*(part.cpu() for part in found), store.read_to_host(torch.arange(ROWS)), *deltas]


@pytest.mark.parametrize("initial", [None, Uniform(-0.1, 0.4)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_on_a_gpu_have_the_bits_of_the_cpu(optimizer, initial, gpu):
    here = shard(optimizer, initial)
    expected = left(here, torch.device("cpu"), used(here, torch.device("cpu")))
    with gpu.used("auto") as device:
        there = shard(optimizer, initial, ZerosOn(device))
        found = left(there, device, used(there, device))
    assert len(found) == len(expected) > 4
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert (expected[0][2].view(torch.int32) == 0).all()  # padding


@pytest.mark.parametrize("initial", [None, Uniform(-0.1, 0.4)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_on_the_cpu_lie_as_on_a_gpu_where_other_ranks_have_one(optimizer, initial):
    """With the same bits as where each part of a record lies by itself."""
    results = []
    for allocate in (None, ZerosOn(CPU)):
        hosted = shard(optimizer, initial, allocate)
        found = used(hosted, CPU)
        assert len(hosted.store.memory) == 1 or allocate is None
        found.append(hosted.store.read_to_host(torch.arange(ROWS)))
        hosted.undo()
        results.append([*found, hosted.store.read_to_host(torch.arange(ROWS))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert results[0][-2].any() and not results[0][-1].any()


def test_no_lookup_and_no_update_waits_for_the_gpu(gpu):
    with gpu.used("auto") as device:
        hosted = shard("rowwise_adagrad", None, ZerosOn(device))
        with waits_for_gpu() as waits:
            used(hosted, device)
    assert waits == []
    assert dispatch.taken()["begin_rows"] == dispatch.taken()["sparse_update"] == "triton"


def test_waiting_is_noticed(gpu):
    with gpu.used("auto") as device:
        hosted = shard("sgd", Uniform(-0.1, 0.4), ZerosOn(device))
        with waits_for_gpu() as waits:
            hosted.lookup(torch.arange(3))
    assert "initial_rows __call__" in waits


@pytest.mark.parametrize("seconds, tries", [(60, 3), (0, 1)])
def test_memory_of_a_gpu_that_is_not_free_yet_is_asked_for_again(monkeypatch, seconds, tries):
    """It fails twice. The driver frees memory of a killed rank some time after its death."""
    asked, zeros = [], torch.zeros

    def not_free_yet(*shape, **options):
        asked.append(shape)
        if len(asked) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*shape, **options)

    monkeypatch.setattr("ecrm.base.allocate.FREED_SECONDS", seconds)
    monkeypatch.setattr(torch, "zeros", not_free_yet)
    with imitated_gpu() as device:
        if tries == 3:
            assert ZerosOn(device)(2, 3).cpu().tolist() == [[0.0] * 3] * 2
        else:
            with pytest.raises(torch.OutOfMemoryError):
                ZerosOn(device)(2, 3)
    assert asked == [(2, 3)] * tries


LARGE = 1 << 17
"""Bytes that CUDA does not take along with a copy."""


@pytest.mark.parametrize(
    "way, waits",
    [
        (lambda host, here, fast: host.to(here.device), True),
        (lambda host, here, fast: host.to(here.device, non_blocking=True), True),
        (lambda host, here, fast: host[:9].to(here.device, non_blocking=True), False),
        (lambda host, here, fast: fast.to(here.device, non_blocking=True), False),
        (lambda host, here, fast: fast.to(here.device), True),
        (lambda host, here, fast: here.copy_(host, non_blocking=True), True),
        (lambda host, here, fast: here.copy_(fast, non_blocking=True), False),
        (lambda host, here, fast: fast.copy_(here, non_blocking=True), False),
        (lambda host, here, fast: fast.copy_(here), True),
        (lambda host, here, fast: host[:9].copy_(here[:9], non_blocking=True), True),
        (lambda host, here, fast: here.cpu(), True),
        (lambda host, here, fast: on_device(here.device, host), False),
        (lambda host, here, fast: on_device(here.device, fast), False),
        (lambda host, here, fast: coming(here), False),
        (lambda host, here, fast: on_host(here, here), True),
        (lambda host, here, fast: here[here != 0], True),
        (lambda host, here, fast: here[1:], False),
        (lambda host, here, fast: torch.equal(here, here), True),
        (lambda host, here, fast: torch.tensor([1], device=here.device), True),
    ],
)
def test_results_are_waited_for_and_copies_whose_memory_is_not_pinned(monkeypatch, way, waits):
    seen = []
    with imitated_gpu() as device:
        here = torch.ones(LARGE, dtype=torch.uint8, device=device)
        host = torch.zeros(LARGE, dtype=torch.uint8)
        fast = torch.empty(LARGE, dtype=torch.uint8, pin_memory=True)
        assert fast.is_pinned() and fast[5:].is_pinned() and not host.is_pinned()
        monkeypatch.setattr(imitation, "wait_for_gpu", lambda: seen.append(1))
        way(host, here, fast)
        assert len(seen) == waits
        assert fast.pin_memory().is_pinned()


@pytest.fixture(params=[1 << 16, 16])
def small(request, monkeypatch):
    """Bytes that CUDA takes along with a copy: all of a message in these tests, or less."""
    dispatch.use_on_gpu("reference")
    monkeypatch.setattr(imitation, "SMALL", request.param)
    monkeypatch.setattr(pinned, "SMALL", request.param)
    yield
    dispatch.use_on_gpu("auto")


def outside_of_kernels(waits):
    """The reference of a kernel waits where the kernel does not."""
    return [place for place in waits if not place.startswith("kernel ")]


def test_a_step_waits_for_nothing_and_its_commit_once(small):
    rows, gradients = torch.arange(5), torch.ones(5, DIM)
    heads = [(ROWS_ASKED, 0, 0, 0), rows, (ROWS_ASKED, 1, 0, 0), rows]
    came = {(0, 0, 0): Picked(gradients, rows), (1, 0, 0): gradients.reshape(-1)}
    with imitated_gpu() as device:
        hosted = shard("sgd", None, ZerosOn(device))
        with waits_for_gpu() as waits:
            asked = ShardRequests.of({0: heads}, {(0, 0): hosted})
            asked.replies()
            asked.update(came, True, 0)
            hosted.pass_over(rows, True)
            hosted.correct(rows[:1], torch.zeros(1, hosted.store.record_bytes).byte())
            assert outside_of_kernels(waits) == []
            hosted.deltas_since_commit()
            hosted.committed()
            assert outside_of_kernels(waits) == ["undo _settle"]
            hosted.pass_over(rows, True)
            hosted.undo()
        assert outside_of_kernels(waits) == ["undo _settle"]


@pytest.mark.parametrize("kind", [ParityRows, BackupRows])
def test_redundancy_waits_for_nothing(kind, small):
    rows, records = torch.arange(5), torch.ones(5, 16, dtype=torch.uint8)
    with imitated_gpu() as device:
        held = kind(8, 16, missing=True, allocate=ZerosOn(device))
        with waits_for_gpu() as waits:
            held.restore(rows, records)
            held.apply(rows, 1, records * 3)
            if kind is BackupRows:
                held.put(rows, records * 4)
            found = held.read(rows)
            held.correct(rows[:1], records[0])
            held.undo()
        assert outside_of_kernels(waits) == []
        assert found.cpu().unique().tolist() == [4 if kind is BackupRows else 1 ^ 3]
        assert not held.records.cpu().any()


def test_records_are_read_to_the_host_with_one_wait(monkeypatch):
    monkeypatch.setattr(gpu_copies, "WINDOW", 1000)
    with imitated_gpu() as device:
        store = shard("adagrad", None, ZerosOn(device)).store
        size = store.kept_bytes
        records = torch.arange(ROWS * size).to(torch.uint8).view(ROWS, size)
        store.write(torch.arange(ROWS), store.with_padding(records.to(device)))
        for count, expected in ((3, 1), (ROWS, 2)):  # of more than a window, one for each
            with waits_for_gpu() as waits:
                out = torch.empty(count, size, dtype=torch.uint8)
                found = store.read_to_host(torch.arange(count), out)
            assert found is out and torch.equal(out, records[:count])
            assert waits == ["base read_to_host"] * expected


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_record_on_a_gpu_lies_in_one_row_that_begins_at_16_bytes(optimizer, gpu):
    with gpu.used("auto") as device:
        store = shard(optimizer, None, ZerosOn(device)).store
        (matrix,) = store.memory
        assert 4 * matrix.stride(0) == store.record_bytes
        assert store.record_bytes % 16 == 0 and 0 <= store.record_bytes - store.kept_bytes < 16
        rows, kept = torch.tensor([3]), torch.full((1, store.kept_bytes), 7, dtype=torch.uint8)
        store.write(rows, store.with_padding(kept.to(device)))
        words, beside_zeros = matrix.cpu().view(torch.int32), store.kept_bytes // 4 - 1
        assert (words[3, :beside_zeros] == 0x07070707).all() and words[3, -1] == 0x07070707
        assert not words[3, beside_zeros:-1].any()
        assert not words[2].any() and not words[4].any()
        assert torch.equal(store.read_to_host(rows), kept)
        assert store.weights.cpu().view(torch.int32).sum() == DIM * 0x07070707
        assert store.last_bytes(slice(2, 5)).cpu().tolist() == [0, 7, 0]
        assert store.last_bytes(slice(3, 4)).cpu().tolist() == [7]


def test_an_update_that_is_passed_over_after_one_that_is_not_is_taken_back(gpu):
    with gpu.used("auto") as device:
        hosted = shard("rowwise_adagrad", None, ZerosOn(device))
        sums = hosted.gradient_space(2, keep_delta=True)
        sums.fill_(1.0)
        sums[:, DIM:] = 0
        hosted.update(torch.tensor([1, 4]), sums, True, 0)
        hosted.pass_over(torch.tensor([4, 9]), True)
        (rows, deltas), *_ = hosted.deltas_since_commit()
        assert rows.tolist() == [1, 4, 9] and deltas.cpu()[:2].any(1).all()
        assert not deltas.cpu()[2].any()
        hosted.undo()
        assert not hosted.store.read(torch.arange(ROWS)).cpu().any()
