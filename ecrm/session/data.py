"""Batches that are a pure function of step and slot, from any dataset that can be indexed."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ecrm.errors import UsageError
from ecrm.model.determinism import seed_slot
from ecrm.session.feed import Drawn, Feed, Source
from ecrm.session.other_data import check_indexable, no_batches
from ecrm.session.streams import Streams, StreamSource
from ecrm.session.whole_number import whole
from ecrm.session.workers import Worker


class Dataset(Protocol):
    """A map-style dataset, as torch's: `len(dataset)` samples, each the same whenever asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def _default_collate(samples: list[Any]) -> Any:
    from torch.utils.data import default_collate

    return default_collate(samples)


class Indexed:
    """The samples of a map-style dataset in batches, epoch after epoch.

    - `batch_size`: samples of a batch, which is one slot's part of a step.
    - `collate(samples)`: makes a batch of a list of samples; by default torch's default_collate.
    - `shuffle`: whether each epoch has an order of its own, drawn from (`seed`, epoch).
    - `epochs`: how often each sample is seen; by default without end.
    - `workers`: how many processes of each rank make its batches ahead, so that steps need not wait
      for them. By default they are made in the rank itself, between steps. The bits are the same.
      An evaluation has as many of its own, from its first batch to its last.

    Samples follow each other: a batch may hold the last ones of an epoch and the first ones of the
    next, and every epoch has each sample once. So there is no `drop_last`. There is no sampler
    either: have the dataset give its samples in the order that is wanted, with shuffle=False. After
    the last of `epochs` the last batch may be smaller, and slots after it have none in that step.
    Gradients of a step are divided by the number of slots that have a batch, whatever its size.

    Workers are forked when a rank needs its first batch, with the dataset as it is then. They have
    one thread each, and die with their rank. Files that are open, but for those that can only be
    written, have places of their own in each; one that cannot be opened once more is an error.
    What `collate` raises in one is raised here, with the traceback from there. What they return
    must be what pickle can write. Not checked: that dataset and collate stand a fork, which a
    connection does not.

    The order of an epoch takes 8 bytes a sample of memory. A process keeps up to three such
    orders, and so does each of its workers. Raises UsageError for an empty dataset
    or batch, and for fewer than 0 workers or 1 epoch.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        collate: Callable[[list[Any]], Any] = _default_collate,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        workers: int = 0,
    ) -> None:
        batch_size = whole(batch_size, "Indexed(batch_size", 1)
        workers, seed = whole(workers, "Indexed(workers", 0), operator.index(seed)
        if epochs is not None:
            epochs = whole(epochs, "Indexed(epochs", 1, ", or None for no end")
        check_indexable(dataset)
        self.dataset, self.batch_size, self._collate = dataset, batch_size, collate
        self._shuffle, self._seed = shuffle, seed
        self.epochs, self.workers = epochs, workers
        self._orders: dict[int, Tensor] = {}

    def batch(self, step: int, slot: int, slots: int) -> Any:
        """The batch of a slot in a step of `slots` batches; None after the last epoch."""
        first = (step * slots + slot) * self.batch_size
        count = self.batch_size
        if self.epochs is not None:
            count = min(count, self.epochs * len(self.dataset) - first)
        if count < 1:
            return None
        return self._collate(self._read(self.samples(first, count)))

    def slots_in(self, step: int, slots: int) -> range:
        """The slots that have a batch in a step of `slots` batches."""
        if self.epochs is None:
            return range(slots)
        batches = -(-self.epochs * len(self.dataset) // self.batch_size)
        return range(min(slots, max(0, batches - step * slots)))

    def samples(self, first: int, count: int) -> list[int]:
        """Which samples of the dataset are number `first` and the following, `count` of them."""
        size, found = len(self.dataset), []
        while count:
            epoch, place = divmod(first, size)
            here = min(count, size - place)
            found += self._order(epoch)[place : place + here].tolist()
            first, count = first + here, count - here
        return found

    def steps(self, epochs: float, slots: int) -> int:
        """How many steps of `slots` batches it takes to see every sample `epochs` times."""
        return -int(-epochs * len(self.dataset) // (self.batch_size * slots))

    @property
    def whole_batches(self) -> int:
        """How many batches it takes to see each sample once, and in order."""
        return -(-len(self.dataset) // self.batch_size)

    def whole_batch(self, number: int) -> Any:
        """One of `whole_batches`; the last one may be smaller."""
        first = number * self.batch_size
        last = min(first + self.batch_size, len(self.dataset))
        return self._collate(self._read(list(range(first, last))))

    def _read(self, numbers: list[int]) -> list[Any]:
        """Samples of the dataset, in one call where it has `__getitems__`, as torch's loader does.

        Raises UsageError where that call gives another number of samples.
        """
        read_many = getattr(self.dataset, "__getitems__", None)
        if not callable(read_many):
            return [self.dataset[number] for number in numbers]
        samples = list(read_many(numbers))
        if len(samples) != len(numbers):
            raise UsageError(
                f"ecrm.Indexed({type(self.dataset).__name__}): its __getitems__ gave "
                f"{len(samples)} samples for {len(numbers)} numbers",
                otherwise="return a list with one sample for each number, in their order",
            )
        return samples

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            kept = {known: order for known, order in self._orders.items() if abs(known - epoch) < 2}
            self._orders = {**kept, epoch: self._drawn(epoch)}
        return self._orders[epoch]

    def _drawn(self, epoch: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(len(self.dataset))
        digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
        random = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randperm(len(self.dataset), generator=random)


Batches = Indexed | Streams | Callable[[int, int], Any]
"""Where batches come from: `Indexed`, `Streams`, or a function of (step, slot)."""


class PureSource:
    """Batches that depend on step and slot alone: `make(step, slot)`.

    `slots_in(step)` are the slots that have one.
    """

    streams = False

    def __init__(
        self, make: Callable[[int, int], Any], slots_in: Callable[[int], range], seed: int
    ) -> None:
        self._make, self.slots_in, self._seed = make, slots_in, seed

    def draw(self, step: int, slot: int, before: bytes | None) -> Drawn:
        """The batch of a slot in a step, made with random numbers of its own."""
        if slot not in self.slots_in(step):
            return Drawn(None, over=True)
        seed_slot(self._seed, step, -1 - slot)
        return Drawn(self._make(step, slot))


def source_of(batches: Batches, slots: int, seed: int) -> Source:
    """Where the batches of `slots` slots are made. Raises UsageError for anything else."""
    if isinstance(batches, Streams):
        return StreamSource(batches, slots, seed)
    if isinstance(batches, Indexed):
        return PureSource(
            lambda step, slot: batches.batch(step, slot, slots),
            lambda step: batches.slots_in(step, slots),
            seed,
        )
    if callable(batches):
        return PureSource(batches, lambda step: range(slots), seed)
    raise no_batches(batches, "steps")


_STEPS = "session.steps(batches, steps"


def steps_of(batches: Batches, slots: int, steps: int | None) -> int:
    """How many steps are trained: at most `steps`. Raises UsageError where nobody has said."""
    if not isinstance(batches, Indexed | Streams) and not callable(batches):
        raise no_batches(batches, "steps")
    if isinstance(batches, Indexed) and batches.epochs is not None:
        there = batches.steps(batches.epochs, slots)
        return there if steps is None else min(whole(steps, _STEPS, 1), there)
    if steps is None:
        raise UsageError(
            "session.steps(batches) does not say how many steps to train",
            otherwise="type session.steps(batches, 10_000), or give ecrm.Indexed its epochs",
        )
    return whole(steps, _STEPS, -(2**63))  # what is below 1 is told by the caller


def feed_of(batches: Batches, slots: int, steps: int, seed: int) -> Feed:
    """What batches come from on this rank; its workers are forked for the first one."""
    source = source_of(batches, slots, seed)
    count = batches.workers if isinstance(batches, Indexed | Streams) else 0
    return Feed(source, lambda: started(source, count), steps)


def started(source: Source, count: int) -> list[Worker]:
    """So many workers that draw from a source, forked now."""
    workers: list[Worker] = []
    for number in range(count):
        name = f"worker {number} of {count}"
        workers.append(Worker(lambda task: source.draw(*task), name, workers))
    return workers
