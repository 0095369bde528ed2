"""Workers make batches as they are here, tell their errors, and die with whoever has them."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrec import KeyedJaggedTensor

from ecrm.base.allocate import lazy_zeros
from ecrm.base.errors import UsageError
from ecrm.model.determinism import aligned
from ecrm.session.data import Indexed, feed_of
from ecrm.session.parcel import packed_into_memory, unpacked_from_memory
from ecrm.session.workers import Worker, WorkerLost


def through(value: Any) -> Any:
    memory = packed_into_memory(value)
    try:
        return unpacked_from_memory(memory)
    finally:
        os.close(memory)


def test_a_batch_arrives_as_it_was_made():
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(6),
        lengths=torch.tensor([2, 0, 1, 3]),
        weights=torch.rand(6),
    )
    kjt.offset_per_key()  # as a model has left it
    strided = torch.arange(12.0).view(3, 4).t()[1:]
    batch = {
        "kjt": kjt,
        "strided": strided,
        "none": torch.empty(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "one": torch.tensor(True),
        "wide": torch.zeros(1).expand(4, 5),
        "trained": torch.ones(2, requires_grad=True),
        "words": ("x", [1, None]),
    }
    there = through(batch)
    assert there["words"] == batch["words"] and there["trained"].requires_grad
    for name in ("strided", "none", "half", "one", "wide"):
        assert torch.equal(there[name], batch[name]) and there[name].dtype == batch[name].dtype
        assert there[name].stride() == batch[name].stride()
        assert there[name].data_ptr() % 64 == 0
    back = there["kjt"]
    assert type(back) is KeyedJaggedTensor and back.keys() == kjt.keys()
    for mine, theirs in zip(kjt.to_dict().values(), back.to_dict().values(), strict=True):
        assert torch.equal(mine.values(), theirs.values())
        assert torch.equal(mine.weights(), theirs.weights())
        assert torch.equal(mine.lengths(), theirs.lengths())
    there["strided"].add_(1)  # it is the receiver's own
    assert strided[0, 0] == 1


def noisy(samples: list[int]) -> dict[str, Any]:
    if 33 in samples:
        raise KeyError("sample 33 is bad")
    return {"samples": samples, "noise": torch.rand(3), "sum": torch.rand(100_000).sum()}


@pytest.mark.parametrize("threads", [1, 2])
def test_workers_make_the_batches_that_are_made_without_them(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plain, ahead = (
            feed_of(Indexed(range(30), 4, noisy, workers=workers), 3, 9, 5) for workers in (0, 2)
        )
        places = [(step, slot) for step in range(6) for slot in (0, 2)]
        places += [(4, 0), (4, 1), (5, 1), (5, 0)]  # step 4 is redone, and slot 1 comes from others
        try:
            for step, slot in places:
                one, other = (feed.draw(step, slot, [0, 2]).batch for feed in (plain, ahead))
                assert one["samples"] == other["samples"]
                assert torch.equal(one["noise"], other["noise"])
                assert torch.equal(one["sum"], other["sum"])
        finally:
            ahead.close()
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_worker_comes_when_its_batch_is_asked_for_with_its_traceback():
    feed = feed_of(Indexed(range(40), 4, noisy, shuffle=False, workers=1), 1, 100, 0)
    try:
        for step in range(8):
            feed.draw(step, 0, [0])
        with pytest.raises(KeyError, match="sample 33 is bad") as failed:
            feed.draw(8, 0, [0])
        told = "".join(traceback.format_exception(failed.value))
        assert "in noisy" in told and 'raise KeyError("sample 33 is bad")' in told
        assert feed.draw(9, 0, [0]).batch["samples"] == [36, 37, 38, 39]
    finally:
        feed.close()


class Unreadable(Exception):
    """An error that pickle can write, but not read."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


def children() -> set[int]:
    return {
        int(pid)
        for pid in Path("/proc/self/task")
        .joinpath(str(os.getpid()), "children")
        .read_text()
        .split()
    }


