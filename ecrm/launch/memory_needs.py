"""The memory needed by a run, compared with the memory of this machine.

Known from the config and the manifest of the data alone; imports no torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from ecrm.base.errors import UsageError
from ecrm.base.wording import counted
from ecrm.checkpoint.compatibility import capped
from ecrm.config.schema import READY_BYTES, WORKING_BYTES_TO_SHARE, Config
from ecrm.data.described import Described, describe
from ecrm.launch.dense_size import dense_parameters, pairs
from ecrm.placement.sparse_optimizer import STATE_WIDTHS
from ecrm.placement.tables import MOST_ROWS
from ecrm.run.plan import view_over

if TYPE_CHECKING:
    from ecrm.placement.view import View

PROCESS_BYTES = 50_000_000
"""Memory of a rank's process apart from its libraries (measured: 47 MB)."""
LEAST_PROCESS_BYTES = 40_000_000
"""The least of PROCESS_BYTES."""
LIBRARIES_BYTES = 280_000_000
"""Python, torch, TorchRec and MPI in memory (measured: 281 MB).

The ranks of this machine share the libraries, for the ranks are forked from one process. Ranks on a
GPU, and ranks of other hosts, have libraries of their own.
"""
PAGE = 4096
DENSE_COPIES = {"sgd": 3, "adagrad": 6, "adam": 7}
"""Floats of a dense holder for each dense parameter, by optimizer.

A holder keeps the present state, the commit and the start of the run. Adam has no state at the
start.
"""
ORDERS = 3
"""Orders of rows kept by a process at most, as by `ecrm.Indexed`."""
GPU_VECTOR = 16
"""Bytes: the size of a record on a GPU is a multiple of GPU_VECTOR."""
NOTES_BYTES = 2_000_000
"""Notes of steps beside a dense state at most: 30 bytes a slot and step, of 1,000 steps."""
BUFFERS = 3
"""Copies of each looked up value held by the trainers in a step, with the recipes' DLRM."""
REGISTERED = 16 << 20
"""Bytes of lent memory registered with a GPU at once; registering hands out the pages."""
MB = 1e6


@dataclass(frozen=True)
class Need:
    """Bytes needed by one rank.

    - `process`: the process itself, without libraries.
    - `rows`, with optimizer state, and `parity`: once every row was updated.
    - `undo`: undo logs at most.
    - `dense`: the dense replica.
    - `ready`: memory of a spare for a takeover, with `storage.prefault`.
    - `order`: the numbers of a table's rows in a random order, for this pass and both beside it.
    - `staging`: copies on the host of data sent and received by a GPU, at most. Most of `staging`
      is pinned.

    A Need may instead count memory of a GPU. `process` is then 0: the memory taken by CUDA itself
    depends on the GPU and its driver.
    """

    process: int = PROCESS_BYTES
    rows: int = 0
    parity: int = 0
    undo: int = 0
    dense: int = 0
    ready: int = 0
    order: int = 0
    staging: int = 0

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


