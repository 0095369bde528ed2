"""Loading a model's state into a session before training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecrm.base.opened_file import OpenedFile
from ecrm.base.wording import listed
from ecrm.checkpoint.checksums import check_share
from ecrm.errors import DataError, UsageError
from ecrm.placement.initial_values import FileValues, Initial, Values, digest_of_windows
from ecrm.placement.tables import Table
from ecrm.process.preflight import host_name
from ecrm.run.collective_check import share_json
from ecrm.transport.base import Transport

_DAMAGE = ""
"""The key among digests of windows for a rank's report of a damaged file."""


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
        if one is not other:
            others.setdefault(name, {})[alias] = other.detach()
            if not source and not torch.equal(one, other):
                raise _two_for_one(where, alias, name)
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


def _two_for_one(where: str, alias: str, name: str) -> UsageError:
    return UsageError(
        f"{where}: {alias}.weight and {name}.weight are one table here, "
        "and have other numbers there"
    )


def check_names(tables: Iterable[Table]) -> None:
    """Raise UsageError if a file has different numbers under two names of the same table.

    Reads tables with two names whole, some rows at a time. Raises DataError for a damaged file.
    """
    tables = list(tables)
    _check_files(tables, 0, 1)
    twice = [table for table in tables if _others(table)]
    _check_names(twice, _digests(twice, 0, [0]))


def with_digests(transport: Transport, tables: Iterable[Table]) -> list[Table]:
    """Collective: return the tables; tables in files get the digest of their values in the file.

    Ranks of a host with the same opened file share the reading: the file is read once per host.
    Raises UsageError on every rank if the loaded files differ between ranks, or if a file has
    different numbers under two names of the same table. Raises DataError for a damaged file.
    """
    tables = list(tables)
    while True:
        files = [table for table in tables if isinstance(table.initial, FileValues)]
        mine = [[table.name, table.rows, table.dim, *_others(table)] for table in files]
        said = share_json(transport, [host_name(), mine, _opened(files)])
        if not any(loaded for _, loaded, _ in said.values()):
            return tables
        if any(loaded != mine for _, loaded, _ in said.values()):
            return tables  # comparing the models of ranks reports the difference
        hosts = {rank: host for rank, (host, _, _) in said.items()}
        here, _, opened = said[transport.rank]
        together = [
            rank for rank in sorted(said) if (said[rank][0], said[rank][2]) == (here, opened)
        ]
        place = together.index(transport.rank)
        shared = share_json(transport, _checked_digests(tables, place, together))
        if shared.keys() == said.keys():
            _raise_damage(shared)
            found = _agreed(shared, hosts)
            _check_names(tables, found)
            return _with(tables, found)


def _check_files(tables: Iterable[Table], place: int, of: int) -> None:
    """Raise DataError if this rank's share of the files of tables is damaged."""
    files = [table.initial for table in tables if isinstance(table.initial, FileValues)]
    for source in sorted({file.source for file in files if file.opened is not None}):
        check_share(Path(source), place, of)


def _checked_digests(tables: Sequence[Table], place: int, together: list[int]) -> dict[str, str]:
    """The digests of this rank's share of all windows; for a damaged file an error at `_DAMAGE`."""
    try:
        _check_files(tables, place, len(together))
        return _digests(tables, place, together)
    except DataError as error:
        return {_DAMAGE: str(error)}


def _raise_damage(shared: Mapping[int, Mapping[str, str]]) -> None:
    """Raise DataError if a rank has found a damaged file."""
    for rank, digests in sorted(shared.items()):
        if _DAMAGE in digests:
            error = DataError(digests[_DAMAGE])
            error.speaker = rank
            raise error


def _others(table: Table) -> Mapping[str, Tensor]:
    """The values of a table under further names in the file, by name."""
    return table.initial.others if isinstance(table.initial, FileValues) else {}


def _opened(tables: Iterable[Table]) -> list[list[int]]:
    """The identities of the opened files of tables, valid only on this host."""
    files = [table.initial for table in tables if isinstance(table.initial, FileValues)]
    return [list(file.opened.known) for file in files if file.opened is not None]


def _digests(tables: Iterable[Table], place: int, together: list[int]) -> dict[str, str]:
    """The digests of this rank's share of all windows: share `place` among ranks `together`."""
    windows = [
        (_window(name, first), values, first)
        for table in tables
        if isinstance(initial := table.initial, FileValues)
        for name, values in (
            (table.name, initial),
            *((name, replace(initial, values=other)) for name, other in initial.others.items()),
        )
        for first in values.windows
    ]
    return {
        name: initial.window_digest(first)
        for name, initial, first in windows[place :: len(together)]
    }


def _window(name: str, first: int) -> str:
    return f"{name} from row {first}"


def _check_names(tables: Iterable[Table], digests: Mapping[str, str]) -> None:
    """Raise UsageError if windows of a table differ between its names."""
    for table in tables:
        if isinstance(initial := table.initial, FileValues):
            for other in initial.others:
                for first in initial.windows:
                    if digests[_window(other, first)] != digests[_window(table.name, first)]:
                        raise _two_for_one(initial.source, other, table.name)


def _agreed(shared: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> dict[str, str]:
    """Merge the digests of windows from all ranks. Raises UsageError if two ranks differ."""
    found: dict[str, tuple[str, int]] = {}
    for rank, digests in sorted(shared.items()):
        for window, digest in digests.items():
            before, other = found.setdefault(window, (digest, rank))
            if before != digest:
                here, there = hosts[rank], hosts[other]
                if here == there:
                    here, there = f"rank {rank}", f"rank {other} of {there}"
                error = UsageError(
                    f"the loaded file has other numbers on {here} than on {there}: {window}",
                    otherwise="copy the same file to every host, and leave it as it is",
                )
                error.speaker = min(shared)
                raise error
    return {window: digest for window, (digest, _) in found.items()}


def _with(tables: Iterable[Table], digests: Mapping[str, str]) -> list[Table]:
    done = []
    for table in tables:
        if isinstance(initial := table.initial, FileValues):
            parts = [digests[_window(table.name, first)] for first in initial.windows]
            initial = replace(initial, digest=digest_of_windows(parts))
        done.append(replace(table, initial=initial))
    return done
