"""Batches that are a pure function of step and slot, from any dataset that can be indexed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ecrm.errors import UsageError


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

    Samples follow each other without end: a batch may hold the last ones of an epoch and the first
    ones of the next, and every epoch has each sample once. The order of an epoch takes 8 bytes a
    sample of memory. Raises UsageError for an empty dataset or batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        collate: Callable[[list[Any]], Any] = _default_collate,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"Indexed(batch_size={batch_size}): at least 1 is needed")
        if not len(dataset):
            raise UsageError("Indexed: the dataset is empty, at least 1 sample is needed")
        self.dataset, self.batch_size, self._collate = dataset, batch_size, collate
        self._shuffle, self._seed = shuffle, seed
        self._orders: dict[int, Tensor] = {}

    def batch(self, step: int, slot: int, slots: int) -> Any:
        """The batch of a slot in a step of `slots` batches."""
        first = (step * slots + slot) * self.batch_size
        return self._collate([self.dataset[i] for i in self.samples(first, self.batch_size)])

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
        return self._collate([self.dataset[i] for i in range(first, last)])

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


Batches = Indexed | Callable[[int, int], Any]
"""Where batches come from: `Indexed`, or a function of (step, slot)."""


def maker(batches: Batches, slots: int) -> Callable[[int, int], Any]:
    """(step, slot) -> the batch of that slot in that step. Raises UsageError for anything else."""
    if isinstance(batches, Indexed):
        return lambda step, slot: batches.batch(step, slot, slots)
    if callable(batches):
        return batches
    raise UsageError(
        f"session.steps({type(batches).__name__}, ...): give ecrm.Indexed(dataset, ...) or a "
        "function of (step, slot) that returns a batch"
    )
