"""One rank of `ecrm train`: check, connect, build, run."""

from __future__ import annotations

import gc
from typing import Any, NoReturn

import torch

from ecrm.base.console import Waiting, say
from ecrm.process.device import gpu_trained_on
from ecrm.process.guard import Guarded
from ecrm.process.stop_signals import StopSignals
from ecrm.run.announce import start_fields, tell_end
from ecrm.run.build_rank import Rank
from ecrm.run.claim import ClaimedRun, Job, claim_run
from ecrm.run.connect import Cluster, connect
from ecrm.run.ending import Record
from ecrm.run.memory_check import check_gpu_memory
from ecrm.run.plan import BuiltIn
from ecrm.run.run_rank import run_rank
from ecrm.train.announce import own_fields, pace, start_in_words
from ecrm.train.build_engine import spaces_of
from ecrm.train.build_rank import build_rank
from ecrm.train.check_inputs import check_inputs
from ecrm.train.keep import keep
from ecrm.train.trainer import Trainer
from ecrm.transport.base import Transport


def train(job: Job, guarded: Guarded, stop: StopSignals) -> NoReturn:
    """Be one rank of a run, and end the process: see `run_rank`."""
    torch.set_num_threads(job.config.train.threads)
    run_rank(
        lambda transport: _run(transport, job, stop),
        guarded,
        stop,
        count_calls=job.config.cluster.stuck_seconds > 0,
        run_dir=job.run_dir,
    )


def _run(transport: Transport, job: Job, stop: StopSignals) -> int:
    """Collective: the whole run. Returns 0 for a complete run or a stop on request, else 1."""

    def say_on_first(line: str) -> None:
        if transport.rank == transport.live[0]:
            say(line)

    with Waiting(say_on_first) as waiting:
        waiting("the data and the config are checked")
        dataset = check_inputs(transport, job.config)
        run = claim_run(transport, job, BuiltIn(job.config, gpu_trained_on(job.config)), waiting)
        if run is None:
            transport.close()
            return 0
        cluster = connect(transport, run)
        check_gpu_memory(transport, run.config, cluster, spaces_of(run.config, dataset))
        rank = build_rank(transport, run, dataset, cluster, stop, waiting)
        fields = start_fields(run, cluster, rank, own_fields(run.config))
    _tell_start(run, cluster, rank, fields)
    kept = keep(run, rank)
    trainer = Trainer(
        rank.engine,
        dataset,
        run.config,
        run.start.steps,
        Record(run.folder, fields, rank.meters.traffic, rank.meters.profile),
        rank.reporter.progress,
        lambda: stop.received,
        kept.checkpoints,
        rank.watch,
        run.start.data_began,
        kept.history,
        rank.reporter.event,
        lambda summary, unkept: tell_end(run, rank, summary, unkept, pace(summary)),
    )
    gc.collect()
    # a garbage collection through all objects of torch stops every rank for 0.1 to 0.4 s
    gc.freeze()
    rank.standstill.watch(rank.engine)
    try:
        trainer.run()
    finally:
        rank.standstill.end()
    rank.transport.close()
    return 0 if run.folder.is_complete or trainer.stopped else 1


def _tell_start(run: ClaimedRun, cluster: Cluster, rank: Rank, fields: dict[str, Any]) -> None:
    """Report the start of the run."""
    rank.reporter.started(
        {**fields, "failures_left": rank.engine.state.failures_left},
        start_in_words(run.config, cluster.protection, fields, run.start.steps),
    )
