"""A session's tables: TorchRec's collections in a model turned into collections of ECRM."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
import torchrec
from torch import Tensor, nn
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule

from ecrm.base.errors import UsageError
from ecrm.placement.initial_values import Values
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import RowSpace, Table
from ecrm.tables.batch_rows import BatchRows
from ecrm.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from ecrm.tables.first_values import first_values, initial_of
from ecrm.tables.optimizers import optimizer_of, without_optimizer
from ecrm.tables.placeholder import stand_in
from ecrm.tables.row_source import RowSource

Collection = EmbeddingBagCollection | EmbeddingCollection

_OURS: Mapping[type, type] = {
    torchrec.EmbeddingBagCollection: EmbeddingBagCollection,
    torchrec.EmbeddingCollection: EmbeddingCollection,
}
_MANAGED = (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionCollection,
    ManagedCollisionModule,
)
LARGE_BYTES = 1 << 20
"""Size in bytes above which an embedding of torch's own is reported."""
FACTORS = (1e-6, 1e9)
"""The least and the most ids of a mean bag in `pooling_factors`."""
_FUSED = (FusedEmbeddingBagCollection, FusedEmbeddingCollection)


@dataclass(frozen=True)
class Tables:
    """The tables of a model in a session, and the collections looking up their rows.

    The name of a table is the name of its weight in the module's state_dict, without `.weight`.
    `values` are the initial values of some tables, float32 [rows, dim] by name. The other tables
    begin with `Table.initial`. Values filled with random numbers by a script may differ between
    ranks. `aliases` are {further name: name}: a table has several names in the state_dict if its
    collection is in the model twice. `untrained` maps tables without an optimizer to the paths of
    their collections in the model; no step changes their rows.
    """

    tables: tuple[Table, ...]
    values: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    collections: tuple[Collection, ...]
    source: RowSource
    untrained: Mapping[str, str]

    def check_optimizers(self) -> None:
        """Raise UsageError for a table without an optimizer."""
        for table, path in self.untrained.items():
            raise without_optimizer(table, path)

    def with_values(self) -> list[Table]:
        """The tables; a table with an entry in `values` begins with the entry."""
        return [
            replace(table, initial=Values(self.values[table.name]))
            if table.name in self.values
            else table
            for table in self.tables
        ]

    def with_lookups(
        self, tables: Sequence[Table], pooling_factors: Mapping[str, float]
    ) -> list[Table]:
        """The tables with their lookups: ids of a bag, times the features of the table.

        `pooling_factors` are the ids of a mean bag, 1 by default, by the table's name in TorchRec's
        config. Raises UsageError for other things than a dict, for a name of no table, and for a
        number outside of FACTORS.
        """
        if not isinstance(pooling_factors, Mapping):
            raise UsageError(
                f"Session(pooling_factors={pooling_factors!r}): give a dict, such as "
                "{'t_tags': 20}, by the names of TorchRec's configs"
            )
        names = [table.name.rpartition(".")[2] for table in tables]
        least, most = FACTORS
        for name, factor in pooling_factors.items():
            if name not in names:
                raise UsageError(
                    f"Session(pooling_factors=...) has {name}, and the tables are "
                    f"{', '.join(dict.fromkeys(names))}",
                    otherwise="type the name of a TorchRec config",
                )
            if not (isinstance(factor, int | float) and least <= factor <= most):
                raise UsageError(
                    f"Session(pooling_factors=...) has {factor!r} for {name}: give the mean number "
                    f"of ids in a bag, a number of Python from {least:g} to {most:g}"
                )
        return [
            replace(table, lookups=table.lookups * pooling_factors.get(name, 1))
            for table, name in zip(tables, names, strict=True)
        ]

    def lay_out(self, spaces: Sequence[RowSpace]) -> None:
        """Tell the collections the places of their tables; needed before `batch_rows`."""
        for number, collection in enumerate(self.collections):
            collection.lay_out(number, spaces)

    def batch_rows(self, kjts: Iterable[Any], spaces: int) -> BatchRows:
        """The rows asked for by a batch in `spaces` row spaces, as from `BatchRows.of`."""
        return BatchRows.of(kjts, [collection.layout for collection in self.collections], spaces)


@dataclass(frozen=True)
class _FoundTable:
    """A table of a collection: name, path, TorchRec's config, and the module with the weight."""

    name: str
    path: str
    config: Any
    holder: nn.Module

    @property
    def weight(self) -> nn.Parameter:
        weight = self.holder._parameters.get("weight")
        if weight is None:
            raise UsageError(
                f"table {self.name} has a weight that is computed from others",
                otherwise="leave torch.nn.utils.parametrize, weight_norm and pruning of it out",
            )
        return weight


