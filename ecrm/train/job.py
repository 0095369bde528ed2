"""One rank of `ecrm train`: check everything, build the engine, train, and end so that nothing hangs."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from ecrm import __version__
from ecrm.allocate import Allocate, lazy_zeros
from ecrm.checkpoint.folder import FOLDER as CHECKPOINTS
from ecrm.checkpoint.folder import CheckpointFolder, name_of
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.lost_rows import CheckpointRows
from ecrm.checkpoint.mapped_folder import hold, leave_link, make_folder
from ecrm.checkpoint.mapped_restore import Reopened
from ecrm.checkpoint.restore import Restorer
from ecrm.config.check import NEED_CHECKPOINTS
from ecrm.config.schema import Config
from ecrm.console import Waiting
from ecrm.data.dataset import CriteoDataset
from ecrm.data.dataset_info import read_manifest
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import EnginePolicy, Hooks
from ecrm.engine.rollback import Durable
from ecrm.errors import DataError, EcrmError, NotKept, StrayRow, Unrecoverable, UsageError
from ecrm.faults.flip import FlipSwitch, parse_flip
from ecrm.faults.kill import Kill, KillSwitch
from ecrm.faults.without_undo import leave_updates_in_place
from ecrm.kernels import native
from ecrm.model.dlrm import build_dense_parts, resolve_dense_arch
from ecrm.model.replica import FlatDenseReplica
from ecrm.placement.tables import Table
from ecrm.placement.view import View
from ecrm.process.cores import AUTO, POLL, Cores
from ecrm.process.counted_transport import CountedTransport
from ecrm.process.guard import Guarded
from ecrm.process.memory import keep_freed_memory
from ecrm.process.orphaned import leave_no_memory
from ecrm.process.preflight import say_once
from ecrm.process.ready import Loading, ReadyMemory, ready_spares
from ecrm.process.startup import THE_START
from ecrm.process.stop_signals import StopSignals
from ecrm.protection import make_protection
from ecrm.protection.base import Protection, VerifyReport
from ecrm.run.auto_resume import AUTO_RESUME, check_same, look, tidy
from ecrm.run.auto_resume import about as run_of
from ecrm.run.plan import Start, plan, plan_start, view_over
from ecrm.run.run_folder import RunFolder
from ecrm.run.run_lock import check_run_dir
from ecrm.storage import resolve_backend
from ecrm.storage.base import SparseOptimizer
from ecrm.train.collective_check import introduce, on_one_rank, own_folder, share_json, together
from ecrm.train.consistency import Given, given, unlike
from ecrm.train.finite import FiniteWatch
from ecrm.train.history import History
from ecrm.train.profile import Profile, ProfiledTransport
from ecrm.train.progress import MOST_FINISHED
from ecrm.train.reporter import Reporter, say
from ecrm.train.traffic import Traffic
from ecrm.train.trainer import Trainer
from ecrm.transport.base import Transport
from ecrm.transport.mpi import MpiTransport
from ecrm.wording import counted

DENSE_FEATURES = 13

HOST_VARIABLE = "ECRM_HOST"
"""Environment variable that names this rank's host, where the system's own host name does not tell."""

LAST_WORDS_SECONDS = 5.0
"""How long a rank that ends because of an error waits for the others before it kills itself."""


def run(
    config: Config,
    run_dir: Path | None,
    kills: Sequence[Kill],
    guarded: Guarded,
    stop: StopSignals,
    resume: Path | None = None,
    init_from: Path | None = None,
) -> NoReturn:
    """Be one rank of the run; ends the process, with 0 when the run is complete or has stopped when asked to.

    Does not return: after a failure MPI cannot be finalised safely, so the process leaves by
    `os._exit`.
    """
    torch.set_num_threads(config.train.threads)
    keep_freed_memory()
    transport = None
    waiting = Waiting(lambda line: transport.rank == transport.live[0] and say(line))
    guarded.loaded()
    try:
        transport = MpiTransport()
        guarded.up()
        if config.cluster.stuck_seconds:
            transport = CountedTransport(transport, guarded.calls)
        code = _run(transport, config, run_dir, kills, stop, resume, init_from, waiting)
    except EcrmError as error:
        waiting.over()
        if transport is None:
            say_once(f"ecrm: error: {error}", about=THE_START)
            code = error.exit_code
        elif not (isinstance(error, Unrecoverable) or hasattr(error, "speaker")):
            _die_of(error)  # nobody else has it: the others must see this rank die
        else:
            code = _end_with(error, transport, run_dir)
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(OSError):  # where the terminal is gone
        sys.stdout.flush()
        sys.stderr.flush()
    if stop.alone:
        leave_no_memory()
    guarded.done()
    os._exit(code)


def _run(
    transport: Transport,
    config: Config,
    run_dir: Path | None,
    kills: Sequence[Kill],
    stop: StopSignals,
    resume: Path | None,
    init_from: Path | None,
    waiting: Waiting,
) -> int:
    waiting("the data and the config are checked")
    started = len(transport.live)
    dataset, steps = together(transport, lambda: _check(started, config))
    _check_alike(transport, config, steps)
    together(transport, lambda: _use_instruction_set(config.kernels.instruction_set))
    auto = resume == AUTO_RESUME
    folder, lock = together(transport, lambda: RunFolder(run_dir)), None
    if run_dir is not None:
        lock, strangers = own_folder(
            transport, run_dir, _host(), lambda: None if auto else check_run_dir(run_dir, mine=True)
        )
        _check_shared(config, run_dir, strangers, transport.live)
    waiting("what the run goes on from is looked for" if resume else "the run folder is checked")
    if auto:
        resume, complete, before = _life(transport, config, folder)
        if complete:
            transport.close()
            return 0
    start = together(transport, lambda: plan_start(config, run_dir, resume, kills, init_from))
    steps = start.steps
    goes_on = resume is not None
    if start.mapped is not None:
        first = transport.rank == transport.live[0]
        if run_dir is not None:
            together(transport, lambda: first and leave_link(run_dir, start.mapped))
        together(transport, lambda: make_folder(start.mapped, config, first))
    held = hold(start.mapped) if start.mapped is not None else None
    own = CheckpointFolder(run_dir / CHECKPOINTS) if run_dir is not None else None
    begins_with = start.begins_with
    rows = CheckpointRows(
        own, [checkpoint.path for checkpoint in start.checkpoints], begins_with and begins_with.path
    )
    protection = make_protection(config, start.mapped, rows)
    processes = _processes(transport, config)
    readers = introduce(transport, _host())
    view = together(transport, lambda: start_view(config, protection, processes))
    reporter = Reporter(
        folder,
        processes,
        protection.dense_replicas - 1,
        _durable_in_words(config, start),
        protection.any_shards_may_be_lost,
    )
    switch = KillSwitch(kills, transport.rank, reporter.killing, folder.event)
    flipping = FlipSwitch(parse_flip(config.testing.flip), transport.rank)
    cores = _cores(transport, config, processes)
    cores.heed(view)
    profile, traffic = None, Traffic(transport)
    if config.train.profile:
        profile = Profile(transport.rank)
        transport = ProfiledTransport(transport, profile)

    def phase(step: int, name: str) -> None:
        if profile is not None:
            profile.phase(step, name)
        traffic.phase(name)
        flipping(step, name)
        switch(step, name)

    def event(fields: dict[str, Any]) -> None:
        if fields["event"] == "view":
            cores.heed(fields["view"])
        reporter.event(fields)

    began = time.monotonic()
    watch = FiniteWatch(
        config.train.on_nonfinite == "stop",
        config.train.log_every_steps or MOST_FINISHED,
        reporter.event,
        own.newest if own is not None else lambda: 0,
    )
    hooks = Hooks(
        phase,
        event,
        asks=lambda: stop.received is not None or reporter.cannot_write,
        troubled=watch.losses,
    )
    durable = None
    if start.mapped is not None:
        durable = Reopened()
    elif config.checkpoints or goes_on or begins_with is not None:
        durable = Restorer(own, start.checkpoints, say, start.identity, begins_with)
    memory = ReadyMemory(ready_spares(protection))
    waiting("tables are built")
    engine = build_engine(
        config,
        transport,
        protection,
        view,
        dataset,
        hooks,
        durable,
        memory.allocate,
        start.identity["rows_seed"],
    )
    reporter.watch(engine)
    flipping.watch(engine)
    if config.testing.skip_undo:
        leave_updates_in_place(engine)
    if goes_on or begins_with is not None:
        if transport.rank == transport.live[0]:
            for line in (*start.refused, *start.changed):
                say(line)
        waiting(f"tables are read from {resume or init_from}")
        engine.recovery.resume()
    if config.storage.prefault:
        waiting("the system hands out the memory of the tables")
        together(transport, lambda: memory.start(engine))
        if start.mapped is None:  # pages of files would count as changed
            # a recovery's, once the step after it is done
            hooks.committed = lambda: memory.committed(engine)
    about = {
        "version": __version__,
        "storage": resolve_backend(config.storage.backend),
        "kernels": native.instruction_set(),
        "dense_arch": resolve_dense_arch(config.model.dense_arch),
        "world_size": config.world_size,
        "oversubscribed": cores.manner,
        "shares_memory_with": readers,
        "config": config.to_dict(),
        "kills": [str(kill) for kill in kills],
    }
    if run_dir is not None:
        about["run"] = run_of(config)
    if folder.earlier:
        about["before"] = before
    if goes_on:
        about["resumed"] = {
            "from": str(resume),
            "step": engine.step,
            "changed": start.changed,
            "data_began": start.data_began,
        }
    if begins_with is not None:
        about["init_from"] = str(begins_with.path)
    about["set_up_seconds"] = time.monotonic() - began
    waiting.over()
    fields = {**about, "failures_left": engine.state.failures_left}
    reporter.started(fields, _in_words(config, protection, about, steps))
    by = "logloss" if config.checkpoint.keep_best == "logloss" else "auc"
    loaded = durable.loaded if isinstance(durable, Restorer) else None
    held_out = ("data", "data.eval_fraction")  # evaluations of other samples say nothing here
    goes_on_measured = loaded is not None and all(
        loaded.manifest.identity.get(key) == start.identity[key] for key in held_out
    )
    history = History(by, loaded.manifest.evaluations if goes_on_measured else ())
    checkpoints = None
    if own is not None and (config.checkpoints or config.checkpoint.at_end):
        policy = CheckpointPolicy(steps, **vars(config.checkpoint))
        # no checkpoint of the step that mapped files go on from
        first = 0 if start.mapped is not None else None
        checkpoints = Checkpoints(
            engine,
            own,
            start.identity,
            policy,
            reporter.event,
            first=first,
            not_finite=watch.checkpoint,
            evaluations=history.to_json,
            began_from=None if loaded is None else loaded.path,
        )
        if goes_on_measured and config.checkpoint.keep_best != "none":
            left_behind = on_one_rank(transport, lambda: own.inherit_best(loaded))
            if left_behind and transport.rank == transport.live[0]:
                say(left_behind)
    trainer = Trainer(
        engine,
        dataset,
        config,
        steps,
        folder,
        about,
        traffic,
        profile,
        reporter.progress,
        lambda: stop.received,
        checkpoints,
        watch,
        start.data_began,
        history,
        reporter.event,
    )
    gc.collect()
    # a collection that goes through all that torch brought along stops every rank for 0.1 to 0.4 s
    gc.freeze()
    summary = trainer.run()
    if summary is not None:
        _print_result(
            summary,
            engine.state.protection,
            folder,
            [kill for kill in kills if kill.rank in engine.view.live],
        )
    if trainer.unkept:
        error = NotKept(
            f"the model of step {engine.step} is not kept: no checkpoint of it: {trainer.unkept}"
        )
        error.speaker = engine.view.reporter
        raise error
    if engine.rank == engine.view.reporter:
        _say_kept(run_dir, own.newest() if own is not None else 0)
    transport.close()
    del held, lock
    return 0 if folder.is_complete or trainer.stopped else 1


def _cores(
    transport: Transport, config: Config, processes: Mapping[int, Mapping[str, Any]]
) -> Cores:
    mine = processes[transport.rank]
    alike = [
        rank
        for rank, process in processes.items()
        if (process["host"], process["cores"]) == (mine["host"], mine["cores"])
    ]
    wish = config.cluster.oversubscribed
    return Cores(transport, alike, POLL if wish == AUTO and config.train.threads > 1 else wish)


def _durable_in_words(config: Config, start: Start) -> str:
    """What all roll back to when more is lost than the protection covers; empty where there is nothing."""
    if start.mapped is not None:
        return "the last commit in the mapped files"
    return (
        "a checkpoint"
        if config.checkpoints or start.checkpoints or start.begins_with is not None
        else ""
    )


def start_view(
    config: Config, protection: Protection, processes: Mapping[int, Mapping[str, Any]]
) -> View:
    """Where roles are at the start, `processes` saying which ranks share a host; UsageError when these are too few."""
    unknown = {"failure_domain": None}  # of a rank that has died already
    names = [
        processes.get(rank, unknown)["failure_domain"] or f"rank {rank}"
        for rank in range(config.world_size)
    ]
    return view_over(config, protection, names)


def build_engine(
    config: Config,
    transport: Transport,
    protection: Protection,
    view: View,
    dataset: CriteoDataset,
    hooks: Hooks,
    durable: Durable | None = None,
    allocate: Allocate = lazy_zeros,
    rows_seed: int | None = None,
) -> Engine:
    """This rank's engine for a config, at the undisturbed start, `view`; `rows_seed` is that of rows never updated, if not train.seed."""
    model, train = config.model, config.train
    arch, backend = resolve_dense_arch(model.dense_arch), resolve_backend(config.storage.backend)
    tables = [Table(name, rows, model.embedding_dim) for name, rows in dataset.tables]
    replicas = protection.dense_replicas
    optimizer = SparseOptimizer(train.sparse_optimizer, train.sparse_lr, train.sparse_eps)
    loading = Loading(transport.rank, view, ready_spares(protection), arch, backend, optimizer)

    def event(fields: dict[str, Any]) -> None:
        if fields["event"] == "view":
            loading.heed(fields["view"])
        hooks.event(fields)

    def make_dense() -> FlatDenseReplica:
        parts = build_dense_parts(
            arch, DENSE_FEATURES, len(tables), model.bottom_mlp, model.top_mlp, train.seed
        )
        return FlatDenseReplica(parts, train.dense_optimizer, train.dense_lr)

    return Engine(
        transport=transport,
        tables=tables,
        view=view,
        protection=protection,
        make_store=loading.make_store,
        make_dense=make_dense,
        seed=train.seed if rows_seed is None else rows_seed,
        policy=EnginePolicy(
            commit_interval=config.protection.commit_interval,
            rebuild_rows_per_step=config.protection.rebuild_rows_per_step,
            dense_replicas=replicas,
            scrub_rows_per_step=config.protection.scrub_rows_per_step,
            reshape=config.protection.reshape,
        ),
        hooks=replace(hooks, event=event, committed=lambda: hooks.committed()),
        durable=durable,
        allocate=allocate,
    )


