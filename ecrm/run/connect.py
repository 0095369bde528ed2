"""The ranks of a run together: their hosts, roles, shared memory and cores, from their hellos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ecrm.config.schema import Config
from ecrm.engine.hooks import Introductions
from ecrm.placement.view import View
from ecrm.placement.view_change import plan_rollback
from ecrm.process.cores import AUTO, POLL, Cores
from ecrm.process.preflight import host_name
from ecrm.protection.base import Protection
from ecrm.protection.registry import make_protection
from ecrm.run.claim import RunContext
from ecrm.run.hello import Hello, Hellos
from ecrm.run.plan import view_over
from ecrm.run.whereabouts import Whereabouts
from ecrm.transport.base import Transport

Processes = dict[int, Mapping[str, Any]]
"""The `process` of every rank's hello; of a rank that has joined, of its present process."""


@dataclass(frozen=True)
class Cluster:
    """All ranks of a run, as seen by one rank at the start.

    `memory_readers` are the ranks able to read the memory shared by this rank. `view` has the roles
    before any death. `rows_on_gpu`: some rank has its rows on a GPU.
    """

    protection: Protection
    processes: Processes
    memory_readers: Sequence[int]
    view: View
    cores: Cores
    rows_on_gpu: bool


def connect(
    transport: Transport, run: RunContext, hellos: Hellos, gone: Sequence[int] = ()
) -> Cluster:
    """Deal out the roles, the same on all ranks; no rank reads the memory of this rank so far.

    Ranks `gone` before get no role: other ranks have their roles from the start. Raises UsageError
    for all ranks if the failure domains are too few for the protection.
    """
    config = run.config
    protection = make_protection(
        config.protection,
        config.cluster.servers,
        run.start.mapped,
        run.durable.rows,
        durable=config.mapped.flush == "commit",
    )
    processes = {rank: hello.process for rank, hello in hellos.items()}
    view = start_view(config, protection, processes)
    if gone:
        view = plan_rollback(view, gone, protection.shape, protection.dense_replicas)
    on_gpu = any(hello.rows_on_gpu for hello in hellos.values())
    cores = _cores(transport, config, processes)
    return Cluster(protection, processes, (), view, cores, on_gpu)


def start_view(config: Config, protection: Protection, processes: Processes) -> View:
    """The view at the start, with the failure domains named by `processes`.

    Raises UsageError, with a remedy to type, if the failure domains are too few.
    """
    unknown = {"failure_domain": None}  # of a rank that has died already
    names = [
        processes.get(rank, unknown)["failure_domain"] or f"rank {rank}"
        for rank in range(config.world_size)
    ]
    return view_over(config, protection, names)


def accept(transport: Transport, hellos: Hellos) -> list[int]:
    """Map the memory offered by the ranks of this host; return the ranks with readable memory."""
    if transport.shared_memory is None or transport.joined:
        return []
    offers = {rank: hello.offer for rank, hello in hellos.items() if rank != transport.rank}
    return transport.shared_memory.accept(host_name(), offers)


def share_with(
    transport: Transport, cluster: Cluster, accepted: Mapping[int, Sequence[int]]
) -> Cluster:
    """Let ranks read this rank's memory by `accepted`, the results of `accept` on all ranks."""
    if transport.shared_memory is None or transport.joined:
        return cluster
    readers = _readers(transport.rank, accepted)
    transport.shared_memory.share_with(readers)
    return replace(cluster, memory_readers=readers)


class Acquaintances(Introductions):
    """Tells of processes and of shared memory when ranks join.

    Brings `cluster.processes` up to date, and the ranks that share cores or read each other's
    memory. `mine` is the hello of this rank.
    """

    def __init__(
        self, transport: Transport, mine: Hello, cluster: Cluster, whereabouts: Whereabouts
    ) -> None:
        self._transport, self._mine = transport, mine
        self._cluster, self._whereabouts = cluster, whereabouts

    def about(self) -> dict[str, Any]:
        """The process of this rank, its offer to read memory, and its word there."""
        return {"process": self._mine.process, "offer": self._mine.offer, "word": self._mine.word}

    def meet(self, facts: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Map the memory of ranks of this host; return the ranks with readable memory."""
        rank, memory = self._transport.rank, self._transport.shared_memory
        self._cluster.processes.update({of: each["process"] for of, each in facts.items()})
        self._cluster.cores.know(sharing_cores(rank, self._cluster.processes))
        if memory is None:
            return []
        offers = {of: each["offer"] for of, each in facts.items() if of != rank}
        readable = memory.accept(self._mine.host, offers)
        self._whereabouts.learn(self._transport, {of: each["word"] for of, each in facts.items()})
        return readable

    def met(self, answers: Mapping[int, Sequence[int]]) -> None:
        """Let ranks read this rank's memory, by the results of `meet` on all ranks."""
        if self._transport.shared_memory is not None:
            self._transport.shared_memory.share_with(_readers(self._transport.rank, answers))


def _readers(rank: int, accepted: Mapping[int, Sequence[int]]) -> list[int]:
    """The ranks that read the memory of `rank`, by the readable ranks of every rank."""
    return sorted(of for of, read in accepted.items() if rank in read)


def sharing_cores(rank: int, processes: Processes) -> list[int]:
    """All ranks of the host of `rank` that are allowed the same cores, `rank` included."""
    mine = processes[rank]
    return [
        of
        for of, process in processes.items()
        if (process["host"], process["cores"]) == (mine["host"], mine["cores"])
    ]


def _cores(transport: Transport, config: Config, processes: Processes) -> Cores:
    """The cores of this rank, shared with all ranks of the host allowed the same cores."""
    sharing, wish = sharing_cores(transport.rank, processes), config.cluster.oversubscribed
    return Cores(transport, sharing, POLL if wish == AUTO and config.train.threads > 1 else wish)
