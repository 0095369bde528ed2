"""Rows of a shard: FBGEMM's bits, deltas that undo, missing rows."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch

from ecrm.base.errors import UsageError
from ecrm.kernels import sparse_update as kernel
from ecrm.kernels.unit_order import unique_by_unit
from ecrm.placement.initial_values import InitFunction, Uniform
from ecrm.placement.sparse_optimizer import NAMES, STATE_WIDTHS, SparseOptimizer
from ecrm.placement.tables import Table, row_spaces
from ecrm.storage.base import NativeStore, Store
from ecrm.storage.hosted import HostedShard
from ecrm.storage.initial_rows import InitialRows
from ecrm.storage.missing_rows import MissingRows
from support.fbgemm_store import FbgemmStore

OPTIMIZERS = ["sgd", "rowwise_adagrad", "adagrad"]


def _filled(kind: type[Store], optimizer: str, rows: int = 50, dim: int = 8):
    values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0))
    return kind(rows, dim, SparseOptimizer(optimizer, 0.05), lambda local: values[local])


def _space(store, gradients):
    """Gradients where `update_with_delta` wants them."""
    space = torch.zeros(len(gradients), store.record_bytes // 4)
    space[:, : store.dim] = gradients
    return space


def _gradients(step: int, rows: int, dim: int = 8):
    generator = torch.Generator().manual_seed(step)
    chosen = torch.randperm(rows, generator=generator)[:20]
    return chosen, torch.randn(20, dim, generator=generator)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_native_store_is_fbgemm_bit_for_bit(optimizer):
    ours, theirs = _filled(NativeStore, optimizer), _filled(FbgemmStore, optimizer)
    everything = torch.arange(50)
    for step in range(20):
        rows, gradients = _gradients(step, 50)
        before = theirs.read(rows)
        # FBGEMM's own optimizer; with the delta it would be our kernel
        theirs.update(rows, gradients)
        delta = ours.update_with_delta(rows, _space(ours, gradients))
        assert torch.equal(delta, before ^ theirs.read(rows))
        assert torch.equal(ours.read(everything), theirs.read(everything))
        assert torch.equal(ours.read_tail(everything), ours.read(everything)[:, 4 * ours.dim :])
        assert torch.equal(ours.lookup(everything), theirs.lookup(everything))
        assert torch.equal(ours.lookup_state(everything), theirs.lookup_state(everything))
    assert (
        ours.record_bytes
        == theirs.record_bytes
        == {"sgd": 36, "rowwise_adagrad": 40, "adagrad": 68}[optimizer]
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_more_than_4_gib_into_a_shard_are_updated_where_they_lie(optimizer):
    dim, boundary = 128, (1 << 32) // (128 * 4)
    rows = torch.tensor(
        [
            0,
            5,
            boundary - 1,
            boundary,
            boundary + 5,
            2 * boundary - 1,
            2 * boundary,
            2 * boundary + 5,
        ]
    )
    stores = [
        kind(
            2 * boundary + 6,
            dim,
            SparseOptimizer(optimizer, 0.05),
            lambda local: local.remainder(7).to(torch.float32).unsqueeze(1).repeat(1, dim),
        )
        for kind in (NativeStore, FbgemmStore)
    ]
    for step, chosen in enumerate([rows, rows[[1, 4, 7]], rows[[4]], rows[[7]]]):
        gradients = torch.randn(chosen.numel(), dim, generator=torch.Generator().manual_seed(step))
        before = stores[1].read(rows)
        delta = stores[0].update_with_delta(chosen, _space(stores[0], gradients))
        stores[1].update(chosen, gradients)  # FBGEMM's own optimizer
        assert torch.equal(stores[0].read(rows), stores[1].read(rows))
        untouched = ~torch.isin(rows, chosen)
        assert torch.equal(stores[1].read(rows)[untouched], before[untouched])
        stores[1].xor(chosen, delta)
        assert torch.equal(stores[1].read(rows), before)
        stores[1].xor(chosen, delta)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_with_and_without_the_delta_mix_in_fbgemms_memory(optimizer):
    mixed, plain = _filled(FbgemmStore, optimizer), _filled(FbgemmStore, optimizer)
    everything = torch.arange(50)
    for step in range(20):
        rows, gradients = _gradients(step, 50)
        plain.update(rows, gradients)
        before = mixed.read(rows)
        if step % 3:
            assert torch.equal(
                mixed.update_with_delta(rows, _space(mixed, gradients)), before ^ mixed.read(rows)
            )
        else:
            mixed.update(rows, gradients)
        assert torch.equal(mixed.read(everything), plain.read(everything))


@pytest.mark.parametrize("kind", [NativeStore, FbgemmStore])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("units", [1, 3])
def test_undo_returns_the_bits_of_the_commit(kind, optimizer, units):
    hosted = HostedShard(_filled(kind, optimizer), 50, missing=False, units=units)
    everything = torch.arange(50)
    never = set(range(50))

    def update(step: int) -> int:
        """One update; how many of its rows were never updated before."""
        rows, gradients = _gradients(step, 50)
        rows, places = unique_by_unit(rows, units)
        space = hosted.gradient_space(len(rows), keep_delta=True)
        # those after the first are merged
        assert space.shape[1] == (hosted.store.dim if step > 1 else hosted.store.record_bytes // 4)
        space[:, hosted.store.dim :] = 0
        space[:, : hosted.store.dim] = gradients[places.argsort()]
        hosted.update(rows, space, keep_delta=True, step=step)
        first = len(never & set(rows.tolist()))
        never.difference_update(rows.tolist())
        return first

    update(0)
    hosted.committed()
    committed = hosted.store.read(everything)
    hosted.undo()
    assert torch.equal(hosted.store.read(everything), committed)
    # the second of them merges, and has rows that no update had before
    assert update(1) > 0 and update(2) > 0
    assert update(3) > 0
    update(4)
    changed = hosted.store.read(everything)
    parts = hosted.deltas_since_commit()
    assert len(parts) == units and all(
        ((rows % units) == unit).all() for unit, (rows, _) in enumerate(parts)
    )
    rows, delta = (torch.cat(each) for each in zip(*parts))
    assert rows.numel() == rows.unique().numel()
    merged = torch.zeros_like(committed)
    merged[rows] = delta
    assert torch.equal(committed ^ changed, merged)
    hosted.undo()
    assert torch.equal(hosted.store.read(everything), committed)
    hosted.undo()
    assert torch.equal(hosted.store.read(everything), committed)


def test_missing_rows_are_found_restored_and_forgotten():
    hosted = HostedShard(_filled(NativeStore, "sgd"), 50, missing=True)
    asked = torch.tensor([3, 7, 11])
    assert torch.equal(hosted.missing_among(asked), asked)
    records = torch.randint(0, 255, (3, 36), dtype=torch.uint8)
    hosted.restore(asked, records)
    hosted.undo()
    assert hosted.missing_rows == 50
    assert torch.equal(hosted.missing_among(asked), asked)
    assert hosted.missing.first(5).numel() == 0
    hosted.missing.probed(4)
    assert hosted.missing.first(5).tolist() == [0, 1, 2, 3]
    hosted.missing.probed(50)
    assert hosted.missing.first(5).tolist() == [0, 1, 2, 3, 4]
    hosted.restore(asked, records)
    hosted.committed()
    hosted.undo()
    assert hosted.missing_rows == 47
    assert torch.equal(hosted.store.read(asked), records)
    assert hosted.missing_among(asked).numel() == 0
    rest = hosted.missing.first(100)
    assert rest.numel() == 47
    hosted.restore(rest, torch.zeros(47, 36, dtype=torch.uint8))
    assert hosted.missing_rows == 0
    hosted.committed()
    assert hosted.missing is None


def test_rows_found_and_lost_again_are_zeros_and_probed_again():
    hosted = HostedShard(_filled(NativeStore, "sgd"), 50, missing=True)
    assert hosted.missing.unprobed(20) == hosted.missing.unprobed(20) == (0, 20)
    hosted.missing.remove_zeros(slice(0, 20, 2), torch.ones(10, dtype=torch.bool))
    hosted.missing.probed(20)
    hosted.committed()
    records = torch.full((3, hosted.store.record_bytes), 7, dtype=torch.uint8)
    hosted.restore(torch.tensor([20, 21, 40]), records)
    hosted.missing.remove_zeros(slice(20, 24, 1), torch.tensor([True, False, True, False]))
    assert hosted.missing.unprobed(4) == (20, 24)
    hosted.missing.probed(24)
    assert hosted.missing.unprobed(4) == (24, 28)
    hosted.undo()
    assert hosted.missing_rows == 40
    assert not hosted.store.read(torch.arange(50)).any()
    assert hosted.missing.unprobed(100) == (20, 50)
    hosted.missing.probed(50)
    assert hosted.missing.unprobed(100) == (50, 50)


@pytest.mark.parametrize("rows", [1, 100, 65_536, 200_001])
def test_first_missing_rows_come_in_order_whatever_was_removed(rows):
    missing = MissingRows(rows)
    missing.probed(rows)
    generator = torch.Generator().manual_seed(rows)
    model = set(range(rows))
    for _ in range(8):
        wanted = torch.randperm(rows, generator=generator)[: rows // 9 + 1]
        wanted = wanted[missing.among(wanted)]
        missing.remove(wanted)
        model -= set(wanted.tolist())
        first = missing.first(rows // 10)
        assert first.tolist() == sorted(model)[: rows // 10]
        missing.remove(first)
        model -= set(first.tolist())
        assert missing.count == len(model)
    assert missing.first(0).numel() == 0


def test_initial_rows_do_not_depend_on_who_asks():
    (space,) = row_spaces([Table("a", 100, 8), Table("b", 4, 8), Table("c", 30, 8)])
    everything = InitialRows(space, seed=5)(torch.arange(space.rows))
    some = torch.tensor([133, 2, 101, 103, 104, 99, 100])
    assert torch.equal(InitialRows(space, seed=5)(some), everything[some])
    assert not torch.equal(InitialRows(space, seed=6)(some), everything[some])
    assert everything[:100].abs().max() <= 0.1
    assert everything[100:104].abs().max() <= 0.5
    assert everything[100:104].abs().max() > 0.2
    padding = InitialRows(space, seed=5)(torch.tensor([134, 500, 3]))[:2]
    assert not padding.view(torch.int32).any(), "zeros to the bit"


FUNCTIONS = {
    "normal": torch.nn.init.normal_,
    "uniform": partial(torch.nn.init.uniform_, a=2.0, b=3.0),
    "ones": torch.nn.init.ones_,
    "nothing": lambda row: None,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_makes_of_a_row_does_not_depend_on_who_asks(name):
    initial = InitFunction(FUNCTIONS[name])
    tables = [Table("a", 50, 8), Table("b", 40, 8, initial=initial), Table("c", 9, 8)]
    (space,) = row_spaces(tables)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    everything = InitialRows(space, seed=5)(torch.arange(space.rows))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    some = torch.tensor([98, 89, 2, 51, 50, 88])
    assert torch.equal(InitialRows(space, seed=5)(some), everything[some])
    # those of other tables are as they would be without
    (plain,) = row_spaces([replace(table, initial=None) for table in tables])
    without = InitialRows(plain, seed=5)(torch.arange(space.rows))
    rows = everything[50:90]
    assert torch.equal(without[:50], everything[:50]) and torch.equal(without[90:], everything[90:])
    # its place in another space changes nothing, its number and the seed do
    (_, alone) = row_spaces([Table("x", 3, 4), Table("b", 40, 8, initial=initial)])
    (first,) = row_spaces([Table("b", 40, 8, initial=initial)])
    assert torch.equal(InitialRows(alone, seed=5)(torch.arange(40)), rows)
    drawn = name in ("normal", "uniform")
    assert drawn != torch.equal(InitialRows(first, seed=5)(torch.arange(40)), rows)
    assert drawn != torch.equal(InitialRows(space, seed=6)(torch.arange(50, 90)), rows)
    assert len(rows.unique(dim=0)) == (40 if drawn else 1)
    if name == "uniform":
        assert 2 <= rows.min() < 2.1 and 2.9 < rows.max() <= 3
    if not drawn:
        assert (rows == (1.0 if name == "ones" else 0.0)).all()


def test_a_function_sees_one_row_and_torchs_generator_alone():
    seen = []
    function = InitFunction(
        lambda row: seen.append((row.shape, row.dtype, torch.is_grad_enabled()))
    )
    (space,) = row_spaces([Table("a", 50, 8, initial=function)])
    InitialRows(space, seed=5)(torch.tensor([3, 3, 60, 4]))
    assert seen == [((1, 8), torch.float32, False)] * 3


def test_rows_begin_uniform_in_the_range_of_their_table():
    spaces = row_spaces(
        [
            Table("a", 400, 8, initial=Uniform(0.25, 0.75)),
            Table("b", 100, 8, initial=Uniform(-0.1, 0.1)),
            Table("c", 100, 8, initial=Uniform(1.0, 1.0)),
            Table("d", 100, 8),
        ]
    )
    values = InitialRows(spaces[0], seed=5)(torch.arange(710))
    assert 0.25 <= values[:400].min() < 0.26 and 0.74 < values[:400].max() <= 0.75
    assert (values[500:600] == 1).all() and not values[700:].any()
    plain = row_spaces([Table(table.name, table.rows, 8) for table in spaces[0].tables])[0]
    default = InitialRows(plain, seed=5)(torch.arange(700))
    # the same range, written out, is the default
    assert torch.equal(values[400:500], default[400:500])
    assert torch.equal(values[600:700], default[600:])
    torch.testing.assert_close(values[:400], default[:400] / 0.05 * 0.25 + 0.5)


@pytest.mark.parametrize("low, high", [(1.0, 0.5), (0.0, float("inf")), (float("nan"), 1.0)])
def test_a_range_without_numbers_is_refused(low, high):
    with pytest.raises(UsageError, match=f"rows cannot begin uniform from {low} to {high}: "):
        Uniform(low, high)


@pytest.mark.parametrize("kind", [NativeStore, FbgemmStore])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_row_never_updated_is_zeros_in_store_and_initial_to_those_who_look(kind, optimizer):
    store = _filled(kind, optimizer)
    initial = store.lookup(torch.arange(50))
    assert initial.abs().min() > 0
    assert not store.read(torch.arange(50)).any()
    rows, gradients = _gradients(0, 50)
    delta = store.update_with_delta(rows, _space(store, torch.zeros_like(gradients)))
    assert torch.equal(delta, store.read(rows))
    assert torch.equal(store.lookup(torch.arange(50)), initial)
    store.xor(rows, delta)
    assert not store.read(torch.arange(50)).any()


class _Counting:
    """A tensor that is only indexed, and how many elements were read so."""

    def __init__(self, tensor):
        self._tensor, self.read = tensor, 0

    def __getitem__(self, where):
        found = self._tensor[where]
        self.read += found.numel()
        return found

    def __getattr__(self, name):
        return getattr(self._tensor, name)


def test_looking_for_missing_rows_costs_no_more_than_there_are_rows():
    rows, budget = 1 << 20, 64
    missing = MissingRows(rows)
    counting = missing._present = _Counting(missing._present)
    rounds = 0
    while missing.unprobed(1 << 12)[0] < rows:
        first, last = missing.unprobed(1 << 12)
        zeros = torch.ones(last - first, dtype=torch.bool)
        zeros[0] = rounds % 100 == 0  # a few that are not, and hold nothing up
        missing.remove_zeros(slice(first, last, 1), zeros)
        missing.probed(last)
        counting.read -= last - first  # this is the probe, and not the looking
        missing.first(budget)
        rounds += 1
        missing.committed()
    assert rounds == rows >> 12 and missing.count == rounds - -(-rounds // 100)
    assert counting.read <= rows + rounds * 2 * budget


def test_missing_rows_are_those_of_a_plain_set():
    rows, random = 60_000, Random(3)
    missing = MissingRows(rows)
    now, probed = set(range(rows)), 0
    kept = now.copy(), probed
    for _ in range(300):
        what = random.choice(("probe", "probe", "restore", "commit", "undo", "look", "look"))
        if what == "probe":
            first, last = missing.unprobed(random.choice((7, 900, 20_000)))
            zeros = torch.rand(last - first) < random.choice((0.0, 0.9, 1.0))
            missing.remove_zeros(slice(first, last, 1), zeros)
            missing.probed(last)
            now, probed = (
                now - {first + place for place in zeros.nonzero().flatten().tolist()},
                last,
            )
        elif what == "restore" and now:
            some = random.sample(sorted(now), min(len(now), random.choice((1, 50))))
            missing.remove(torch.tensor(some))
            now = now.difference(some)
        elif what == "commit":
            missing.committed()
            kept = now.copy(), probed
        elif what == "undo":
            missing.undo()
            now, probed = kept[0].copy(), kept[1]
        count = random.choice((1, 30, 5_000))
        assert missing.first(count).tolist() == sorted(row for row in now if row < probed)[:count]
        passed = set(random.sample(range(probed), min(probed, random.choice((0, 1, 2_000)))))
        first = missing.first(count, torch.tensor(sorted(passed), dtype=torch.int64))
        left = sorted(row for row in now - passed if row < probed)
        assert first.tolist() == left[:count]
        assert missing.count == len(now)


def test_the_kernels_have_the_optimizers_and_widths_of_state_of_a_run():
    assert kernel.OPTIMIZERS == NAMES
    for name in NAMES:
        assert kernel.state_widths(name, 7) == STATE_WIDTHS[name](7)
