"""A model's state from outside, put into a session before it trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecrm.checkpoint.checksums import check_share
from ecrm.errors import DataError, UsageError
from ecrm.opened_file import OpenedFile
from ecrm.placement.initial_values import FileValues, Initial, Values, digest_of_windows
from ecrm.placement.tables import Table
from ecrm.process.preflight import host_name
from ecrm.rank.collective_check import share_json
from ecrm.transport.base import Transport
from ecrm.wording import listed

_DAMAGE = ""
"""The name among digests of windows under which a rank says that a file is damaged."""


def load(
    module: nn.Module,
    tables: Iterable[Table],
    aliases: Mapping[str, str],
    state: Mapping[str, Any],
    where: str,
    source: str = "",
    opened: OpenedFile | None = None,
) -> list[Table]:
    """Put all of a state_dict but tables into a module; returns tables that begin with its rows.

    `where` is what messages call the state. `source` is the file in which its tensors are mapped,
    "" where they are in memory, of which tables then keep a copy. `opened` tells that file from
    others of its name. The module stays as it is where UsageError is raised: for names that are
    missing or too many, other shapes and dtypes, or two numbers for one table in memory.
    `with_digests` and `check_names` look at those in files.
    """
    here = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    _check(here, state, where)
    others: dict[str, dict[str, Tensor]] = {}
    for alias, name in aliases.items():
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
        values = state[f"{table.name}.weight"].detach()
        initial: Initial
        if source:
            initial = FileValues(values, source, "", opened, others.get(table.name, {}))
        else:  # rows are looked up all along, and whoever gave the values may change them
            initial = Values(values.to("cpu", copy=True).contiguous())
        loaded.append(replace(table, initial=initial))
    return loaded


def _check(here: Mapping[str, Tensor], state: Mapping[str, Any], where: str) -> None:
    there = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    lines = []
    for name in {**here, **there}:
        ours, theirs = (_in_words(of.get(name)) for of in (here, there))
        if ours != theirs:
            lines.append(f"{name} is {theirs} there, {ours} here")
    if lines:
        raise UsageError(f"{where} is of another model: {listed(lines)}")


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
    """Raise UsageError where a file has other numbers under two names of one table.

    It reads these tables whole, some rows at a time. Raises DataError for a damaged file.
    """
    tables = list(tables)
    _check_files(tables, 0, 1)
    twice = [table for table in tables if _others(table)]
    _check_names(twice, _digests(twice, 0, [0]))


def with_digests(transport: Transport, tables: Iterable[Table]) -> list[Table]:
    """Collective: the tables, those in files with the digest of what the file holds.

    The ranks of a host that have opened the same file share the reading, so it is read once per
    host. Raises UsageError on every rank where ranks have files of one name and other content, and
    where a file has other numbers under two names of one table.
    """
    tables = list(tables)
    while True:
        files = [table for table in tables if isinstance(table.initial, FileValues)]
        mine = [[table.name, table.rows, table.dim, *_others(table)] for table in files]
        said = share_json(transport, [host_name(), mine, _opened(files)])
        if not any(loaded for _, loaded, _ in said.values()):
            return tables
        if any(loaded != mine for _, loaded, _ in said.values()):
            return tables  # which is told where ranks compare their models
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
    """Raise DataError where this rank's share of the files of tables is damaged."""
    files = [table.initial for table in tables if isinstance(table.initial, FileValues)]
    for source in sorted({file.source for file in files if file.opened is not None}):
        check_share(Path(source), place, of)


def _checked_digests(tables: Sequence[Table], place: int, together: list[int]) -> dict[str, str]:
    """The digests of this rank's share of all windows, or, by `_DAMAGE`, that a file is damaged."""
    try:
        _check_files(tables, place, len(together))
        return _digests(tables, place, together)
    except DataError as error:
        return {_DAMAGE: str(error)}


def _raise_damage(shared: Mapping[int, Mapping[str, str]]) -> None:
    """Raise DataError where a rank has found a file damaged."""
    for rank, digests in sorted(shared.items()):
        if _DAMAGE in digests:
            error = DataError(digests[_DAMAGE])
            error.speaker = rank
            raise error


def _others(table: Table) -> Mapping[str, Tensor]:
    """The values of a table under its other names in the file, by name."""
    return table.initial.others if isinstance(table.initial, FileValues) else {}


def _opened(tables: Iterable[Table]) -> list[list[int]]:
    """What tells the files of tables from others of their names; not on another host."""
    files = [table.initial for table in tables if isinstance(table.initial, FileValues)]
    return [list(file.opened.known) for file in files if file.opened is not None]


def _digests(tables: Iterable[Table], place: int, together: list[int]) -> dict[str, str]:
    """The digests of this rank's share of all windows: that at `place` of those `together`."""
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
    """Raise UsageError where windows of one table differ by its name."""
    for table in tables:
        if isinstance(initial := table.initial, FileValues):
            for other in initial.others:
                for first in initial.windows:
                    if digests[_window(other, first)] != digests[_window(table.name, first)]:
                        raise _two_for_one(initial.source, other, table.name)


def _agreed(shared: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> dict[str, str]:
    """The digests of all windows, by those of all ranks."""
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
