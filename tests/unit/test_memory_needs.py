"""The memory that a run is said to need, and what is refused before a rank starts."""

from __future__ import annotations

import random
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ecrm.base.allocate import ZerosOn
from ecrm.base.errors import UsageError
from ecrm.config import load_config
from ecrm.config.schema import READY_BYTES, WORKING_BYTES
from ecrm.device import pinned
from ecrm.device.copies import copies_of, on_device
from ecrm.kernels import dispatch
from ecrm.kernels.records import merge_records
from ecrm.launch import gpu_memory
from ecrm.launch.gpu_memory import free_on_gpus
from ecrm.launch.memory_needs import (
    LIBRARIES_BYTES,
    REGISTERED,
    Needs,
    _grown_log_bytes,
    check_memory,
    check_room,
    in_words,
)
from ecrm.model.module_replica import ModuleReplica
from ecrm.placement.assignment import initial_view
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.stripes import RowLayout
from ecrm.placement.tables import Table, row_spaces
from ecrm.protection.mapped_files.shard_file import ShardFile
from ecrm.protection.registry import make_protection
from ecrm.protection.routing import ROWS, ShardRequests
from ecrm.protection.stand_in import LastSeen
from ecrm.recipes.models import Dlrm
from ecrm.recipes.rows import open_rows
from ecrm.recipes.train import OPTIMIZERS
from ecrm.storage.base import NativeStore
from ecrm.storage.hosted import HostedShard
from ecrm.storage.undo import UndoLog
from ecrm.testing.imitated_gpu import imitated_gpu
from ecrm.transport.alone import LoneTransport
from ecrm.transport.message import Picked
from ecrm.transport.staged import StagedTransport
from support.advice import check_advice, dataset

GB = 10**9


def near(estimated: float, measured: float, share: float = 0.15) -> bool:
    return abs(estimated - measured) <= share * measured


def test_rows_parity_and_dense_replicas_are_counted_as_they_are_made(tmp_path):
    data, rng = dataset(tmp_path / "data", table_rows=300), random.Random(1)
    for name in ("none", "erasure", "chain", "checkpoint", "mapped"):
        for optimizer in ("sgd", "rowwise_adagrad", "adagrad", "adam"):
            dense = rng.choice(("sgd", "adagrad", "adam"))
            config = load_config(
                "tiny",
                [
                    f"data.path={data}",
                    f"protection.name={name}",
                    f"train.sparse_optimizer={optimizer}",
                    "cluster.servers=5",
                    "protection.m=2",
                    "protection.copies=3",
                    f"train.dense_optimizer={dense}",
                ],
            )
            need = Needs(config, 20)
            (space,) = row_spaces([Table(f"t{n}", 300 + n, 8) for n in range(26)])
            layout = RowLayout(
                make_protection(
                    config.protection, config.cluster.servers, tmp_path, durable=False
                ).shape,
                space.rows,
            )
            store = NativeStore(
                layout.data_rows_per_shard, 8, SparseOptimizer(optimizer, 0.1), lambda rows: rows
            )
            assert need.server.rows == store.memory_bytes
            assert need.server.parity == layout.parity_rows_per_shard * store.record_bytes
            replica = ModuleReplica(
                Dlrm(config, open_rows(config)),
                lambda ps, kind=OPTIMIZERS[dense]: kind(ps, lr=1),
            )
            size = sum(parameter.numel() for parameter in replica.parameters)
            replica.apply(torch.ones(len(replica.contribution(1.0))))
            replica.commit()
            assert size > 1000 and near(need.trainer.dense, replica.memory_bytes, 0.01)


ALL = ("none", "erasure", "chain", "replicate", "stateless", "checkpoint", "mapped")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("trainers", [1, 4])
@pytest.mark.parametrize(("prefault", "spares"), [(False, 1), (True, 1), (True, 7)])
def test_all_ranks_together_need_at_most_what_each_needs(
    tmp_path, name, trainers, prefault, spares
):
    """The sum of all ranks' needs, if the data reach every row.

    Dense replicas and last seen rows are those of the real view.
    """
    data = dataset(tmp_path / "data", table_rows=300)
    sets = [f"cluster.trainers={trainers}", "train.slots=4", "cluster.servers=5", "protection.m=2"]
    sets += ["protection.copies=3", "protection.last_seen_rows=400", "checkpoint.every_steps=2"]
    sets += [f"cluster.spares={spares}", f"storage.prefault={str(prefault).lower()}"]
    config = load_config("tiny", [f"data.path={data}", f"protection.name={name}", *sets])
    needs, protection = (
        Needs(config, 10**6),
        make_protection(config.protection, config.cluster.servers, tmp_path, durable=False),
    )
    view = initial_view(
        "dedicated", protection.shape, trainers, spares, config.slots, protection.dense_replicas
    )
    ranks = needs.of_ranks(view.shards, sorted(set(view.slots)), view.dense, view.spares)
    assert needs.most == sum(need.total for need in ranks) + LIBRARIES_BYTES
    assert in_words(config, 10**6, None, None)[-1].startswith(f"at most {needs.most / 1e6:,.0f} MB")
    if name == "stateless":
        assert needs.trainer.parity == LastSeen(400, config.model.embedding_dim).memory_bytes


