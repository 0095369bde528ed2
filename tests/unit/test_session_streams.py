"""Streams go on, after a resume at any step, with the very batches that follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper
from torchdata.stateful_dataloader import StatefulDataLoader

from ecrm.base.errors import UsageError
from ecrm.model.nested_state import read
from ecrm.session.data import feed_of
from ecrm.session.feed import Feed
from ecrm.session.streams import ENDED, Streams

STEPS = 8


class Noisy:
    """Samples with a random transform."""

    def __init__(self, slot: int) -> None:
        self.slot = slot

    def __len__(self) -> int:
        return 11 - 5 * self.slot

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([100.0 * self.slot + number, torch.rand(()).item()])


class Iterated(IterableDataset[Tensor]):
    """The same samples, one after the other, with their place as state."""

    def __init__(self, slot: int) -> None:
        self.samples, self.at = Noisy(slot), 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def indexed(slot: int, epoch: int) -> StatefulDataLoader[Tensor]:
    return StatefulDataLoader(Noisy(slot), batch_size=4)


def drawn_order(slot: int, epoch: int) -> StatefulDataLoader[Tensor]:
    return StatefulDataLoader(Noisy(slot), batch_size=4, shuffle=True)


def given_order(slot: int, epoch: int) -> StatefulDataLoader[Tensor]:
    random = torch.Generator().manual_seed(10 * slot + epoch)
    return StatefulDataLoader(Noisy(slot), batch_size=4, shuffle=True, generator=random)


def iterated(slot: int, epoch: int) -> StatefulDataLoader[Tensor]:
    return StatefulDataLoader(Iterated(slot), batch_size=4)


def nodes(slot: int, epoch: int) -> Loader[Tensor]:
    """A loader that begins anew where the state of its end is loaded."""
    samples = [torch.tensor([number, slot]) for number in range(len(Noisy(slot)))]
    return Loader(Mapper(Batcher(IterableWrapper(samples), 4, drop_last=False), torch.stack))


def draw(feed: Feed, first: int, states: dict[int, bytes | None]) -> list[list[Any]]:
    """(batch, state before it) of both slots, from a step on to the last one."""
    rows = []
    for step in range(first, STEPS):
        row = []
        for slot in (0, 1):
            drawn = feed.draw(step, slot, [0, 1], states[slot])
            row.append((None if drawn.over else drawn.batch.clone(), states[slot]))
            # the state after the batch before, as a session has it once it has drawn this one
            if drawn.over or drawn.before is not None:
                row[-1] = (row[-1][0], ENDED if drawn.over else drawn.before)
            states[slot] = drawn.after
        rows.append(row)
    return rows


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [indexed, drawn_order, given_order, iterated, nodes])
def test_a_stateful_loader_goes_on_at_every_step_with_the_same_bits(make, workers):
    streams = Streams(make, workers, epochs=2)
    feed = feed_of(streams, 2, STEPS, 0)
    try:
        all_of_it = draw(feed, 0, {0: None, 1: None})
        seen = [row[0][0] for row in all_of_it if row[0][0] is not None]
        assert [len(batch) for batch in seen] == [4, 4, 3] * 2
        assert [row[1][0] is None for row in all_of_it] == [False] * 4 + [True] * 4
        assert sorted(torch.cat(seen)[:, 0].tolist()) == sorted([*range(11)] * 2)
        for first in range(1, STEPS):
            feed.on_recovery()
            if workers == 0:
                feed = feed_of(streams, 2, STEPS, 0)
            again = draw(feed, first, {slot: all_of_it[first][slot][1] for slot in (0, 1)})
            for one, other in zip(all_of_it[first:], again, strict=True):
                for (batch, _), (same, _) in zip(one, other, strict=True):
                    assert (batch is None) == (same is None)
                    assert batch is None or torch.equal(batch, same)
    finally:
        feed.close()


class Empty(Iterated):
    def __init__(self, slot: int, epoch: int) -> None:
        super().__init__(slot)
        self.at = 99 if epoch else 0


def test_what_cannot_work_is_refused():
    with pytest.raises(UsageError, match="epochs=0"):
        Streams(indexed, epochs=0)
    feed = feed_of(Streams(Empty, epochs=2), 1, 99, 0)
    state = None
    for step in range(11):
        state = feed.draw(step, 0, [0], state).after
    with pytest.raises(UsageError, match="slot 0 has no batch in epoch 1"):
        feed.draw(11, 0, [0], state)


class Drawing(Iterated):
    """Its state is that of a generator of numpy's, with an array in it."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": np.random.RandomState(self.at).get_state()}


class Queueing(Iterated):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "waiting": deque([self.at])}


def test_a_state_with_arrays_of_numpy_is_carried():
    after = feed_of(Streams(Drawing), 2, STEPS, 0).draw(0, 1, [0, 1], None).after
    assert after is not None
    state = read(torch.frombuffer(bytearray(after), dtype=torch.uint8))
    made = np.random.RandomState()
    made.set_state(state["random"])
    assert made.rand() == np.random.RandomState(state["at"]).rand()


def test_a_state_that_no_other_rank_could_load_is_refused_with_the_first_batch():
    feed = feed_of(Streams(Queueing), 2, STEPS, 0)
    with pytest.raises(UsageError, match=r"stream of slot 1 waiting cannot be read") as told:
        feed.draw(0, 1, [0, 1], None)
    said = str(told.value)
    assert "a collections.deque: keep tensors, numbers and words there" in said
    assert "\n" not in said and "\x1b" not in said and len(said) < 250


@pytest.mark.parametrize("before, now", [(2, None), (None, 2)])
def test_streams_with_and_without_epochs_do_not_go_on_from_each_other(before, now):
    def streams(epochs):
        if epochs is None:
            return Streams(lambda slot: indexed(slot, 0))
        return Streams(indexed, epochs=epochs)

    state = feed_of(streams(before), 1, 99, 0).draw(0, 0, [0], None).after
    had = "without" if before is None else "with"
    with pytest.raises(UsageError, match=f"slot 0 goes on from one {had} epochs"):
        feed_of(streams(now), 1, 99, 0).draw(1, 0, [0], state)
    assert not feed_of(streams(before), 1, 99, 0).draw(1, 0, [0], state).over
