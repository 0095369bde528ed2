"""Build and end the run of a session, on ranks started by ecrm."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecrm.base.allocate import Allocate
from ecrm.base.console import Waiting, say
from ecrm.base.errors import EcrmError, UsageError
from ecrm.base.log import SPEAKER
from ecrm.base.wording import counted, measured
from ecrm.config.schema import Config
from ecrm.engine import events
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks, StepAborted, StopRequested
from ecrm.model.module_replica import ModuleReplica
from ecrm.placement.initial_values import FileValues
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table, row_spaces
from ecrm.process.device import device_of, gpu_trained_on, trained_on
from ecrm.process.farewell import freeze
from ecrm.process.preflight import host_name
from ecrm.run.announce import start_event, tell_end
from ecrm.run.build_rank import Rank, build_rank
from ecrm.run.claim import RunContext, claim_run
from ecrm.run.connect import Acquaintances, Cluster, accept, connect, share_with
from ecrm.run.consistency import given_of
from ecrm.run.disk_check import free_on_disk, judge_disk, most_at_once
from ecrm.run.ending import Ending, Record
from ecrm.run.finite import REMEDY as OF_CONFIGS
from ecrm.run.gather import gather_results, on_all
from ecrm.run.hello import Hello, Inputs, check_inputs, hello_of, needed_versions
from ecrm.run.inputs import FACTORS, OF_CONFIG, OF_SCRIPT, check_started, data_of
from ecrm.run.joining import over_links, write_join_file
from ecrm.run.keep import checkpoint_folder, checkpoints_of, inherit_best
from ecrm.run.loaded_files import with_digests
from ecrm.run.log_delivery import FileMark, NoMark
from ecrm.run.memory_check import judge_memory, reserve_own, shown_gpu
from ecrm.run.plan import BuiltIn
from ecrm.run.policy import policy_of
from ecrm.run.rank_run import RankRun, RunStopped
from ecrm.run.reported import EVALUATED, ended_early, last_named
from ecrm.run.run_folder import RunFolder
from ecrm.run.run_lock import make_run_dir
from ecrm.run.sealed import meet
from ecrm.run.session_progress import SessionProgress, samples_of, steps_skipped
from ecrm.run.slot_faults import AFTER, UNJUDGED, Place
from ecrm.run.spec import RunSpec
from ecrm.run.standstill import Standstill
from ecrm.run.started import Started, Wanted, too_late
from ecrm.run.summary import flat_state
from ecrm.run.this_rank import WITHOUT_GROUPS, ThisRank, this_rank
from ecrm.run.trained_module import (
    TrainedModule,
    digests_of,
    names_of,
    shapes_of,
)
from ecrm.run.user_code import UserCode, user_code_of
from ecrm.run.whereabouts import Whereabouts, word_of
from ecrm.transport.base import Transport

REMEDY = "lower the learning rates"


def start_run(wanted: Wanted) -> Started:
    """Collective: build the run wanted by a session, as this rank.

    The run of an earlier session ends first. No earlier call is collective otherwise: if the script
    has failed on a rank before, all ranks learn of the failure now. Raises UsageError, DataError
    and Unrecoverable, always on every rank. Raises RunStopped if no work is left, and UsageError if
    ecrm has not started this process.
    """
    rank = this_rank()
    transport = rank.transport
    _check_no_group()
    futile = rank.met and rank.part is None
    if rank.part is not None:
        _end_before(rank)
        free_memory()
    rank.met = True
    SPEAKER.step = None
    spec, follows = rank.spec_of(rank.number), rank.script.follows_config
    gone = () if rank.number == 1 else _gone(transport, spec.config)

    def say_on_first(line: str) -> None:
        if transport.rank == transport.live[0] or transport.joined:
            say(line)

    with Waiting(say_on_first) as waiting:
        waiting(f"{'the' if follows else 'the script and the'} config are checked")
        started = _Start(rank, wanted, len(transport.live) + len(gone))
        before = transport.said_at_start[0] if transport.joined else {}
        said = gather_results(transport, lambda: started.hello(spec, futile))
        hellos = {of: Hello(**facts) for of, facts in said.items()}
        if transport.joined:
            hellos[transport.rank] = _as_before(hellos[transport.rank], before[transport.rank])
        check_inputs(transport, hellos, started.inputs, OF_CONFIG if follows else OF_SCRIPT)
        if any(hello.reads_files for hello in hellos.values()):
            started.read_files()
        wanted, config, module = started.wanted, started.config, started.module
        trained = BuiltIn(config, module.on) if follows else module
        spaces = row_spaces(wanted.tables)
        clusters: list[Cluster] = []

        def make_ready(run: RunContext) -> Any:
            cluster = connect(transport, run, hellos, gone)
            clusters[:] = [cluster]
            reserve_own(config, cluster, spaces, transport.rank)
            free = free_on_disk(checkpoint_folder(run))
            return [accept(transport, hellos), shown_gpu(config), free]

        claimed = claim_run(transport, replace(spec, config=config), trained, make_ready, waiting)
        if claimed is None:
            raise RunStopped(0)
        run, ready = claimed
        replica = wanted.make_dense()
        if follows and run.start.checkpoints and isinstance(replica, ModuleReplica):
            replica.goes_on_from = run.start.checkpoints[0].step
        rank.held.append(run.held)
        cluster = share_with(transport, clusters[0], {of: said[0] for of, said in ready.items()})
        available = {of: hello.available for of, hello in hellos.items()}
        gpus = {of: said[1] for of, said in ready.items()}
        lacking = on_all(transport, lambda: judge_memory(config, cluster, spaces, available, gpus))
        free = [said[2] for said in ready.values()]
        at_once = most_at_once(config, run.start.steps, wanted.keeps_best)
        full = on_all(
            transport, lambda: judge_disk(run.spec.run_dir, replica, spaces, free, at_once)
        )
        for warning in filter(None, (lacking, full)):
            say_on_first(f"warning: {warning}")
        cluster.cores.apply_view(cluster.view)
        words = {of: hello.word for of, hello in hellos.items()}
        whereabouts = Whereabouts.of_ranks(transport, started.word, words)
        mine = hellos[transport.rank]
        built = build_rank(
            transport,
            run,
            cluster,
            rank.stop,
            waiting,
            lambda transport, hooks, allocate: _engine(
                transport, hooks, allocate, run, cluster, wanted, whereabouts, mine
            ),
            OF_CONFIGS if follows else REMEDY,
            _multiplied(config, wanted) if follows else None,
        )
        start = start_event(
            run,
            cluster,
            built,
            script=None if follows else rank.script,
            dense_arch=config.model.interaction if follows else None,
            open_end=wanted.open_end or None,
        )
    built.standstill.places = whereabouts.places
    rank_run, summary = _rank_run(rank, run, built, start, wanted)
    built.standstill.watch(built.engine)
    if not transport.joined:
        _tell_start(run, cluster, built, start, wanted)
    writes = transport.rank == built.engine.view.reporter and not transport.joined
    if rank.number == 1 and writes:
        hosts = [str(hellos[of].host) for of in range(config.world_size) if of in hellos]
        write_join_file(run.folder.path, transport, hosts)
    if rank.number > 1 and over_links():
        say_on_first(f"session {rank.number} admits no rank: a host that is lost stays lost")
    freeze()

    def doing(place: Place | str) -> None:
        ends = isinstance(place, Place) and place.part in UNJUDGED
        rank.place = "" if ends else place
        whereabouts.enter(place if isinstance(place, Place) else None)
        rank.calls.awaited = not (isinstance(place, Place) and place.part == AFTER)

    rank.part = ScriptPart(rank_run, run.folder, built.standstill, doing, summary)
    typed = config.train.check_determinism
    if typed < 0:
        typed = 0 if follows else wanted.check_steps  # tests have checked the recipe
    if transport.joined:
        typed = 0  # the other ranks are past the checks
    finite = config.train.on_nonfinite == "stop"
    mark = NoMark() if run.folder.path is None else FileMark(run.folder.path, transport.rank)
    return Started(
        rank_run,
        doing,
        typed,
        finite,
        mark,
        rank.number,
        run.start.steps,
        run.start.data_began,
    )


def _as_before(hello: Hello, before: Mapping[str, Any]) -> Hello:
    """The hello of a rank that joins, in the failure domain of the rank that was lost.

    Raises UsageError if the inputs of this rank are others than at the start of the run.
    """
    if hello.inputs != before["inputs"]:
        raise UsageError(
            f"host {hello.host}: the config, the script, the data, the sources of ecrm or the "
            "versions here are others than those of the run",
            otherwise="copy the files of another host, install its ecrm and versions, and join "
            "again",
        )
    domain = before["process"]["failure_domain"]
    return replace(hello, process={**hello.process, "failure_domain": domain})


class _Start:
    """This rank's inputs to a run, as wanted by a session; `word` holds the rank's whereabouts."""

    def __init__(self, rank: ThisRank, wanted: Wanted, started: int) -> None:
        """`started` is the number of ranks, dead ranks included."""
        self._rank, self._started = rank, started
        self._follows = rank.script.follows_config
        self.wanted = replace(wanted, tables=_named(wanted.tables, self._follows))
        self.word, self._offset = word_of(rank.transport)

    def hello(self, spec: RunSpec, futile: bool) -> dict[str, Any]:
        """Check the inputs of this rank, and return its hello. Raises UsageError and DataError."""
        _check_begun(futile)
        wanted, follows, config = self.wanted, self._follows, spec.config
        self.config = config = merged_config(spec, wanted, self._started)
        self.module = trained_by(wanted, config)
        if follows:
            others: dict[str, Any] = {"data": data_of(config)}
            steps = BuiltIn(config).steps()
        else:
            text = self._rank.script.path.read_bytes()
            script = [hashlib.sha256(text).hexdigest(), list(self._rank.script.arguments)]
            lookups = [table.lookups for table in wanted.tables]
            others, steps = {"script": script, FACTORS: lookups}, wanted.steps
        given = given_of(host_name(), config, steps, **others)
        about = json.loads(json.dumps(self.module.about()))
        versions = needed_versions(config)
        self.inputs = Inputs(given, trained_on(config), versions, about, self.module.weights)
        shown_gpu(config)  # before any rank counts
        reads = any(isinstance(table.initial, FileValues) for table in wanted.tables)
        return hello_of(self._rank.transport, config, self.inputs, reads, self._offset)

    def read_files(self) -> None:
        """Collective: read the files of tables, and compare the content between ranks."""
        tables = with_digests(self._rank.transport, self.wanted.tables)
        self.wanted = replace(self.wanted, tables=tables)
        self.module = replace(self.module, wanted=self.wanted)


def _end_before(rank: ThisRank) -> None:
    """Collective: end the run of the script's session before the one that begins.

    Raises UsageError where its loop was left, EcrmError where its summary cannot be written, and
    what the end of a run raises.
    """
    part = rank.part
    assert part is not None
    if rank.unfinished:
        raise UsageError(rank.unfinished)
    run_dir = rank.spec_of(rank.number + 1).run_dir
    if run_dir is not None:  # before the run is complete: it tells the launch of one more
        try:
            make_run_dir(run_dir)
        except OSError as error:
            raise UsageError(
                f"cannot make {run_dir}, the folder of the next session: {error.strerror}",
                otherwise="make room there, or give the run another folder by --run-dir",
            ) from None
    complete = part.end() == 0
    part.over()
    reporter = part.engine.view.reporter

    def check_complete() -> None:
        if rank.transport.rank == reporter and not complete:
            raise EcrmError(f"session {rank.number} is not complete: cannot write summary.json")

    gather_results(rank.transport, check_complete)
    rank.transport.joined = False  # all ranks begin the next session alike
    rank.calls.awaited = False  # the start of a session takes as long as it takes
    rank.part, rank.place, rank.number = None, "", rank.number + 1


def free_memory() -> None:
    """Free the memory of an earlier session, which no variable of the script holds any more."""
    gc.unfreeze()
    for _ in range(2):  # the first may only finalize what the second frees
        gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _gone(transport: Transport, config: Config) -> tuple[int, ...]:
    """The ranks that have died in the sessions before."""
    return tuple(rank for rank in range(config.world_size) if rank not in transport.live)


def _check_begun(futile: bool) -> None:
    """Raise UsageError if an earlier session of the script could not begin, `futile`."""
    if futile:
        raise UsageError(
            "a session before could not begin, and no other can in this run",
            otherwise="mend that, and start the run again",
        )


def _check_no_group() -> None:
    """Raise UsageError if the script has a process group: a killed rank would break the group."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise UsageError(
            "the script has a process group, which does not survive a killed rank",
            otherwise=WITHOUT_GROUPS,
        )


