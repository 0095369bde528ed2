"""Build and end the run of a session, on ranks started by ecrm."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecrm.base.allocate import Allocate
from ecrm.base.console import Waiting, say
from ecrm.base.wording import counted, measured
from ecrm.config.schema import Config
from ecrm.engine.dense import DenseReplica
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks, StepAborted, StopRequested
from ecrm.engine.sealed import meet
from ecrm.engine.slot_faults import AFTER, UNJUDGED, Place
from ecrm.errors import EcrmError, Unrecoverable, UsageError
from ecrm.model.module_replica import ModuleReplica
from ecrm.model.nested_state import leaves
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table, row_spaces
from ecrm.process.device import device_of, gpu_trained_on
from ecrm.process.preflight import host_name
from ecrm.run.announce import start_fields, start_in_words, tell_end
from ecrm.run.build_rank import Rank, build_rank
from ecrm.run.check_start import check_alike, check_started
from ecrm.run.claim import Job, RunContext, claim_run
from ecrm.run.collective_check import collective_check, share_at_start, share_json
from ecrm.run.connect import Cluster, connect
from ecrm.run.consistency import Alike, given_of
from ecrm.run.ending import Ending, Record
from ecrm.run.finite import REMEDY as OF_CONFIGS
from ecrm.run.keep import checkpoints_of, inherit_best
from ecrm.run.loaded_files import with_digests
from ecrm.run.log_delivery import FileMark, NoMark
from ecrm.run.memory_check import check_memory
from ecrm.run.plan import BuiltIn, dense_arch
from ecrm.run.policy import policy_of
from ecrm.run.rank_run import RankRun, RunStopped
from ecrm.run.reported import EVALUATED, ended_early, last_named
from ecrm.run.run_folder import RunFolder
from ecrm.run.run_lock import make_run_dir
from ecrm.run.session_progress import SessionProgress, samples_of, steps_skipped
from ecrm.run.standstill import Standstill
from ecrm.run.started import Started, Wanted, too_late
from ecrm.run.summary import flat_state
from ecrm.run.this_rank import WITHOUT_GROUPS, ThisRank, this_rank
from ecrm.run.trained_module import (
    TrainedModule,
    begins_otherwise,
    differences,
    digests_of,
    names_of,
    shapes_of,
)
from ecrm.run.whereabouts import Whereabouts
from ecrm.transport.base import Transport

ALIKE = Alike(
    "script and config",
    {"script": "another script"},
    "copy the script and the config to every host, and give it the same arguments",
)
REMEDY = "lower the learning rates"
TOLD = "told"
"""The file in a run folder with the `Mark` of the steps told to functions for on_commit."""


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
    collective_check(transport, lambda: _check_begun(futile))
    job, follows = rank.job_of(rank.number), rank.script.follows_config
    gone = () if rank.number == 1 else _gone(transport, job.config)

    def say_on_first(line: str) -> None:
        if transport.rank == transport.live[0]:
            say(line)

    with Waiting(say_on_first) as waiting:
        waiting(f"{'the' if follows else 'the script and the'} config are checked")
        started = len(transport.live) + len(gone)
        config = collective_check(transport, lambda: _config(job, wanted, started, follows))
        wanted = replace(wanted, tables=with_digests(transport, _named(wanted.tables, follows)))
        module = _trained(wanted, config)
        _check(transport, rank, config, module)
        trained = BuiltIn(config, module.on) if follows else module
        run = claim_run(transport, replace(job, config=config), trained, waiting)
        if run is None:
            raise RunStopped(0)
        replica = wanted.make_dense()
        if follows and run.start.checkpoints and isinstance(replica, ModuleReplica):
            replica.goes_on_from = run.start.checkpoints[0].step
        rank.held.append(run.held)
        cluster = connect(transport, run, gone)
        lacking = check_memory(transport, config, cluster, row_spaces(wanted.tables))
        if lacking:
            say_on_first(f"warning: {lacking}")
        whereabouts = Whereabouts.shared(transport)
        built = build_rank(
            transport,
            run,
            cluster,
            rank.stop,
            waiting,
            lambda transport, hooks, allocate: _engine(
                transport, hooks, allocate, run, cluster, wanted, whereabouts
            ),
            OF_CONFIGS if follows else REMEDY,
            _multiplied(config, wanted) if follows else None,
        )
        own = {"script": rank.script.typed}
        if follows:
            own = {"dense_arch": dense_arch(config)}
        end = {"open_end": True} if wanted.open_end else {}
        fields = start_fields(run, cluster, built, {**own, **end})
    built.standstill.places = whereabouts.places
    rank_run, words = _rank_run(rank, run, built, fields, wanted)
    built.standstill.watch(built.engine)
    _tell_start(run, cluster, built, fields, wanted)
    gc.collect()
    # collecting garbage among all objects of torch would stop every rank for 0.1 to 0.4 s
    gc.freeze()

    def doing(place: Place | str) -> None:
        ends = isinstance(place, Place) and place.part in UNJUDGED
        rank.place = "" if ends else place
        whereabouts.be_at(place if isinstance(place, Place) else None)
        rank.calls.awaited = not (isinstance(place, Place) and place.part == AFTER)

    rank.part = ScriptPart(rank_run, run.folder, built.standstill, doing, words, wanted.make_dense)
    typed = config.train.check_determinism
    if typed < 0:
        typed = 0 if follows else wanted.check_steps  # tests have checked the recipe
    finite = config.train.on_nonfinite == "stop"
    mark = NoMark() if run.folder.path is None else FileMark(run.folder.path / TOLD)
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


def _end_before(rank: ThisRank) -> None:
    """Collective: end the run of the script's session before the one that begins.

    Raises UsageError where its loop was left, EcrmError where its summary cannot be written, and
    what the end of a run raises.
    """
    part = rank.part
    assert part is not None
    if rank.unfinished:
        raise UsageError(rank.unfinished)
    run_dir = rank.job_of(rank.number + 1).run_dir
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

    collective_check(rank.transport, check_complete)
    part.share_model()
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
    fields: dict[str, Any],
    wanted: Wanted,
) -> tuple[RankRun, SummaryFields]:
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
    record = Record(run.folder, fields, rank.meters.traffic, rank.meters.profile)
    words = SummaryFields(engine, steps, wanted.samples, flat=this.script.follows_config)
    ending = Ending(engine, run.config, steps, record, checkpoints, progress, words)
    progress.restart_clock()

    def told(summary: dict[str, Any] | None, unkept: str) -> None:
        tell_end(run, rank, summary, unkept, _pace(summary))

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
    native = dense_arch(config) == "native" and config.train.device == "cuda"
    return len(wanted.tables) if native else None


def _config(job: Job, wanted: Wanted, started: int, follows: bool) -> Config:
    """Merge the script's choices into the config. Raises UsageError if the two conflict.

    `follows`: the script follows the config, and has no choices of its own.
    """
    config = job.config
    check_started(started, config)
    check_best(config, job.run_dir, wanted)
    if follows:
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


def _trained(wanted: Wanted, config: Config) -> TrainedModule:
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


def _check(transport: Transport, rank: ThisRank, config: Config, trained: TrainedModule) -> None:
    """Collective: raise UsageError on every rank unless all have the same script, config and model.

    The arguments of the script and the first weights must be the same, too. A config and its data
    were compared before.
    """
    if not rank.script.follows_config:
        text = collective_check(transport, rank.script.path.read_bytes)
        mine = given_of(
            host_name(),
            config,
            trained.wanted.steps,
            script=[hashlib.sha256(text).hexdigest(), list(rank.script.arguments)],
        )
        check_alike(transport, mine, ALIKE)
    check_models(share_json(transport, trained.about()))
    check_weights(share_json(transport, trained.weights))


def check_models(of_ranks: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise UsageError unless all ranks have the same model.

    `of_ranks` are the results of `TrainedModule.about`, by rank.
    """
    first, *others = sorted(of_ranks)
    here = of_ranks[first]
    for rank in others:
        there = of_ranks[rank]
        for name, table in here["table"].items():
            if begins_otherwise(there["table"].get(name), table):
                raise _other_numbers(f"table {name}", rank, first)
        if there != here:
            where = f"on rank {rank}", f"on rank {first}"
            raise UsageError(
                f"rank {rank} has another model than rank {first}: "
                f"{differences(there, here, *where) or _first_other(there, here, *where)}",
                otherwise="build it alike on all ranks, from the script and its arguments alone",
            ).on_all_ranks(first)


