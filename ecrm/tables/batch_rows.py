"""The rows asked for by the batch of a slot, and the place of every id among the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ecrm.base.allocate import CPU
from ecrm.base.errors import UsageError
from ecrm.kernels.unit_order import Uses, unique_with_uses
from ecrm.protection.pooled import SlotBags
from ecrm.tables.layout import Group, Layout
from ecrm.transport.digests import tensor_digest

_DEEPEST = 3
"""How many levels of containers `find_kjts` searches."""


class IdPlaces(NamedTuple):
    """The place of each of n ids among the U rows of a row space.

    Args:
        places: int64 [n].
        uses: The uses of the U rows, if the n ids are all ids of the row space in the batch.
    """

    places: Tensor
    uses: Uses | None = None


class BatchRows:
    """The rows of the batch of a slot.

    `rows[space]` are unique row numbers of a row space, int64 [U], ascending.
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        places: Mapping[tuple[int, int], Sequence[IdPlaces]],
        kjts: Sequence[object],
        bags: Callable[[], Sequence[SlotBags | None]] | None = None,
    ) -> None:
        self.rows, self._places, self._bags = tuple(rows), places, bags
        self._made_of = {id(kjt): _ids_of(kjt) for kjt in kjts}
        self._kjts = tuple(kjts)  # held, so that Python gives no later object the same id()

    @classmethod
    def of(cls, kjts: Iterable[Any], layouts: Iterable[Layout], spaces: int) -> BatchRows:
        """Find the rows that collections with these layouts may look up in a batch.

        `kjts` are the KeyedJaggedTensors or TensorDicts passed to the model later. `spaces` is the
        number of row spaces. An id outside of its table asks for no row, and raises no error yet:
        the collection raises the error when the model looks up the id. So a model may mend ids
        before the look-up, in place or in a new KeyedJaggedTensor.
        """
        kjts, layouts = list({id(kjt): kjt for kjt in kjts}.values()), list(layouts)
        parts: list[list[Tensor]] = [[] for _ in range(spaces)]
        counts = [0] * spaces
        spans: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        users: list[list[tuple[Any, Layout, Group]]] = [[] for _ in range(spaces)]
        for kjt in kjts:
            features = cache(partial(_features, kjt))
            for layout in layouts:
                pair, all_there = [], True
                for group in layout.groups:
                    at_once = _wanted_at_once(group, kjt)
                    wanted, whole = (
                        _wanted(group, features()) if at_once is None else ([at_once], True)
                    )
                    start = counts[group.space]
                    parts[group.space] += wanted
                    counts[group.space] += sum(ids.numel() for ids in wanted)
                    if wanted:
                        users[group.space].append((kjt, layout, group))
                    pair.append((group.space, start, counts[group.space]))
                    all_there &= whole
                if all_there:
                    spans[id(kjt), layout.number] = pair
        found = [_unique(ids) for ids in parts]
        places = {
            key: [
                IdPlaces(found[space][1][start:end], _whole(found[space][2], start, end))
                for space, start, end in pair
            ]
            for key, pair in spans.items()
        }

        def bags() -> list[SlotBags | None]:
            return [
                _bags(*uses[0], found[space][1]) if len(uses) == 1 else None
                for space, uses in enumerate(users)
            ]

        return cls([rows for rows, *_ in found], places, kjts, bags)

    @cached_property
    def bags(self) -> tuple[SlotBags | None, ...]:
        """The bags of the rows, by row space, if sums of these are the only use known, else `None`.

        To be called before the batch may change.
        """
        return (None,) * len(self.rows) if self._bags is None else tuple(self._bags())

    @property
    def digests(self) -> dict[int, int]:
        """`tensor_digest` of tensors of ids and lengths on the CPU, by `id(tensor)`."""
        marked = (pair for pairs in self._made_of.values() for pair in pairs)
        return {id(tensor): mark for tensor, mark in marked if tensor.is_cpu}

    def places(
        self, kjt: object, features: Callable[[], Mapping[str, JaggedTensor]], layout: Layout
    ) -> Sequence[IdPlaces]:
        """Places among `rows` of the ids looked up by a collection, group by group.

        `features()` are the features of `kjt`. The places are known from `of` if `kjt` is of the
        batch, with all features, without stray ids, and unchanged. Else the ids are searched for
        now, as for a `kjt` made by the model.

        Raises StrayId for an id outside of its table, DataError for ids neither int64 nor int32,
        UsageError for an id without a fetched row, and KeyError for a missing feature.
        """
        known = self._places.get((self._original(kjt), layout.number))
        if known is not None:
            return known
        return [IdPlaces(self._search(group, features())) for group in layout.groups]

    def _original(self, kjt: object) -> int:
        """The `id()` of the kjt of the batch with these very ids, as after `kjt.to`; 0 for none."""
        own = [each for each in self._kjts if each is kjt]
        alike = own or [each for each in self._kjts if _keys(each) == _keys(kjt)]
        now = _ids_of(kjt) if alike else []
        return next((id(each) for each in alike if _same(self._made_of[id(each)], now)), 0)

    def _search(self, group: Group, features: Mapping[str, JaggedTensor]) -> Tensor:
        rows, found = self.rows[group.space], []
        for entry in group.entries:
            jagged = features[entry.feature]
            entry.check(jagged)
            wanted = entry.row_numbers(jagged.values())
            places = torch.searchsorted(rows, wanted)
            missing = places == rows.numel()
            if rows.numel():
                missing |= rows[places.clamp(max=rows.numel() - 1)] != wanted
            if missing.any():
                told = entry.in_words(jagged, int(missing.nonzero()[0]))
                raise UsageError(
                    f"{told} of table {entry.table} was not fetched for this batch",
                    otherwise="give the session a sparse= that returns every KeyedJaggedTensor "
                    "whose ids the model looks up",
                )
            found.append(places)
        return torch.cat(found)


