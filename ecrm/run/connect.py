"""Let the ranks of a run meet: find shared hosts, memory and cores, and deal out roles."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecrm.config.schema import Config
from ecrm.placement.view import View
from ecrm.placement.view_change import plan_rollback
from ecrm.process.cores import AUTO, POLL, Cores
from ecrm.process.preflight import host_name
from ecrm.protection.base import Protection
from ecrm.protection.registry import make_protection
from ecrm.run.claim import RunContext
from ecrm.run.collective_check import collective_check, introduce, share_json
from ecrm.run.plan import view_over
from ecrm.transport.base import Transport

Processes = dict[int, dict[str, Any]]
"""The process of every rank: {"pid", "host", "failure_domain", "cores": usable core numbers}."""


@dataclass(frozen=True)
class Cluster:
    """All ranks of a run, as seen by one rank at the start.

    `memory_readers` are the ranks able to read the memory shared by this rank. `view` has the roles
    before any death. `rows_on_gpu`: some rank has its rows on a GPU.
    """

    protection: Protection
    processes: Processes
    memory_readers: list[int]
    view: View
    cores: Cores
    rows_on_gpu: bool


def connect(transport: Transport, run: RunContext, gone: Sequence[int] = ()) -> Cluster:
    """Collective: let the ranks share memory and cores, and deal out the roles.

    Ranks `gone` before get no role: other ranks have their roles from the start. Raises UsageError
    on every rank if the failure domains are too few for the protection.
    """
    config = run.config
    protection = make_protection(
        config.protection,
        config.cluster.servers,
        run.start.mapped,
        run.durable.rows,
        durable=config.mapped.flush == "commit",
    )
    processes = _processes(transport, config)
    readers = introduce(transport, host_name())
    view = collective_check(transport, lambda: start_view(config, protection, processes))
    if gone:
        view = plan_rollback(view, gone, protection.shape, protection.dense_replicas)
    cores = _cores(transport, config, processes)
    cores.heed(view)
    on_gpu = share_json(transport, config.storage.device != "cpu")
    return Cluster(protection, processes, readers, view, cores, any(on_gpu.values()))


def start_view(
    config: Config, protection: Protection, processes: Mapping[int, Mapping[str, Any]]
) -> View:
    """The view at the start, with the failure domains named by `processes`.

    Raises UsageError, with a remedy to type, if the failure domains are too few.
    """
    unknown = {"failure_domain": None}  # of a rank that has died already
    names = [
        processes.get(rank, unknown)["failure_domain"] or f"rank {rank}"
        for rank in range(config.world_size)
    ]
    return view_over(config, protection, names)


def _processes(transport: Transport, config: Config) -> Processes:
    """Collective: the process of every rank."""
    host = host_name()
    domain = f"rank {transport.rank}"
    if config.cluster.failure_domain == "host":
        hosts = config.testing.imitated_hosts
        domain = f"{host}#{transport.rank % hosts}" if hosts else host
    mine = {
        "pid": os.getpid(),
        "host": host,
        "failure_domain": domain,
        "cores": sorted(os.sched_getaffinity(0)),
    }
    return share_json(transport, mine)


def _cores(transport: Transport, config: Config, processes: Processes) -> Cores:
    """The cores of this rank, shared with all ranks of the host allowed the same cores."""
    mine = processes[transport.rank]
    sharing = [
        rank
        for rank, process in processes.items()
        if (process["host"], process["cores"]) == (mine["host"], mine["cores"])
    ]
    wish = config.cluster.oversubscribed
    return Cores(transport, sharing, POLL if wish == AUTO and config.train.threads > 1 else wish)
