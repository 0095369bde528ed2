"""What to write instead of data that a session cannot use, such as torch's DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate

from ecrm.errors import UsageError

_MADE = (
    "where make(slot) gives a stream that keeps its place, such as torchdata's StatefulDataLoader"
)


def check_indexable(dataset: Any) -> None:
    """Raise UsageError unless samples can be asked for by number, and there are some."""
    name = f"ecrm.Indexed({type(dataset).__name__})"
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"{name}: give it the dataset of the DataLoader, as in {_in_place_of(dataset)}"
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
    """Why `data` cannot be given to a `method` of the session, and what can."""
    name = f"session.{method}({type(data).__name__})"
    trains = method == "steps"
    if isinstance(data, DataLoader):
        streams = trains and isinstance(data.dataset, IterableDataset)
        call = f"session.{method}({_in_place_of(data, trains)}{', steps' if trains else ''})"
        return UsageError(
            f"{name}: no rank could take over its place in the data",
            otherwise=f"type {call}{', ' + _MADE if streams else ''}",
        )
    ways = (
        ", ecrm.Streams(make) or a function of (step, slot) that returns a batch"
        if trains
        else " or a list of batches"
    )
    return UsageError(name, otherwise=f"give ecrm.Indexed(dataset, batch_size, ...){ways}")


def _in_place_of(loader: DataLoader[Any], trains: bool = True) -> str:
    """What to write in place of a DataLoader."""
    if isinstance(loader.dataset, IterableDataset):
        return "ecrm.Streams(make)" if trains else "list(loader)"
    parts = ["dataset", f"batch_size={loader.batch_size or 1}"]
    if loader.collate_fn is not default_collate:
        name = getattr(loader.collate_fn, "__name__", "")
        parts.append(f"collate={name if name.isidentifier() else 'collate_fn'}")
    parts += ["shuffle=False"] if isinstance(loader.sampler, SequentialSampler) and trains else []
    parts += [f"workers={loader.num_workers}"] if loader.num_workers else []
    return f"ecrm.Indexed({', '.join(parts)})"