def test_a_ready_spare_needs_the_memory_of_a_shard(tmp_path):
    """Two spares for each death survived at once, with storage.prefault; the others need none."""
    data = dataset(tmp_path / "data", table_rows=300)
    sets = [f"data.path={data}", "cluster.servers=4", "cluster.spares=6", "protection.m=2"]
    sets += ["cluster.trainers=3", "train.slots=3", "train.global_batch=63"]
    config = load_config("tiny", [*sets, "storage.prefault=true"])
    needs, plain = Needs(config, 20), Needs(load_config("tiny", sets), 20)
    shard = needs.server.rows + needs.server.parity
    lines = in_words(config, 20, None, None)
    mb = (shard + READY_BYTES) / 1e6
    assert lines[3] == f"ranks 7-10: {mb + 50:,.1f} MB (process 50.0, ready {mb:,.1f}) each"
    assert lines[4] == "ranks 11-12: 50.0 MB (process 50.0) each"
    assert needs.most >= plain.most + 4 * (shard + READY_BYTES)
    assert needs.certain == plain.certain + 4 * shard + 4 * (shard + WORKING_BYTES)


def test_every_rank_and_host_is_told(tmp_path):
    data = dataset(tmp_path / "data")
    config = load_config("tiny", [f"data.path={data}"])
    lines = in_words(config, 20, ["a", "b"] * 3, None)
    need = Needs(config, 20)
    assert (
        lines[1] == f"ranks 0-2: {need.server} each"
        and f"rows {need.server.rows / 1e6:,.1f}, parity" in lines[1]
    )
    assert lines[2] == f"ranks 3-4: {need.trainer} each" and lines[3] == f"rank 5: {need.spare}"
    of_hosts = {
        "a": 2 * need.server.total + need.trainer.total,
        "b": need.server.total + need.trainer.total + need.spare.total,
    }
    assert lines[4:6] == [
        f"{host}: {(of_ranks + 3 * LIBRARIES_BYTES) / 1e6:,.1f} MB, 840 MB of it for libraries"
        for host, of_ranks in of_hosts.items()
    ]
    here = in_words(
        load_config("tiny", [f"data.path={data}", "cluster.layout=colocated"]),
        20,
        None,
        5 * GB,
    )
    assert (
        here[1].startswith("ranks 0-1: ")
        and "dense" in here[1]
        and here[-2].endswith("MB, 280 MB of it for libraries, 5,000 MB are available")
    )


@pytest.mark.parametrize("hosts", [["a", "b"] * 4, ["a"] * 8])
def test_hosts_that_are_too_few_are_refused(tmp_path, hosts):
    sets = [f"data.path={dataset(tmp_path / 'data')}", "cluster.failure_domain=host"]
    sets += ["cluster.servers=4", "cluster.spares=2"]

    def accept(overrides) -> None:
        in_words(load_config("tiny", overrides), 20, hosts, None)

    with pytest.raises(UsageError, match="cannot keep the units of a stripe apart: .* at least"):
        accept(sets)
    check_advice(accept, sets)
    assert in_words(load_config("tiny", sets), 20, None, None), "where the hosts are not known"


