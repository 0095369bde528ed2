"""Loading a model's state into a session before training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ecrm.base.errors import UsageError
from ecrm.base.opened_file import OpenedFile
from ecrm.base.wording import listed
from ecrm.placement.initial_values import FileValues, Initial, Values
from ecrm.placement.tables import Table
from ecrm.run.loaded_files import two_for_one


def load(
    module: nn.Module,
    tables: Iterable[Table],
    aliases: Mapping[str, str],
    state: Mapping[str, Any],
    where: str,
    source: str = "",
    opened: OpenedFile | None = None,
    strict: bool = True,
) -> list[Table]:
    """Load a state_dict, except tables, into a module; return the tables with the loaded rows.

    `where` is the name of the state in messages. `source` is the file with the mapped tensors, ""
    for tensors in memory; tables then keep a copy. `opened` identifies the file even if a new file
    takes its name. Raises UsageError, before any change to the module, for missing or unknown
    names, for wrong shapes or dtypes, and for different values of the same table in memory.
    `with_digests` and `check_names` compare values in files. If not `strict`, tables may have more
    rows in the session than in the state, and parts missing in the state keep their values.
    """
    tables = list(tables)
    here = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    _check(here, state, where, () if strict else [f"{table.name}.weight" for table in tables])
    _check_grown(tables, state, where)
    others: dict[str, dict[str, Tensor]] = {}
    for alias, name in aliases.items():
        if not {f"{name}.weight", f"{alias}.weight"} <= state.keys():
            continue
        one, other = state[f"{name}.weight"], state[f"{alias}.weight"]
        if not one.is_set_to(other):
            others.setdefault(name, {})[alias] = other.detach()
            if not source and not torch.equal(one, other):
                raise two_for_one(where, alias, name)
    module.load_state_dict(
        {
            name: here[name] if name in here and here[name].is_meta else value
            for name, value in state.items()
        },
        strict=False,
    )
    loaded = []
    for table in tables:
        if f"{table.name}.weight" not in state:
            loaded.append(table)
            continue
        values = state[f"{table.name}.weight"].detach()
        initial: Initial
        if source:
            initial = FileValues(values, source, "", opened, others.get(table.name, {}))
        else:  # a copy: rows are looked up during the whole run, and the caller may change values
            initial = Values(values.to("cpu", copy=True).contiguous())
        loaded.append(replace(table, initial=initial))
    return loaded


def _check(
    here: Mapping[str, Tensor], state: Mapping[str, Any], where: str, tables: Collection[str]
) -> None:
    """Raise UsageError if names, shapes or dtypes of `here` and the state differ.

    If `tables` has names, these tables may have fewer rows in the state, which may lack any name.
    """
    there = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if differing := _differing(here, there, tables):
        lines = [
            f"{name} is {_in_words(there.get(name))} there, {_in_words(here.get(name))} here"
            for name in differing
        ]
        weights = [name for name, tensor in here.items() if tensor.is_meta]
        helps = where.startswith("session.load: ") and not _differing(here, there, weights)
        raise UsageError(
            f"{where} is of another model: {listed(lines)}",
            otherwise="for new rows type strict=False" if helps else "",
        )


def _differing(
    here: Mapping[str, Tensor], there: Mapping[str, Tensor], tables: Collection[str]
) -> list[str]:
    """The names of differing tensors; `tables` as in `_check`."""
    found = []
    for name in {**here, **there}:
        if _in_words(here.get(name)) == _in_words(there.get(name)) or (
            tables and name not in there
        ):
            continue
        if not (name in tables and name in here and _is_smaller(there[name], here[name])):
            found.append(name)
    return found


def _is_smaller(there: Tensor, here: Tensor) -> bool:
    """Whether a table has fewer rows in the state, of the same width and dtype."""
    alike = there.dtype == here.dtype and there.shape[1:] == here.shape[1:]
    return alike and there.dim() == 2 and 0 < len(there) < len(here)


def _check_grown(tables: Iterable[Table], state: Mapping[str, Any], where: str) -> None:
    """Raise UsageError if a table with new rows has its own initialization."""
    for table in tables:
        values = state.get(f"{table.name}.weight")
        if values is not None and len(values) < table.rows and table.initial is not None:
            raise UsageError(
                f"{where}: table {table.name} has {table.rows - len(values):,} rows more here, and "
                "an initialization of its own",
                otherwise="leave out its weight_init_min, weight_init_max and init_fn",
            )


def new_here(module: nn.Module, tables: Iterable[Table], state: Mapping[str, Any]) -> list[str]:
    """Lines about tensors of a module and rows of tables missing in the loaded state."""
    missing = [
        name
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, Tensor) and name not in state
    ]
    lines = [f"{listed(missing)} not in the file, new here"] if missing else []
    for table in tables:
        initial = table.initial
        known = len(initial.values) if isinstance(initial, Values | FileValues) else table.rows
        if known < table.rows:
            lines.append(f"table {table.name} has {table.rows - known:,} new rows")
    return lines


def _in_words(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{' x '.join(map(str, tensor.shape)) or 'one number'} {kind}"
