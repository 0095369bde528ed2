"""Check whether the hosts of a run have enough memory for its tables, before taking any."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod

import torch

from ecrm.base.allocate import UNTOUCHED
from ecrm.base.errors import UsageError
from ecrm.base.wording import named
from ecrm.config.schema import READY_BYTES, Config
from ecrm.placement.stripes import StripeShape, row_layouts
from ecrm.placement.tables import RowSpace
from ecrm.run.connect import Cluster
from ecrm.storage.base import VECTOR, state_shapes

MB = 1e6


def judge_memory(
    config: Config,
    cluster: Cluster,
    spaces: Sequence[RowSpace],
    available: Mapping[int, int],
    gpus: Mapping[int, tuple[str, int] | None],
) -> str:
    """A warning, or "", about tables possibly too large for the memory of hosts and GPUs.

    By rank: the bytes `available` on its host, and its result of `shown_gpu`. Raises UsageError if
    the memory is certain to be too small: with storage.prefault, or on a GPU, where all memory of
    the tables is taken at the start. Otherwise rows never updated need no memory.

    Not counted: tables in mapped files, shards of a rank dead by now, for the heir is not known
    yet, and memory taken later by the script and the workers of its data. Memory taken earlier by
    a script is not available any more, and thereby counted.
    """
    hosts = {rank: str(process["host"]) for rank, process in cluster.processes.items()}
    each = shard_bytes(
        spaces, cluster.protection.shape, cluster.rows_on_gpu, config.cluster.whole_tables
    )
    on_gpu = {rank: shown for rank, shown in gpus.items() if shown is not None}
    needed_there = {rank: each * len(cluster.view.shards_of(rank)) for rank in on_gpu}
    judge_gpus(needed_there, on_gpu, hosts)
    if config.kind.rows_in_files:
        return ""
    needed: dict[str, int] = {}
    ready = cluster.view.spares[: config.ready_spares]
    for rank in (*cluster.view.shards, *ready):
        if rank in hosts and rank not in on_gpu:  # a rank that has died here takes no memory
            to_work_in = READY_BYTES if rank in ready else 0
            needed[hosts[rank]] = needed.get(hosts[rank], 0) + each + to_work_in
    there = {
        host: min(available[rank] for rank in available if hosts[rank] == host) for host in needed
    }
    return judged(needed, there, config.storage.prefault, spares=bool(ready))


def shown_gpu(config: Config) -> tuple[str, int] | None:
    """As `free_on_gpu`; `None` for a rank with rows on the CPU or on an imitated GPU.

    Each rank must have chosen its GPU. CUDA takes memory of its own at the first call: every rank
    of a GPU calls once before any rank counts.
    """
    looks = config.storage.device == "cuda" and not config.testing.imitated_gpu
    return free_on_gpu() if looks else None


def reserve_own(config: Config, cluster: Cluster, spaces: Sequence[RowSpace], rank: int) -> None:
    """Ask the system for the rows of a rank's shards, as `reserve`; not for rows on a GPU."""
    looks = config.storage.device == "cuda" and not config.testing.imitated_gpu
    if not looks and not config.kind.rows_in_files:
        shards = len(cluster.view.shards_of(rank))
        host = str(cluster.processes[rank]["host"])
        reserve(spaces, cluster.protection.shape, shards, host, config.cluster.whole_tables)


def free_on_gpu() -> tuple[str, int]:
    """This rank's GPU, by a name unique among GPUs of a host, and the free bytes of the GPU."""
    number = torch.cuda.current_device()
    name = getattr(torch.cuda.get_device_properties(number), "uuid", number)
    return str(name), torch.cuda.mem_get_info()[0]


def judge_gpus(
    needed: Mapping[int, int], there: Mapping[int, tuple[str, int]], hosts: Mapping[int, str]
) -> None:
    """Raise UsageError if ranks sharing a GPU need more bytes of the GPU than are free.

    By rank: bytes needed, the GPU's name with its free bytes, and the host.
    """
    sharing: dict[tuple[str, str], list[int]] = {}
    for rank, (name, _) in there.items():
        sharing.setdefault((hosts[rank], name), []).append(rank)
    for (host, _), ranks in sharing.items():
        wanted, free = (
            sum(needed[rank] for rank in ranks),
            min(there[rank][1] for rank in ranks),
        )
        if wanted > free:
            raise UsageError(
                f"the tables need {wanted / MB:,.0f} MB of memory on the GPU of "
                f"{named('rank', ranks)} on {host}, {free / MB:,.0f} MB are free there",
                {"storage.device": "cpu"},
                otherwise="use more servers on more GPUs, or fewer rows",
            )


def reserve(
    spaces: Sequence[RowSpace],
    shape: StripeShape,
    shards: int,
    host: str,
    whole_tables: bool = False,
) -> None:
    """Ask the system for the rows of some shards, and give the memory back untouched.

    Raises UsageError if the system refuses.
    """
    with ExitStack() as held:
        for space, layout in zip(spaces, row_layouts(spaces, shape, whole_tables), strict=True):
            size = layout.data_rows_per_shard * 4 * space.dim
            for _ in range(shards):
                try:
                    memory = mmap.mmap(-1, size, flags=UNTOUCHED)
                except (OSError, OverflowError) as failed:
                    error = failed if isinstance(failed, OSError) else OSError(0, "too large")
                    raise UsageError(
                        f"the system refuses {size / MB:,.0f} MB of memory on {host} for a shard "
                        f"of {space.tables[0].name} and tables like it: "
                        f"{error.strerror or error}",
                        otherwise="use more servers on more hosts, or fewer rows",
                    ) from None
                held.enter_context(memory)


def shard_bytes(
    spaces: Sequence[RowSpace], shape: StripeShape, padded: bool, whole_tables: bool = False
) -> int:
    """Bytes of one shard once every row is updated: rows, optimizer state and redundancy.

    `padded`: records are padded, on all ranks, because some rank has its rows on a GPU.
    """
    total = 0
    for space, layout in zip(spaces, row_layouts(spaces, shape, whole_tables), strict=True):
        rows = layout.data_rows_per_shard + layout.parity_rows_per_shard
        total += rows * record_bytes(space, padded)
    return total


def record_bytes(space: RowSpace, padded: bool = False) -> int:
    """Bytes of a row with its optimizer state; `padded` as for `shard_bytes`."""
    assert space.optimizer is not None
    state = sum(prod(each) for each in state_shapes(space.optimizer.name, 1, space.dim))
    floats = space.dim + state + 1
    if padded:
        floats += -floats % VECTOR
    return 4 * floats


def judged(
    needed: Mapping[str, int], available: Mapping[str, int], prefault: bool, spares: bool = False
) -> str:
    """The warning of `judge_memory`, or its UsageError, from bytes by host.

    With `spares` the bytes needed are of ready spares, too.
    """
    what = "the tables and ready spares need" if spares else "the tables need"
    for host, wanted in needed.items():
        if wanted <= available[host]:
            continue
        numbers = (
            f"{what} {wanted / MB:,.0f} MB of memory on {host}, "
            f"{available[host] / MB:,.0f} MB are available there, for batches and workers of the "
            "data too"
        )
        if prefault:
            raise UsageError(
                f"with storage.prefault {numbers}",
                {"storage.prefault": False},
                otherwise="use more hosts with --hosts",
            )
        return f"once every row is trained {numbers}: use more hosts with --hosts, or fewer rows"
    return ""