def _first_other(said: Mapping[str, Any], mine: Mapping[str, Any], there: str, here: str) -> str:
    """Describe the first different number of two identities of the same tables and tensors."""
    theirs, ours = dict(leaves(said)), dict(leaves(mine))
    return next(
        f"{name} is {theirs.get(name)} {there}, {ours.get(name)} {here}"
        for name in {**ours, **theirs}
        if theirs.get(name) != ours.get(name)
    )


def check_weights(of_ranks: Mapping[int, Mapping[str, str]]) -> None:
    """Raise UsageError unless every tensor of the module is the same on all ranks.

    `of_ranks` are the digests of tensors, by rank and name.
    """
    first, *others = sorted(of_ranks)
    for rank in others:
        for name, digest in of_ranks[first].items():
            if of_ranks[rank].get(name) != digest:
                raise _other_numbers(name, rank, first)


def _other_numbers(name: str, rank: int, first: int) -> UsageError:
    return UsageError(
        f"{name} begins with other numbers on rank {rank} than on rank {first}",
        otherwise="draw them alike on all ranks, such as by torch.manual_seed(0) "
        "before the model is built",
    ).on_all_ranks(first)


def _engine(
    transport: Transport,
    hooks: Hooks,
    allocate: Allocate,
    run: RunContext,
    cluster: Cluster,
    wanted: Wanted,
    whereabouts: Whereabouts,
) -> Engine:
    """This rank's engine at step 0."""
    config = run.config
    hooks.whereabouts = whereabouts.when_dead
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
    )