def _in_words(config: Config, protection: Protection, about: dict[str, Any], steps: int) -> str:
    """What begins, in one line."""
    resumed = f"from step {about['resumed']['step']}, " if "resumed" in about else ""
    resumed += f"with the weights of {about['init_from']}, " if "init_from" in about else ""
    return (
        f"{resumed}{config.ranks_in_words}, {protection.in_words}, {counted(config.slots, 'slot')}, {counted(steps, 'step')} of {counted(config.train.global_batch, 'sample')}; "
        f"storage {about['storage']}, dense arch {about['dense_arch']}, kernels {about['kernels']}"
    )


def _check(started: int, config: Config) -> tuple[CriteoDataset, int]:
    """Open the data and check what only now can be checked, `started` being the number of ranks; raises UsageError."""
    if started != config.world_size:
        cluster = config.cluster
        raise UsageError(
            f"this config needs {counted(config.world_size, 'rank')} ({config.ranks_in_words}, {cluster.layout}), but {started} were started: "
            f"type mpirun --with-ft ulfm -n {config.world_size} ..., or ecrm launch"
        )
    dataset = CriteoDataset.open(
        config.data.path, config.model.max_rows_per_table or None, config.data.eval_fraction
    )
    return dataset, plan(config)


def _use_instruction_set(name: str) -> None:
    """Raises UsageError where this machine lacks it."""
    try:
        native.use(native.instruction_set() if name == "auto" else name)
    except ValueError as error:
        raise UsageError(
            f"kernels.instruction_set is {name}: {error}", {"kernels.instruction_set": "auto"}
        ) from None