def test_only_what_cannot_fit_for_certain_is_refused(tmp_path):
    """100 million rows fit if 20 steps reach few of them.

    They do not fit if all memory is handed out at the start.
    """
    data = [
        f"data.path={dataset(tmp_path / 'data', table_rows=4_000_000)}",
        "model.max_rows_per_table=0",
    ]

    def accept(overrides) -> None:
        config = load_config("tiny", overrides)
        check_memory(config, 20, 3 * GB)

    config = load_config("tiny", data)
    assert Needs(config, 20).server.rows > GB and check_memory(config, 20, 3 * GB) == ""
    assert "if every row is trained that these data can reach" in check_memory(
        config, 10**6, 3 * GB
    )
    with pytest.raises(
        UsageError,
        match="at least 8,.* MB of memory, 3,000 MB are available here: 6 ranks, and with "
        "storage.prefault all rows and redundancy, also for a shard on 1 spare: ",
    ):
        accept([*data, "storage.prefault=true"])
    check_advice(accept, [*data, "storage.prefault=true"])
    with pytest.raises(
        UsageError,
        match="80 ranks: set cluster.spares=0, or start the ranks on more machines with --hosts",
    ):
        accept([*data, "cluster.spares=75"])
    check_advice(accept, [*data, "cluster.spares=75"])
    with pytest.raises(UsageError, match="ranks: start the ranks on more machines with --hosts"):
        accept([*data, "cluster.servers=90"])


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
def test_mapped_files_hold_what_is_said_of_them(tmp_path, optimizer):
    """Every row is updated, and every step of two commits looks up as many as it can."""
    data = dataset(tmp_path / "data", table_rows=300)
    sets = [f"data.path={data}", "protection.name=mapped", f"train.sparse_optimizer={optimizer}"]
    config = load_config("tiny", [*sets, "protection.commit_interval=2"])
    looked_up = config.train.global_batch * 26 // config.cluster.servers
    (space,) = row_spaces([Table(f"t{number}", 300 + number, 8) for number in range(26)])
    layout = RowLayout(
        make_protection(config.protection, config.cluster.servers, tmp_path, durable=False).shape,
        space.rows,
    )
    for shard in range(config.cluster.servers):
        file = ShardFile(tmp_path, f"shard{shard}", False)
        store = NativeStore(
            layout.data_rows_per_shard,
            8,
            SparseOptimizer(optimizer, 0.1),
            lambda rows: rows,
            allocate=file.allocate,
        )
        rows = torch.arange(layout.data_rows_per_shard)[:looked_up]
        for commit in (2, 4):
            for _ in range(2):
                file.note(rows, store.read(rows))
            file.prepare(commit)
            file.commit(commit)
        for part in store.memory:
            part.fill_(1)
        for memory in file._maps:
            memory.flush()
    held = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("shard*[ws01]"))
    said = Needs(config, 10**6)._files
    assert 0.9 * held <= said <= 1.1 * held


def test_mapped_files_that_may_outgrow_their_disk_are_warned_of(tmp_path, monkeypatch):
    config = load_config(
        "tiny", [f"data.path={dataset(tmp_path / 'data')}", "protection.name=mapped"]
    )
    most, free = Needs(config, 20).files, []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[-1]))
    folder = tmp_path / "run" / "mapped"  # which is not there yet
    free.append(most)
    assert check_room(config, 20, folder) == ""
    free.append(most - 1)
    said = r"may come to need .* MB more, .* MB are free there: a full disk kills ranks"
    assert re.search(said, check_room(config, 20, folder))
    folder.mkdir(parents=True)
    (folder / "shard0-space0.rows").write_bytes(bytes(8192))
    # where a run goes on, some is there already
    assert check_room(config, 20, folder) == ""


ON_GPU = ["storage.device=cuda", "cluster.servers=4", "model.max_rows_per_table=0"]


def test_rows_on_gpus_are_counted_there_and_copies_of_what_they_send_here(tmp_path):
    data = [f"data.path={dataset(tmp_path / 'data', table_rows=300)}", "cluster.servers=4"]
    on_cpu = Needs(load_config("tiny", data), 20)
    needs = Needs(load_config("tiny", [*data, *ON_GPU]), 20)
    # records of 10 floats take 12 on a GPU
    assert 5 * needs.server_on_gpu.rows == 6 * on_cpu.server.rows > 0
    assert 5 * needs.server_on_gpu.parity == 6 * on_cpu.server.parity > 0
    assert needs.server_on_gpu.undo > on_cpu.server.undo > 0
    assert needs.server.rows == needs.server.parity == needs.server.undo == 0
    assert needs.server.staging > REGISTERED == pinned.CHUNK
    assert needs.trainer == on_cpu.trainer
    of_libraries = (needs.config.world_size - 1) * LIBRARIES_BYTES
    assert needs.most - 4 * needs.server.staging - of_libraries < on_cpu.most
    imitated = [*data, *ON_GPU, "testing.imitated_gpu=true"]
    server = Needs(load_config("tiny", imitated), 20).server
    assert (server.rows, server.parity) == (needs.server_on_gpu.rows, needs.server_on_gpu.parity)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
