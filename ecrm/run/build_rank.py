"""Build one rank: the engine with its tables and hooks, the watches, and the reporter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ecrm.base.allocate import CPU, Allocate, ZerosOn
from ecrm.base.console import say
from ecrm.base.log import SPEAKER
from ecrm.config.schema import Config
from ecrm.engine import events
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.process.farewell import freeze
from ecrm.process.ready import ReadyMemory
from ecrm.process.stop_signals import StopSignals
from ecrm.process.title import name_by_role
from ecrm.run.claim import RunContext
from ecrm.run.connect import Cluster
from ecrm.run.finite import REMEDY, FiniteWatch
from ecrm.run.gather import gather_results
from ecrm.run.inject_faults import Faults, injected_faults
from ecrm.run.metrics_endpoint import MetricsEndpoint
from ecrm.run.profile import Profile, ProfiledTransport
from ecrm.run.progress import MOST_FINISHED
from ecrm.run.reporter import Reporter
from ecrm.run.standstill import Standstill
from ecrm.run.traffic import Traffic
from ecrm.run.warm_up import warm_up_kernels
from ecrm.transport.base import Transport


@dataclass(frozen=True)
class Meters:
    """Counters of this rank's bytes and, with train.profile, its milliseconds."""

    traffic: Traffic
    profile: Profile | None

    def phase(self, step: int, name: str) -> None:
        """Begin a phase, and end the phase before."""
        if self.profile is not None:
            self.profile.phase(step, name)
        self.traffic.phase(name)


@dataclass(frozen=True)
class Rank:
    """The parts of one rank in training. `began` is the begin of building, by time.monotonic()."""

    transport: Transport
    engine: Engine
    reporter: Reporter
    watch: FiniteWatch
    meters: Meters
    began: float
    standstill: Standstill


MakeEngine = Callable[[Transport, Hooks, Allocate], Engine]
"""(transport, hooks, allocate) -> this rank's engine at step 0."""


def build_rank(
    transport: Transport,
    run: RunContext,
    cluster: Cluster,
    stop: StopSignals,
    waiting: Callable[[str], None],
    make_engine: MakeEngine,
    remedy: str = REMEDY,
    features: int | None = None,
) -> Rank:
    """Collective: this rank with its tables, initial tables or the tables to go on with.

    `features` is the number of embeddings of a sample multiplied on a GPU, else `None`. `remedy` is
    the advice to a person about nonfinite losses. Raises UsageError, DataError and Unrecoverable,
    each on every rank.
    """
    config = run.config
    reporter = _reporter(run, cluster, remedy)
    faults = injected_faults(
        () if transport.joined else run.spec.kills,
        config.testing,
        transport.rank,
        reporter.killing,
        run.folder.event,
    )
    meters = Meters(Traffic(transport), Profile(transport.rank) if config.train.profile else None)
    if meters.profile is not None:
        transport = ProfiledTransport(transport, meters.profile)
    began = time.monotonic()
    watch = FiniteWatch(
        config.train.on_nonfinite == "stop",
        config.train.log_every_steps or MOST_FINISHED,
        reporter.event,
        run.durable.newest,
        remedy,
    )
    hooks = _hooks(transport.rank, cluster, reporter, faults, meters, watch, stop)
    name_by_role(cluster.view, transport.rank)
    standstill = Standstill(hooks)
    memory = ReadyMemory(config.ready_spares)
    waiting("tables are built")
    # records are alike on all ranks
    allocate = ZerosOn(CPU) if cluster.rows_on_gpu else memory.allocate
    engine = make_engine(transport, hooks, allocate)
    reporter.watch(engine)
    if faults is not None:
        faults.watch(engine)
    if "cuda" in (config.storage.device, config.train.device):
        waiting("kernels of the GPU are compiled")
    on_gpu = cluster.rows_on_gpu or config.train.device == "cuda"
    _warm_up(transport, config, engine, features, on_gpu)
    if transport.joined:
        waiting("the run admits this rank")
        # here: after the join all other ranks would wait for a second
        freeze()
        engine.recovery.join()
    elif run.loads_tables:
        _load_tables(transport, run, engine, waiting)
    if config.storage.prefault:
        waiting("the system hands out the memory of the tables")
        hand_out(transport, memory, engine)
        if run.start.mapped is None:  # pages of files would count as changed
            # memory new since a recovery, once the step after the recovery is done
            hooks.committed = lambda: memory.committed(engine)
    return Rank(transport, engine, reporter, watch, meters, began, standstill)


def hand_out(transport: Transport, memory: ReadyMemory, engine: Engine) -> None:
    """Collective: have all memory handed out now; on a rank that joins later, beside the steps.

    A rank that joins is a member already: all other ranks would wait for its pages.
    """
    gather_results(transport, lambda: None if transport.joined else memory.start(engine))


def _warm_up(
    transport: Transport, config: Config, engine: Engine, features: int | None, any_gpu: bool
) -> None:
    def say_on_first(line: str) -> None:
        if transport.rank == transport.live[0]:
            say(line)

    warm_up_kernels(transport, config, engine.state.spaces, features, any_gpu, say_on_first)


def _reporter(run: RunContext, cluster: Cluster, remedy: str) -> Reporter:
    return Reporter(
        run.folder,
        cluster.processes,
        events.Terms(
            cluster.protection.dense_replicas - 1,
            run.durable.in_words,
            cluster.protection.any_shards_may_be_lost,
            remedy,
        ),
        MetricsEndpoint(run.config.metrics.port, run.config.metrics.address),
    )


def _hooks(
    rank: int,
    cluster: Cluster,
    reporter: Reporter,
    faults: Faults | None,
    meters: Meters,
    watch: FiniteWatch,
    stop: StopSignals,
) -> Hooks:
    """The hooks of the engine: for phases, events, stop requests and trouble."""

    def phase(step: int, name: str) -> None:
        SPEAKER.step = step
        meters.phase(step, name)
        if faults is not None:
            faults.phase(step, name)

    def event(told: events.Event) -> None:
        if isinstance(told, events.View):
            cluster.cores.apply_view(reporter.view)
            name_by_role(reporter.view, rank)
        reporter.event(told)

    return Hooks(
        phase,
        event,
        asks=lambda: stop.received is not None or reporter.cannot_write,
        troubled=watch.losses,
        skipped=watch.skipped,
    )


def _load_tables(
    transport: Transport, run: RunContext, engine: Engine, waiting: Callable[[str], None]
) -> None:
    """Collective: load the tables at the start, from a checkpoint or from mapped files."""
    if transport.rank == transport.live[0]:
        for line in (*run.start.refused, *run.start.changed):
            say(line)
    waiting(f"tables are read from {run.resume or run.spec.init_from}")
    engine.recovery.resume()
