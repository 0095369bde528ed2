"""EmbeddingBagCollection and EmbeddingCollection, put by a session in place of TorchRec's.

Legend: B samples, U fetched rows of one row space, D floats of a row, n ids looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
import torchrec
from torch import Tensor, nn
from torchrec.modules.embedding_configs import pooling_type_to_str
from torchrec.modules.embedding_modules import process_pooled_embeddings, reorder_inverse_indices
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ecrm.base.errors import UsageError
from ecrm.device.copies import on_device
from ecrm.kernels.unit_order import Uses
from ecrm.model.replica_refusals import FREEZE_ROWS
from ecrm.ops import Memory
from ecrm.placement.tables import RowSpace
from ecrm.tables.batch_rows import on_cpu
from ecrm.tables.layout import Entry, Layout, check_ids
from ecrm.tables.placeholder import check_loads, check_stays
from ecrm.tables.pooling import pool, reads_in_place, spread
from ecrm.tables.row_source import FetchedRows, RowSource


class LookedUp(NamedTuple):
    """A group of outputs, the places of its ids, [n], and the rows fetched for the slot."""

    entries: tuple[Entry, ...]
    pooling: str
    space: int
    places: Tensor
    uses: Uses | None
    fetched: FetchedRows

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.fetched.leaves[self.space].device

    @property
    def memory(self) -> Memory:
        """Memory for the gradients of the rows."""
        return partial(self.fetched.take_memory, self.space)

    def rows(self) -> Tensor:
        """The rows for a use of the rows themselves, float32 [U, D].

        Raises UsageError, with advice, for rows summed on their servers.
        """
        self._check_came()
        self.fetched.look(self.space)
        return self.fetched.filled(self.space)

    def _check_came(self) -> None:
        found = self.fetched.found.get(self.space)
        if found is not None and found.summed:
            raise UsageError(
                f"bags of table {self.entries[0].table}, or of tables like it, were summed on "
                "their servers, and the model has another use for the rows",
                {"cluster.placement": "rows"},
                otherwise="look up the ids of the batch as they came, in one collection",
            )

    def pooled(self, lengths: Tensor, weights: Tensor | None, features: int) -> Tensor:
        """The bags of the rows, as by `pool`."""
        fetched, found = self.fetched, None
        fetched.look(self.space)
        if self.uses is None or self.pooling != "sum" or weights is not None:
            self._check_came()
        rows = fetched.leaves[self.space]
        if reads_in_place(rows, self.pooling, weights):
            found = fetched.found.get(self.space)
        else:
            rows = fetched.filled(self.space)
        return pool(
            rows,
            self.places,
            lengths,
            self.pooling,
            weights,
            features,
            self.memory,
            self.uses,
            partial(fetched.leave, self.space),
            found,
            fetched.rounded_to,
        )


class _Rows:
    """The shared part of the two collections: a source of rows, in a session.

    In a session the weights are parameters on the meta device, with the same names in the
    state_dict. Among the bases this class comes after TorchRec's class, so that Python can turn an
    object of TorchRec's class into an object of ours.
    """

    _source: RowSource | None = None
    _table_names: tuple[str, ...] = ()
    _trained: Sequence[tuple[str, nn.Parameter, bool]] = ()
    _layout: Layout | None = None

    def take_rows_from(self, source: RowSource, table_names: Sequence[str]) -> None:
        """Look up the rows of `source` from now on.

        `table_names` are the names of the collection's tables in the row spaces.
        """
        self._source, self._table_names, self._layout = source, tuple(table_names), None

    @property
    def layout(self) -> Layout:
        """The place of the outputs in the row spaces, as found by `lay_out`."""
        assert self._layout is not None
        return self._layout

    def lay_out(self, number: int, spaces: Sequence[RowSpace]) -> Layout:
        """Find the collection's tables in the row spaces. `number` is unique to the collection."""
        named = self.named_parameters()  # type: ignore[attr-defined]
        self._trained = [(name, weight, weight.requires_grad) for name, weight in named]
        names = dict(zip((config.name for config in self.configs()), self._table_names))
        entries = [(names[entry.table], entry) for entry in self.entries()]
        self._layout = Layout.of(number, entries, spaces, self._weighted())
        return self._layout

    def _check_stays(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Raise UsageError if `convert` would change the device or dtype of rows of a session."""
        check_stays(convert, torch.zeros(1, device=self.device))  # type: ignore[attr-defined]

    def _check_loads(self, state: Mapping[str, Any], prefix: str) -> None:
        """Raise UsageError if a state_dict has values for rows kept by a session."""
        names = [name for name, _ in self.named_parameters()]  # type: ignore[attr-defined]
        for table, name in zip(self._table_names, names):
            check_loads(table, state, prefix + name)

    def configs(self) -> Sequence[Any]:
        """TorchRec's configs of the tables."""
        raise NotImplementedError

    def entries(self) -> list[Entry]:
        """One entry per feature of each table, in the order of the output."""
        uses = [(config, feature) for config in self.configs() for feature in config.feature_names]
        return [
            Entry(number, feature, config.name, config.num_embeddings, self._pooling(config))
            for number, (config, feature) in enumerate(uses)
        ]

    def _pooling(self, config: Any) -> str:
        return ""

    def _weighted(self) -> bool:
        return False

    def _check_own(self, what: str) -> None:
        """Raise UsageError if a session keeps the rows: the rows are not in this process then."""
        if self._source is not None:
            raise UsageError(
                f"{what} of the collection with table {self.configs()[0].name}, whose rows a "
                "session keeps",
                otherwise="call it before the session is made, or give the table an init_fn",
            )

    def _fetched(self) -> FetchedRows:
        """The rows fetched for the running slot. Raises UsageError outside of a slot."""
        fetched = self._source.current if self._source is not None else None
        if fetched is None:
            raise UsageError(
                f"rows of table {self.configs()[0].name} are looked up, and no step fetched any",
                otherwise="call the model inside session.steps or session.eval_batches",
            )
        return fetched

    def _is_without_samples(self, kjt: KeyedJaggedTensor) -> bool:
        """Whether a batch has all features of the collection, but no sample."""
        features = {entry.feature for group in self.layout.groups for entry in group.entries}
        return not kjt.lengths().numel() and bool(features) and features <= set(kjt.keys())

    def _leaf(self) -> Tensor:
        """Fetched rows, used for device and dtype only: a batch without samples looks up no row."""
        return self._fetched().leaves[self.layout.groups[0].space].detach()

    def _looked_up(
        self, features: object, jagged: Callable[[], dict[str, JaggedTensor]]
    ) -> list[LookedUp]:
        """The parts of `LookedUp`, group by group.

        Raises UsageError for a table frozen or unfrozen after the session was made.
        """
        with torch._C.DisableTorchFunctionSubclass():  # asking a stand-in takes 20 us
            changed = [of for of in self._trained if of[1].requires_grad != of[2]]
        for name, _, trained in changed:
            was = "frozen" if trained else "unfrozen"
            raise UsageError(f"{name} was {was} after the session was made", otherwise=FREEZE_ROWS)
        fetched = self._fetched()
        places = fetched.batch.places(features, jagged, self.layout)
        return [
            LookedUp(
                group.entries,
                group.pooling,
                group.space,
                found.places,
                found.uses,
                fetched,
            )
            for group, found in zip(self.layout.groups, places)
        ]


class EmbeddingBagCollection(torchrec.EmbeddingBagCollection, _Rows):  # type: ignore[misc]
    """TorchRec's EmbeddingBagCollection, with rows kept by a session.

    Without a session, constructor, weights in this process, names and outputs are TorchRec's. In a
    session the collection pools rows fetched for the batch, with a single operation per row space
    and pooling. Gradients of the rows are summed in a fixed order.

    Raises StrayId for an id outside of its table. StrayId is a DataError and an IndexError; the
    message names feature, sample, id and table. All remaining errors are TorchRec's.
    """

    def configs(self) -> Sequence[Any]:
        """TorchRec's configs of the tables."""
        return list(self.embedding_bag_configs())

    def _pooling(self, config: Any) -> str:
        return str(pooling_type_to_str(config.pooling))

    def _weighted(self) -> bool:
        return bool(self.is_weighted())

    def reset_parameters(self) -> None:
        """Draw all rows anew, according to the configs of the tables.

        Raises UsageError in a session: a session begins with such rows anyway.
        """
        self._check_own("reset_parameters()")
        super().reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the weights, as `to` does; in a session only check `fn`."""
        if self._source is None:
            super()._apply(fn, recurse)
        else:
            self._check_stays(fn)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self._source is not None:
            self._check_loads(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled rows, float32 [B, sum of D], of a KeyedJaggedTensor or a TensorDict."""
        kjt = maybe_td_to_kjt(features, None)
        if self._source is None:
            check_ids(self.entries(), kjt.to_dict())
            return super().forward(kjt)
        kjt = on_cpu(kjt)
        if self._is_without_samples(kjt):
            values = self._leaf().new_zeros(0, sum(self._lengths_per_embedding))
            return self._pooled(values)
        inverse = reorder_inverse_indices(
            kjt.inverse_indices_or_none(), list(chain.from_iterable(self._feature_names))
        )
        looked_up = self._looked_up(features, kjt.to_dict)
        if inverse.numel() == 0 and self._in_one_piece(looked_up, kjt):
            values = self._bags(looked_up[0], kjt, len(looked_up[0].entries))
        else:
            jagged = kjt.to_dict()
            pooled = [torch.empty(0)] * len(self._embedding_names)
            device = torch.device("cpu")
            for group in looked_up:
                device = group.device
                bags = self._bags(group, kjt)
                counts = [jagged[entry.feature].lengths().numel() for entry in group.entries]
                for entry, part in zip(group.entries, bags.split(counts)):
                    pooled[entry.number] = part
            values = process_pooled_embeddings(pooled, on_device(device, inverse))
        return self._pooled(values)

    def rows_of_single_ids(
        self, features: KeyedJaggedTensor
    ) -> tuple[Tensor, Tensor, Memory] | None:
        """Fetched rows, their places, and the memory for their gradients.

        Rows are float32 [U, D], places int64 [B * F], sample after sample.

        Returns `None` without a session or samples, if a bag has no id or several, if bags have
        weights or inverse indices, if bags are rounded, or if the rows of the tables are not
        fetched together.
        """
        kjt = on_cpu(maybe_td_to_kjt(features, None))
        if self._source is None or self.is_weighted() or self._is_without_samples(kjt):
            return None
        if kjt.inverse_indices_or_none() is not None or not self._has_single_ids(kjt):
            return None
        looked_up = self._looked_up(features, kjt.to_dict)
        rounded = self._fetched().rounded_to != torch.float32
        if rounded or not self._in_one_piece(looked_up, kjt):
            return None
        (group,) = looked_up
        by_sample = group.places.view(len(group.entries), -1).t().reshape(-1)
        return group.rows(), on_device(group.device, by_sample), group.memory

    def _has_single_ids(self, kjt: KeyedJaggedTensor) -> bool:
        """Whether every bag looked up by the collection has a single id."""
        if bool((kjt.lengths() == 1).all()):
            return True
        jagged = kjt.to_dict()
        lengths = [jagged[entry.feature].lengths() for entry in self.entries()]
        return all(bool((each == 1).all()) for each in lengths)

    def _pooled(self, values: Tensor) -> KeyedTensor:
        return KeyedTensor(
            keys=self._embedding_names,
            length_per_key=self._lengths_per_embedding,
            values=values,
        )

    def _in_one_piece(self, looked_up: Sequence[LookedUp], kjt: KeyedJaggedTensor) -> bool:
        """Whether a single operation gives the output: one group, in order, of equal batches."""
        if len(looked_up) != 1:
            return False
        entries = looked_up[0].entries
        numbers = [entry.number for entry in entries]
        if numbers != sorted(numbers):
            return False
        if not kjt.variable_stride_per_key():
            return True
        jagged = kjt.to_dict()
        return len({jagged[entry.feature].lengths().numel() for entry in entries}) == 1

    def _bags(self, group: LookedUp, kjt: KeyedJaggedTensor, features: int = 1) -> Tensor:
        """The bags of a group, feature after feature; side by side if `features` is the count."""
        weights, entries = None, group.entries
        keys = kjt.keys()
        if [entry.feature for entry in entries] == keys and len(set(keys)) == len(keys):
            lengths = kjt.lengths()
            weights = [kjt.weights()] if self.is_weighted() else None
        else:
            members = [kjt.to_dict()[entry.feature] for entry in entries]
            lengths = torch.cat([member.lengths() for member in members])
            weights = [member.weights() for member in members] if self.is_weighted() else None
        whole = None if weights is None else torch.cat(weights)
        return group.pooled(lengths.to(torch.int64, copy=True), whole, features)


class EmbeddingCollection(torchrec.EmbeddingCollection, _Rows):  # type: ignore[misc]
    """TorchRec's EmbeddingCollection, with rows kept by a session.

    Without a session, constructor, weights in this process, names and outputs are TorchRec's. In a
    session the collection returns rows fetched for the batch. Gradients of the rows are summed in a
    fixed order.

    Raises StrayId for an id outside of its table. StrayId is a DataError and an IndexError; the
    message names feature, sample, id and table. All remaining errors are TorchRec's.
    """

    def configs(self) -> Sequence[Any]:
        """TorchRec's configs of the tables."""
        return list(self.embedding_configs())

    def reset_parameters(self) -> None:
        """Draw all rows anew, according to the configs of the tables.

        Raises UsageError in a session: a session begins with such rows anyway.
        """
        self._check_own("reset_parameters()")
        super().reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the weights, as `to` does; in a session only check `fn`."""
        if self._source is None:
            super()._apply(fn, recurse)
        else:
            self._check_stays(fn)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self._source is not None:
            self._check_loads(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return rows, float32 [n, D], of every feature of a KeyedJaggedTensor or a TensorDict."""
        kjt = maybe_td_to_kjt(features, None)
        if self._source is None:
            check_ids(self.entries(), kjt.to_dict())
            return dict(super().forward(kjt))
        names = list(chain.from_iterable(self.embedding_names_by_table()))
        if self._is_without_samples(kjt):
            none, dims = self._leaf(), [config.embedding_dim for config in self.configs()]
            of_tables = zip(self.embedding_names_by_table(), dims, strict=True)
            lengths = torch.empty(0, dtype=torch.int64, device=none.device)
            return {
                name: JaggedTensor(values=none.new_zeros(0, dim), lengths=lengths)
                for of_table, dim in of_tables
                for name in of_table
            }
        jagged = on_cpu(kjt).to_dict()
        found: dict[str, JaggedTensor] = {}
        for group in self._looked_up(features, lambda: jagged):
            members = [jagged[entry.feature] for entry in group.entries]
            counts = [member.values().numel() for member in members]
            parts = spread(group.rows(), group.places.split(counts), group.memory)
            for entry, member, values in zip(group.entries, members, parts):
                found[names[entry.number]] = JaggedTensor(
                    values=values,
                    lengths=on_device(group.device, member.lengths()),
                    weights=on_device(group.device, member.values())
                    if self.need_indices()
                    else None,
                )
        return {name: found[name] for name in names}
