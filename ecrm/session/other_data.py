"""Advice on replacing data not usable by a session, such as torch's DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from ecrm.base.errors import UsageError

_MADE = (
    "where make(slot) gives a stream that keeps its place, such as torchdata's StatefulDataLoader"
)


def check_indexable(dataset: Any) -> None:
    """Raise UsageError unless the dataset has a length, samples by number, and a sample."""
    name = f"ecrm.Indexed({type(dataset).__name__})"
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"{name}: give it the dataset of the DataLoader, as in {_in_place_of(dataset)}"
            f"{_left_out(dataset)}"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{name}: its samples cannot be asked for by number",
            otherwise=f"give ecrm.Streams(make), {_MADE}",
        )
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError):
        raise UsageError(
            f"{name}: nobody knows how many samples it has", otherwise="give it a __len__"
        ) from None
    if not size:
        raise UsageError(f"{name}: the dataset is empty, at least 1 sample is needed")


def no_batches(data: Any, method: str) -> UsageError:
    """The error for unusable `data` given to a `method` of the session, with a usable kind."""
    name = f"session.{method}({type(data).__name__})"
    trains = method == "steps"
    if isinstance(data, DataLoader):
        streams = trains and isinstance(data.dataset, IterableDataset)
        call = f"session.{method}({_in_place_of(data, trains)}{', steps' if trains else ''})"
        return UsageError(
            f"{name}: no rank could take over its place in the data",
            otherwise=f"type {call}{', ' + _MADE if streams else ''}"
            f"{_left_out(data) if trains else ''}",
        )
    ways = (
        ", ecrm.Streams(make) or a function of (step, slot) that returns a batch"
        if trains
        else " or a list of batches"
    )
    return UsageError(name, otherwise=f"give ecrm.Indexed(dataset, batch_size, ...){ways}")


def _in_place_of(loader: DataLoader[Any], trains: bool = True) -> str:
    """The code to write in place of a DataLoader."""
    if isinstance(loader.dataset, IterableDataset):
        return "ecrm.Streams(make)" if trains else "list(loader)"
    if not trains and _own_order(loader):
        return "list(loader)"
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)
    parts = ["dataset", f"batch_size={size}"]
    if loader.collate_fn is not default_collate:
        name = getattr(loader.collate_fn, "__name__", "")
        name = name if name.isidentifier() else "collate_fn"
        single = loader.batch_sampler is None  # without batching
        parts.append(f"collate={f'lambda samples: {name}(samples[0])' if single else name}")
    parts += ["shuffle=False"] if trains and _in_order(loader) else []
    parts += [f"workers={loader.num_workers}"] if loader.num_workers else []
    return f"ecrm.Indexed({', '.join(parts)})"


def _left_out(loader: DataLoader[Any]) -> str:
    """Advice on the parts of a DataLoader missing in Indexed."""
    if isinstance(loader.dataset, IterableDataset):
        return ""
    said = ""
    if isinstance(_sampler(loader), DistributedSampler):
        said += "; leave out DistributedSampler, for slots share the samples"
    if own := _own_order(loader):
        said += (
            f"; the order of {own} is not kept: put it into the dataset and type shuffle=False, "
            "or give a function of (step, slot) that returns a batch"
        )
    if getattr(loader.batch_sampler, "drop_last", False):
        said += "; leave out drop_last, for a batch goes on with samples of the next epoch"
    return said


def _own_order(loader: DataLoader[Any]) -> str:
    """The class giving a DataLoader an order not known to Indexed; "" for a known order."""
    batches, samples = loader.batch_sampler, _sampler(loader)
    if batches is not None and not isinstance(batches, BatchSampler):
        return type(batches).__name__
    shuffled = (
        isinstance(samples, RandomSampler)
        and not samples.replacement
        and samples.num_samples == len(samples.data_source)
    )
    usual = shuffled or isinstance(samples, (SequentialSampler, DistributedSampler))
    return "" if usual else type(samples).__name__


def _in_order(loader: DataLoader[Any]) -> bool:
    """Whether every sample comes once, in the order of the dataset."""
    samples = _sampler(loader)
    distributed = isinstance(samples, DistributedSampler) and not samples.shuffle
    in_order = distributed or isinstance(samples, SequentialSampler)
    return in_order and not _own_order(loader)


def _sampler(loader: DataLoader[Any]) -> Any:
    """The sampler deciding the order of samples."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)