@dataclass(frozen=True)
class RowLoad:
    """All rows of one width: the number of `rows`, the bytes of a `record`, the rows of a step.

    A record is a row with its optimizer state. `looked_up` is the most rows updated by a step.
    """

    rows: int
    record: int
    looked_up: int

    def touched(self, config: Config, shard: int) -> int:
        """The most rows updated between two commits, of a shard with `shard` rows."""
        between = self.looked_up * config.protection.commit_interval
        return min(between // config.cluster.servers, shard)


def _periods(rows: int, config: Config) -> int:
    """Periods of stripes of each server, for `rows` rows of one width."""
    k, servers = config.kind.stripes(config.protection)[0], config.cluster.servers
    # whole tables on servers: all servers have the size of the fullest
    if config.cluster.whole_tables:
        return ceil(MOST_ROWS * rows / servers / k)
    return -(-rows // (k * servers))


def of_server(load: RowLoad, config: Config) -> Need:
    """The need of a server with its share of the rows of one width."""
    k, m = config.kind.stripes(config.protection)
    periods = _periods(load.rows, config)
    logged = 1 + config.kind.logged(config.protection)
    undo = load.touched(config, periods * k) * load.record * logged
    return Need(
        rows=periods * k * load.record,
        parity=periods * m * load.record,
        undo=undo if config.kind.keeps_deltas else 0,
    )


class Needs:
    """The needs of a config's ranks: a `server`, a `trainer`, a `spare`, and all ranks together.

    `load` has the rows of all tables. `ready_spare` is the need of one of the next
    `config.ready_spares` spares. `server_on_gpu` and `dense_on_gpu` are the needs of a server
    and a dense replica on a GPU. Memory of an imitated GPU counts as memory of the host.
    """

    def __init__(self, config: Config, steps: int) -> None:
        self.config = config
        cluster, train, dim = config.cluster, config.train, config.model.embedding_dim
        data = describe(config.data.path, config.data.eval_fraction)
        tables = capped(data.tables, config.model.max_rows_per_table)
        record = 4 * (dim + sum(STATE_WIDTHS[train.sparse_optimizer](dim)) + 1)
        if config.storage.device == "cuda":
            record = -(-record // GPU_VECTOR) * GPU_VECTOR
        k = config.kind.stripes(config.protection)[0]
        periods = _periods(sum(tables.values()), config)
        looked_up = ceil(train.global_batch * sum(data.lookups.values()))
        self.load = RowLoad(sum(tables.values()), record, looked_up)
        self.server = of_server(self.load, config)
        dense = _dense_bytes(config, data)
        self.dense_on_gpu = dense if _is_on_gpu(config, config.train.device) else 0
        self._dense = dense - self.dense_on_gpu
        self.trainer = Need(
            dense=self._dense,
            parity=_last_seen(config, sum(tables.values())),
            order=0 if data.ordered else ORDERS * 8 * data.train_rows,
            staging=_trainer_staging(config, looked_up, self.dense_on_gpu),
        )
        self.server_on_gpu = Need(process=0)
        rows_on_gpu = _is_on_gpu(config, config.storage.device)
        if rows_on_gpu:
            rows, parity, undo = self.server.rows, self.server.parity, self.server.undo
            touched = self.load.touched(config, periods * k)
            if undo:
                undo = _grown_log_bytes(
                    config, touched, record, periods * k
                ) + touched * record * config.kind.logged(config.protection)
            self.server = Need(staging=_server_staging(config, looked_up, touched, record))
            self.server_on_gpu = Need(process=0, rows=rows, parity=parity, undo=undo)
        self.spare = Need()
        self.ready_spare = Need(ready=self.server.rows + self.server.parity + READY_BYTES)
        updated = sum(
            min(size, ceil(steps * train.global_batch * data.lookups[name]))
            for name, size in tables.items()
        )
        share = -(-updated // cluster.servers)
        self._updated = min(self.server.rows, share * max(record, PAGE)) + min(
            self.server.parity, share * config.failures_survived * max(record, PAGE)
        )
        self._files = _mapped_bytes(config, periods * cluster.servers, updated, looked_up)

    def of_ranks(
        self,
        servers: Sequence[int],
        trainers: Sequence[int],
        holders: Sequence[int],
        spares: Sequence[int] = (),
    ) -> list[Need]:
        """The need of each rank, in the order of the ranks.

        `servers`, `trainers`, `holders` and `spares` are ranks; `holders` have a dense replica. A
        server may be named once for each of its shards. The spares come in the order of takeovers.
        """
        needs = [Need() for _ in range(self.config.world_size)]
        for rank in dict.fromkeys(servers):
            needs[rank] += replace(self.server, process=0)
        for rank in trainers:
            needs[rank] += replace(self.trainer, process=0, dense=0)
        for rank in holders:
            needs[rank] = replace(needs[rank], dense=self._dense)
        for rank in spares[: self.config.ready_spares]:
            needs[rank] += replace(self.ready_spare, process=0)
        return needs

    def on_gpu_of_ranks(self, servers: Sequence[int], holders: Sequence[int]) -> list[Need]:
        """The need of each rank on its GPU; arguments as for `of_ranks`."""
        needs = [Need(process=0) for _ in range(self.config.world_size)]
        for rank in dict.fromkeys(servers):
            needs[rank] += self.server_on_gpu
        for rank in holders:
            needs[rank] = replace(needs[rank], dense=self.dense_on_gpu)
        return needs

    @property
    def certain(self) -> int:
        """Bytes needed by all ranks together at least, no matter which rows are updated."""
        config = self.config
        holders = max(config.cluster.trainers, config.failures_survived + 1)
        bytes_of_all = LEAST_PROCESS_BYTES * config.world_size + self._dense * holders
        if config.storage.prefault:
            bytes_of_all += (self.server.rows + self.server.parity) * config.cluster.servers
        # memory to share is taken by ranks that lend memory alone
        return bytes_of_all + self._ready - WORKING_BYTES_TO_SHARE * self.spares_in_need

    @property
    def most(self) -> int:
        """Bytes needed by all ranks together once every row reachable by the run is updated.

        An updated row counts as a page, or as a record if larger; all rows of a shard count at most
        as the whole shard.
        """
        config, cluster = self.config, self.config.cluster
        rows = self.server.rows + self.server.parity if config.storage.prefault else self._updated
        holders = max(cluster.trainers, config.failures_survived + 1)
        if cluster.failure_domain == "host":  # all trainers may be on one host
            holders = cluster.trainers + config.failures_survived
        of_trainers = self.trainer.parity + self.trainer.order + self.trainer.staging
        of_slots = self._dense * holders + of_trainers * cluster.trainers
        of_shards = (rows + self.server.undo + self.server.staging) * cluster.servers
        processes = PROCESS_BYTES * config.world_size + libraries(config, config.world_size)
        return processes + of_slots + of_shards + self._ready

    @property
    def buffers(self) -> int:
        """Bytes of a step's buffers on all trainers together, about."""
        return BUFFERS * 4 * self.config.model.embedding_dim * self.load.looked_up

    @property
    def spares_in_need(self) -> int:
        """The number of spares with memory ready for a takeover."""
        return min(self.config.ready_spares, self.config.cluster.spares)

    @property
    def _ready(self) -> int:
        """Bytes of all ready spares together."""
        return self.ready_spare.ready * self.spares_in_need

    @property
    def files(self) -> int:
        """Most bytes held by mapped files, with every row reachable by the run updated."""
        holders = max(self.config.cluster.trainers, 1)
        return self._files + self._dense * holders + NOTES_BYTES * 2 * holders


def libraries(config: Config, ranks: int, on_this_machine: bool = True) -> int:
    """Bytes of the libraries of some ranks on one host."""
    on_gpu = "cuda" in (config.storage.device, config.train.device)
    return LIBRARIES_BYTES * (1 if on_this_machine and not on_gpu else ranks)


def _mapped_bytes(config: Config, rows: int, updated: int, looked_up: int) -> int:
    """Bytes of the files of `rows` rows, `updated` of them updated, and of the journals.

    Values, state and marks lie apart. In each area an updated row takes whole pages.
    """
    dim, state = config.model.embedding_dim, STATE_WIDTHS[config.train.sparse_optimizer]
    sizes = [4 * floats for floats in (dim, *state(dim), 1)]
    of_rows = sum(min(rows * size, updated * (size // PAGE + 2) * PAGE) for size in sizes)
    entry = 8 + sum(sizes)
    return of_rows + 2 * looked_up * config.protection.commit_interval * entry


def _is_on_gpu(config: Config, device: str) -> bool:
    return device == "cuda" and not config.testing.imitated_gpu


def _grown_log_bytes(config: Config, touched: int, record: int, rows: int) -> int:
    """Bytes of the log of a shard with `rows` rows on a GPU, with the log growing on demand.

    `touched` rows are updated between two commits. The log has room for a quarter more rows than
    one step updates. With merged steps the log also has room for twice all touched rows, and 4
    bytes a row.
    """
    steps = config.protection.commit_interval
    of_a_step = -(-touched // steps) * record * 5 // 4
    return of_a_step if steps == 1 else of_a_step + 2 * touched * (record + 8) + 4 * rows


def _server_staging(config: Config, looked_up: int, touched: int, record: int) -> int:
    """Most bytes on the host for data sent and received by a server with rows on a GPU.

    Lent memory has a quarter more room, in chunks registered as a whole. Received data, and row
    numbers, lie in pinned memory, rounded up by torch to the next power of two.
    """
    copies = config.kind.stripes(config.protection)[1]
    asked = looked_up // config.cluster.servers
    values, deltas = asked * 4 * config.model.embedding_dim, touched * record if copies else 0
    came = values + 8 * asked + copies * (deltas + 8 * touched)
    return (values + deltas) * 5 // 4 + REGISTERED + 2 * came


def _trainer_staging(config: Config, looked_up: int, dense_on_gpu: int) -> int:
    """Most bytes on the host for data received and sent by a trainer's GPU, as `_server_staging`.

    Counted are values and gradients of rows, the model's gradients for each slot, and the sum of
    the model's gradients.
    """
    if not dense_on_gpu:
        return 0
    trainers = config.cluster.trainers
    values = -(-looked_up // trainers) * 4 * config.model.embedding_dim
    gradient = dense_on_gpu // DENSE_COPIES[config.train.dense_optimizer]
    slots = -(-config.slots // trainers)
    return values * 5 // 4 + REGISTERED + 2 * (values + (slots + 1) * gradient)


def _last_seen(config: Config, rows: int) -> int:
    """Bytes of the rows remembered by a rank with slots: row number and values of each row."""
    return min(config.kind.remembered(config.protection), rows) * (
        8 + 4 * config.model.embedding_dim
    )


def _dense_bytes(config: Config, data: Described) -> int:
    """Bytes of a dense holder's replica.

    TorchRec's dot products have a buffer of two int64 for each pair, kept three times.
    """
    parameters = dense_parameters(config.model, data)
    buffers = pairs(len(data.features)) if config.model.architecture == "dlrm" else 0
    return 4 * parameters * DENSE_COPIES[config.train.dense_optimizer] + 3 * 16 * buffers


def check_memory(config: Config, steps: int, available: int, gpus: Sequence[int] = ()) -> str:
    """A warning, or "", about running all ranks on a machine with `available` bytes.

    `gpus` are the bytes free on each GPU, empty if unknown. Raises UsageError if the memory is
    certain to be too small: rows never updated need no memory, and a table larger than the machine
    is no reason, unless the whole table is handed out at the start, as on a GPU.
    """
    needs = Needs(config, steps)
    if needs.certain > available:
        rows = ", and with storage.prefault all rows and redundancy"
        if needs.spares_in_need:
            rows += f", also for a shard on {counted(needs.spares_in_need, 'spare')}"
        raise UsageError(
            f"this run needs at least {needs.certain / MB:,.0f} MB of memory, "
            f"{available / MB:,.0f} MB are available here: "
            f"{config.world_size} ranks{rows if config.storage.prefault else ''}",
            *_that_fit(config, steps, available, gpus),
            otherwise="start the ranks on more machines with --hosts",
        )
    for gpu, (ranks, need) in _on_gpus(needs, len(gpus)).items():
        if _taken_at_start(need) > gpus[gpu]:
            raise UsageError(
                f"this run needs at least {_taken_at_start(need) / MB:,.0f} MB of memory on GPU "
                f"{gpu}, {gpus[gpu] / MB:,.0f} MB are free there: {counted(ranks, 'rank')} with "
                f"{' and '.join(_kinds(need))}",
                *_that_fit(config, steps, available, gpus),
                otherwise="start the ranks on more machines with --hosts",
            )
    if needs.most > available:
        return (
            "if every row is trained that these data can reach, this run needs "
            f"{needs.most / MB:,.0f} MB of memory, {available / MB:,.0f} MB are available here: "
            "use more machines with --hosts, or a smaller model.max_rows_per_table"
        )
    for gpu, (_, need) in _on_gpus(needs, len(gpus)).items():
        if need.total > gpus[gpu]:
            return (
                f"with full undo logs this run needs {need.total / MB:,.0f} MB of memory on GPU "
                f"{gpu}, {gpus[gpu] / MB:,.0f} MB are free there: use a smaller "
                "train.global_batch or protection.commit_interval"
            )
    return ""


def _on_gpus(needs: Needs, gpus: int) -> dict[int, tuple[int, Need]]:
    """The number of ranks and the ranks' common need, for each GPU of this machine in use.

    Ranks share GPUs: rank r uses GPU r modulo the number of GPUs.
    """
    if not gpus or not (needs.server_on_gpu.total or needs.dense_on_gpu):
        return {}
    view = _view(needs.config, None)
    found: dict[int, tuple[int, Need]] = {}
    for rank, need in enumerate(needs.on_gpu_of_ranks(view.shards, view.dense)):
        if need.total:
            ranks, before = found.get(rank % gpus, (0, Need(process=0)))
            found[rank % gpus] = (ranks + 1, before + need)
    return found


def _taken_at_start(need: Need) -> int:
    return need.rows + need.parity + need.dense


def _kinds(need: Need) -> list[str]:
    words = {"rows": need.rows, "redundancy": need.parity, "dense replicas": need.dense}
    return [word for word, size in words.items() if size]


def check_room(config: Config, steps: int, folder: Path) -> str:
    """A warning, or "", about mapped files in `folder` possibly larger than the free space.

    Mapped files are sparse, and a page without room at the first write kills its rank. The files
    are largest once every row reachable by the data is trained.
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


def _that_fit(
    config: Config, steps: int, available: int, gpus: Sequence[int]
) -> list[Mapping[str, object]]:
    """Settings for which the memory certain to be needed fits."""

    def fits(section: str, **values: object) -> bool:
        changed = replace(config, **{section: replace(getattr(config, section), **values)})
        needs = Needs(changed, steps)
        return needs.certain <= available and all(
            _taken_at_start(need) <= gpus[gpu]
            for gpu, (_, need) in _on_gpus(needs, len(gpus)).items()
        )

    ways: list[Mapping[str, object]] = []
    rows_on_gpu = bool(gpus) and _is_on_gpu(config, config.storage.device)
    if rows_on_gpu and config.kernels.backend == "auto" and fits("storage", device="cpu"):
        ways.append({"storage.device": "cpu"})
    if config.storage.prefault and fits("storage", prefault=False):
        ways.append({"storage.prefault": False})
    caps = (1 << power for power in range(30, 3, -1))
    ways += [
        {"model.max_rows_per_table": cap}
        for cap in caps
        if (config.storage.prefault or rows_on_gpu) and fits("model", max_rows_per_table=cap)
    ][:1]
    if config.cluster.spares and fits("cluster", spares=0):
        ways.append({"cluster.spares": 0})
    return ways


def in_words(
    config: Config,
    steps: int,
    hosts: Sequence[str] | None,
    available: int | None,
    gpus: Sequence[int] = (),
) -> list[str]:
    """Lines for `--dry-run`: the need of each rank, and of each of the `hosts` of the ranks.

    `hosts` is `None` for this machine, `available` is `None` if the bytes here are unknown. `gpus`
    are the bytes free on each GPU here, empty if unknown. Raises UsageError, with a remedy to type,
    if the hosts are too few for the config.
    """
    needs, view = Needs(config, steps), _view(config, hosts)
    names = ["this machine"] * config.world_size if hosts is None else hosts
    ranks = needs.of_ranks(view.shards, sorted(set(view.slots)), view.dense, view.spares)
    lines = [
        "memory once all rows are updated; a row takes memory from its first update on; "
        f"buffers of a step come on top, about {needs.buffers / MB:,.1f} MB on all trainers:",
        *_by_need(ranks),
    ]
    for host in dict.fromkeys(names):
        on = _of_host(ranks, names, host)
        here = "" if available is None else f", {available / MB:,.0f} MB are available"
        of_libraries = libraries(config, names.count(host), on_this_machine=hosts is None)
        lines.append(
            f"{host}: {(on.total + of_libraries) / MB:,.1f} MB, {of_libraries / MB:,.0f} MB of it "
            f"for libraries{here}"
        )
    lines.append(
        f"at most {needs.most / MB:,.0f} MB in all for the rows that these data can reach "
        f"in {steps:,} steps"
    )
    of_gpu = needs.on_gpu_of_ranks(view.shards, view.dense)
    if any(need.total for need in of_gpu):
        lines.append(
            "memory of GPUs, all of it taken at the start but for undo logs; "
            "what CUDA itself takes is not counted:"
        )
        lines += _by_need(of_gpu)
        if gpus:
            lines += [
                f"GPU {gpu}: {need.total / MB:,.1f} MB, {gpus[gpu] / MB:,.0f} MB are free"
                for gpu, (_, need) in _on_gpus(needs, len(gpus)).items()
            ]
        else:
            lines += [
                f"GPUs of {host}: {_of_host(of_gpu, names, host).total / MB:,.1f} MB"
                for host in dict.fromkeys(names)
            ]
    return lines


def _view(config: Config, hosts: Sequence[str] | None) -> View:
    """The view at the start."""
    from ecrm.protection.registry import make_protection

    domains: Sequence[str] = [f"rank {rank}" for rank in range(config.world_size)]
    if hosts is not None and config.cluster.failure_domain == "host":
        domains = hosts
    protection = make_protection(
        config.protection, config.cluster.servers, Path("mapped"), durable=False
    )
    return view_over(config, protection, domains)


def _by_need(ranks: Sequence[Need]) -> list[str]:
    """A line for all ranks with an equal need; no line for ranks without a need."""
    lines = []
    for need in dict.fromkeys(need for need in ranks if need.total):
        those = [rank for rank, other in enumerate(ranks) if other == need]
        lines.append(f"{_ranks(those)}: {need}{' each' if len(those) > 1 else ''}")
    return lines


def _of_host(ranks: Sequence[Need], hosts: Sequence[str], host: str) -> Need:
    return sum(
        (need for need, name in zip(ranks, hosts, strict=True) if name == host), Need(process=0)
    )


def _ranks(numbers: Sequence[int]) -> str:
    """Ranks, ascending, runs of ranks as first-last, such as "rank 6" or "ranks 0-3"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    runs = ", ".join("-".join(map(str, part)) for part in parts)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {runs}"