def _rank_run(
    this: ThisRank,
    run: RunContext,
    rank: Rank,
    start: events.Start,
    wanted: Wanted,
) -> tuple[RankRun, SessionSummaryFields]:
    """This rank's part in the run, and the facts of the end."""
    engine, steps = rank.engine, run.start.steps
    every = run.config.train.log_every_steps
    progress = SessionProgress(
        steps, every, rank.reporter.progress, wanted.open_end, wanted.samples
    )
    progress.begins_at(engine)
    checkpoints = checkpoints_of(run, rank)
    if wanted.keeps_best:
        inherit_best(run, rank)
    record = Record(run.folder, start.about(), rank.meters.traffic, rank.meters.profile)
    words = SessionSummaryFields(engine, steps, wanted.samples, flat=this.script.follows_config)
    ending = Ending(engine, run.config, steps, record, checkpoints, progress, words)
    progress.restart_clock()

    def told(summary: dict[str, Any] | None, why_not_kept: str) -> None:
        tell_end(run, rank, summary, why_not_kept, _pace(summary))

    rank_run = RankRun(
        engine,
        steps,
        record,
        ending,
        progress,
        checkpoints,
        rank.watch,
        lambda: this.stop.received,
        told,
    )
    return rank_run, words


def _named(tables: Sequence[Table], follows: bool) -> list[Table]:
    """The tables of a run; in a config's run by their names in the data."""
    if not follows:
        return list(tables)
    return [replace(table, name=table.name.rpartition(".")[2]) for table in tables]


