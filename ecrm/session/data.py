"""Batches as a pure function of step and slot, from any indexable dataset."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sized
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ecrm.base.errors import UsageError
from ecrm.base.wording import counted
from ecrm.model.determinism import seed_slot, seeded_aside
from ecrm.session.feed import DrawnBatch, Feed, Source
from ecrm.session.other_data import check_indexable, no_batches
from ecrm.session.streams import Streams, StreamSource
from ecrm.session.whole_number import whole
from ecrm.session.workers import Worker


class Dataset(Protocol):
    """A map-style dataset, as in torch: `len(dataset)` samples, every sample always the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def _default_collate(samples: list[Any]) -> Any:
    from torch.utils.data import default_collate

    return default_collate(samples)


class Indexed:
    """The samples of a map-style dataset in batches, epoch after epoch.

    - `dataset`: the dataset, or a function that makes the dataset, called with the first batch.
      Ranks without slots, such as servers and spares, then make no dataset. An exception is a
      server with a copy of the dense part, if trainers are fewer than copies: the server computes a
      slot of the first step for a comparison, unless `check_determinism` is 0. Random numbers drawn
      by the function depend on `seed` alone, whenever a rank calls the function.
    - `batch_size`: samples of a batch; a batch is the part of a slot in a step.
    - `collate(samples)`: makes a batch of a list of samples; by default torch's default_collate.
    - `shuffle`: whether every epoch has a new order, drawn from (`seed`, epoch).
    - `epochs`: how often every sample is seen; by default without end.
    - `workers`: the number of processes per rank for making batches ahead, so that steps need not
      wait. By default the rank itself makes batches, between steps. The bits are the same. An
      evaluation has as many extra workers, from its first batch to its last.
    - `size`: the number of samples, needed with a function, and refused with a dataset.

    Samples form a single sequence: a batch may hold the last samples of an epoch and the first
    samples of the next, and every epoch has every sample once. So `drop_last` is not needed. No
    sampler can be given: have the dataset give samples in the order wanted, with shuffle=False. The
    last batch of the last epoch may be smaller, and later slots have no batch in the step.
    Gradients of a step are divided by the number of slots with a batch of any size.

    Workers are forked when a rank needs its first batch, with the dataset in its state at the time.
    A worker has a single thread, and dies with its rank. Open regular files have an own read
    position in every worker, except files open only for writing; a file that cannot be opened again
    is an error. An error of `collate` in a worker is raised on the rank, with the worker's
    traceback. Pickle must be able to write the batches. Not checked: that dataset and collate
    survive a fork; a connection does not.

    The order of an epoch takes 8 bytes a sample of memory. A process keeps up to three orders, and
    so does every worker. Raises UsageError for an empty dataset or batch, for fewer than 0 workers,
    and for fewer than 1 epoch. Also raises UsageError with the first batch, if the function makes
    a dataset of another size.
    """

    def __init__(
        self,
        dataset: Dataset | Callable[[], Dataset],
        batch_size: int,
        collate: Callable[[list[Any]], Any] = _default_collate,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        workers: int = 0,
        size: int | None = None,
    ) -> None:
        batch_size = whole(batch_size, "Indexed(batch_size", 1)
        workers, seed = whole(workers, "Indexed(workers", 0), operator.index(seed)
        if epochs is not None:
            epochs = whole(epochs, "Indexed(epochs", 1, ", or None for no end")
        self._make: Callable[[], Dataset] | None = None
        self._dataset: Dataset | None = None
        makes = isinstance(dataset, type) or not hasattr(dataset, "__getitem__")
        if callable(dataset) and makes:
            if size is None:
                raise UsageError(
                    "ecrm.Indexed(function): the number of samples is not known before the "
                    "function is called",
                    otherwise="give size=..., or the dataset itself",
                )
            self._make, self._size = dataset, whole(size, "Indexed(size", 1)
        else:
            check_indexable(dataset)
            if size is not None:
                raise UsageError(
                    "ecrm.Indexed(dataset, size=...): the dataset has a size of its own",
                    otherwise="leave size out, or give a function that makes the dataset",
                )
            self._dataset = cast("Dataset", dataset)
        self.batch_size, self._collate = batch_size, collate
        self._shuffle, self._seed = shuffle, seed
        self.epochs, self.workers = epochs, workers
        self._orders: dict[int, Tensor] = {}

    @property
    def dataset(self) -> Dataset:
        """The dataset; the first call makes a dataset given by a function.

        Raises UsageError for a made dataset of another size.
        """
        if self._dataset is None:
            assert self._make is not None
            with seeded_aside(self._seed):
                made = self._make()
            check_indexable(made)
            if len(made) != self._size:
                raise UsageError(
                    f"ecrm.Indexed(function, size={self._size}): the function has made a dataset "
                    f"of {counted(len(made), 'sample')}",
                    otherwise=f"give size={len(made)}",
                )
            self._dataset = made
        return self._dataset

    @property
    def _count(self) -> int:
        """The number of samples; makes no dataset."""
        return self._size if self._make is not None else len(self.dataset)

    def batch(self, step: int, slot: int, slots: int) -> Any:
        """The batch of a slot in a step of `slots` batches; `None` after the last epoch."""
        first = (step * slots + slot) * self.batch_size
        count = self.batch_size
        if self.epochs is not None:
            count = min(count, self.epochs * self._count - first)
        if count < 1:
            return None
        return self._collate(self._read(self.samples(first, count)))

    def slots_in(self, step: int, slots: int) -> range:
        """The slots with a batch in a step of `slots` batches."""
        if self.epochs is None:
            return range(slots)
        batches = -(-self.epochs * self._count // self.batch_size)
        return range(min(slots, max(0, batches - step * slots)))

    def samples(self, first: int, count: int) -> list[int]:
        """Numbers in the dataset of `count` samples, from place `first` of the sequence on."""
        size, found = self._count, []
        while count:
            epoch, place = divmod(first, size)
            here = min(count, size - place)
            found += self._order(epoch)[place : place + here].tolist()
            first, count = first + here, count - here
        return found

    def steps(self, epochs: float, slots: int) -> int:
        """The number of steps of `slots` batches for seeing every sample `epochs` times."""
        return -int(-epochs * self._count // (self.batch_size * slots))

    @property
    def whole_batches(self) -> int:
        """The number of batches for seeing every sample once, in order."""
        return -(-self._count // self.batch_size)

    def whole_batch(self, number: int) -> Any:
        """The batch `number` of `whole_batches`; the last batch may be smaller."""
        first = number * self.batch_size
        last = min(first + self.batch_size, self._count)
        return self._collate(self._read(list(range(first, last))))

    def _read(self, numbers: list[int]) -> Any:
        """Read samples, in a single call if the dataset has `__getitems__`, as torch's loader does.

        Samples with a length go to `collate` as they are. Raises UsageError if `__getitems__`
        returns a wrong number of samples.
        """
        read_many = getattr(self.dataset, "__getitems__", None)
        if not callable(read_many):
            return [self.dataset[number] for number in numbers]
        samples = read_many(numbers)
        if not isinstance(samples, Sized):
            samples = list(samples)
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
            return torch.arange(self._count)
        digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
        random = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randperm(self._count, generator=random)


Batches = Indexed | Streams | Callable[[int, int], Any]
"""The source of batches: `Indexed`, `Streams`, or a function of (step, slot)."""


class PureSource:
    """Batches depending on step and slot alone: `make(step, slot)`.

    `slots_in(step)` are the slots with a batch.
    """

    streams = False

    def __init__(
        self, make: Callable[[int, int], Any], slots_in: Callable[[int], range], seed: int
    ) -> None:
        self._make, self.slots_in, self._seed = make, slots_in, seed

    def draw(self, step: int, slot: int, before: bytes | None) -> DrawnBatch:
        """The batch of a slot in a step, made with random numbers seeded for step and slot."""
        if slot not in self.slots_in(step):
            return DrawnBatch(None, over=True)
        seed_slot(self._seed, step, -1 - slot)
        return DrawnBatch(self._make(step, slot))


def source_of(batches: Batches, slots: int, seed: int) -> Source:
    """The source of the batches of `slots` slots. Raises UsageError for unusable `batches`."""
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
    """The number of steps to train: at most `steps`.

    Raises UsageError for unusable `batches`, and without `steps` if `batches` has no end.
    """
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
    return whole(steps, _STEPS, -(2**63))  # the caller reports numbers below 1


def feed_of(batches: Batches, slots: int, steps: int, seed: int) -> Feed:
    """The feed of batches on this rank; workers are forked for the first batch."""
    source = source_of(batches, slots, seed)
    count = batches.workers if isinstance(batches, Indexed | Streams) else 0
    return Feed(source, lambda: started(source, count, batches), steps)


def started(source: Source, count: int, batches: object) -> list[Worker]:
    """Fork `count` workers now, drawing batches from `source`, made of `batches`.

    A dataset given by a function is made before, so that workers share the dataset's memory.
    """
    workers: list[Worker] = []
    if count and isinstance(batches, Indexed):
        batches.dataset  # noqa: B018
    for number in range(count):
        name = f"worker {number} of {count}"
        workers.append(Worker(lambda task: source.draw(*task), name, workers))
    return workers
