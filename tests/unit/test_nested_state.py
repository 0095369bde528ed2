"""Nested state is copied, written and read exactly, or refused by the path of the entry."""

from __future__ import annotations

import enum
import sys
import types
from collections import (
    ChainMap,
    Counter,
    OrderedDict,
    UserDict,
    defaultdict,
    deque,
    namedtuple,
)
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ecrm.base.errors import UsageError
from ecrm.model.nested_state import check_readable, placed, read, written
from ecrm.transport.digests import plain


class Noted(dict):
    """A dict with something beside its items, and an `update` that is another one."""

    def update(self, *_: Any) -> None:
        raise AssertionError("entries are put one by one")


class Kind(enum.Enum):
    FIRST = 1


class Words(enum.StrEnum):
    FIRST = "first"


class Growing(list):
    pass


Pair = namedtuple("Pair", "one other")


def noted(note: list[int], **items: Any) -> Noted:
    made = Noted(items)
    made.note = note
    return made


def annotated() -> OrderedDict[str, Any]:
    """As torch's `state_dict` is."""
    made = OrderedDict(b=torch.ones(2), a=2)
    made._metadata = {"": {"version": 3}}
    return made


CARRIED: dict[str, Any] = {
    "Counter": Counter([1, 1, 3]),
    "nested": {"in": [Counter("ab"), (Counter("c"), 1.5)]},
    "OrderedDict": OrderedDict(b=1, a=2),
    "a state_dict": annotated(),
    "keys": {1: 2, (1, "a"): 3, None: 4, 0.5: 5},
    "set": {1, 2},
    "numbers": [True, 1 << 70, 0.1, float("inf"), 1j, b"ab", bytearray(b"ab"), None],
    "of torch": [torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided],
    "numpy's numbers": [np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True)],
    "numpy's words": [np.str_("ab"), np.datetime64("2020-01-01")],
    "arrays": [np.arange(4, dtype=np.uint32).reshape(2, 2).T, np.array(2.5), np.zeros((0, 3))],
    "tensors": [torch.eye(2).to_sparse(), torch.ones(1).expand(3), torch.tensor(True)],
    "of bits": [torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.bfloat16)],
}
ONCE_NAMED: dict[str, Any] = {
    "UserDict": UserDict(a=1),
    "ChainMap": ChainMap({"a": 1}),
    "namedtuple": Pair(1, torch.ones(2)),
    "frozenset": frozenset({1}),
    "Fraction": Fraction(1, 3),
    "range": range(3),
}
"""Carried once their class is named to torch."""
NEVER: dict[str, Any] = {
    "defaultdict": defaultdict(int, {1: 2}),
    "dict subclass": noted([1], a=1),
    "deque": deque([1], maxlen=2),
    "array of objects": np.array([object()]),
    "mappingproxy": types.MappingProxyType({"a": 1}),
    "lambda": lambda: 1,
    "generator": (number for number in range(3)),
    "module": types,
    "dict with a key of another kind": {Kind.FIRST: 1},
}
# torch 2.14 begins to read subclasses of list, and Python 3.11.4 to pickle enums by their value.
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
(ONCE_NAMED if TORCH >= (2, 14) else NEVER)["list subclass"] = Growing([1])
(ONCE_NAMED if sys.version_info >= (3, 11, 4) else NEVER).update(
    {"Enum": Kind.FIRST, "StrEnum": Words.FIRST}
)


def same(one: Any, other: Any) -> bool:
    """Whether two values are of the same type, and alike inside."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        return alike and torch.equal(one.to_dense().float(), other.to_dense().float())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        beside = getattr(one, "__dict__", 0) == getattr(other, "__dict__", 0)
        return beside and list(one) == list(other) and same([*one.values()], [*other.values()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_is_exact(name):
    state = {"before": 1, "value": [CARRIED[name]]}
    check_readable(state, "optimizer group")
    assert same(read(written(state)), state)
    assert same(placed(state), state)
    assert same(placed(state, placed(state)), state)


@pytest.mark.parametrize("name", [*ONCE_NAMED, *NEVER])
def test_anything_else_is_refused_by_its_path_and_the_advice_works(name):
    value = {**ONCE_NAMED, **NEVER}[name]
    with pytest.raises(UsageError) as refused:
        check_readable({"a": [1, {"b": value}]}, "optimizer group")
    said = str(refused.value)
    assert said.startswith("optimizer group a.1.b cannot be read back by other ranks: it is a ")
    assert type(value).__name__ in said and "\n" not in said
    assert said.endswith(f"add_safe_globals([{type(value).__name__}])") == (name in ONCE_NAMED)
    if name in ONCE_NAMED:
        with torch.serialization.safe_globals([type(value)]):
            check_readable({"a": value}, "optimizer group")
            assert same(read(written({"a": value})), {"a": value})


def test_a_state_with_a_class_that_is_not_named_any_more_is_refused():
    with pytest.raises(UsageError, match=r"a saved state has \S*Fraction, .*add_safe_globals"):
        read(written({"a": Fraction(1, 3)}))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": torch.ones(2), "b": 1}, {"b": 2, "a": torch.zeros(2)}),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (Counter({1: 2, 3: 1}), Counter({3: 4})),
        ({-1: 1, -2: 2}, {-2: 1}),
    ],
    ids=["dict", "OrderedDict", "Counter", "keys of one hash"],
)
def test_a_dict_is_filled_in_place_and_has_the_order_of_its_source(before, after):
    target = placed(before)
    tensor = target.get("a")
    assert placed(after, target) is target and same(target, after)
    assert not isinstance(tensor, Tensor) or target["a"] is tensor


def test_what_a_dict_has_beside_its_items_is_copied():
    source = noted([1], a=torch.ones(1))
    copied = placed(source, placed(noted([2], a=torch.zeros(1))))
    assert same(copied, source) and copied.note is not source.note
    target = placed(annotated())
    changed = annotated()
    changed._metadata[""]["version"] = 4
    assert placed(changed, target)._metadata == {"": {"version": 4}}
    assert target._metadata is not changed._metadata
    ways = defaultdict(dict, {"a": {"b": Counter("xxy")}})
    assert same(placed(ways), ways) and placed(ways).default_factory is dict


def test_numbers_of_numpy_and_names_of_enums_are_compared():
    values = [np.float32(0.1), np.float32(0.2), np.int64(1), 1, Kind.FIRST, torch.float16]
    assert len({plain(value) for value in values}) == len(values)