def test_workers_start_with_the_first_batch_and_end_with_the_feed():
    before = children()
    feed = feed_of(Indexed(range(40), 4, noisy, shuffle=False, workers=2), 1, 100, 0)
    try:
        assert feed.slots_in(0) == range(1)
        feed.on_recovery()
        assert children() == before, "a rank without slots has none"
        feed.draw(0, 0, [0])
        assert len(children() - before) == 2
    finally:
        feed.close()
    assert children() == before


class InAFile:
    """Samples that are read at their places in a file that stays open."""

    def __init__(self, path: Path, mode: str = "rb") -> None:
        path.write_bytes(b"".join(number.to_bytes(8, "little") for number in range(6000)))
        self.file = path.open(mode, buffering=0)

    def __len__(self) -> int:
        return 6000

    def __getitem__(self, number: int) -> int:
        self.file.seek(8 * number)
        os.sched_yield()
        return int.from_bytes(self.file.read(8), "little")


@pytest.mark.parametrize("mode", ["rb", "r+b", "a+b"])
def test_workers_read_an_open_file_each_at_its_own_place(tmp_path, mode):
    data = Indexed(InAFile(tmp_path / "samples", mode), 100, list, shuffle=False, workers=2)
    feed = feed_of(data, 2, 30, 0)
    try:
        for step in range(30):
            for slot in (0, 1):
                first = 100 * (2 * step + slot)
                assert feed.draw(step, slot, [0, 1]).batch == list(range(first, first + 100))
    finally:
        feed.close()


def test_a_file_that_workers_cannot_open_once_more_is_named(tmp_path, monkeypatch):
    path, opened = tmp_path / "samples", os.open

    def refuse(name: str, flags: int) -> int:
        if os.path.realpath(name) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(name, flags)

    feed = feed_of(Indexed(InAFile(path), 4, list, workers=1), 1, 100, 0)
    monkeypatch.setattr(os, "open", refuse)
    told = f"^{path} is open, and a worker cannot open it once more: Permission denied: close it"
    try:
        with pytest.raises(UsageError, match=told):
            feed.draw(0, 0, [0])
    finally:
        feed.close()


def test_rank_and_workers_print_to_one_file_one_after_the_other(capfd):
    worker = Worker(lambda task: print("in the worker"), "worker")
    try:
        for _ in range(2):
            worker.ask("a line")
            worker.answer()
            print("in the rank")
    finally:
        worker.close()
    assert capfd.readouterr().out.splitlines() == ["in the worker", "in the rank"] * 2


def test_workers_use_torch_though_the_rank_has_used_its_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        numbers, ones = torch.arange(1 << 22, dtype=torch.int64), torch.ones(512, 512)

        def work(task: str) -> list[float]:
            return [numbers.sum().item(), (ones @ ones).sum().item()]

        expected = work("here")  # teams of threads are there from now on, and are not forked
        worker = Worker(work, "worker")
        try:
            worker.ask("there")
            assert worker.answer(patience=20) == expected
        finally:
            worker.close()
    finally:
        torch.set_num_threads(before)


def test_workers_do_not_have_the_memory_of_tables():
    rows = lazy_zeros(1 << 20)
    rows.fill_(1.0)
    worker = Worker(lambda task: Path("/proc/self/maps").read_text(), "worker")
    try:
        worker.ask("maps")
        place = f"{rows.data_ptr():x}"
        assert any(begins(line) <= rows.data_ptr() < ends(line) for line in own_maps()), place
        for line in worker.answer().splitlines():
            assert not begins(line) <= rows.data_ptr() < ends(line), line
    finally:
        worker.close()


def own_maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def begins(line: str) -> int:
    return int(line.partition("-")[0], 16)


def ends(line: str) -> int:
    return int(line.partition("-")[2].partition(" ")[0], 16)


def test_what_pickle_cannot_write_is_told_in_one_line():
    feed = feed_of(Indexed(range(40), 4, lambda samples: lambda: 0, workers=1), 1, 100, 0)
    told = "^the batch of step 0, slot 0 cannot be sent from its worker: .*: return what pickle can"
    try:
        with pytest.raises(UsageError, match=told):
            feed.draw(0, 0, [0])
    finally:
        feed.close()


