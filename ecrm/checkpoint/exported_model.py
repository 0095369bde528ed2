"""The tables and dense tensors of a checkpoint's model, under their names in an exported file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ecrm.base.errors import EcrmError, UsageError
from ecrm.checkpoint.compatibility import DENSE
from ecrm.checkpoint.model_file import as_array
from ecrm.checkpoint.saved_model import read_model
from ecrm.model.nested_state import unpacked
from ecrm.placement.initial_values import FileValues, Initial, Uniform, digest_of_windows
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table

TABLE = "sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"
DENSE_PARTS = {
    "dlrm": ("dense_arch.", "over_arch."),
    "dcnv2": ("dense_arch.", "inter_arch.", "over_arch."),
    "two_tower": ("user_tower.", "item_tower."),
}
"""The beginnings of the dense tensors' names by `model.architecture`."""


@dataclass(frozen=True)
class ExportedModel:
    """Tables, the names of each table in the file, and all else by `dense_of(exported state)`."""

    tables: Sequence[Table]
    names: Mapping[str, Sequence[str]]
    dense_of: Callable[[Sequence[Tensor]], dict[str, np.ndarray[Any, Any]]]


def exported_model(identity: Mapping[str, Any]) -> ExportedModel:
    """The model of an identity. Raises UsageError if the identity does not tell all rows."""
    return _session(identity) if "tensor" in identity else _of_config(identity)


def _session(identity: Mapping[str, Any]) -> ExportedModel:
    """A script's own model, under the names of its state_dict."""
    initial = _Beginnings(identity["told"].get("loaded", ""))
    tables = [
        Table(
            name, table["rows"], table["dim"], _optimizer(identity, name), initial.of(name, table)
        )
        for name, table in identity["table"].items()
    ]
    first_names = identity["names"]
    names = {
        table: (weight, *(name for name, first in first_names.items() if first == weight))
        for table, weight in ((table, f"{table}.weight") for table in identity["table"])
    }

    def dense_of(state: Sequence[Tensor]) -> dict[str, np.ndarray[Any, Any]]:
        named = unpacked(state[0])
        found = {name: named[first] for name, first in first_names.items() if first in named}
        return {name: as_array(tensor) for name, tensor in found.items() if tensor is not None}

    return ExportedModel(tables, names, dense_of)


def _optimizer(identity: Mapping[str, Any], table: str) -> SparseOptimizer | None:
    numbers = identity["rates"].get(table)
    if numbers is None:
        return None
    return SparseOptimizer(**{**numbers, "betas": tuple(numbers["betas"])})


class _Beginnings:
    """The initial values of rows; `loaded` is the file loaded by the run, "" without a file."""

    def __init__(self, loaded: str) -> None:
        self._loaded = loaded
        self._state: dict[str, Any] | None = None

    def of(self, name: str, table: Mapping[str, Any]) -> Initial | None:
        """The initial values of a table's rows. Raises UsageError if the values are lost."""
        begins = table["begins"]
        if not isinstance(begins, str):
            return None if begins is None else Uniform(*begins)
        values = self._values(name, table)
        if values is None:
            there = f"put {self._loaded} back as it was, or " if self._loaded else ""
            raise UsageError(
                f"rows of table {name} that no step has updated begin as {begins}, which the "
                "checkpoint does not hold",
                otherwise=f'{there}call session.save("model.pt") at the end of the script',
            )
        return values

    def _values(self, name: str, table: Mapping[str, Any]) -> FileValues | None:
        """The values in the file; None if the file lacks the values with which the run began."""
        if self._state is None:
            try:
                self._state = read_model(Path(self._loaded)) if self._loaded else {}
            except EcrmError:
                self._state = {}
        values = self._state.get(f"{name}.weight")
        if not isinstance(values, Tensor) or values.dim() != 2:
            return None
        if values.shape[1] != table["dim"] or len(values) > table["rows"]:
            return None
        found = FileValues(values, self._loaded)
        digest = digest_of_windows(found.window_digest(first) for first in found.windows)
        return found if table["begins"] == f"values {digest[:16]}" else None


def _of_config(identity: Mapping[str, Any]) -> ExportedModel:
    """The model of a config, under its own names. Raises UsageError if too old."""
    if DENSE not in identity:
        raise UsageError(
            "the checkpoint was written by ecrm 0.2.0 or before, with another layout of the dense "
            "part",
            otherwise="export the checkpoint with ecrm 0.2.0",
        )
    dim, tables = identity["model.embedding_dim"], identity["tables"]
    parts = DENSE_PARTS[identity["model.architecture"]]

    def dense_of(state: Sequence[Tensor]) -> dict[str, np.ndarray[Any, Any]]:
        named = unpacked(state[0]).items()
        found = {name: tensor for name, tensor in named if name.startswith(parts)}
        return {name: as_array(tensor) for name, tensor in found.items() if tensor is not None}

    return ExportedModel(
        [Table(name, rows, dim) for name, rows in tables.items()],
        {name: (TABLE.format(name),) for name in tables},
        dense_of,
    )