def _multiplied(config: Config, wanted: Wanted) -> int | None:
    """The number of embeddings of a sample multiplied on the GPU; `None` for none."""
    native = config.model.interaction == "native" and config.train.device == "cuda"
    return len(wanted.tables) if native else None


def merged_config(spec: RunSpec, wanted: Wanted, started: int) -> Config:
    """Merge the script's choices into the config. Raises UsageError if the two conflict.

    A recipe has no choices of its own. `started` is the number of ranks.
    """
    config = spec.config
    check_started(started, config)
    check_best(config, spec.run_dir, wanted)
    if spec.script.follows_config:
        return config
    trainers = config.cluster.trainers
    if wanted.slots < trainers:
        raise UsageError(
            f"Session(slots={wanted.slots}) is fewer than the {counted(trainers, 'trainer')}: "
            f"type --trainers {wanted.slots}, or give the Session {trainers} slots"
        )
    if config.train.seed not in (0, wanted.seed):
        raise UsageError(
            f"train.seed is {config.train.seed}, but the script has Session(seed={wanted.seed}): "
            "leave one of them out"
        )
    train = replace(
        config.train,
        slots=wanted.slots,
        seed=wanted.seed,
        steps=wanted.steps,
        epochs=0.0,
        global_batch=wanted.slots,
    )
    return replace(config, train=train)


