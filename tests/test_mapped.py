"""Mapped files: right after any kill of any ranks, or of all, at every write and between them; on the simulated cluster and for real."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ecrm.engine.hooks import Hooks
from ecrm.errors import DataError, Unrecoverable, UsageError
from ecrm.mapped import dense_file, shard_file
from ecrm.mapped.manifest import _check_files, hold
from ecrm.mapped.reopen import Reopened, last_commit
from ecrm.mapped.shard_file import ShardFile
from ecrm.mapped.words import Words
from ecrm.placement.tables import Table
from ecrm.simulate.oracle import truth_of
from ecrm.simulate.schedule import draw
from ecrm.simulate.workload import Workload, run_workload
from ecrm.storage import store_factory
from ecrm.storage.base import SparseOptimizer, Store
from ecrm.transport.simulated import RandomFaults, SimulatedCluster

SMALL = Workload(
    tables=(Table("a", 9, 4), Table("b", 5, 4)), steps=4, servers=2, trainers=1, slots=1, spares=0, ids_per_slot=4, protection="mapped"
)


def run(workload: Workload, faults=(), resume: bool = False, spare_one: bool = True, seed: int = 0):
    """(tables reported, errors, how many were killed, events) of one simulated run over the files in the workload's folder."""
    Path(workload.folder).mkdir(parents=True, exist_ok=True)
    tables, events, doomed = [], [], set()

    def may_kill(rank: int, killed: tuple[int, ...]) -> bool:
        if rank in doomed or (spare_one and len(doomed) + 1 >= workload.world_size):
            return False
        doomed.add(rank)
        return True

    if isinstance(faults, RandomFaults):
        faults = replace(faults, may_kill=may_kill)
    cluster = SimulatedCluster(workload.world_size, seed, faults, most_calls=300_000)

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name), event=events.append)
        try:
            return run_workload(workload, transport, hooks, report=tables.append, durable=Reopened(), resume=resume)
        except (Unrecoverable, DataError) as error:
            return error

    outcome = cluster.run(program)
    errors = [result for result in outcome.results.values() if isinstance(result, Exception)]
    return tables, errors, len(outcome.killed), events


def drawn(seed: int, folder: Path) -> Workload:
    """A job of the survivable suite, over mapped files."""
    return replace(draw(seed, "survivable").workload, protection="mapped", folder=str(folder), domains=None, scrub_rows_per_step=0)


def test_any_ranks_but_one_may_die_at_any_instant(tmp_path):
    died = rolled_back = 0
    for seed in range(40):
        rng = random.Random(f"mapped {seed}")
        workload = drawn(seed, tmp_path / str(seed))
        faults = RandomFaults(most=workload.world_size, per_call=rng.choice((0.005, 0.02)), per_recovery_call=0.05, together=0.5)
        tables, errors, killed, events = run(workload, faults, seed=seed)
        assert not errors, (seed, errors)
        assert tables and all(found == truth_of(workload).tables for found in tables), seed
        died, rolled_back = died + killed, rolled_back + sum(event["event"] == "rolled_back" for event in events)
    assert died > 40 and rolled_back > 20


def test_all_may_die_again_and_again_and_the_next_start_goes_on(tmp_path):
    restarts = 0
    for seed in range(40):
        rng = random.Random(f"mapped {seed}")
        workload = drawn(seed, tmp_path / str(seed))
        tables: list = []
        for attempt in range(50):
            faults = RandomFaults(most=workload.world_size, per_call=rng.choice((0.005, 0.02)), together=0.9)
            tables, errors, _, _ = run(workload, faults if attempt < 6 else (), attempt > 0, spare_one=False, seed=100 * seed + attempt)
            assert not errors, (seed, attempt, errors)
            if tables:
                break
            restarts += 1
        assert tables and all(found == truth_of(workload).tables for found in tables), seed
    assert restarts > 40


@contextmanager
def snapshots(monkeypatch, folder: Path, into: Path, rng: random.Random):
    """Copies of the folder as a kill would leave it: before and inside every write, and inside every update of rows where they lie."""
    taken: list[Path] = []

    def take() -> Path:
        taken.append(into / str(len(taken)))
        shutil.copytree(folder, taken[-1])
        return taken[-1]

    set_word, write, update = Words.__setitem__, shard_file.write_at, Store.update

    def word(self, name, value):
        take()
        set_word(self, name, value)

    def cut_write(file, data, at, durable):
        take()
        half = bytes(data)[: rng.randrange(len(data))]
        write(file, half, at, durable)
        take()
        write(file, data, at, durable)

    def torn_update(self, rows, gradients):
        before = {path: path.read_bytes() for path in folder.glob("*.rows")}
        update(self, rows, gradients)
        copy = take()
        for path, old in before.items():
            new = np.frombuffer(path.read_bytes(), np.uint64)
            was = np.frombuffer(old.ljust(new.nbytes, b"\0"), np.uint64)
            mixed = np.where([rng.random() < 0.5 for _ in range(new.size)] if (new != was).any() else False, was, new)
            (copy / path.name).write_bytes(mixed.astype(np.uint64).tobytes())

    monkeypatch.setattr(Words, "__setitem__", word)
    monkeypatch.setattr(shard_file, "write_at", cut_write)
    monkeypatch.setattr(dense_file, "write_at", cut_write)
    monkeypatch.setattr(Store, "update", torn_update)
    yield taken
    monkeypatch.undo()


