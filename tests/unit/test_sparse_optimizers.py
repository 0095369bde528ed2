"""Optimizers of rows against torch.optim's and TorchRec's, and the spaces that they make.

Those update every row in every step; so do these tests. Their operations are rounded elsewhere than
ours, so rows agree to 1e-5, relative, after ten steps.
"""

from __future__ import annotations

import pytest
import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from ecrm.base.errors import UsageError
from ecrm.kernels.records import RecordLog
from ecrm.kernels.sparse_update import OPTIMIZERS
from ecrm.placement.sparse_optimizer import NAMES, SparseOptimizer
from ecrm.placement.tables import Table, row_spaces
from ecrm.storage.base import NativeStore, Store
from support import fbgemm_store
from support.fbgemm_store import FbgemmStore

ROWS, DIM, STEPS, RATE, EPSILON = 30, 12, 10, 0.03, 1e-6


def _torchs(name: str, decay: float, decoupled: bool):
    """The same optimizer elsewhere, for one parameter, where there is one."""
    numbers = {"lr": RATE, "weight_decay": decay}
    made = {
        ("sgd", False): lambda p: torch.optim.SGD([p], **numbers),
        ("adagrad", False): lambda p: torch.optim.Adagrad([p], eps=EPSILON, **numbers),
        ("rowwise_adagrad", False): lambda p: RowWiseAdagrad([p], eps=EPSILON, **numbers),
        ("adam", False): lambda p: torch.optim.Adam([p], eps=EPSILON, betas=(0.8, 0.95), **numbers),
        ("adam", True): lambda p: torch.optim.AdamW([p], eps=EPSILON, betas=(0.8, 0.95), **numbers),
    }
    return made[name, decoupled]


def _ours(name: str, decay: float, decoupled: bool) -> SparseOptimizer:
    return SparseOptimizer(name, RATE, EPSILON, (0.8, 0.95), decay, decoupled)


def _updated_as(way: str, store: Store, gradients: torch.Tensor, step: int) -> None:
    """One update of all rows: plain, with its delta, or into a log, which must take it back."""
    everything = torch.arange(ROWS)
    if way == "plain":
        store.update(everything, gradients, step)
        return
    before = store.read(everything)
    if way == "delta":
        sums = torch.zeros(ROWS, store.record_bytes // 4)
        sums[:, :DIM] = gradients
        delta = store.update_with_delta(everything, sums, step)
    else:
        log = RecordLog(
            torch.zeros(2 * ROWS, dtype=torch.int64),
            torch.zeros(2 * ROWS, store.record_bytes, dtype=torch.uint8),
            torch.zeros(ROWS, dtype=torch.int32),
        )
        store.update_logged(everything, gradients, log, step)
        delta = log.records[:ROWS]
    assert torch.equal(delta, before ^ store.read(everything))


@pytest.mark.parametrize("way", ["plain", "delta", "logged"])
@pytest.mark.parametrize("kind", [NativeStore, FbgemmStore])
@pytest.mark.parametrize(
    ("name", "decay", "decoupled"),
    [
        *((name, decay, False) for name in NAMES for decay in (0.0, 0.2)),
        ("adam", 0.2, True),
    ],
)
def test_rows_are_those_of_torchs_optimizers(name, decay, decoupled, kind, way):
    random = torch.Generator().manual_seed(3)
    begin = torch.randn(ROWS, DIM, generator=random)
    theirs = torch.nn.Parameter(begin.clone())
    optimizer = _torchs(name, decay, decoupled)(theirs)
    # as a scheduler changes it
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    store = kind(
        ROWS,
        DIM,
        _ours(name, decay, decoupled),
        lambda rows: begin[rows],
        rate=lambda step: 1 / (1 + step),
    )
    plain = NativeStore(ROWS, DIM, _ours(name, 0.0, False), lambda rows: begin[rows])
    for step in range(STEPS):
        gradients = torch.randn(ROWS, DIM, generator=random)
        theirs.grad = gradients.clone()
        optimizer.step()
        schedule.step()
        _updated_as(way, store, gradients, step)
        plain.update(torch.arange(ROWS), gradients, step)
    found = store.lookup(torch.arange(ROWS))
    torch.testing.assert_close(found, theirs.detach(), rtol=1e-5, atol=1e-6)
    # neither the decay nor the schedule is small enough to be missed
    assert (plain.lookup(torch.arange(ROWS)) - found).abs().max() > 0.01


@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adagrad"])
def test_decoupled_decay_shrinks_the_row_before_the_step(name):
    begin = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3))
    shrunk = begin * (1 - RATE * 0.2)
    gradients, everything = torch.ones(ROWS, DIM), torch.arange(ROWS)
    store, plain = (
        NativeStore(ROWS, DIM, _ours(name, decay, True), lambda rows, of=of: of[rows])
        for decay, of in ((0.2, begin), (0.0, shrunk))
    )
    for each in (store, plain):
        each.update(everything, gradients)
    assert torch.equal(store.read(everything), plain.read(everything))