def _check_alike(transport: Transport, config: Config, steps: int) -> None:
    """Raise UsageError on every rank unless all have the same data, config and number of steps."""
    manifest = together(transport, lambda: read_manifest(Path(config.data.path)))
    mine = asdict(given(_host(), config, manifest, steps))
    ranks = {rank: Given(**fields) for rank, fields in share_json(transport, mine).items()}
    if problem := unlike(ranks):
        error = UsageError(problem)
        error.speaker = min(ranks)
        raise error


def _processes(transport: Transport, config: Config) -> dict[int, dict[str, Any]]:
    """Process id, host, failure domain and usable cores of every rank: {"pid", "host", "failure_domain", "cores"}."""
    host = _host()
    domain = f"rank {transport.rank}"
    if config.cluster.failure_domain == "host":
        hosts = config.testing.imitated_hosts
        domain = f"{host}#{transport.rank % hosts}" if hosts else host
    return share_json(
        transport,
        {
            "pid": os.getpid(),
            "host": host,
            "failure_domain": domain,
            "cores": sorted(os.sched_getaffinity(0)),
        },
    )


def _host() -> str:
    """This rank's host."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


def _end_with(error: EcrmError, transport: Transport, run_dir: Path | None) -> int:
    """An error that all ranks have: say why, once, and leave together with its code."""
    if transport.rank == getattr(error, "speaker", transport.live[0]):
        _say_why(error, run_dir)
    timer = threading.Timer(LAST_WORDS_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    transport.close()
    return error.exit_code


def _say_why(error: EcrmError, run_dir: Path | None) -> None:
    """The last word of a run, in its folder too. Others come before a folder is this run's."""
    print(f"ecrm: error: {error}", file=sys.stderr, flush=True)
    if run_dir is not None and isinstance(error, (Unrecoverable, DataError, StrayRow)):
        RunFolder(run_dir).failure(str(error), error.exit_code)