def find_kjts(batch: object) -> list[Any]:
    """Find every KeyedJaggedTensor in a batch, and every TensorDict of jagged features.

    Looks into tuples, lists, dicts, dataclasses and objects with attributes, three levels deep.
    Returns every object once, in the order of the fields.
    """
    return list({id(kjt): kjt for kjt in _kjts_in(batch, _DEEPEST)}.values())


def _kjts_in(value: object, levels: int) -> Iterator[Any]:
    if isinstance(value, KeyedJaggedTensor) or (
        isinstance(value, TensorDict) and _has_jagged_features(value)
    ):
        yield value
    elif levels and not isinstance(value, (Tensor, nn.Module, type)):
        for part in _parts(value):
            yield from _kjts_in(part, levels - 1)


def _has_jagged_features(tensors: TensorDict) -> bool:
    """Whether TorchRec can turn a TensorDict into a KeyedJaggedTensor."""
    features = list(tensors.values())
    return bool(features) and all(
        isinstance(getattr(feature, "_values", None), Tensor) for feature in features
    )


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, (Mapping, TensorDict)):
        return list(value.values())
    if isinstance(value, (tuple, list)):
        return value
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).values())


def _ids_of(kjt: Any) -> list[tuple[Tensor, int]]:
    """The tensors of ids and lengths, paired with marks for detecting later changes.

    The mark of a CPU tensor is a digest: numpy may change the tensor without torch knowing. The
    mark on a GPU is torch's version count, and 0 for inference tensors, left unchecked.
    """
    features = kjt.values() if isinstance(kjt, TensorDict) else [kjt]
    tensors: list[Tensor] = [
        tensor
        for feature in cast(list[Any], features)
        for tensor in (feature._values, feature._lengths, feature._offsets)
        if tensor is not None
    ]
    return [
        (each, tensor_digest(each) if each.is_cpu else 0 if each.is_inference() else each._version)
        for each in tensors
    ]


def _keys(kjt: Any) -> list[str]:
    """The features of a batch, in order."""
    return list(kjt.keys())


def _same(before: list[tuple[Tensor, int]], now: list[tuple[Tensor, int]]) -> bool:
    """Whether all ids and lengths of `before` are unchanged in `now`; `now` may have more tensors.

    TorchRec computes lengths or offsets of a KeyedJaggedTensor only on demand.
    """
    return all(any(ids is each and mark == its for each, its in now) for ids, mark in before)


def _features(kjt: Any) -> Mapping[str, JaggedTensor]:
    """The features of a batch; empty without samples: TorchRec cannot split such a batch."""
    kjt = on_cpu(maybe_td_to_kjt(kjt, None))
    features: Mapping[str, JaggedTensor] = kjt.to_dict() if kjt.lengths().numel() else {}
    return features


def on_cpu(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return `kjt` with all tensors on the CPU: `kjt` itself if the tensors are on the CPU."""
    return kjt if kjt.values().is_cpu else kjt.to(CPU)


def _wanted_at_once(group: Group, kjt: object) -> Tensor | None:
    """Row numbers of a group's ids by few operations, int64 [n]; `None` where `_wanted` is due."""
    if not isinstance(kjt, KeyedJaggedTensor) or kjt.values().is_meta:
        return None
    return group.row_numbers(kjt) if kjt.lengths().numel() else None


def _wanted(group: Group, features: Mapping[str, JaggedTensor]) -> tuple[list[Tensor], bool]:
    """Row numbers of a group's usable ids, and whether no feature is missing and no id stray."""
    wanted, whole = [], True
    for entry in group.entries:
        jagged = features.get(entry.feature)
        if jagged is None:
            whole = False
            continue
        ids = jagged.values()
        if not entry.may_look_up(ids):
            whole, ids = False, entry.within(ids)
        wanted.append(entry.row_numbers(ids))
    return wanted, whole


def _unique(parts: list[Tensor]) -> tuple[Tensor, Tensor, Uses]:
    """Return unique row numbers, int64 [U], ascending, the place of every input, and the uses."""
    if not parts:
        parts = [torch.empty(0, dtype=torch.int64)]
    return unique_with_uses(parts[0].contiguous() if len(parts) == 1 else torch.cat(parts), units=1)


def _bags(kjt: object, layout: Layout, group: Group, places: Tensor) -> SlotBags | None:
    """The bags of the only group with rows of a space; `places` are of all ids of the space."""
    if not isinstance(kjt, KeyedJaggedTensor) or not kjt.values().is_cpu:
        return None
    if group.pooling != "sum" or layout.weighted or not kjt.lengths().numel():
        return None
    jagged = kjt.to_dict()
    lengths = [jagged[feature].lengths() for feature in group.features if feature in jagged]
    uses = [int(part.sum()) for part in lengths]
    if len(lengths) != len(group.entries) or sum(uses) != places.numel():
        return None
    return SlotBags(
        [entry.place for entry in group.entries],
        [part.numel() for part in lengths],
        uses,
        torch.cat(lengths).long(),
        places,
    )


def _whole(uses: Uses, start: int, end: int) -> Uses | None:
    """The uses of all inputs, if the inputs from `start` to `end` are all inputs."""
    return uses if end - start == uses.order.numel() else None
