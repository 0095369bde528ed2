"""How much memory a run needs, and whether this machine has it.

Known from the config and the manifest of the data alone; imports no torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ecrm.checkpoint.compatibility import capped
from ecrm.config.schema import Config
from ecrm.data.dataset_info import read_manifest
from ecrm.data.layout import INTEGERS
from ecrm.errors import UsageError
from ecrm.run.plan import view_over

PROCESS_BYTES = 165_000_000
"""What a rank holds for itself: Python, torch, MPI, its buffers (measured: 165 MB)."""
LEAST_PROCESS_BYTES = 100_000_000
"""What it holds for certain."""
PAGE = 4096
STATE_FLOATS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "sgd": lambda dim: (),
    "rowwise_adagrad": lambda dim: (1,),
    "adagrad": lambda dim: (dim,),
    "adam": lambda dim: (dim, dim),
}
"""Floats of optimizer state of a row, in each array of it."""
MOMENTS = {"sgd": 0, "adagrad": 1, "adam": 2}
NOTES_BYTES = 2_000_000
"""Notes of steps beside a dense state at most: 5 bytes for each of 262,144 samples, and losses."""
MB = 1e6


@dataclass(frozen=True)
class Need:
    """Bytes that one rank needs.

    - `process`: the process itself, with its libraries.
    - `rows`, with their optimizer state, and `parity`: once every row was updated.
    - `undo`: undo logs at most.
    - `dense`: the dense replica.
    """

    process: int = PROCESS_BYTES
    rows: int = 0
    parity: int = 0
    undo: int = 0
    dense: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Need) -> Need:
        return Need(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )

    def __str__(self) -> str:
        parts = [
            f"{field.name} {getattr(self, field.name) / MB:,.1f}"
            for field in fields(self)
            if getattr(self, field.name)
        ]
        return f"{self.total / MB:,.1f} MB ({', '.join(parts)})"


class Needs:
    """What the ranks of a config need: a `server`, a `trainer`, a `spare`, and all together."""

    def __init__(self, config: Config, steps: int) -> None:
        self.config = config
        cluster, train, dim = config.cluster, config.train, config.model.embedding_dim
        tables = capped(
            read_manifest(Path(config.data.path))["tables"], config.model.max_rows_per_table
        )
        record = 4 * (dim + sum(STATE_FLOATS[train.sparse_optimizer](dim)) + 1)
        k, m = _stripes(config)
        periods = -(-sum(tables.values()) // (k * cluster.servers))
        rows, parity = periods * k * record, periods * m * record
        if config.protection.name == "replicate":
            parity = rows * (config.protection.copies - 1)
        looked_up = train.global_batch * len(tables)
        touched = min(looked_up * config.protection.commit_interval // cluster.servers, periods * k)
        undo = (
            0
            if config.protection.name in ("none", "checkpoint", "mapped")
            else touched * record * (1 + m)
        )
        self._dense = _dense_bytes(config, len(tables))
        self.trainer = Need(dense=self._dense, parity=_last_seen(config, sum(tables.values())))
        self.server = Need(rows=rows, parity=parity, undo=undo)
        self.spare = Need()
        updated = sum(min(size, steps * train.global_batch) for size in tables.values())
        share = -(-updated // cluster.servers)
        self._updated = min(rows, share * max(record, PAGE)) + min(
            parity, share * config.failures_survived * max(record, PAGE)
        )
        self._files = _mapped_bytes(config, periods * cluster.servers, updated, looked_up)

    def of_ranks(
        self, servers: Sequence[int], trainers: Sequence[int], holders: Sequence[int]
    ) -> list[Need]:
        """What each rank needs, in the order of the ranks.

        `servers`, `trainers` and `holders` are ranks; `holders` have a dense replica.
        """
        needs = [Need() for _ in range(self.config.world_size)]
        for rank in servers:
            needs[rank] += replace(self.server, process=0)
        for rank in trainers:
            needs[rank] += replace(self.trainer, process=0, dense=0)
        for rank in holders:
            needs[rank] = replace(needs[rank], dense=self._dense)
        return needs

    @property
    def certain(self) -> int:
        """Bytes that all ranks need at least, whatever rows are updated."""
        config = self.config
        holders = max(config.cluster.trainers, config.failures_survived + 1)
        bytes_of_all = LEAST_PROCESS_BYTES * config.world_size + self._dense * holders
        if config.storage.prefault:
            bytes_of_all += (self.server.rows + self.server.parity) * config.cluster.servers
        return bytes_of_all

    @property
    def most(self) -> int:
        """Bytes that all ranks need once every row is updated that the run can update.

        A row takes a page, or its part of the table where that is smaller.
        """
        config, cluster = self.config, self.config.cluster
        rows = self.server.rows + self.server.parity if config.storage.prefault else self._updated
        holders = max(cluster.trainers, config.failures_survived + 1)
        if cluster.failure_domain == "host":  # all trainers may be in one
            holders = cluster.trainers + config.failures_survived
        of_slots = self._dense * holders + self.trainer.parity * cluster.trainers
        of_shards = (rows + self.server.undo) * cluster.servers
        return PROCESS_BYTES * config.world_size + of_slots + of_shards

    @property
    def files(self) -> int:
        """Bytes that mapped files hold at most, with every row updated that the run can update."""
        holders = max(self.config.cluster.trainers, 1)
        return self._files + self._dense * holders + NOTES_BYTES * 2 * holders


def _mapped_bytes(config: Config, rows: int, updated: int, looked_up: int) -> int:
    """Bytes of the files of `rows` rows of which so many are `updated`, and of their journals.

    Values, state and marks lie apart. A row of each that is updated takes its pages.
    """
    dim, state = config.model.embedding_dim, STATE_FLOATS[config.train.sparse_optimizer]
    sizes = [4 * floats for floats in (dim, *state(dim), 1)]
    of_rows = sum(min(rows * size, updated * (size // PAGE + 2) * PAGE) for size in sizes)
    entry = 8 + sum(sizes)
    return of_rows + 2 * looked_up * config.protection.commit_interval * entry


def _stripes(config: Config) -> tuple[int, int]:
    """(k, m) of the layout of a protection."""
    protection = config.protection
    return {"erasure": (protection.k, protection.m), "chain": (1, protection.copies - 1)}.get(
        protection.name, (1, 0)
    )


def _last_seen(config: Config, rows: int) -> int:
    """Bytes of the rows that a rank with slots remembers: a number and the values of each."""
    if config.protection.name != "stateless":
        return 0
    return min(config.protection.last_seen_rows, rows) * (8 + 4 * config.model.embedding_dim)


def _dense_bytes(config: Config, tables: int) -> int:
    """Bytes of a replica: parameters and optimizer state, twice, for the way back to the commit."""
    model, inputs, parameters = config.model, INTEGERS, 0
    width = model.bottom_mlp[-1] + (tables + 1) * tables // 2
    for first, widths in ((INTEGERS, model.bottom_mlp), (width, model.top_mlp)):
        inputs = first
        for outputs in widths:
            parameters += (inputs + 1) * outputs
            inputs = outputs
    return 2 * 4 * parameters * (1 + MOMENTS[config.train.dense_optimizer])


def check_memory(config: Config, steps: int, available: int) -> str:
    """A warning, or "", where a machine with so many bytes `available` is to run all ranks.

    Raises UsageError where it cannot for certain: rows that are never updated need no memory, so
    that a table larger than the machine is no reason, unless all of it is handed out at the start.
    """
    needs = Needs(config, steps)
    if needs.certain > available:
        rows = ", and with storage.prefault all rows and redundancy"
        raise UsageError(
            f"this run needs at least {needs.certain / MB:,.0f} MB of memory, "
            f"{available / MB:,.0f} MB are available here: "
            f"{config.world_size} ranks{rows if config.storage.prefault else ''}",
            *_that_fit(config, steps, available),
            otherwise="start the ranks on more machines with --hosts",
        )
    if needs.most > available:
        return (
            "if every row is trained that these data can reach, this run needs "
            f"{needs.most / MB:,.0f} MB of memory, {available / MB:,.0f} MB are available here: "
            "use more machines with --hosts, or a smaller model.max_rows_per_table"
        )
    return ""


def check_room(config: Config, steps: int, folder: Path) -> str:
    """A warning where mapped files in `folder` may need more than is free there, or nothing.

    They are sparse, and a page that finds no room when it is first written kills its rank. What
    they may need is when every row is trained that the data can reach.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    held = sum(file.stat().st_blocks * 512 for file in folder.glob("*.*"))
    free, most = shutil.disk_usage(there).free, Needs(config, steps).files - held
    if most > free:
        return (
            f"{folder}: mapped files may come to need {most / MB:,.0f} MB more, "
            f"{free / MB:,.0f} MB are free there: a full disk kills ranks; "
            "name a folder with more room in mapped.path"
        )
    return ""


