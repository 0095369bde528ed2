"""A model's state from outside, put into a session before it trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ecrm.errors import UsageError
from ecrm.placement.initial_values import FileValues, Values, digest_of_windows
from ecrm.placement.tables import Table
from ecrm.process.preflight import host_name
from ecrm.rank.collective_check import share_json
from ecrm.transport.base import Transport

SHOWN = 8
"""The most tensors that a message names."""
WINDOW_ROWS = 65_536


def load(
    module: nn.Module,
    tables: Iterable[Table],
    aliases: Mapping[str, str],
    state: Mapping[str, Any],
    where: str,
    source: str = "",
) -> list[Table]:
    """Put all of a state_dict but tables into a module; returns tables that begin with its rows.

    `where` is what messages call the state. `source` is the file in which its tensors are mapped,
    "" where they are in memory. The module stays as it is where UsageError is raised: for names
    that are missing or too many, other shapes and dtypes, or two numbers for one table.
    """
    here = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    _check(here, state, where)
    for alias, name in aliases.items():
        if not _equal(state[f"{alias}.weight"], state[f"{name}.weight"]):
            raise UsageError(
                f"{where}: {alias}.weight and {name}.weight are one table here, "
                "and have other numbers there"
            )
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
        initial = FileValues(values, source) if source else Values(values)
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
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise UsageError(f"{where} is of another model: {'; '.join(lines[:SHOWN])}{more}")


def _in_words(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{' x '.join(map(str, tensor.shape)) or 'one number'} {kind}"


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same numbers; looks at some rows at a time."""
    return one is other or all(
        torch.equal(one[first : first + WINDOW_ROWS], other[first : first + WINDOW_ROWS])
        for first in range(0, len(one), WINDOW_ROWS)
    )


def with_digests(transport: Transport, tables: Iterable[Table]) -> list[Table]:
    """Collective: the tables, those in files with the digest of what the file holds.

    The ranks of a host share the reading, so each file is read once per host. Raises UsageError on
    every rank where hosts have files of one name and other content.
    """
    tables = list(tables)
    while True:
        mine = [
            [table.name, table.rows, table.dim]
            for table in tables
            if isinstance(table.initial, FileValues)
        ]
        said = share_json(transport, [host_name(), mine])
        if not any(loaded for _, loaded in said.values()):
            return tables
        if any(loaded != mine for _, loaded in said.values()):
            return tables  # which is told where ranks compare their models
        hosts = {rank: host for rank, (host, _) in said.items()}
        together = [rank for rank in sorted(hosts) if hosts[rank] == hosts[transport.rank]]
        shared = share_json(transport, _digests(tables, together.index(transport.rank), together))
        if shared.keys() == said.keys():
            return _with(tables, _agreed(shared, hosts))


def _digests(tables: Iterable[Table], place: int, together: list[int]) -> dict[str, str]:
    """The digests of this rank's share of all windows: that at `place` of those `together`."""
    windows = [
        (f"{table.name} from row {first}", table.initial, first)
        for table in tables
        if isinstance(table.initial, FileValues)
        for first in table.initial.windows
    ]
    return {
        name: initial.window_digest(first)
        for name, initial, first in windows[place :: len(together)]
    }


def _agreed(shared: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> dict[str, str]:
    """The digests of all windows, by those of all ranks."""
    found: dict[str, tuple[str, str]] = {}
    for rank, digests in sorted(shared.items()):
        for window, digest in digests.items():
            before, host = found.setdefault(window, (digest, hosts[rank]))
            if before != digest:
                error = UsageError(
                    f"the loaded file has other numbers on {hosts[rank]} than on {host}: {window}",
                    otherwise="copy the same file to every host",
                )
                error.speaker = min(shared)
                raise error
    return {window: digest for window, (digest, _) in found.items()}


def _with(tables: Iterable[Table], digests: Mapping[str, str]) -> list[Table]:
    done = []
    for table in tables:
        if isinstance(initial := table.initial, FileValues):
            parts = [digests[f"{table.name} from row {first}"] for first in initial.windows]
            initial = replace(initial, digest=digest_of_windows(parts))
        done.append(replace(table, initial=initial))
    return done
