"""Mapped files: right after any kill of some or all ranks, at every write and between writes.

Tested on the simulated cluster and with real processes.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ecrm.base.errors import DataError, Unrecoverable, UsageError
from ecrm.checkpoint.mapped_folder import _check_files, hold
from ecrm.checkpoint.mapped_restore import Reopened, last_commit
from ecrm.engine.hooks import Hooks
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.stripes import StripeShape
from ecrm.placement.tables import Table
from ecrm.protection.mapped import MappedProtection
from ecrm.protection.mapped_files import dense_file, file_access, shard_file, words
from ecrm.protection.mapped_files.file_access import read_words
from ecrm.protection.mapped_files.shard_file import ShardFile
from ecrm.protection.mapped_files.words import Words
from ecrm.storage.base import NativeStore, Store
from ecrm.testing.simulate.oracle import truth_of
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.workload import Workload, run_workload
from ecrm.testing.simulated_transport import RandomFaults, SimulatedCluster, SimulationError
from support.seeds import some_and_more
from support.simulating import dies_once
from support.telling import noted_in

SMALL = Workload(
    tables=(Table("a", 9, 4), Table("b", 5, 4)),
    steps=4,
    servers=2,
    trainers=1,
    slots=1,
    spares=0,
    ids_per_slot=4,
    protection="mapped",
)


def run(
    workload: Workload,
    faults=(),
    resume: bool = False,
    spare_one: bool = True,
    seed: int = 0,
    began: list[int] | None = None,
):
    """One simulated run over the files in the workload's folder.

    Returns (tables reported, errors, how many ranks were killed, events). `began` receives the step
    that each rank did first.
    """
    Path(workload.folder).mkdir(parents=True, exist_ok=True)
    tables, events, doomed = [], [], set()

    if isinstance(faults, RandomFaults):
        faults = replace(
            faults,
            may_kill=dies_once(
                doomed, lambda rank: not spare_one or len(doomed) + 1 < workload.world_size
            ),
        )
    cluster = SimulatedCluster(workload.world_size, seed, faults, most_calls=300_000)

    def program(transport):
        steps: list[int] = []

        def after_step(engine):
            if began is not None and not steps:
                steps.append(engine.step - 1)
                began.append(engine.step - 1)

        hooks = Hooks(
            phase=lambda step, name: cluster.enter_phase(transport.rank, step, name),
            event=noted_in(events),
        )
        try:
            return run_workload(
                workload,
                transport,
                hooks,
                report=tables.append,
                durable=Reopened(),
                resume=resume,
                after_step=after_step,
            )
        except (Unrecoverable, DataError) as error:
            return error

    outcome = cluster.run(program)
    errors = [result for result in outcome.results.values() if isinstance(result, Exception)]
    return tables, errors, len(outcome.killed), events


def agreed(folder: Path) -> int:
    """The newest commit that the files say all ranks had agreed on."""
    return max((read_words(path)["committed"] for path in folder.glob("shard*.words")), default=0)


def drawn(seed: int, folder: Path) -> Workload:
    """A job of the survivable suite, over mapped files."""
    return replace(
        draw(seed, "survivable").workload,
        protection="mapped",
        folder=str(folder),
        domains=None,
        scrub_rows_per_step=0,
    )


@pytest.mark.parametrize("seeds", some_and_more(12, 40))
def test_any_ranks_but_one_may_die_at_any_instant(tmp_path, seeds):
    died = rolled_back = 0
    for seed in seeds:
        rng = random.Random(f"mapped {seed}")
        workload = drawn(seed, tmp_path / str(seed))
        faults = RandomFaults(
            most=workload.world_size,
            per_call=rng.choice((0.005, 0.02)),
            per_recovery_call=0.05,
            together=0.5,
        )
        tables, errors, killed, events = run(workload, faults, seed=seed)
        assert not errors, (seed, errors)
        assert tables and all(found == truth_of(workload).tables for found in tables), seed
        died, rolled_back = (
            died + killed,
            rolled_back + sum(event["event"] == "rolled_back" for event in events),
        )
    assert died > len(seeds) and rolled_back > len(seeds) / 2


@pytest.mark.parametrize("seeds", some_and_more(12, 40))
def test_all_may_die_again_and_again_and_the_next_start_goes_on(tmp_path, seeds):
    restarts = 0
    for seed in seeds:
        rng = random.Random(f"mapped {seed}")
        workload = drawn(seed, tmp_path / str(seed))
        tables: list = []
        for attempt in range(50):
            faults = RandomFaults(
                most=workload.world_size, per_call=rng.choice((0.005, 0.02)), together=0.9
            )
            least, began = agreed(Path(workload.folder)) if attempt else 0, []
            tables, errors, _, _ = run(
                workload,
                faults if attempt < 6 else (),
                attempt > 0,
                spare_one=False,
                seed=100 * seed + attempt,
                began=began,
            )
            assert not errors, (seed, attempt, errors)
            assert all(step >= least for step in began), (seed, attempt, least, began)
            if tables:
                break
            restarts += 1
        assert tables and all(found == truth_of(workload).tables for found in tables), seed
    assert restarts > len(seeds)


@contextmanager
def snapshots(monkeypatch, folder: Path, into: Path, rng: random.Random):
    """Copies of the folder as a kill would leave it.

    One copy before and one inside every write, and one inside every update of rows in place.
    """
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

    def torn_update(self, rows, gradients, step):
        before = {path: path.read_bytes() for path in folder.glob("*.rows")}
        update(self, rows, gradients, step)
        copy = take()
        for path, old in before.items():
            new = np.frombuffer(path.read_bytes(), np.uint64)
            was = np.frombuffer(old.ljust(new.nbytes, b"\0"), np.uint64)
            mixed = np.where(
                [rng.random() < 0.5 for _ in range(new.size)] if (new != was).any() else False,
                was,
                new,
            )
            (copy / path.name).write_bytes(mixed.astype(np.uint64).tobytes())

    monkeypatch.setattr(Words, "__setitem__", word)
    monkeypatch.setattr(shard_file, "write_at", cut_write)
    monkeypatch.setattr(dense_file, "write_at", cut_write)
    monkeypatch.setattr(Store, "update", torn_update)
    yield taken
    monkeypatch.undo()


@pytest.mark.parametrize("interval", [1, 3])
def test_cut_at_every_write_the_next_start_goes_on_to_the_same_bits(
    tmp_path, monkeypatch, interval
):
    workload = replace(SMALL, folder=str(tmp_path / "files"), commit_interval=interval)
    truth = truth_of(workload)
    Path(workload.folder).mkdir()
    with snapshots(monkeypatch, Path(workload.folder), tmp_path, random.Random(0)) as taken:
        tables, errors, _, _ = run(workload)
    assert tables == [truth.tables] and not errors
    later = 0
    for copy in taken:
        least, began = agreed(copy), []
        tables, errors, _, _ = run(replace(workload, folder=str(copy)), resume=True, began=began)
        assert tables == [truth.tables] and not errors, (copy, errors)
        assert all(step >= least for step in began), (copy, least, began)
        later += least > 0
    assert len(taken) > 50 and later > 20


def test_without_the_journal_a_cut_is_noticed(tmp_path, monkeypatch):
    """The test above can fail."""
    workload = replace(SMALL, folder=str(tmp_path / "files"))
    truth = truth_of(workload)
    Path(workload.folder).mkdir()
    with snapshots(monkeypatch, Path(workload.folder), tmp_path, random.Random(0)) as taken:
        run(workload)
    monkeypatch.setattr(ShardFile, "_entries", lambda self, slot, record_bytes: iter(()))
    wrong = sum(
        run(replace(workload, folder=str(copy)), resume=True)[0] != [truth.tables] for copy in taken
    )
    assert wrong > 0


class Device:
    """What is on the device for certain.

    File names are there as of the folder's last sync, contents as of each file's last sync.
    """

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self._rng = folder, rng
        self._names: set[str] = set()
        self._synced: dict[str, bytes] = {}
        self._history: dict[str, list[bytes]] = {}

    def sync(self, path: Path) -> None:
        if path == self.folder:
            self._names = {file.name for file in path.iterdir()}
            return
        self._synced[path.name] = path.read_bytes()
        self._history[path.name] = []

    def renamed(self, old: str, new: str) -> None:
        if old in self._synced:
            self._synced[new] = self._synced.pop(old)

    def changed(self, *paths: Path) -> None:
        for path in paths:
            self._history.setdefault(path.name, []).append(path.read_bytes())

    def after_a_power_cut(self, copy: Path) -> None:
        """A copy of the folder after a power cut.

        Everything that is not synced may be there or not: names, sectors, and words up to some
        change.
        """
        copy.mkdir()
        for path in self.folder.iterdir():
            if path.name not in self._names and self._rng.random() < 0.5:
                continue
            states = [
                self._synced.get(path.name, b""),
                *self._history.get(path.name, []),
                path.read_bytes(),
            ]
            if path.suffix == ".words":
                content = self._rng.choice(states)
            else:
                size = len(self._rng.choice(states))
                content = b"".join(
                    self._rng.choice(states).ljust(size, b"\0")[at : min(at + 512, size)]
                    for at in range(0, size, 512)
                )
            (copy / path.name).write_bytes(content)


@contextmanager
def power_cuts(
    monkeypatch, folder: Path, into: Path, rng: random.Random, chance: float, left_out: str = ""
):
    """Copies of the folder as power cuts would leave it.

    Cuts come at random before writes, changes of a word, updates and syncs. What `left_out` names
    ("rows", "words", "journal", "folder", "new files", "sizes") is never synced.
    """
    device, taken = Device(folder, rng), []
    set_word, write, update, flush, flush_rows = (
        Words.__setitem__,
        shard_file.write_at,
        Store.update,
        Words.flush,
        ShardFile._flush_rows,
    )
    sync, replace_file, make = file_access.sync, os.replace, Words.__init__

    def maybe_cut() -> None:
        if rng.random() < chance:
            taken.append(into / f"cut{len(taken)}")
            device.after_a_power_cut(taken[-1])

    def make_words(self, path, initial, durable):
        self.path = path
        make(self, path, initial, durable)

    def word(self, name, value):
        maybe_cut()
        set_word(self, name, value)
        device.changed(self.path)

    def write_and_sync(file, data, at, durable):
        maybe_cut()
        write(file, data, at, False)
        device.changed(Path(file.name))
        maybe_cut()
        if durable and left_out != "journal":
            device.sync(Path(file.name))

    def update_rows(self, rows, gradients, step):
        maybe_cut()
        update(self, rows, gradients, step)
        device.changed(*folder.glob("*.rows"))
        maybe_cut()

    def flush_words(self):
        maybe_cut()
        if left_out != "words":
            flush(self)
            device.sync(self.path)

    def flush_all_rows(self):
        maybe_cut()
        if self._durable and left_out != "rows":
            flush_rows(self)
            device.sync(self.path)

    def sync_one(path):
        maybe_cut()
        kind = "folder" if path == folder else "new files" if path.suffix == ".new" else "sizes"
        if left_out != kind:
            sync(path)
            device.sync(path)

    def rename(old, new):
        replace_file(old, new)
        device.renamed(Path(old).name, Path(new).name)

    monkeypatch.setattr(Words, "__init__", make_words)
    monkeypatch.setattr(Words, "__setitem__", word)
    monkeypatch.setattr(Words, "flush", flush_words)
    for module in (shard_file, dense_file):
        monkeypatch.setattr(module, "write_at", write_and_sync)
    for module in (shard_file, words):
        monkeypatch.setattr(module, "sync", sync_one)
    monkeypatch.setattr(ShardFile, "_flush_rows", flush_all_rows)
    monkeypatch.setattr(Store, "update", update_rows)
    monkeypatch.setattr(os, "replace", rename)
    yield taken
    monkeypatch.undo()


def _after_power_cuts(
    monkeypatch, tmp_path: Path, durable: bool, chance: float, left_out: str = "", interval: int = 1
) -> Iterator[bool]:
    """For each power cut, whether the next start comes to the undisturbed bits."""
    workload = replace(
        SMALL, folder=str(tmp_path / "files"), durable=durable, commit_interval=interval
    )
    truth = truth_of(workload)
    Path(workload.folder).mkdir()
    with power_cuts(
        monkeypatch, Path(workload.folder), tmp_path, random.Random(0), chance, left_out
    ) as taken:
        tables, errors, _, _ = run(workload)
    assert tables == [truth.tables] and not errors
    for copy in taken:
        try:
            _check_files(copy, workload.steps)
            tables, errors, _, _ = run(replace(workload, folder=str(copy)), resume=True)
        except DataError:  # refused
            tables = []
        # a file that makes no sense, such as one of no bytes
        except (OSError, ValueError, SimulationError):
            tables = []
        yield tables == [truth.tables] and not errors


@pytest.mark.parametrize(
    ("interval", "chance", "least"),
    [(1, 0.3, 20), *(pytest.param(i, 1.0, 80, marks=pytest.mark.drill) for i in (1, 3))],
)
def test_flushed_at_commits_the_next_start_goes_on_after_a_power_cut(
    tmp_path, monkeypatch, interval, chance, least
):
    right = list(
        _after_power_cuts(monkeypatch, tmp_path, durable=True, chance=chance, interval=interval)
    )
    print(len(right))
    assert all(right) and len(right) > least


def test_not_flushed_a_power_cut_is_noticed(tmp_path, monkeypatch):
    """The test above can fail."""
    assert not all(_after_power_cuts(monkeypatch, tmp_path, durable=False, chance=0.1))


@pytest.mark.parametrize(
    "left_out",
    [
        *(pytest.param(each, marks=pytest.mark.drill) for each in ("rows", "words")),
        *("journal", "folder", "new files", "sizes"),
    ],
)
def test_with_one_kind_of_sync_left_out_a_power_cut_is_noticed(tmp_path, monkeypatch, left_out):
    assert not all(
        _after_power_cuts(monkeypatch, tmp_path, durable=True, chance=0.7, left_out=left_out)
    )


def test_the_last_commit_of_files():
    assert last_commit([4, 4, 4], [4, 5, 5]) == 4  # some have not finished step 5
    assert last_commit([5, 4, 4], [5, 5, 5]) == 5  # all had, and one has seen that all agreed
    # one has begun to go back since: the others had decided so
    assert last_commit([5, 4, 4], [5, 5, 4]) == 4


def _file(folder: Path) -> tuple[ShardFile, Store]:
    file = ShardFile(folder, "shard0-space0", durable=True)
    optimizer = SparseOptimizer("rowwise_adagrad", 0.05)
    return file, NativeStore(
        30, 4, optimizer, lambda rows: torch.ones(rows.numel(), 4), file.allocate
    )


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
    journal = (tmp_path / "shard0-space0.journal0").stat().st_size + (
        tmp_path / "shard0-space0.journal1"
    ).stat().st_size
    assert file.written_bytes == journal + 7 * store.record_bytes > 14 * store.record_bytes
    file.prepare(1)
    file.commit(1)
    assert file.written_bytes == journal + 7 * store.record_bytes


def test_written_bytes_of_a_rank_go_on_after_a_rollback(tmp_path):
    file, store = _file(tmp_path)
    _step(file, store, 1)
    rank = MappedProtection(2, tmp_path, durable=False)
    rank.files[0, 0], rank._dense = file, SimpleNamespace(written_bytes=5)
    again = rank.with_shape(StripeShape(2, 1, 0))
    assert again.written_bytes == rank.written_bytes == file.written_bytes + 5 > 5
    again.files, again._dense = rank.files, rank._dense
    assert again.written_bytes == 2 * rank.written_bytes


def test_files_that_a_killed_run_has_not_let_go_of_yet_are_waited_for(tmp_path):
    run(replace(SMALL, folder=str(tmp_path)))
    held = hold(tmp_path)
    threading.Timer(0.3, held.close).start()
    began = time.monotonic()
    _check_files(tmp_path, steps=4)
    assert held.closed and time.monotonic() - began < 2


def test_files_that_cannot_be_used_are_refused_before_anything_starts(tmp_path):
    workload = replace(SMALL, folder=str(tmp_path))
    run(workload)
    _check_files(tmp_path, steps=4)
    with pytest.raises(
        UsageError, match="is at step 4, this config trains 2: set train.steps=4, or more"
    ):
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
