"""Row numbers of all ids by few operations are those found feature by feature."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecrm.placement.tables import Table, row_spaces
from ecrm.tables.batch_rows import BatchRows, _wanted, _wanted_at_once
from ecrm.tables.layout import Entry, Group, Layout

ROWS = {"a": 5, "b": 7, "c": 4}


def group_of(*features: tuple[str, str]) -> Group:
    """A group of (feature, table), with the tables in one row space."""
    spaces = row_spaces([Table(name, rows, 4) for name, rows in ROWS.items()])
    entries = [
        (table, Entry(number, feature, table, ROWS[table], "sum"))
        for number, (feature, table) in enumerate(features)
    ]
    (group,) = Layout.of(0, entries, spaces).groups
    return group


ALL = group_of(("a", "a"), ("b", "b"), ("c", "c"))
MIDDLE = group_of(("b", "b"), ("c", "c"))


def kjt(keys: str, values: list[int], lengths: list[int], **more: object) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        list(keys), torch.tensor(values), lengths=torch.tensor(lengths), **more
    )


@pytest.mark.parametrize(
    "group, batch",
    [
        (ALL, kjt("abc", [0, 4, 6, 0, 3, 3], [1] * 6)),
        (ALL, kjt("abc", [0, 4, 6, 0, 3, 3], [2, 0, 0, 2, 1, 1])),
        (MIDDLE, kjt("xbcy", [9, 9, 6, 0, 3, 3, 9, 9], [1] * 8)),
        (MIDDLE, kjt("xbc", [9, 6, 0, 3, 3], [1, 0, 1, 1, 1, 1])),
        (group_of(("b", "b")), kjt("abc", [0, 6, 5, 3], [1, 2, 1])),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_all_at_once_is_as_feature_by_feature(group, batch, dtype):
    batch = KeyedJaggedTensor(batch.keys(), batch.values().to(dtype), lengths=batch.lengths())
    wanted, whole = _wanted(group, batch.to_dict())
    found = _wanted_at_once(group, batch)
    assert whole and found is not None and found.dtype == torch.int64
    assert torch.equal(found, torch.cat(wanted))


@pytest.mark.parametrize(
    "group, batch",
    [
        (ALL, kjt("bac", [0, 4, 6, 0, 3, 3], [1] * 6)),  # another order
        (ALL, kjt("ab", [0, 4, 6, 0], [1] * 4)),  # a feature is missing
        (ALL, kjt("abc", [0, 4, 6, 0, 3], [1, 1, 1, 1, 1, 0])),  # unequal counts
        (ALL, kjt("abc", [], [0] * 6)),  # no ids
        (ALL, kjt("abc", [], [])),  # no samples
        (ALL, kjt("abc", [0, 5, 6, 0, 3, 3], [1] * 6)),  # a stray id at the upper end
        (ALL, kjt("abc", [0, 4, 6, -1, 3, 3], [1] * 6)),  # and at the lower
        (group_of(("a", "a"), ("a", "b")), kjt("ab", [0, 1, 2, 3], [1] * 4)),  # of two tables
        (ALL, kjt("abca", [0, 1, 2, 3], [1] * 4)),  # a key twice
    ],
)
def test_any_other_batch_is_left_to_the_reference(group, batch):
    assert _wanted_at_once(group, batch) is None


@pytest.mark.parametrize("values", [[0, 4, 6, 0], [0, 4, 6, 0, 3, 3, 1, 1]])
def test_lengths_that_do_not_add_up_to_the_ids_are_refused(values):
    layout = Layout(0, (ALL,))
    with pytest.raises(RuntimeError, match="split"):
        BatchRows.of([kjt("abc", values, [1] * 6)], [layout], 1)