def _tell_start(
    run: RunContext, cluster: Cluster, rank: Rank, fields: dict[str, Any], wanted: Wanted
) -> None:
    """Report the start of the run."""
    steps = f"{'at most ' if wanted.open_end else ''}{counted(run.start.steps, 'step')}"
    if wanted.samples:
        steps += f" of {counted(wanted.samples, 'sample')}"
    arch = f"dense arch {fields['dense_arch']}, " if "dense_arch" in fields else ""
    rank.reporter.started(
        {**fields, "failures_left": rank.engine.state.failures_left},
        start_in_words(run.config, cluster.protection, fields, steps, arch),
    )


class ScriptPart:
    """This rank's part in the run of a script, for the end of the script."""

    def __init__(
        self,
        run: RankRun,
        folder: RunFolder,
        standstill: Standstill,
        doing: Callable[[Place | str], None],
        words: SummaryFields,
        make_dense: Callable[[], DenseReplica],
    ) -> None:
        self._run, self._folder, self._standstill, self._doing = run, folder, standstill, doing
        self._words, self._make_dense = words, make_dense
        self.engine = run.engine

    @property
    def steps_left(self) -> int:
        """The number of steps not trained yet."""
        return self._run.steps_left

    def over(self) -> None:
        """End the watch for standstills: the script and the run have ended, well or badly."""
        self._standstill.end()

    def share_model(self) -> None:
        """Collective, once the run is over: give every rank the trained dense part.

        Later code of the script may use the model of an earlier session, on any rank. Raises
        Unrecoverable if all holders of the dense part have died since the end.
        """
        engine, transport = self.engine, self.engine.state.transport
        while True:
            holders = [rank for rank in engine.view.dense if rank in transport.live]
            if not holders:
                raise Unrecoverable(
                    "all holders of the dense part have died between two sessions: start the run "
                    "again with --resume auto"
                )
            giver, dense = min(holders), engine.state.dense
            gives = dense is not None and engine.rank == giver
            shared = share_at_start(
                transport, dense.export() if dense is not None and gives else []
            )
            if giver in shared:
                break
        if dense is None:
            self._make_dense().load(shared[giver])

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


class SummaryFields:
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
        return {
            "steps_per_second": pace,
            **samples_of(self._samples, self._engine.step, pace),
            **{EVALUATED + name: value for name, value in named},
            "sessions": self.sessions,
            "ended_early": ended_early(self._engine, self._steps),
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
        faults = self._engine.recovery.faults
        return [fault.to_dict(rank) for rank, fault in faults.items() if fault.known]


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