def swap(module: nn.Module, seed: int = 0) -> Tables:
    """Turn every TorchRec EmbeddingBagCollection and EmbeddingCollection of a module into ECRM's.

    The collections stay the same objects and get another class. So the module may itself be a
    collection. The weights become placeholders (`TablePlaceholder`). `seed` is for tables
    whose `init_fn` has to see the whole table.

    Raises UsageError, before any change, for a module without tables and for tables unfit for a
    session.
    """
    _check_managed(module)
    collections = _collections_in(module)
    found = [table for path, collection in collections for table in _tables_of(path, collection)]
    first = {id(table.weight): table for table in reversed(found)}
    kept = [table for table in found if first[id(table.weight)] is table]
    _check_tied(module, first, {id(table.holder) for table in found})
    tables = tuple(_described(table) for table in kept)
    untrained = {
        table.name: table.path for table in kept if optimizer_of(table.name, table.weight) is None
    }
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
    replaced = {number: stand_in(table.weight, table.name) for number, table in first.items()}
    holders = {id(table.holder): (table.holder, id(table.weight)) for table in found}
    for holder, number in holders.values():
        holder.weight = replaced[number]
    return Tables(tables, values, aliases, tuple(ours.values()), source, untrained)


def _collections_in(module: nn.Module) -> list[tuple[str, Any]]:
    """Every collection with its path, in the order of the state_dict, once per path."""
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
        _check_collection(path, part)
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


def _check_tied(module: nn.Module, tables: Mapping[int, _FoundTable], holders: Set[int]) -> None:
    """Raise UsageError for the weight of a table, by its id, in a module of another kind."""
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if id(parameter) in tables and id(part) not in holders:
                raise UsageError(
                    f"parameter {path}.{name} is the weight of table {tables[id(parameter)].name}, "
                    "too, and a session keeps the rows of a table",
                    otherwise="give that layer a weight of its own, or look rows up through the "
                    "collection instead of the layer",
                )


def _check_collection(path: str, part: Any) -> None:
    """Raise UsageError for weighted bags with mean pooling, undefined in torch."""
    if isinstance(part, torchrec.EmbeddingBagCollection) and part.is_weighted():
        for config in part.embedding_bag_configs():
            if config.pooling == torchrec.PoolingType.MEAN:
                raise UsageError(
                    f"table {config.name} of {path or 'the model'} has weighted bags and "
                    "PoolingType.MEAN, which torch does not define",
                    otherwise="take PoolingType.SUM, and divide the weights of each bag by their "
                    "sum before",
                )


def _check_managed(module: nn.Module) -> None:
    """Raise UsageError for TorchRec modules changing ids between a batch and its tables."""
    for path, part in module.named_modules():
        if isinstance(part, _MANAGED):
            raise UsageError(
                f"{path or 'the model'} is a {type(part).__name__}, which gives ids other numbers "
                "after a session has fetched their rows, and keeps a state of its own",
                otherwise="hash ids to the size of their table where batches are made, and take "
                "a torchrec.EmbeddingBagCollection or EmbeddingCollection",
            )


def _tables_of(path: str, collection: Any) -> list[_FoundTable]:
    bags = isinstance(collection, torchrec.EmbeddingBagCollection)
    holders = "embedding_bags" if bags else "embeddings"
    configs = collection.embedding_bag_configs() if bags else collection.embedding_configs()
    return [
        _FoundTable(
            ".".join(part for part in (path, holders, config.name) if part),
            path,
            config,
            getattr(collection, holders)[config.name],
        )
        for config in configs
    ]


def _described(found: _FoundTable) -> Table:
    config = found.config
    if not (config.num_embeddings > 0 and config.embedding_dim > 0):
        raise UsageError(
            f"table {found.name} has {config.num_embeddings} rows of {config.embedding_dim} floats",
            otherwise="give it 1 row of 1 float at least",
        )
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
        operator.index(config.num_embeddings),  # also takes a number of numpy or torch
        operator.index(config.embedding_dim),
        optimizer_of(found.name, found.weight) or SparseOptimizer("sgd", 0.0),
        initial_of(config),
        lookups=float(len(config.feature_names)),
    )


def large_embeddings(module: nn.Module) -> list[str]:
    """A line for each large embedding of torch's own outside the session's tables."""
    lines = []
    for path, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or part.weight.is_meta:
            continue
        if (size := part.weight.nbytes) > LARGE_BYTES:
            kind = (
                "EmbeddingBagCollection"
                if isinstance(part, nn.EmbeddingBag)
                else ("EmbeddingCollection")
            )
            lines.append(
                f"! {path} is a torch.nn.{type(part).__name__} of {size / 1e6:,.1f} MB: it is "
                "replicated on each rank with slots, not sharded, and each step sends its whole "
                f"gradient: use a torchrec.{kind}"
            )
    return lines
