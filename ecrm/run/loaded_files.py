"""The files loaded by the sessions of all ranks: the same content, undamaged, read once a host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ecrm.base.errors import DataError, UsageError
from ecrm.checkpoint.checksums import check_share
from ecrm.placement.initial_values import FileValues, digest_of_windows
from ecrm.placement.tables import Table
from ecrm.process.preflight import host_name
from ecrm.run.gather import gather_results
from ecrm.transport.base import Transport

_DAMAGE = ""
"""The key among digests of windows for a rank's report of a damaged file."""


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
        said = gather_results(transport, partial(_facts, tables))
        mine = said[transport.rank][1]
        if any(loaded != mine for _, loaded, _ in said.values()):
            return tables  # comparing the models of ranks reports the difference
        hosts = {rank: host for rank, (host, _, _) in said.items()}
        here, _, opened = said[transport.rank]
        together = [
            rank for rank in sorted(said) if (said[rank][0], said[rank][2]) == (here, opened)
        ]
        place = together.index(transport.rank)
        shared = gather_results(transport, partial(_checked_digests, tables, place, together))
        if shared.keys() == said.keys():
            _raise_damage(shared)
            agreed = _agreed(shared, hosts)
            _check_names(tables, agreed)
            return _with(tables, agreed)


def _facts(tables: Sequence[Table]) -> list[Any]:
    """This rank's host, its loaded tables, and the identities of the opened files."""
    files = [table for table in tables if isinstance(table.initial, FileValues)]
    loaded = [[table.name, table.rows, table.dim, *_others(table)] for table in files]
    return [host_name(), loaded, _opened(files)]


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
            raise DataError(digests[_DAMAGE]).on_all_ranks(rank)


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
                        raise two_for_one(initial.source, other, table.name)


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
                raise UsageError(
                    f"the loaded file has other numbers on {here} than on {there}: {window}",
                    otherwise="copy the same file to every host, and leave it as it is",
                ).on_all_ranks(min(shared))
    return {window: digest for window, (digest, _) in found.items()}


def _with(tables: Iterable[Table], digests: Mapping[str, str]) -> list[Table]:
    done = []
    for table in tables:
        if isinstance(initial := table.initial, FileValues):
            parts = [digests[_window(table.name, first)] for first in initial.windows]
            initial = replace(initial, digest=digest_of_windows(parts))
        done.append(replace(table, initial=initial))
    return done


def two_for_one(where: str, alias: str, name: str) -> UsageError:
    return UsageError(
        f"{where}: {alias}.weight and {name}.weight are one table here, "
        "and have other numbers there"
    )
