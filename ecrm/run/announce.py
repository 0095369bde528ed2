"""Lines printed at the start and at the end of a run."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import Any

from ecrm import __version__
from ecrm.base.console import say
from ecrm.base.errors import NotKept
from ecrm.base.version_set import name_of as name_of_versions
from ecrm.base.version_set import version_set
from ecrm.base.wording import counted
from ecrm.checkpoint.folder import name_of
from ecrm.config.faults import Kill, unfired
from ecrm.config.script import Script
from ecrm.engine.events import Start
from ecrm.engine.failures import RecoveryRecord
from ecrm.kernels import native
from ecrm.process.device import gpu_memory
from ecrm.protection.base import Protection, VerifyReport
from ecrm.run.build_rank import Rank
from ecrm.run.claim import RunContext
from ecrm.run.connect import Cluster
from ecrm.run.run_folder import RunFolder


def start_event(
    run: RunContext,
    cluster: Cluster,
    rank: Rank,
    script: Script | None,
    dense_arch: str | None,
    open_end: bool | None,
) -> Start:
    """The event `start` of this rank, with facts of the training; `set_up_seconds` end here."""
    config, start, versions = run.config, run.start, version_set()
    resumed = None
    if run.resume is not None:
        resumed = {
            "from": str(run.resume),
            "step": rank.engine.step,
            "changed": start.changed,
            "data_began": start.data_began,
        }
    return Start(
        version=__version__,
        kernels=native.instruction_set(),
        versions=versions,
        version_set=name_of_versions(versions),
        dense_arch=dense_arch,
        script=None if script is None else script.typed,
        script_sha256=None if script is None else script.digest,
        open_end=open_end,
        world_size=config.world_size,
        oversubscribed=cluster.cores.manner,
        shares_memory_with=cluster.memory_readers,
        config=config.to_dict(),
        kills=[str(kill) for kill in run.spec.kills],
        gpu=gpu_memory(config),
        run=None if run.folder.path is None else run.trained.about(),
        before=run.ended_before if run.folder.earlier else None,
        resumed=resumed,
        init_from=None if start.begins_with is None else str(start.begins_with.path),
        set_up_seconds=time.monotonic() - rank.began,
        failures_left=rank.engine.state.failures_left,
    )


def print_result(
    summary: dict[str, Any],
    protection: Protection,
    folder: RunFolder,
    pace: str,
) -> None:
    """Print the end of a run in a few lines.

    `pace` is the speed of the steps, with any further remark about the steps.
    """
    say(
        f"finished {counted(summary['steps'], 'step')} at {pace}, "
        f"{counted(len(summary['failures']), 'failure')} survived"
    )
    if summary["parity"] is not None and protection.redundancy:
        say(protection.verified_in_words(VerifyReport(**summary["parity"])))
    if summary["scrub"] is not None:
        say(_scrubbed(summary["scrub"]))
    say(f"model_sha256 {summary['model_sha256']}")
    say(f"model_digest {summary['model_digest']}")
    if folder.path is not None and folder.is_complete:
        say(f"results in {folder.path}")


def warn_of_unfired(kills: Sequence[Kill], failures: Sequence[RecoveryRecord]) -> None:
    """Print a line for each scheduled kill missing from a run with these failures."""
    died_in = {rank: failure.step for failure in failures for rank in failure.ranks}
    for kill, why in unfired(kills, died_in).items():
        say(f"ecrm: warning: --kill {kill} never happened: {why}")


def _scrubbed(scrub: dict[str, int]) -> str:
    """The result of scrubbing in one line."""
    text = (
        f"scrub: {counted(scrub['rows_checked'], 'row')} checked, "
        f"{counted(scrub['passes'], 'time')} round; "
    )
    if not scrub["corruptions"]:
        return text + "no corruption"
    text += f"{counted(scrub['corruptions'], 'corruption')}, {scrub['repaired']} repaired"
    if scrub["exact"] < scrub["corruptions"]:
        text += (
            f", only {scrub['exact']} of them before anything used it: the model may not be that "
            "of an undisturbed run"
        )
    return text


def tell_end(
    run: RunContext, rank: Rank, summary: dict[str, Any] | None, why_not_kept: str, pace: str
) -> None:
    """Report a finished run. Raises NotKept, on every rank, unless `why_not_kept` is "".

    `summary` is the summary on the reporter, `None` elsewhere; `pace` as in `print_result`.
    """
    engine = rank.engine
    if summary is not None:
        print_result(summary, engine.state.protection, run.folder, pace)
    if engine.rank == engine.view.reporter:
        warn_of_unfired(run.spec.kills, engine.state.failures.failures)
    if why_not_kept:
        raise NotKept(
            f"the model of step {engine.step} is not kept: no checkpoint of it: {why_not_kept}"
        ).on_all_ranks(engine.view.reporter)
    if engine.rank == engine.view.reporter:
        say_kept(run)


def say_kept(run: RunContext) -> None:
    """Print the place of the model, and the command to export the model as one file."""
    run_dir, own = run.folder.path, run.durable.own
    if run_dir is None or own is None:
        say("nothing of this run is kept: there was no --run-dir")
    elif step := own.newest():
        say(
            f"model of step {step} in {own.path / name_of(step)}; as one file: "
            f"ecrm export {shlex.quote(str(run_dir))} --output model.safetensors"
        )