def _die_of(error: EcrmError) -> NoReturn:
    """An error of this rank alone: say why and die, so that the others go on without it."""
    print(f"ecrm: error: {error}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _life(transport: Transport, config: Config, folder: RunFolder) -> tuple[Path | None, bool, str]:
    """Collective, once the folder is this run's: the folder to go on from, whether the run is complete, how it ended before; tidies up."""
    first = transport.rank == transport.live[0]

    def decide() -> list[Any] | None:
        if not first:
            return None
        found = look(folder.path, AUTO_RESUME, mine=True)
        check_same(folder.path, config)
        if found.complete:
            say(f"{folder.path} holds the complete run: nothing is left to do")
        ended = "" if found.complete else tidy(folder.path)
        return [str(found.resume or ""), found.complete, ended, len(folder.all_events())]

    mine = together(transport, decide)
    said = [entry for _, entry in sorted(share_json(transport, mine).items()) if entry is not None]
    if not said:
        error = Unrecoverable(
            f"a rank died before it had looked into {folder.path}: start the run again"
        )
        error.speaker = transport.live[0]
        raise error
    resume, complete, ended, folder.earlier = said[0]
    return Path(resume) if resume else None, complete, ended


def _check_shared(
    config: Config, run_dir: Path, strangers: Sequence[int], live: Sequence[int]
) -> None:
    """Raise UsageError on every rank where checkpoints cannot be written for want of a folder that all ranks see."""
    if strangers and (config.checkpoints or config.checkpoint.at_end):
        never = {"every_steps": 0, "every_minutes": 0, "at_end": False, "keep_best": "none"}
        without = {f"checkpoint.{key}": value for key, value in never.items()}
        error = UsageError(
            f"--run-dir {run_dir}: rank {strangers[0]} sees another folder there than rank {live[0]}, and checkpoints need one",
            *([] if config.protection.name in NEED_CHECKPOINTS else [without]),
            otherwise="name a folder on storage that all ranks share",
        )
        error.speaker = live[0]
        raise error


def _say_kept(run_dir: Path | None, step: int) -> None:
    """Where the model is, and what to type to have it as one file."""
    if run_dir is None:
        say("nothing of this run is kept: there was no --run-dir")
    elif step:
        checkpoint = run_dir / CHECKPOINTS / name_of(step)
        say(
            f"model of step {step} in {checkpoint}; as one file: ecrm export {shlex.quote(str(run_dir))} --output model.safetensors"
        )


def _scrubbed(scrub: dict[str, int]) -> str:
    """The result of scrubbing in one line."""
    text = f"scrub: {counted(scrub['rows_checked'], 'row')} checked, {counted(scrub['passes'], 'time')} round; "
    if not scrub["corruptions"]:
        return text + "no corruption"
    text += f"{counted(scrub['corruptions'], 'corruption')}, {scrub['repaired']} repaired"
    if scrub["exact"] < scrub["corruptions"]:
        text += f", only {scrub['exact']} of them before anything used it: the model may not be that of an undisturbed run"
    return text


def _print_result(
    summary: dict[str, Any], protection: Protection, folder: RunFolder, unfired: list[Kill]
) -> None:
    area = "-" if summary["eval_auc"] is None else f"{summary['eval_auc']:.4f}"
    print(
        f"finished {counted(summary['steps'], 'step')} at {summary['samples_per_second']:,.0f} samples/s, "
        f"evaluation auc {area}, {counted(len(summary['failures']), 'failure')} survived"
    )
    if summary["parity"] is not None and protection.redundancy:
        print(protection.verified_in_words(VerifyReport(**summary["parity"])))
    if summary["scrub"] is not None:
        print(_scrubbed(summary["scrub"]))
    print(f"model_sha256 {summary['model_sha256']}")
    if folder.path is not None and folder.is_complete:
        print(f"results in {folder.path}")
    for kill in unfired:
        print(
            f"ecrm: warning: --kill {kill} never happened: that phase did not begin on rank {kill.rank} from that step on"
        )
    sys.stdout.flush()