@pytest.mark.parametrize("kind", [NativeStore, FbgemmStore])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_is_not_in_a_step_stays_as_it_is(kind, name):
    begin = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3))
    store = kind(ROWS, DIM, _ours(name, 0.2, False), lambda rows: begin[rows])
    some, others = torch.arange(0, ROWS, 2), torch.arange(1, ROWS, 2)
    store.update(torch.arange(ROWS), torch.ones(ROWS, DIM), 0)
    before = store.read(others)
    store.update(some, torch.ones(len(some), DIM), 1)
    assert torch.equal(store.read(others), before)


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (SparseOptimizer("adam", RATE), None),
        (SparseOptimizer("adagrad", RATE, weight_decay=0.1), None),
        (SparseOptimizer("adagrad", RATE), lambda step: 0.5),
    ],
)
def test_fbgemm_is_not_asked_for_what_its_cpu_build_lacks_or_does_wrongly(
    monkeypatch, optimizer, rate
):
    monkeypatch.setattr(fbgemm_store, "_embedding", lambda *words: pytest.fail("FBGEMM was asked"))
    stores = [
        kind(ROWS, DIM, optimizer, lambda rows: torch.ones(len(rows), DIM), rate=rate)
        for kind in (NativeStore, FbgemmStore)
    ]
    for store in stores:
        store.update(torch.arange(ROWS), torch.ones(ROWS, DIM), 2)
    assert torch.equal(*(store.read(torch.arange(ROWS)) for store in stores))
    with pytest.raises(pytest.fail.Exception, match="FBGEMM was asked"):
        FbgemmStore(
            ROWS, DIM, SparseOptimizer("adagrad", RATE), lambda rows: torch.ones(len(rows), DIM)
        ).update(torch.arange(ROWS), torch.ones(ROWS, DIM))


def test_every_kernel_has_its_optimizer():
    assert NAMES == OPTIMIZERS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "lamb"}, "sparse optimizer 'lamb' is none of sgd, rowwise_adagrad"),
        ({"learning_rate": -0.1}, "adam: learning_rate is -0.1, it must be 0 or more"),
        ({"epsilon": float("nan")}, "adam: epsilon is nan, it must be 0 or more"),
        ({"weight_decay": float("inf")}, "adam: weight_decay is inf, it must be 0 or more"),
        ({"betas": (0.9, 1.0)}, r"adam: betas are \(0.9, 1.0\), each must be at least 0 and less"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        SparseOptimizer(**{"name": "adam", "learning_rate": 0.1, **change})


def test_a_rate_that_is_no_number_is_refused_before_a_row_is_changed():
    store = NativeStore(
        ROWS,
        DIM,
        SparseOptimizer("sgd", RATE),
        lambda rows: torch.ones(len(rows), DIM),
        rate=lambda step: float("nan"),
    )
    with pytest.raises(UsageError, match="learning rate is nan at step 7, it must be 0 or more"):
        store.update(torch.arange(ROWS), torch.ones(ROWS, DIM), 7)
    assert torch.equal(store.lookup(torch.arange(ROWS)), torch.ones(ROWS, DIM))


def test_tables_of_one_width_lie_together_where_their_optimizers_numbers_are_the_same():
    slow, same, fast = (SparseOptimizer("adam", rate) for rate in (0.1, 0.1, 0.2))
    spaces = row_spaces(
        [
            Table("a", 10, 8),
            Table("b", 5, 8, slow),
            Table("c", 7, 4, slow),
            Table("d", 3, 8, same),
            Table("e", 2, 8, fast),
            Table("f", 4, 8),
        ]
    )
    assert [
        ([table.name for table in space.tables], space.dim, space.optimizer) for space in spaces
    ] == [
        (["a", "f"], 8, None),
        (["b", "d"], 8, slow),
        (["c"], 4, slow),
        (["e"], 8, fast),
    ]
    assert [space.table_numbers for space in spaces] == [(0, 5), (1, 3), (2,), (4,)]
    assert [space.offsets for space in spaces] == [(0, 10), (0, 5), (0,), (0,)]


def test_two_tables_of_one_name_are_refused():
    with pytest.raises(UsageError, match="two tables have the name a"):
        row_spaces([Table("a", 10, 8), Table("b", 5, 8), Table("a", 5, 4)])