def trained_by(wanted: Wanted, config: Config) -> TrainedModule:
    """The module that a session trains, before the files of its tables are read."""
    replica = wanted.make_dense()
    if not isinstance(replica, ModuleReplica):
        return TrainedModule(wanted, {}, {}, {})
    module, state = replica.module, replica.named_state
    return TrainedModule(
        wanted, shapes_of(module), names_of(module), digests_of(state), gpu_trained_on(config)
    )


def check_best(config: Config, run_dir: Path | None, wanted: Wanted) -> None:
    """Raise UsageError if the best model is to be kept, but the run cannot write checkpoints."""
    wants = "session.every(keep_best=True) writes a checkpoint"
    if not wanted.keeps_best:
        return
    if run_dir is None:
        raise UsageError(f"{wants}, but the run has no folder", otherwise="type --run-dir DIR")
    if not (config.checkpoints or config.checkpoint.at_end):
        raise UsageError(
            f"{wants}, but the run writes none",
            otherwise="leave out checkpoint.at_end=false",
        )
    if config.kind.rows_in_files:
        raise UsageError(
            f"{wants}, but protection.name is {config.protection.name}, which goes on without "
            "checkpoints",
            otherwise="leave out keep_best, or give the run another protection",
        )


def _engine(
    transport: Transport,
    hooks: Hooks,
    allocate: Allocate,
    run: RunContext,
    cluster: Cluster,
    wanted: Wanted,
    whereabouts: Whereabouts,
    mine: Hello,
) -> Engine:
    """This rank's engine at step 0."""
    config = run.config
    hooks.inquest = UserCode(whereabouts.place_of_dead)
    hooks.introductions = Acquaintances(transport, mine, cluster, whereabouts)
    return Engine(
        transport=transport,
        tables=wanted.tables,
        view=cluster.view,
        protection=cluster.protection,
        optimizer=SparseOptimizer("sgd", 0.0),  # tables have own optimizers
        make_dense=wanted.make_dense,
        seed=run.start.identity["rows_seed"],
        policy=policy_of(config, cluster.protection),
        hooks=hooks,
        durable=run.durable.tier,
        allocate=allocate,
        device=device_of(config, "storage.device"),
        slots_on=wanted.device,
        sparse_rate=wanted.sparse_rate,
        wire_dtype=wanted.wire_dtype,
        whole_tables=config.cluster.whole_tables,
    )


