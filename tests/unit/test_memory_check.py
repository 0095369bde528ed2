"""What a script's tables need of its hosts' memory, and what is said where it is not there."""

from types import SimpleNamespace

import pytest
import torch

from ecrm.base.allocate import CPU, ZerosOn, lazy_zeros
from ecrm.base.errors import UsageError
from ecrm.config import load_config
from ecrm.config.schema import READY_BYTES
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.stripes import StripeShape
from ecrm.placement.tables import Table, row_spaces
from ecrm.run import memory_check
from ecrm.run.memory_check import (
    judge_gpus,
    judge_memory,
    judged,
    reserve,
    shard_bytes,
    shown_gpu,
)
from ecrm.storage.base import NativeStore

MB = 1_000_000


def test_a_shard_is_rows_their_state_and_redundancy():
    """84 stripes a shard of 2 rows and a parity row, each of 8 + 1 + 1 floats, rounded up."""
    one = Table("one", 500, 8, SparseOptimizer("rowwise_adagrad", 0.1))
    assert shard_bytes(row_spaces([one]), StripeShape(3, 2, 1), False) == 84 * 3 * 40
    assert shard_bytes(row_spaces([one]), StripeShape(3, 1, 0), False) == 167 * 40
    more = [one, Table("two", 6, 4, SparseOptimizer("adam", 0.1))]
    both = row_spaces(more)
    assert shard_bytes(both, StripeShape(3, 2, 1), False) == 84 * 3 * 40 + 3 * 52


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
@pytest.mark.parametrize("dim", [4, 7, 8, 64])
def test_records_are_counted_as_stores_have_them(dim, optimizer):
    """Those of a GPU are padded."""
    spaces = row_spaces([Table("one", 3, dim, SparseOptimizer(optimizer, 0.1))])
    for allocate in (lazy_zeros, ZerosOn(CPU)):
        store = NativeStore(1, dim, spaces[0].optimizer, torch.zeros_like, allocate)
        padded = isinstance(allocate, ZerosOn)
        assert shard_bytes(spaces, StripeShape(3, 1, 0), padded) == store.record_bytes


def test_a_host_without_the_memory_is_named_and_refused_where_all_is_handed_out():
    needed, there = {"a": 90 * MB, "b": 90 * MB}, {"a": 100 * MB, "b": 80 * MB}
    assert judged(needed, {**there, "b": 90 * MB}, prefault=True) == ""
    said = judged(needed, there, prefault=False)
    assert said.startswith("once every row is trained the tables need 90 MB of memory on b, 80 MB")
    with pytest.raises(UsageError, match="90 MB .* on b.*set storage.prefault=false") as caught:
        judged(needed, there, prefault=True)
    assert str(caught.value).count("\n") == 0


def test_a_shard_that_the_system_refuses_is_refused_in_one_line():
    optimizer = SparseOptimizer("sgd", 0.1)
    huge = row_spaces([Table("ads", 1 << 50, 8, optimizer)])
    with pytest.raises(
        UsageError, match="refuses .* MB of memory on b for a shard of ads "
    ) as said:
        reserve(huge, StripeShape(2, 1, 1), shards=1, host="b")
    assert str(said.value).count("\n") == 0
    reserve(huge, StripeShape(2, 1, 1), shards=0, host="b")
    reserve(row_spaces([Table("ads", 500, 8, optimizer)]), StripeShape(2, 1, 1), 2, "b")


def test_ranks_that_share_a_gpu_need_it_together():
    needed, hosts = {0: 60 * MB, 1: 60 * MB, 2: 0}, {0: "a", 1: "a", 2: "b"}
    judge_gpus(needed, {0: ("x", 60 * MB), 1: ("y", 60 * MB), 2: ("x", 1)}, hosts)
    there = {0: ("x", 120 * MB), 1: ("x", 119 * MB), 2: ("x", 1)}
    said = "need 120 MB of memory on the GPU of ranks 0, 1 on a, 119 MB are free there: set stor"
    with pytest.raises(UsageError, match=said) as caught:
        judge_gpus(needed, there, hosts)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("lacking", [0, 1])