def test_records_on_a_gpu_are_as_large_as_is_said(tmp_path, optimizer):
    sets = [f"data.path={dataset(tmp_path / 'data')}", f"train.sparse_optimizer={optimizer}"]
    sets.append("cluster.servers=4")
    need = Needs(load_config("tiny", [*sets, *ON_GPU]), 20).server_on_gpu
    with imitated_gpu() as device:
        own = SparseOptimizer(optimizer, 0.1)
        store = NativeStore(1, 8, own, lambda rows: rows, ZerosOn(device))
    rows, rest = divmod(need.rows, store.record_bytes)
    assert rows > 0 and not rest and store.memory_bytes == store.record_bytes
    on_cpu = Needs(load_config("tiny", sets), 20).server.rows
    assert rows == on_cpu // store.kept_bytes


def test_what_a_server_sends_and_gets_takes_no_more_of_its_host_than_is_said(tmp_path):
    """Every row of a step is another one, and what comes is not in memory of this host."""
    data = dataset(tmp_path / "data", table_rows=3000)
    sets = [f"data.path={data}", "protection.m=1", *ON_GPU]
    config, rows = load_config("tiny", [*sets, "train.global_batch=1024"]), 20_000
    asked = torch.arange(config.train.global_batch * 26 // 4)
    optimizer = SparseOptimizer(config.train.sparse_optimizer, 0.1)
    dispatch.use_on_gpu("reference")
    with imitated_gpu() as device:
        copies_of(device).wait()
        inner, before = Lending(), pinned._in_use
        staged = StagedTransport(inner, device)
        store = NativeStore(
            rows, 8, optimizer, lambda few: torch.zeros(len(few), 8, device=device), ZerosOn(device)
        )
        hosted = HostedShard(store, rows, missing=False, allocate=staged.lend_on_device)
        step = ShardRequests.of({0: [(ROWS, 0, 0, 0), asked]}, {(0, 0): hosted})
        staged.exchange(step.replies())
        gradients = Picked(torch.ones(len(asked), 8), torch.arange(len(asked)))
        step.update({(0, 0, 0): gradients}, True, 0)
        taken = [pinned._in_use - before]
        ((_, deltas),) = hosted.deltas_since_commit()
        staged.exchange({0: [deltas]})
        came = staged.receive_memory(deltas.nbytes)
        on_device(device, torch.from_numpy(came))
        taken.append(pinned._in_use - before)
    dispatch.use_on_gpu("auto")
    lent = sum(twin.nbytes for twin in inner.lent)
    said = Needs(config, 20).server.staging - REGISTERED
    assert min(taken) > 0 and said / 2 < lent + max(taken) <= lent + sum(taken) <= said


class Lending(LoneTransport):
    """Notes what was lent."""

    def __init__(self):
        self.lent = []

    def allocate_shared(self, *shape, dtype=np.float32):
        self.lent.append(super().allocate_shared(*shape, dtype=dtype))
        return self.lent[-1]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_what_a_trainer_with_a_gpu_sends_and_gets_is_counted(tmp_path, optimizer):
    data = [f"data.path={dataset(tmp_path / 'data', table_rows=300)}", "train.slots=4"]
    sets = [*data, "cluster.trainers=2", f"train.dense_optimizer={optimizer}"]
    needs = Needs(load_config("tiny", [*sets, "train.device=cuda"]), 20)
    config = needs.config
    values = config.train.global_batch * 26 // 2 * 4 * config.model.embedding_dim
    gradient = needs.dense_on_gpu // (2 if optimizer == "sgd" else 6)
    # two slots of each trainer; pinned memory of the next power of two
    least = 2 * values + 3 * gradient + REGISTERED
    assert least < needs.trainer.staging < least + 2 * values + 4 * gradient
    on_cpu = Needs(load_config("tiny", sets), 20)
    of_libraries = (config.world_size - 1) * LIBRARIES_BYTES
    assert needs.most - on_cpu.most == (
        2 * needs.trainer.staging - on_cpu._dense * 2 + of_libraries
    )
    lines = in_words(config, 20, None, None)
    assert any("staging" in line for line in lines)


@pytest.mark.parametrize("interval", [1, 3])
def test_logs_on_a_gpu_take_no_more_than_is_said(tmp_path, interval):
    data = dataset(tmp_path / "data", table_rows=300)
    sets = [
        f"data.path={data}",
        f"protection.commit_interval={interval}",
        "protection.m=1",
        *ON_GPU,
    ]
    config, rows = load_config("tiny", [*sets, "train.global_batch=32"]), 2000
    store = NativeStore(rows, 8, SparseOptimizer(config.train.sparse_optimizer, 0.1), lambda r: r)
    updated = config.train.global_batch * 26 // 4
    with imitated_gpu() as device:
        taken, allocate = [], ZerosOn(device)

        def counting(*shape, **of):
            taken.append(allocate(*shape, **of))
            return taken[-1]

        log = UndoLog(rows, store.record_bytes, 1, counting, device)
        for step in range(interval):
            numbers = torch.arange(updated) + step * updated
            merging, sums = log.expect(numbers), log.space(updated)
            for some, merged in merging:
                merge_records(merged, numbers[some].to(device), sums.view(torch.uint8)[some])
            if not merging:
                log.keep(numbers, sums.view(torch.uint8))
    largest: dict[tuple[int, ...], int] = {}
    for memory in taken:  # each grows in the place of a smaller one
        key = (memory.element_size(), *memory.shape[1:])
        largest[key] = max(largest.get(key, 0), memory.nbytes)
    said = _grown_log_bytes(config, updated * interval, store.record_bytes, rows)
    assert 0.5 * said <= sum(largest.values()) <= said


def test_ranks_that_share_a_gpu_are_added_up_and_what_does_not_fit_is_refused(tmp_path):
    data = [f"data.path={dataset(tmp_path / 'data', table_rows=100_000)}", *ON_GPU]
    needs = Needs(load_config("tiny", data), 20)
    each = needs.server_on_gpu.rows + needs.server_on_gpu.parity
    full = needs.server_on_gpu.total

    def accept(overrides, gpus=(2 * each, 2 * each)) -> str:
        return check_memory(load_config("tiny", overrides), 20, 90 * GB, gpus)

    assert accept(data, (2 * full, 2 * full)) == "" == accept(data, ())
    assert "with full undo logs this run needs" in accept(data)
    with pytest.raises(UsageError, match="on GPU 1, .* free there: 2 ranks with rows and redund"):
        accept(data, (2 * each, 2 * each - 1))
    # four servers on one GPU, and on two of three
    for gpus in ((4 * each - 1,), (2 * each, each, each - 1)):
        with pytest.raises(UsageError, match="set storage.device=cpu or model.max_rows") as no:
            accept(data, gpus)
        assert str(no.value).count("\n") == 0
        check_advice(lambda sets, gpus=gpus: accept(sets, gpus), data)


def test_a_dry_run_says_what_each_gpu_needs(tmp_path):
    config = load_config("tiny", [f"data.path={dataset(tmp_path / 'data')}", *ON_GPU])
    need = Needs(config, 20).server_on_gpu
    lines = in_words(config, 20, None, 5 * GB, (8 * GB, 9 * GB))
    at = next(number for number, line in enumerate(lines) if line.startswith("memory of GPUs"))
    assert lines[at + 1] == f"ranks 0-3: {need} each" and "process" not in lines[at + 1]
    two = f"{2 * need.total / 1e6:,.1f} MB"
    assert lines[at + 2 :] == [
        f"GPU 0: {two}, 8,000 MB are free",
        f"GPU 1: {two}, 9,000 MB are free",
    ]
    elsewhere = in_words(config, 20, ["a", "b"] * 3 + ["a"], None)
    assert elsewhere[-2:] == [f"GPUs of a: {two}", f"GPUs of b: {two}"]


def test_the_memory_of_gpus_is_asked_for_in_a_process_that_ends(tmp_path, monkeypatch):
    data = f"data.path={dataset(tmp_path / 'data')}"
    config = load_config("tiny", [data, *ON_GPU])
    monkeypatch.setattr(gpu_memory, "PROGRAM", "print([7, 8])")
    assert free_on_gpus(config) == [7, 8]
    monkeypatch.setattr(gpu_memory, "PROGRAM", "raise RuntimeError")
    assert free_on_gpus(config) == []
    monkeypatch.setattr(gpu_memory, "PROGRAM", None)  # asks for nothing
    assert free_on_gpus(load_config("tiny", [data])) == []
    assert free_on_gpus(load_config("tiny", [data, *ON_GPU, "testing.imitated_gpu=true"])) == []