def _tell_start(
    run: RunContext, cluster: Cluster, rank: Rank, start: events.Start, wanted: Wanted
) -> None:
    """Report the start of the run."""
    steps = f"{'at most ' if wanted.open_end else ''}{counted(run.start.steps, 'step')}"
    if wanted.samples:
        steps += f" of {counted(wanted.samples, 'sample')}"
    config = run.config
    trained = (
        f"{config.ranks_in_words}, {cluster.protection.in_words}, "
        f"{counted(config.slots, 'slot')}, {steps}"
    )
    rank.reporter.started(start, start.in_words(trained))


class ScriptPart:
    """This rank's part in the run of a script, for the end of the script."""

    def __init__(
        self,
        run: RankRun,
        folder: RunFolder,
        standstill: Standstill,
        doing: Callable[[Place | str], None],
        words: SessionSummaryFields,
    ) -> None:
        self._run, self._folder, self._standstill, self._doing = run, folder, standstill, doing
        self._words = words
        self.engine = run.engine

    @property
    def steps_left(self) -> int:
        """The number of steps not trained yet."""
        return self._run.steps_left

    def over(self) -> None:
        """End the watch for standstills: the script and the run have ended, well or badly."""
        self._standstill.end()

    def end(self, sessions: int | None = None) -> int:
        """Collective, after the end of the script: verify and keep the model, write the summary.

        `sessions` is the number of the script's sessions, `None` before another session.
        Returns the exit code: 0 if the run is complete, else 1. Raises Unrecoverable on every rank
        if a failure has undone steps, since the script's loop is over.
        """
        self._doing("")
        self._words.sessions = sessions
        asked = False
        while True:
            if self.engine.step < self._run.furthest:
                raise too_late(self.engine, self._run.furthest)
            try:
                if asked:
                    asked = False
                    self._run.stop()
                meet(self.engine, "the end of the script")
                self.engine.check_stop()
                self._run.finish()
                return 0 if self._folder.is_complete else 1
            except StopRequested:
                asked = True
            except StepAborted:
                self._run.on_recovery()


class SessionSummaryFields:
    """The facts reported at the end of a session's run.

    `samples` is the number of samples in a step, 0 if unknown. `flat`: the dense part is digested
    as `flat_state`.
    """

    def __init__(self, engine: Engine, steps: int, samples: int = 0, flat: bool = False) -> None:
        self._engine, self._steps, self._samples, self._flat = engine, steps, samples, flat
        self.sessions: int | None = None
        """The number of the script's sessions, once the script has ended."""

    def digested(self) -> Sequence[Tensor]:
        """The dense part, on the reporter, as digested for the summary."""
        dense = self._engine.state.dense
        assert isinstance(dense, ModuleReplica)
        return flat_state(dense) if self._flat else dense.state_tensors

    def of_summary(self, steps: int, seconds: float) -> dict[str, Any]:
        """Fields of the summary, on the reporter, after `steps` steps in `seconds`."""
        pace = steps / seconds
        named = last_named(self._engine).items()
        ended = ended_early(self._engine, self._steps)
        return {
            "steps_per_second": pace,
            **samples_of(self._samples, self._engine.step, pace),
            **{EVALUATED + name: value for name, value in named},
            "sessions": self.sessions,
            "ended_early": None if ended is None else ended.fields(),
            **self._counts,
        }

    def of_stopped(self) -> dict[str, Any]:
        """Fields of stopped.json, on the reporter."""
        samples = self._samples * self._engine.step
        return {**({"samples": samples} if self._samples else {}), **self._counts}

    @property
    def _counts(self) -> dict[str, Any]:
        return {"steps_skipped": steps_skipped(self._engine), "slot_faults": self._slot_faults}

    @property
    def _slot_faults(self) -> list[dict[str, Any]]:
        faults = user_code_of(self._engine).faults
        return [fault.event(rank).fields() for rank, fault in faults.items() if fault.known]


def _pace(summary: dict[str, Any] | None) -> str:
    """The speed of a run, and the first value reported last, in words; "" without a summary."""
    if summary is None:
        return ""
    if "samples_per_second" in summary:
        pace = f"{summary['samples_per_second']:,.0f} samples/s"
    else:
        pace = f"{summary['steps_per_second']:,.1f} steps/s"
    named = [name for name in summary if name.startswith(EVALUATED)][:1]
    found = [
        f", evaluation {name.removeprefix(EVALUATED)} {measured(summary[name])}" for name in named
    ]
    return pace + "".join(found)