class Named(NamedTuple):
    ids: Any
    label: Any


@dataclasses.dataclass
class Held:
    ids: Any
    label: Any


def numbers(samples: list[int]) -> tuple[Any, Any]:
    return np.random.rand(len(samples), 3).astype(np.float32)[1:], torch.rand(9)[1:4]


BATCHES: dict[str, Callable[[list[int]], Any]] = {
    "numpy": lambda samples: numbers(samples)[0],
    "dict": lambda samples: dict(zip(("ids", "label"), numbers(samples), strict=True)),
    "named": lambda samples: Named(*numbers(samples)),
    "held": lambda samples: Held(*numbers(samples)),
    "tensordict": lambda samples: TensorDict({"label": numbers(samples)[1]}, batch_size=[3]),
    "weighted": lambda samples: KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor(samples),
        lengths=torch.tensor([1, 0, len(samples) - 1, 0]),
        weights=torch.rand(len(samples) + 1)[1:],
    ),
}


def leaves(batch: Any) -> list[Any]:
    """Its tensors and arrays."""
    if isinstance(batch, KeyedJaggedTensor):
        return [batch.values(), batch.weights(), batch.lengths()]
    if isinstance(batch, Held):
        return leaves(vars(batch))
    if isinstance(batch, (dict, TensorDict)):
        return [leaf for part in batch.values() for leaf in leaves(part)]
    if isinstance(batch, tuple):
        return [leaf for part in batch for leaf in leaves(part)]
    return [batch]


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_every_kind_are_the_same_from_workers_and_begin_at_64_bytes(kind):
    plain, ahead = (
        feed_of(Indexed(range(30), 5, BATCHES[kind], workers=workers), 1, 9, 5)
        for workers in (0, 1)
    )
    try:
        for step in range(3):
            one, other = (aligned(feed.draw(step, 0, [0]).batch) for feed in (plain, ahead))
            assert type(one) is type(other)
            pairs = list(zip(leaves(one), leaves(other), strict=True))
            for mine, theirs in pairs:
                assert type(mine) is type(theirs) and mine.dtype == theirs.dtype
                assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))
                for each in (mine, theirs):
                    assert torch.as_tensor(each).data_ptr() % 64 == 0
        assert pairs
    finally:
        ahead.close()


def misbehaves(task: str) -> int:
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "leave":
        os._exit(3)
    if task == "sleep":
        time.sleep(60)
    if task == "raise":
        raise Unreadable(1, 2)
    return os.getpid()


def test_a_worker_that_dies_or_hangs_is_told_of_and_not_waited_for():
    told = {
        "die": "worker x was killed by SIGKILL, as the system does where memory runs out, while",
        "leave": "worker x has ended with exit code 3 while it made leave",
        "sleep": "worker x has not made sleep in 0.2 s",
    }
    for task, words in told.items():
        worker = Worker(misbehaves, "worker x")
        worker.ask("work")
        worker.ask(task)
        worker.ask("work")
        assert worker.answer() != os.getpid()
        with pytest.raises(WorkerLost, match=words):
            worker.answer(patience=0.2 if task == "sleep" else 20)
        worker.close()
    worker = Worker(misbehaves, "worker x")
    worker.ask("raise")
    with pytest.raises(RuntimeError, match="Unreadable: 1 2"):
        worker.answer()
    worker.close()


OWNER = """
import os, signal, sys
sys.path[:0] = {path!r}
from ecrm.session.workers import Worker
workers = [Worker(lambda task: os.getpid(), "worker")]
workers.append(Worker(lambda task: os.getpid(), "worker", workers))
for worker in workers:
    worker.ask("pid")
print(*(worker.answer() for worker in workers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_die_with_a_killed_rank():
    done = subprocess.run(
        [sys.executable, "-c", OWNER.format(path=sys.path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(lives(pid) for pid in pids)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
