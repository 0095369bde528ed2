"""Check whether the hosts of a run have enough memory for its tables, before taking any."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod

import torch

from ecrm.base.allocate import UNTOUCHED
from ecrm.base.wording import named
from ecrm.config.schema import Config
from ecrm.errors import UsageError
from ecrm.placement.stripes import StripeShape
from ecrm.placement.tables import RowSpace
from ecrm.process.linux import memory_bytes
from ecrm.run.collective_check import collective_check, share_json
from ecrm.run.connect import Cluster
from ecrm.storage.base import VECTOR, state_shapes
from ecrm.transport.base import Transport

MB = 1e6


def check_memory(
    transport: Transport, config: Config, cluster: Cluster, spaces: Sequence[RowSpace]
) -> str:
    """Collective: a warning, or "", about tables possibly too large for the hosts' memory.

    Raises UsageError on every rank if the memory is certain to be too small: with storage.prefault,
    or if the system refuses a table so large. Otherwise rows never updated need no memory. Tables
    on a GPU are checked by `check_gpu_memory`. Tables in mapped files are not checked. Memory taken
    earlier by a script is not available any more, and thereby counted; memory taken later by the
    script and the workers of its data is not counted.
    """
    on_gpu = check_gpu_memory(transport, config, cluster, spaces)
    available = share_json(transport, memory_bytes()[1])
    if config.kind.rows_in_files:
        return ""
    hosts = {rank: str(process["host"]) for rank, process in cluster.processes.items()}
    each = shard_bytes(spaces, cluster.protection.shape, cluster.rows_on_gpu)
    needed: dict[str, int] = {}
    for rank in cluster.view.shards:
        if rank not in on_gpu:
            needed[hosts[rank]] = needed.get(hosts[rank], 0) + each
    there = {
        host: min(available[rank] for rank in available if hosts[rank] == host) for host in needed
    }
    prefault = config.storage.prefault
    warning: str = collective_check(transport, lambda: judged(needed, there, prefault))
    on_host = transport.rank not in on_gpu
    shards = len(cluster.view.shards_of(transport.rank)) if on_host else 0
    host = hosts[transport.rank]
    collective_check(transport, lambda: reserve(spaces, cluster.protection.shape, shards, host))
    return warning


def check_gpu_memory(
    transport: Transport, config: Config, cluster: Cluster, spaces: Sequence[RowSpace]
) -> set[int]:
    """Collective: raise UsageError on every rank if the tables do not fit on the GPUs.

    On a GPU all memory of the tables is taken at the start. The needs of ranks sharing a GPU are
    added up. Ranks with rows on the CPU or on an imitated GPU are not checked; returns the ranks
    checked. Each rank must have chosen its GPU.
    """
    looks = config.storage.device == "cuda" and not config.testing.imitated_gpu
    if looks:
        free_on_gpu()  # CUDA takes its own memory, on every rank before any looks
    if not any(share_json(transport, looks).values()):
        return set()
    shown = share_json(transport, free_on_gpu() if looks else None)
    there = {rank: (said[0], said[1]) for rank, said in shown.items() if said is not None}
    each = shard_bytes(spaces, cluster.protection.shape, cluster.rows_on_gpu)
    needed = {rank: each * len(cluster.view.shards_of(rank)) for rank in there}
    hosts = {rank: str(process["host"]) for rank, process in cluster.processes.items()}
    collective_check(transport, lambda: judge_gpus(needed, there, hosts))
    return set(there)


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


def reserve(spaces: Sequence[RowSpace], shape: StripeShape, shards: int, host: str) -> None:
    """Ask the system for the rows of some shards, and give the memory back untouched.

    Raises UsageError if the system refuses.
    """
    with ExitStack() as held:
        for space in spaces:
            size = -(-space.rows // (shape.k * shape.shards)) * shape.k * 4 * space.dim
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


def shard_bytes(spaces: Sequence[RowSpace], shape: StripeShape, padded: bool) -> int:
    """Bytes of one shard once every row is updated: rows, optimizer state and redundancy.

    `padded`: records are padded, on all ranks, because some rank has its rows on a GPU.
    """
    total = 0
    for space in spaces:
        assert space.optimizer is not None
        state = sum(prod(each) for each in state_shapes(space.optimizer.name, 1, space.dim))
        periods = -(-space.rows // (shape.k * shape.shards))
        floats = space.dim + state + 1
        if padded:
            floats += -floats % VECTOR
        total += periods * (shape.k + shape.m) * 4 * floats
    return total


def judged(needed: Mapping[str, int], available: Mapping[str, int], prefault: bool) -> str:
    """The warning of `check_memory`, or its UsageError, from bytes by host."""
    for host, wanted in needed.items():
        if wanted <= available[host]:
            continue
        numbers = (
            f"the tables need {wanted / MB:,.0f} MB of memory on {host}, "
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
