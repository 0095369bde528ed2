"""Rows on a GPU: the bits of the CPU, and no wait for it but for the copy of row numbers."""

import traceback

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ecrm.allocate import CPU, ZerosOn
from ecrm.kernels import dispatch
from ecrm.placement.initial_values import Uniform
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table, row_spaces
from ecrm.storage.base import NativeStore, without_padding
from ecrm.storage.hosted import HostedShard
from ecrm.storage.initial_rows import InitialRows

ROWS, DIM = 20, 8
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")
WAITS = {"nonzero", "item", "tolist", "cpu", "__bool__", "__int__", "__float__", "numpy", "unique"}
"""Names of functions of torch for whose result a host waits."""


class Waits(TorchFunctionMode):
    """Notes what this project calls for which a GPU would be waited for.

    Copies from the host do not count, nor what Triton's interpreter does to imitate a kernel.
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name in WAITS and args[0].is_cuda:
            stack = traceback.extract_stack()
            if not any("triton/runtime/" in frame.filename for frame in stack):
                self.names.append(name)
        return func(*args, **(kwargs or {}))


def shard(optimizer, initial, allocate=None):
    table = Table("a", ROWS - 2, DIM, initial=initial)  # two rows of padding
    (space,) = row_spaces([table])
    store = NativeStore(ROWS, DIM, SparseOptimizer(optimizer, 0.1), InitialRows(space, 5), allocate)
    options = {} if allocate is None else {"allocate": allocate}
    return HostedShard(store, ROWS, missing=False, **options)


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
        with Waits() as waits:
            used(hosted, device)
    assert waits.names == []
    assert dispatch.taken()["begin_rows"] == dispatch.taken()["sparse_update"] == "triton"


def test_waiting_is_noticed(gpu):
    with gpu.used("auto") as device:
        hosted = shard("sgd", Uniform(-0.1, 0.4), ZerosOn(device))
        with Waits() as waits:
            hosted.lookup(torch.arange(3))
    assert "nonzero" in waits.names


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
