"""A session's tables: TorchRec's collections in a model made ours, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torchrec
from torch import Tensor, nn
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from ecrm.errors import UsageError
from ecrm.placement.initial_values import Values
from ecrm.placement.tables import RowSpace, Table
from ecrm.session.batch_rows import BatchRows
from ecrm.session.collections import EmbeddingBagCollection, EmbeddingCollection
from ecrm.session.first_values import first_values, initial_of
from ecrm.session.row_source import RowSource
from ecrm.session.table_optimizers import optimizer_of
from ecrm.session.table_stand_in import stand_in

Collection = EmbeddingBagCollection | EmbeddingCollection

_OURS: Mapping[type, type] = {
    torchrec.EmbeddingBagCollection: EmbeddingBagCollection,
    torchrec.EmbeddingCollection: EmbeddingCollection,
}
_FUSED = (FusedEmbeddingBagCollection, FusedEmbeddingCollection)


@dataclass(frozen=True)
class Tables:
    """The tables of a model in a session, and the collections that look up their rows.

    The name of a table is that of its weight in the module's state_dict, without `.weight`.
    `values` are what some tables begin with, float32 [rows, dim] by name. The others begin as
    `Table.initial` says. Where a script filled a table with random numbers, every rank may have
    others. `aliases` are {further name: name}: a table has several names in the state_dict if its
    collection is in the model twice.
    """

    tables: tuple[Table, ...]
    values: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    collections: tuple[Collection, ...]
    source: RowSource

    def with_values(self) -> list[Table]:
        """The tables, those that have values beginning with them."""
        return [
            replace(table, initial=Values(self.values[table.name]))
            if table.name in self.values
            else table
            for table in self.tables
        ]

    def lay_out(self, spaces: Sequence[RowSpace]) -> None:
        """Tell the collections where their tables are; needed before `batch_rows`."""
        for number, collection in enumerate(self.collections):
            collection.lay_out(number, spaces)

    def batch_rows(self, kjts: Iterable[Any], spaces: int) -> BatchRows:
        """The rows that a batch asks for in `spaces` row spaces, as `BatchRows.of` has them."""
        return BatchRows.of(kjts, [collection.layout for collection in self.collections], spaces)


@dataclass(frozen=True)
class _Found:
    """A table of a collection: its name, TorchRec's config, and the module with its weight."""

    name: str
    path: str
    config: Any
    holder: nn.Module

    @property
    def weight(self) -> nn.Parameter:
        weight = self.holder.weight
        assert isinstance(weight, nn.Parameter)
        return weight


def swap(module: nn.Module, seed: int = 0) -> Tables:
    """Make every EmbeddingBagCollection and EmbeddingCollection of TorchRec in a module ours.

    They stay the same objects, whatever holds them, and get another class. So the module may be one
    itself. Their weights become stand-ins (`TableStandIn`). `seed` is for tables whose
    `init_fn` has to see the whole table.

    Raises UsageError, before anything is changed, for a module without tables and for tables that a
    session cannot keep.
    """
    collections = _collections_in(module)
    found = [table for path, collection in collections for table in _tables_of(path, collection)]
    first = {id(table.weight): table for table in reversed(found)}
    kept = [table for table in found if first[id(table.weight)] is table]
    tables = tuple(_described(table) for table in kept)
    values = first_values({table.name: (table.config, table.weight) for table in kept}, seed)
    aliases = {
        table.name: first[id(table.weight)].name
        for table in found
        if table.name != first[id(table.weight)].name
    }

    source, ours = RowSource(), {id(collection): collection for _, collection in collections}
    for collection in ours.values():
        names = [first[id(table.weight)].name for table in _tables_of("", collection)]
        collection.__class__ = _OURS.get(type(collection), type(collection))
        collection.take_rows_from(source, names)
        collection._device = torch.device("cpu")
    replaced = {number: stand_in(table.weight) for number, table in first.items()}
    holders = {id(table.holder): (table.holder, id(table.weight)) for table in found}
    for holder, number in holders.values():
        holder.weight = replaced[number]
    return Tables(tables, values, aliases, tuple(ours.values()), source)


def _collections_in(module: nn.Module) -> list[tuple[str, Any]]:
    """Every collection with its path, in the order of the state_dict, once for each path."""
    found = []
    for path, part in module.named_modules(remove_duplicate=False):
        if not isinstance(part, (*_OURS, *_FUSED)):
            continue
        where, kind = path or "the model", type(part)
        if not (kind in _OURS or isinstance(part, Collection)):
            raise UsageError(
                f"{where} is a {kind.__module__}.{kind.__name__}",
                otherwise="build it as a torchrec.EmbeddingBagCollection or EmbeddingCollection, "
                "or derive your class from ecrm.EmbeddingBagCollection or ecrm.EmbeddingCollection",
            )
        if getattr(part, "_source", None) is not None:
            raise UsageError(
                f"{where} is in a session already",
                otherwise="build the model anew for another session",
            )
        found.append((path, part))
    if not found:
        raise UsageError(
            "the model has no EmbeddingBagCollection and no EmbeddingCollection",
            otherwise="give the session a model whose tables are in torchrec's collections",
        )
    return found


def _tables_of(path: str, collection: Any) -> list[_Found]:
    bags = isinstance(collection, torchrec.EmbeddingBagCollection)
    holders = "embedding_bags" if bags else "embeddings"
    configs = collection.embedding_bag_configs() if bags else collection.embedding_configs()
    return [
        _Found(
            ".".join(part for part in (path, holders, config.name) if part),
            path,
            config,
            getattr(collection, holders)[config.name],
        )
        for config in configs
    ]


def _described(found: _Found) -> Table:
    config = found.config
    if found.weight.dtype != torch.float32:
        raise UsageError(
            f"table {found.name} has rows of {found.weight.dtype}",
            otherwise="set its data_type to DataType.FP32",
        )
    if config.use_virtual_table:
        raise UsageError(
            f"table {found.name} has use_virtual_table=True",
            otherwise="leave use_virtual_table out",
        )
    return Table(
        found.name,
        config.num_embeddings,
        config.embedding_dim,
        optimizer_of(found.name, found.path, found.weight),
        initial_of(config),
    )
