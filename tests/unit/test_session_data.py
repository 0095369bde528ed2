"""Batches of a map-style dataset: every sample once an epoch, whoever asks and when."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from ecrm.base.errors import UsageError
from ecrm.session.data import Indexed, feed_of, source_of, steps_of
from ecrm.session.other_data import no_batches


def numbers(size: int, batch: int, **options) -> Indexed:
    return Indexed(range(size), batch, collate=list, **options)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("size", "batch", "slots"), [(12, 2, 3), (7, 3, 2), (5, 8, 1), (1, 1, 1)])
def test_every_epoch_has_each_sample_once(shuffle, size, batch, slots):
    data = numbers(size, batch, shuffle=shuffle)
    steps = data.steps(3, slots)
    seen = [
        i for step in range(steps) for slot in range(slots) for i in data.batch(step, slot, slots)
    ]
    assert len(seen) >= 3 * size > len(seen) - batch * slots
    for epoch in range(3):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_batch_depends_on_seed_step_and_slot_alone():
    forward, backward = numbers(50, 4), numbers(50, 4)
    places = [(step, slot) for step in range(30) for slot in range(2)]
    there = {place: forward.batch(*place, 2) for place in places}
    assert there == {place: backward.batch(*place, 2) for place in reversed(places)}
    assert there != {place: numbers(50, 4, seed=1).batch(*place, 2) for place in places}
    first, second = (forward.samples(epoch * 50, 50) for epoch in range(2))
    assert first != second != list(range(50)) != first


def test_epochs_end_with_what_is_left():
    data = numbers(7, 3, epochs=2, shuffle=False)
    assert steps_of(data, 2, None) == steps_of(data, 2, 100) == 3
    assert steps_of(data, 2, 2) == 2
    seen = [data.batch(step, slot, 2) for step in range(3) for slot in range(2)]
    assert seen == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4], [5, 6], None]
    assert [list(data.slots_in(step, 2)) for step in range(4)] == [[0, 1], [0, 1], [0], []]


def test_an_evaluation_sees_all_samples_in_order():
    data = numbers(5, 2)
    assert [data.whole_batch(n) for n in range(data.whole_batches)] == [[0, 1], [2, 3], [4]]


def test_a_function_makes_the_dataset_with_the_first_batch_and_once():
    made = []

    def make() -> range:
        made.append(1)
        return range(7)

    lazy = Indexed(make, 3, collate=list, epochs=2, size=7)
    there = numbers(7, 3, epochs=2)
    assert steps_of(lazy, 2, None) == steps_of(there, 2, None) == 3
    source, feed = source_of(lazy, 2, 0), feed_of(lazy, 2, 3, 0)
    assert list(source.slots_in(2)) == [0] and lazy.whole_batches == 3
    assert list(feed.slots_in(2)) == [0]
    assert not made, "a rank without slots asks for no more"
    for step in range(3):
        for slot in range(2):
            assert lazy.batch(step, slot, 2) == there.batch(step, slot, 2)
    assert feed.draw(0, 0, [0]).batch == there.batch(0, 0, 2)
    assert made == [1]


def test_a_made_dataset_does_not_depend_on_its_step_nor_does_a_batch_on_its_making():
    """A spare that takes over makes the dataset later than the trainer before."""

    def make() -> list[tuple[float, float, float]]:
        return [(random.random(), float(torch.rand(())), numpy.random.rand()) for _ in range(4)]

    def drawn(samples: list) -> list:
        return [samples, random.random(), float(torch.rand(())), numpy.random.rand()]

    early, late = (source_of(Indexed(make, 2, collate=drawn, size=4), 1, 7) for _ in range(2))
    assert early.draw(0, 0, None).batch != early.draw(5, 0, None).batch
    assert early.draw(5, 0, None).batch == late.draw(5, 0, None).batch


def test_workers_share_the_dataset_that_a_function_makes(tmp_path):
    calls = tmp_path / "calls"

    def make() -> range:
        with open(calls, "a") as file:
            file.write("made\n")
        return range(40)

    feed = feed_of(Indexed(make, 2, collate=list, shuffle=False, workers=2, size=40), 1, 20, 0)
    try:
        assert [feed.draw(step, 0, [0]).batch for step in range(4)] == [
            [2 * step, 2 * step + 1] for step in range(4)
        ]
    finally:
        feed.close()
    assert calls.read_text() == "made\n"


def test_a_function_tells_its_size_and_keeps_to_it():
    with pytest.raises(UsageError, match=r"give size=\.\.\., or the dataset itself"):
        Indexed(lambda: range(5), 2)
    with pytest.raises(UsageError, match="leave size out"):
        Indexed(range(5), 2, size=5)
    with pytest.raises(UsageError, match="made a dataset of 5 samples.*give size=5"):
        Indexed(lambda: range(5), 2, size=6).batch(0, 0, 1)
    with pytest.raises(UsageError, match="cannot be asked for by number"):
        Indexed(lambda: None, 2, size=6).batch(0, 0, 1)


def test_what_cannot_work_is_refused():
    with pytest.raises(UsageError, match="batch_size=0"):
        numbers(5, 0)
    with pytest.raises(UsageError, match="empty"):
        numbers(0, 1)
    with pytest.raises(UsageError, match="list"):
        source_of([1, 2], 1, 0)
    with pytest.raises(UsageError, match="workers=-1"):
        numbers(5, 1, workers=-1)
    with pytest.raises(UsageError, match="epochs=0"):
        numbers(5, 1, epochs=0)
    assert Indexed([1, 2], numpy.int64(2)).batch_size == 2
    with pytest.raises(UsageError, match="batch_size=0.5"):
        numbers(5, 0.5)


class Iterated(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Countless(Dataset[int]):
    def __getitem__(self, number: int) -> int:
        return number


def collate_ids(ids: list[int]) -> list[int]:
    return ids


LOADERS = {
    "type session.steps(ecrm.Indexed(dataset, batch_size=32), steps)": DataLoader(
        range(99), 32, shuffle=True
    ),
    "type session.steps(ecrm.Indexed(dataset, batch_size=8, collate=collate_ids, shuffle=False, "
    "workers=2), steps)": DataLoader(range(99), 8, collate_fn=collate_ids, num_workers=2),
    "type session.steps(ecrm.Indexed(dataset, batch_size=1, collate=collate_fn, shuffle=False), "
    "steps)": StatefulDataLoader(range(99), collate_fn=lambda ids: ids),
    "type session.steps(ecrm.Streams(make), steps), where make(slot) gives a stream that keeps its "
    "place, such as torchdata's StatefulDataLoader": StatefulDataLoader(Iterated()),
    "give ecrm.Indexed(dataset, batch_size, ...), ecrm.Streams(make) or a function": range(9),
}


DATA = range(99)
SHARED = "; leave out DistributedSampler, for slots share the samples"
NEXT_EPOCH = "; leave out drop_last, for a batch goes on with samples of the next epoch"
NOT_KEPT = "; the order of {} is not kept: put it into the dataset and type shuffle=False, or give"


class InPairs:
    """Batches of two samples, by numbers."""

    def __iter__(self):
        return iter([[0, 1], [2, 3]])


# what a loader is made with, what to write in its place, and what becomes of the rest
SAMPLERS = [
    ({"batch_size": 4, "shuffle": True, "drop_last": True}, "batch_size=4)", NEXT_EPOCH),
    ({"sampler": DistributedSampler(DATA, 2, 0), "drop_last": True}, "=1)", SHARED + NEXT_EPOCH),
    ({"sampler": DistributedSampler(DATA, 2, 0, shuffle=False)}, "=1, shuffle=False)", SHARED),
    (
        {"sampler": WeightedRandomSampler([1.0] * 99, 99)},
        "=1)",
        NOT_KEPT.format("WeightedRandomSampler"),
    ),
    ({"sampler": SubsetRandomSampler([1, 2])}, "=1)", NOT_KEPT.format("SubsetRandomSampler")),
    ({"sampler": RandomSampler(DATA, True)}, "=1)", NOT_KEPT.format("RandomSampler")),
    ({"sampler": RandomSampler(DATA, False, 10)}, "=1)", NOT_KEPT.format("RandomSampler")),
    ({"batch_sampler": InPairs()}, "=1)", NOT_KEPT.format("InPairs")),
    ({"batch_sampler": BatchSampler(RandomSampler(DATA), 8, True)}, "=8)", NEXT_EPOCH),
    (
        {"batch_size": None},
        "=1, collate=lambda samples: default_convert(samples[0]), shuffle=False)",
        "",
    ),
]


@pytest.mark.parametrize(("given", "instead", "left_out"), SAMPLERS)
def test_what_becomes_of_samplers_and_of_drop_last_is_told(given, instead, left_out):
    loader = DataLoader(DATA, **given)
    told = str(no_batches(loader, "steps"))
    assert f"{instead}, steps){left_out}" in told
    assert left_out or told.endswith(", steps)")
    with pytest.raises(UsageError, match=re.escape(f"{instead}{left_out}")):
        Indexed(loader, 4)
    keeps = left_out.startswith("; the order")
    told = str(no_batches(loader, "eval_batches"))
    assert told.endswith(")") and ("eval_batches(list(loader))" in told) == keeps


@pytest.mark.parametrize("told", LOADERS)
def test_a_loader_is_told_what_to_write_instead(told):
    for steps in (None, 10):
        with pytest.raises(UsageError, match=re.escape(told)) as refused:
            steps_of(LOADERS[told], 2, steps)
        assert "\n" not in str(refused.value)


def test_an_evaluation_tells_what_to_write_instead_of_a_loader():
    told = "type session.eval_batches(ecrm.Indexed(dataset, batch_size=32, workers=1))"
    assert told in str(no_batches(DataLoader(range(9), 32, num_workers=1), "eval_batches"))
    told = "type session.eval_batches(list(loader))"
    assert told in str(no_batches(DataLoader(Iterated()), "eval_batches"))
    assert "or a list of batches" in str(no_batches(iter([]), "eval_batches"))


def test_data_that_cannot_be_indexed_are_told():
    for data in (Iterated(), iter([])):
        with pytest.raises(UsageError, match="asked for by number: give ecrm.Streams"):
            Indexed(data, 4)
    with pytest.raises(UsageError, match=r"Countless\): .* how many samples .*: give it a __len__"):
        Indexed(Countless(), 4)
    with pytest.raises(UsageError, match=r"DataLoader\): .* as in ecrm.Indexed\(dataset, batch_si"):
        Indexed(DataLoader(range(9)), 4)


def test_a_dataset_smaller_than_a_step_comes_round():
    data = numbers(3, 4, shuffle=False)
    assert [data.batch(0, slot, 2) for slot in (0, 1)] == [[0, 1, 2, 0], [1, 2, 0, 1]]


class Columns:
    """A dataset that gives many samples in one call; `short` of some of them."""

    def __init__(self, short: int = 0) -> None:
        self.calls, self._short = [], short

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        raise AssertionError("samples are read together")

    def __getitems__(self, numbers: list[int]) -> list[int]:
        self.calls.append(list(numbers))
        return [10 * number for number in numbers][: len(numbers) - self._short]


def test_samples_are_read_in_one_call_where_the_dataset_has_it():
    data = Columns()
    indexed = Indexed(data, 4, collate=list, shuffle=False)
    assert indexed.batch(1, 1, 2) == [20, 30, 40, 50]
    assert indexed.whole_batch(2) == [80, 90]
    assert data.calls == [[2, 3, 4, 5], [8, 9]]
    with pytest.raises(UsageError, match="__getitems__ gave 3 samples for 4 numbers: return"):
        Indexed(Columns(short=1), 4, collate=list).batch(0, 0, 1)
