"""Rows on an imitated GPU under faults: the bits of the CPU, and no tensor where it cannot be."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from ecrm.allocate import ZerosOn
from ecrm.engine.hooks import Hooks
from ecrm.imitated_gpu import HostMemoryExpected, ImitatedTensor, imitated_gpu
from ecrm.kernels import dispatch
from ecrm.placement.tables import Table
from ecrm.simulate.schedule import draw
from ecrm.simulate.simulation import Failed, run_schedule
from ecrm.simulate.workload import Workload, run_workload
from ecrm.storage.base import Store
from ecrm.storage.undo import UndoLog
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import Picked
from ecrm.transport.simulated import PhaseFault, SimulatedCluster
from ecrm.transport.staged import StagedTransport
from support.training import train


@pytest.fixture
def reference():
    """Plain operations of torch in the place of interpreted kernels, which take a while."""
    dispatch.use_on_gpu("reference")
    yield
    dispatch.use_on_gpu("auto")


def on_gpu(seed):
    """A drawn schedule whose rows are on a GPU. The oracle that watches it has its on the CPU."""
    drawn = draw(seed, "survivable")
    return replace(drawn, workload=replace(drawn.workload, imitated_gpu=True, backend="native"))


# replication; a chain that scrubs; parity of three units, and updates that are merged
@pytest.mark.parametrize("seed", [35, 10, 26])
def test_schedules_end_with_the_bits_of_the_cpu(seed, reference):
    verdict = run_schedule(on_gpu(seed))
    assert verdict.deaths and verdict.recoveries
    assert verdict.rows_checked and (verdict.parity_rows_checked or seed == 35)
    assert dispatch.taken()["sparse_update"] == "reference"


@pytest.mark.drill
def test_many_schedules_end_with_the_bits_of_the_cpu(reference):
    verdicts = [run_schedule(on_gpu(seed)) for seed in range(100, 200)]
    assert sum(verdict.deaths for verdict in verdicts) > 200
    assert sum(verdict.reshapes for verdict in verdicts) > 10


def finished(workload):
    """(digests of tables, deaths) of a run in which a server dies after steps not committed."""
    cluster = SimulatedCluster(workload.world_size, 0, [PhaseFault(1, 2, "update")])

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        return run_workload(workload, transport, hooks)

    outcome = cluster.run(program)
    (digests,) = [result.tables for result in outcome.results.values() if result.tables]
    assert not any(result.verified.mismatches for result in outcome.results.values())
    return digests, len(outcome.killed)


def test_interpreted_kernels_end_with_the_digests_of_the_cpu():
    on_cpu = Workload(
        tables=(Table("a", 20, 8),),
        slots=1,
        trainers=1,
        servers=3,
        k=2,
        steps=3,
        ids_per_slot=3,
        commit_interval=3,
        rebuild_rows_per_step=1000,
    )
    expected = finished(on_cpu)
    assert finished(replace(on_cpu, imitated_gpu=True)) == expected
    assert expected[1] == 1
    taken = dispatch.taken()
    for operation in ("sparse_update", "scatter_add", "parity_apply", "decode", "merge_records"):
        assert taken[operation] == "triton", operation


def test_what_is_sent_unstaged_is_noticed(reference, monkeypatch):
    monkeypatch.setattr(StagedTransport, "_on_host", lambda self, parts: list(parts))
    with pytest.raises(Failed, match="is on cuda:0; only CPU tensors can be sent"):
        run_schedule(on_gpu(0))


def test_row_numbers_left_on_the_host_are_noticed(reference, monkeypatch):
    monkeypatch.setattr(Store, "_here", lambda self, rows: rows)
    with pytest.raises(Failed, match="and a tensor on the host, torch.int64"):
        run_schedule(on_gpu(0))


@pytest.mark.parametrize(
    "mistake, message",
    [
        (lambda here, host: here.numpy(), "numpy of a tensor on cuda:0"),
        (lambda here, host: np.asarray(here), "__array__ of a tensor on cuda:0"),
        (lambda here, host: here + host, "add of tensors on cuda:0 and a tensor on the host"),
        (lambda here, host: here[host.long()], "a tensor on the host, torch.int64 [3]"),
        (lambda here, host: here.__setitem__(0, host), "a tensor on the host, torch.float32 [3]"),
        (lambda here, host: torch.cat([here, host]), "a tensor on the host, torch.float32 [3]"),
        (lambda here, host: torch.add(here, 1, out=host), "a tensor on the host"),
    ],
)
def test_the_imitated_gpu_refuses_memory_of_the_host(mistake, message):
    with imitated_gpu() as device:
        here = torch.zeros(3, device=device)
        with pytest.raises(HostMemoryExpected, match=re.escape(message)):
            mistake(here, torch.ones(3))


def test_moving_to_the_imitated_gpu_and_back_copies():
    host = torch.arange(3)
    with imitated_gpu() as device:
        here = host.to(device)
        assert here.is_cuda and here.device == device and here.to(device) is here
        host[0] = 7
        back = here.cpu()
        assert type(back) is torch.Tensor and back.tolist() == [0, 1, 2]
        back[1] = 7
        assert here.tolist() == [0, 1, 2]
        assert isinstance(here[:1] + 1, ImitatedTensor)
    with pytest.raises((AssertionError, RuntimeError)):  # the imitation has ended
        torch.zeros(3, device=device)


class Recorder(Transport):
    """Keeps what it is given, and loses a peer if it is told to."""

    rank, live = 0, (0, 1, 2)

    def __init__(self, fails=False):
        self.fails, self.given = fails, []

    def exchange(self, outgoing):
        self.given = [part for parts in outgoing.values() for part in parts]
        if self.fails:
            raise PeerFailure
        return {}

    def share(self, tensors):
        return self.exchange({0: tensors})

    def agree(self, flag):
        return flag

    def shrink(self):
        pass

    def close(self):
        pass


def test_staging_copies_each_tensor_once():
    inner = Recorder(fails=True)
    with imitated_gpu() as device:
        staged = StagedTransport(inner, device)
        here, host = torch.arange(6.0, device=device).view(3, 2), torch.ones(2)
        place, empty = torch.tensor([2, 0]), torch.empty(0, device=device)
        with pytest.raises(PeerFailure):
            staged.exchange({1: [(5,), here, empty], 2: [here, Picked(here, place), host]})
    head, whole, nothing, again, picked, plain = inner.given
    assert head == (5,) and plain is host and nothing.numel() == 0
    assert type(whole) is torch.Tensor and whole.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert again is whole and picked.source is whole and picked.rows is place


def test_logs_on_a_gpu_take_only_the_memory_that_they_use(reference):
    with imitated_gpu() as device:
        log = UndoLog(1000, 8, 1, ZerosOn(device), device)
        rows, sums = torch.arange(3), log.space(3)
        sums.fill_(1.0)
        log.expect(rows)
        log.keep(rows, sums.view(torch.uint8))
        held = []
        for first in (2, 5, 40):
            (_, merged), *_ = log.expect(torch.arange(first, first + 3))
            held.append(len(merged.rows))
        assert held == [6, 6, 6]
        (found, records), *_ = log.deltas()
        assert not isinstance(found, ImitatedTensor) and found.tolist() == [0, 1, 2]
        assert records.cpu().view(torch.float32).tolist() == [[1.0, 1.0]] * 3
        log.expect(torch.arange(500))
        assert len(log._merged[0].rows) == 2 * 503
        (found, records), *_ = log.deltas()
        assert found.tolist() == [0, 1, 2] and records.cpu().view(torch.float32).sum() == 6


@pytest.mark.parametrize(
    "devices", [("train",), pytest.param(("train", "storage"), marks=pytest.mark.drill)]
)
def test_the_built_in_trainer_ends_with_the_model_of_the_cpu(
    tmp_path, criteo_rows, devices, reference
):
    sets = ("train.steps=5", "train.global_batch=16", "model.max_rows_per_table=40")
    calm = train(tmp_path / "cpu", criteo_rows, *sets)
    on_gpu = [f"{device}.device=cuda" for device in devices]
    on_gpu += ["testing.imitated_gpu=true", "kernels.backend=reference"]
    # a trainer in its backward, and its heir
    faults = [PhaseFault(3, 2, "backward"), PhaseFault(5, 3, "forward")]
    with_gpu = train(tmp_path / "gpu", criteo_rows, *sets, *on_gpu, faults=faults)
    assert sorted(with_gpu.killed) == [3, 5]
    assert with_gpu.summary["model_sha256"] == calm.summary["model_sha256"]
    assert with_gpu.summary["eval_auc"] == calm.summary["eval_auc"]
    assert with_gpu.summary["kernels_ran"]["dot_interaction"] == "reference"