def _that_fit(config: Config, steps: int, available: int) -> list[Mapping[str, object]]:
    """Settings with which what is certain fits."""

    def fits(section: str, **values: object) -> bool:
        changed = replace(config, **{section: replace(getattr(config, section), **values)})
        return Needs(changed, steps).certain <= available

    ways: list[Mapping[str, object]] = []
    if config.storage.prefault and fits("storage", prefault=False):
        ways.append({"storage.prefault": False})
    caps = (1 << power for power in range(30, 3, -1))
    ways += [
        {"model.max_rows_per_table": cap}
        for cap in caps
        if config.storage.prefault and fits("model", max_rows_per_table=cap)
    ][:1]
    if config.cluster.spares and fits("cluster", spares=0):
        ways.append({"cluster.spares": 0})
    return ways


def in_words(
    config: Config, steps: int, hosts: Sequence[str] | None, available: int | None
) -> list[str]:
    """Lines for `--dry-run`: what each rank needs, and each of the `hosts` of the ranks.

    None for hosts is this machine, and for the bytes `available` here that they are not known.
    Raises UsageError, with what to type, where the hosts are too few for the config.
    """
    from ecrm.protection import make_protection

    needs, protection = Needs(config, steps), make_protection(config, Path("mapped"))
    domains: Sequence[str] = [f"rank {rank}" for rank in range(config.world_size)]
    if hosts is not None and config.cluster.failure_domain == "host":
        domains = hosts
    view = view_over(config, protection, domains)
    hosts = ["this machine"] * config.world_size if hosts is None else hosts
    ranks = needs.of_ranks(view.shards, sorted(set(view.slots)), view.dense)
    lines = [
        "memory once every row is updated; rows never updated take none, "
        "what a step works with is not counted:"
    ]
    for need in dict.fromkeys(ranks):
        those = [rank for rank, other in enumerate(ranks) if other == need]
        lines.append(f"{_ranks(those)}: {need}{' each' if len(those) > 1 else ''}")
    for host in dict.fromkeys(hosts):
        on = sum(
            (need for need, name in zip(ranks, hosts, strict=True) if name == host), Need(process=0)
        )
        here = "" if available is None else f", {available / MB:,.0f} MB are available"
        lines.append(f"{host}: {on.total / MB:,.1f} MB{here}")
    lines.append(
        f"at most {needs.most / MB:,.0f} MB in all for the rows that these data can reach "
        f"in {steps:,} steps"
    )
    return lines


def _ranks(numbers: Sequence[int]) -> str:
    """Ranks, ascending, runs of them as first-last, such as "rank 6" or "ranks 0-3"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    runs = ", ".join("-".join(map(str, part)) for part in parts)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {runs}"
