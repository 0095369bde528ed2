"""Rows on a GPU under faults: the bits of the CPU, and no tensor where it cannot be."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from ecrm.base.allocate import ZerosOn, lazy_zeros
from ecrm.device import pinned
from ecrm.engine.hooks import Hooks
from ecrm.kernels import dispatch
from ecrm.placement.tables import Table
from ecrm.storage.base import Store
from ecrm.storage.undo import UndoLog
from ecrm.testing.imitated_gpu import HostMemoryExpected, ImitatedTensor, imitated_gpu
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.simulation import Failed, run_schedule
from ecrm.testing.simulate.workload import Workload, run_workload
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster
from ecrm.testing.simulated_transport import transport as simulated_transport
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import Picked
from ecrm.transport.staged import StagedTransport
from support.gpu_waits import waits_for_gpu
from support.gpus import Gpu
from support.training import train

IMITATED = Gpu("imitated")


@pytest.fixture
def lends(monkeypatch):
    """What simulated ranks share is registered as what real ones lend, in tiny chunks."""
    kept = []

    def zeros(*shape, dtype=np.float32):
        memory = lazy_zeros(*shape, dtype=dtype)
        kept.append(memory.numpy().reshape(-1).view(np.uint8))
        pinned.lend(kept[-1], read_only=False)
        return memory

    monkeypatch.setattr(pinned, "CHUNK", 256)
    monkeypatch.setattr(simulated_transport, "lazy_zeros", zeros)


@pytest.fixture
def reference():
    """Plain operations of torch in the place of interpreted kernels, which take a while."""
    with dispatch.used_on_gpu("reference"):
        yield


def on_gpu(seed, gpu=IMITATED, share_on_cpu=0.0):
    """A drawn schedule whose rows are on a GPU, but for those of a share of all ranks.

    The oracle that watches it has its on the CPU.
    """
    drawn, rng = draw(seed, "survivable"), random.Random(seed)
    ranks = range(drawn.workload.world_size)
    on_cpu = tuple(rank for rank in ranks if rng.random() < share_on_cpu)
    where = {"rows_on": gpu.name, "gpu_kernels": gpu.kernels, "on_cpu": on_cpu}
    return replace(drawn, workload=replace(drawn.workload, **where))


# replication; a chain that scrubs; parity of three units, and updates that are merged
@pytest.mark.parametrize("seed", [35, 10, 26])
def test_schedules_end_with_the_bits_of_the_cpu(seed, gpu):
    verdict = run_schedule(on_gpu(seed, gpu))
    assert verdict.deaths and verdict.recoveries
    assert verdict.rows_checked and (verdict.parity_rows_checked or seed == 35)
    assert dispatch.taken()["sparse_update"] == gpu.kernels


@pytest.mark.drill
@pytest.mark.parametrize("share_on_cpu", [0.0, 0.5])
def test_many_schedules_end_with_the_bits_of_the_cpu(gpu, share_on_cpu):
    verdicts = [run_schedule(on_gpu(seed, gpu, share_on_cpu)) for seed in range(100, 200)]
    assert sum(verdict.deaths for verdict in verdicts) > 200
    assert sum(verdict.reshapes for verdict in verdicts) > 10


SMALL = Workload(
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
"""Ranks 0 to 2 are servers, 3 is a trainer, 4 a spare."""


def finished(workload):
    """A run in which server 1 dies after steps not committed.

    (digests of tables, who died, what type of device each rank has shards on at the end).
    """
    cluster = SimulatedCluster(workload.world_size, 0, [PhaseFault(1, 2, "update")])
    found = {}

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))

        def note(engine):
            for hosted in engine.state.hosted.values():
                found[engine.rank] = hosted.store.device.type

        return run_workload(workload, transport, hooks, after_step=note)

    outcome = cluster.run(program)
    (digests,) = [result.tables for result in outcome.results.values() if result.tables]
    assert not any(result.verified.mismatches for result in outcome.results.values())
    return digests, [kill.rank for kill in outcome.killed], found


@pytest.mark.parametrize("protection", ["erasure", "chain", "replicate"])
@pytest.mark.parametrize(
    "on_cpu, spare_on",
    [((4,), "cpu"), ((0, 1, 2, 3), "cuda"), ((0, 3), "cuda")],
    ids=["a CPU spare takes over", "a GPU spare takes over", "servers on both"],
)
def test_ranks_with_a_gpu_and_without_work_together(gpu, on_cpu, spare_on, protection):
    copies = {} if protection == "erasure" else {"protection": protection, "k": 1, "m": 1}
    small = replace(SMALL, **copies)
    expected, died, _ = finished(small)
    mixed = replace(small, rows_on=gpu.name, gpu_kernels=gpu.kernels, on_cpu=on_cpu)
    with dispatch.used_on_gpu(gpu.kernels):
        found, also_died, held = finished(mixed)
    assert died == also_died == [1]
    assert held[4] == spare_on
    assert {held[rank] for rank in (0, 2)} == {
        "cpu" if rank in on_cpu else "cuda" for rank in (0, 2)
    }
    assert found == expected


def test_kernels_end_with_the_digests_of_the_cpu(gpu, lends):
    """Interpreted ones on an imitated GPU."""
    expected, died, _ = finished(SMALL)
    with waits_for_gpu() as waits:
        assert finished(replace(SMALL, rows_on=gpu.name))[:2] == (expected, died)
    if gpu.is_imitated:
        between = {"erasure _verify_periods"}
        assert {"staged _wait"} <= set(waits) - between <= {"staged _wait", "undo _settle"}
    assert died == [1]
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

    def agree_alike(self, flag, word):
        return flag, True

    def shrink(self, admit=0):
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


SHORT = ("train.steps=5", "train.global_batch=16", "model.max_rows_per_table=40")


def words(sets):
    """Keys of a config as `train` has them."""
    return [f"{key}={value}".lower() for key, value in sets.items()]


@pytest.fixture(scope="module")
def trained_on_cpu(tmp_path_factory, criteo_rows):
    return train(tmp_path_factory.mktemp("cpu"), criteo_rows, *SHORT)


@pytest.mark.parametrize(
    "devices", [("train",), pytest.param(("train", "storage"), marks=pytest.mark.drill)]
)
def test_a_config_ends_with_the_model_of_the_cpu(
    tmp_path, criteo_rows, devices, trained_on_cpu, reference, lends
):
    on_gpu = words({**{f"{device}.device": "cuda" for device in devices}, **IMITATED.sets})
    # a trainer in its backward, and its heir
    faults = [PhaseFault(3, 2, "backward"), PhaseFault(5, 3, "forward")]
    with waits_for_gpu() as waits:
        with_gpu = train(tmp_path / "gpu", criteo_rows, *SHORT, *on_gpu, faults=faults)
    in_steps = {"module_replica contribution", "slot_work log", "train train", "staged _wait"}
    in_steps |= {"undo _settle", "digests entry_digests"}
    between = {"train evaluate", "evaluation gather", "summary flat_state", "device there"}
    between |= {"nested_state _off_device", "nested_state packed", "nested_state same_bits"}
    between |= {"write _windows", "base read_to_host", "erasure _verify_periods"}
    between |= {"table_digest _add"}
    assert {place for place in waits if "kernel" not in place} - between <= in_steps
    assert "module_replica contribution" in waits
    assert sorted(with_gpu.killed) == [3, 5]
    assert with_gpu.summary["model_sha256"] == trained_on_cpu.summary["model_sha256"]
    assert with_gpu.summary["eval_auc"] == trained_on_cpu.summary["eval_auc"]
    assert with_gpu.summary["kernels_ran"]["dot_interaction"] == "reference"


@pytest.mark.parametrize(
    "devices", [("storage",), pytest.param(("storage", "train"), marks=pytest.mark.drill)]
)
@pytest.mark.parametrize("first", ["cpu", "gpu"])
def test_a_run_goes_on_from_a_checkpoint_of_the_other_device(
    tmp_path, criteo_rows, trained_on_cpu, gpu, first, devices
):
    if "train" in devices and not gpu.is_imitated:
        pytest.skip("a model trained on a GPU has other bits than on the CPU")
    on_gpu = words({**{f"{device}.device": "cuda" for device in devices}, **gpu.sets})
    before, after = ([], on_gpu) if first == "cpu" else (on_gpu, [])
    with dispatch.used_on_gpu(gpu.kernels):
        half = train(tmp_path / "half", criteo_rows, *SHORT, "train.steps=3", *before)
        run = train(tmp_path / "run", criteo_rows, *SHORT, *after, resume=tmp_path / "half")
    assert half.summary["steps"] == 3 and run.of("progress")[0]["step"] > 3
    assert run.summary["model_sha256"] == trained_on_cpu.summary["model_sha256"]