def test_tables_that_do_not_fit_a_gpu_are_refused(lacking):
    """Ranks 3 and 4 need no GPU: theirs are rows on the CPU, and on an imitated GPU."""
    spaces = row_spaces([Table("one", 500, 8, SparseOptimizer("rowwise_adagrad", 0.1))])
    shape = StripeShape(3, 2, 1)
    free = 2 * shard_bytes(spaces, shape, True) - lacking
    about = cluster([[0], [1], [], [2], [3]], shape)
    gpus = {0: ("one", free), 1: ("one", free), 2: ("one", free), 3: None, 4: None}
    config = load_config("tiny", ["data.path=x", "storage.device=cuda"])

    def judge() -> str:
        return judge_memory(config, about, spaces, dict.fromkeys(range(5), 10**12), gpus)

    if lacking:
        with pytest.raises(UsageError, match="on the GPU of ranks 0, 1, 2 on a"):
            judge()
    else:
        assert judge() == ""


def test_only_a_rank_with_rows_on_a_real_gpu_counts_its_memory(monkeypatch):
    monkeypatch.setattr(memory_check, "free_on_gpu", lambda: ("one", 7))

    def shown(*sets: str) -> tuple[str, int] | None:
        return shown_gpu(load_config("tiny", ["data.path=x", *sets]))

    assert shown() is None and shown("storage.device=cuda") == ("one", 7)
    assert shown("storage.device=cuda", "testing.imitated_gpu=true") is None


def cluster(
    shards: list[list[int]], shape: StripeShape, spares: tuple[int, ...] = ()
) -> SimpleNamespace:
    """A run's ranks on host a, with the shards of each."""
    view = SimpleNamespace(
        shards=[rank for rank, held in enumerate(shards) for _ in held],
        shards_of=lambda rank: shards[rank],
        spares=spares,
    )
    processes = {rank: {"host": "a"} for rank in range(len(shards))}
    protection = SimpleNamespace(shape=shape)
    return SimpleNamespace(view=view, processes=processes, protection=protection, rows_on_gpu=True)


def test_a_host_has_the_rows_that_are_not_on_a_gpu():
    spaces = row_spaces([Table("one", 500, 8, SparseOptimizer("rowwise_adagrad", 0.1))])
    shape = StripeShape(3, 2, 1)
    each = shard_bytes(spaces, shape, True)
    about = cluster([[0], [1], [2]], shape)
    config = load_config("tiny", ["data.path=x"])

    def warned(free: int, *on_gpu: int) -> str:
        gpus = {rank: ("one", free) if rank in on_gpu else None for rank in range(3)}
        return judge_memory(config, about, spaces, dict.fromkeys(range(3), each), gpus)

    assert warned(each, 0).startswith("once every row is trained the tables need")
    assert warned(3 * each, 0, 1) == "" == warned(3 * each, 0, 1, 2)


def test_the_next_spares_hold_a_shard_with_prefault():
    """Two spares with m = 1; the third spare, and all spares without prefault, hold none."""
    spaces = row_spaces([Table("one", 500, 8, SparseOptimizer("rowwise_adagrad", 0.1))])
    shape = StripeShape(3, 2, 1)
    each = shard_bytes(spaces, shape, True)
    about = cluster([[0], [1], [2], [], [], []], shape, spares=(3, 4, 5))
    sets, gpus = ["data.path=x", "cluster.spares=3"], dict.fromkeys(range(6))

    def said(free: int, *more: str) -> str:
        config = load_config("tiny", [*sets, *more])
        return judge_memory(config, about, spaces, dict.fromkeys(range(6), free), gpus)

    assert said(3 * each) == ""
    assert said(5 * each + 2 * READY_BYTES, "storage.prefault=true") == ""
    with pytest.raises(UsageError, match="storage.prefault=false"):
        said(5 * each + 2 * READY_BYTES - 1, "storage.prefault=true")


def test_a_rank_dead_by_now_takes_no_memory():
    spaces = row_spaces([Table("one", 500, 8, SparseOptimizer("rowwise_adagrad", 0.1))])
    shape = StripeShape(3, 2, 1)
    each = shard_bytes(spaces, shape, True)
    about = cluster([[0], [1], [2]], shape)
    del about.processes[1]
    config, gpus = load_config("tiny", ["data.path=x"]), {0: None, 2: None}

    def warned(free: int) -> str:
        return judge_memory(config, about, spaces, {0: free, 2: free}, gpus)

    assert warned(2 * each) == "" != warned(2 * each - 1)