@pytest.mark.parametrize("interval", [1, 3])
def test_cut_at_every_write_the_next_start_goes_on_to_the_same_bits(tmp_path, monkeypatch, interval):
    workload = replace(SMALL, folder=str(tmp_path / "files"), commit_interval=interval)
    truth = truth_of(workload)
    Path(workload.folder).mkdir()
    with snapshots(monkeypatch, Path(workload.folder), tmp_path, random.Random(0)) as taken:
        tables, errors, _, _ = run(workload)
    assert tables == [truth.tables] and not errors
    for copy in taken:
        tables, errors, _, _ = run(replace(workload, folder=str(copy)), resume=True)
        assert tables == [truth.tables] and not errors, (copy, errors)
    assert len(taken) > 50


def test_without_the_journal_a_cut_is_noticed(tmp_path, monkeypatch):
    """The test above can fail."""
    workload = replace(SMALL, folder=str(tmp_path / "files"))
    truth = truth_of(workload)
    Path(workload.folder).mkdir()
    with snapshots(monkeypatch, Path(workload.folder), tmp_path, random.Random(0)) as taken:
        run(workload)
    monkeypatch.setattr(ShardFile, "_entries", lambda self, slot, record_bytes: iter(()))
    wrong = sum(run(replace(workload, folder=str(copy)), resume=True)[0] != [truth.tables] for copy in taken)
    assert wrong > 0


def test_the_last_commit_of_files():
    assert last_commit([4, 4, 4], [4, 5, 5]) == 4  # some have not finished step 5
    assert last_commit([5, 4, 4], [5, 5, 5]) == 5  # all had, and one has seen that all agreed
    assert last_commit([5, 4, 4], [5, 5, 4]) == 4  # one has begun to go back since: the others had decided so


def _file(folder: Path) -> tuple[ShardFile, Store]:
    file = ShardFile(folder, "shard0-space0", durable=True)
    return file, store_factory("native", SparseOptimizer("rowwise_adagrad", 0.05))(30, 4, lambda rows: torch.ones(rows.numel(), 4), file.allocate)


def _step(file: ShardFile, store: Store, seed: int) -> None:
    rows = torch.randperm(30, generator=torch.Generator().manual_seed(seed))[:7]
    file.note(rows, store.read(rows))
    store.update(rows, torch.randn(7, 4, generator=torch.Generator().manual_seed(seed)))


def test_a_file_goes_back_over_a_commit_and_forward_to_one(tmp_path):
    everything, states = torch.arange(30), []
    file, store = _file(tmp_path)
    for step in (1, 2, 3):
        states.append(store.read(everything))
        _step(file, store, step)
        file.prepare(step)
        if step < 3:
            file.commit(step)
    states.append(store.read(everything))
    shutil.copytree(tmp_path, tmp_path / "copy")
    file, store = _file(tmp_path / "copy")  # closed by nobody, opened again
    assert (file.committed, file.prepared) == (2, 3)
    file.go_to(3, store)
    assert torch.equal(store.read(everything), states[3]) and file.committed == 3
    file.go_to(2, store)
    assert torch.equal(store.read(everything), states[2]) and file.committed == 2
    file, store = _file(tmp_path)
    file.go_to(1, store)
    assert torch.equal(store.read(everything), states[1])
    with pytest.raises(DataError, match="not files of one run"):
        file.go_to(3, store)
    with pytest.raises(DataError, match="cannot go back to step 0"):
        file.go_to(0, store)


def test_written_bytes_are_the_journal_and_the_rows_where_they_lie(tmp_path):
    file, store = _file(tmp_path)
    _step(file, store, 1)
    journal = (tmp_path / "shard0-space0.journal0").stat().st_size + (tmp_path / "shard0-space0.journal1").stat().st_size
    assert file.written_bytes == journal + 7 * store.record_bytes > 14 * store.record_bytes
    file.prepare(1)
    file.commit(1)
    assert file.written_bytes == journal + 7 * store.record_bytes


def test_files_that_cannot_be_used_are_refused_before_anything_starts(tmp_path):
    workload = replace(SMALL, folder=str(tmp_path))
    run(workload)
    _check_files(tmp_path, steps=4)
    with pytest.raises(UsageError, match="is at step 4, this config trains 2: set train.steps=4 or more"):
        _check_files(tmp_path, steps=2)
    held = hold(tmp_path)
    with pytest.raises(UsageError, match="in use by a run that is still alive"):
        _check_files(tmp_path, steps=4)
    held.close()
    os.truncate(tmp_path / "shard1-space0.rows", 4096)
    with pytest.raises(DataError, match="shard1-space0 in .* shorter than they were"):
        _check_files(tmp_path, steps=4)
    (tmp_path / "shard1-space0.rows").unlink()
    with pytest.raises(DataError, match="shard1-space0 in .* No such file"):
        _check_files(tmp_path, steps=4)


def test_a_step_of_another_run_changes_nothing(tmp_path):
    file, store = _file(tmp_path)
    _step(file, store, 1)
    before = store.read(torch.arange(30))
    file.prepare(1)
    file.commit(1)
    file.commit(2)
    with pytest.raises(DataError, match="cannot go back to step 0"):
        file.go_to(0, store)
    assert torch.equal(store.read(torch.arange(30)), before) and file.prepared == 2
