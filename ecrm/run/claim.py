"""Take a run folder for a run on all ranks, and settle the starting point of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.base.console import say
from ecrm.checkpoint.mapped_folder import hold, leave_link, make_folder
from ecrm.checkpoint.trained import Trained
from ecrm.config.schema import Config
from ecrm.errors import UsageError
from ecrm.faults.kill import Kill
from ecrm.process.preflight import host_name
from ecrm.run.auto_resume import AUTO_RESUME, check_same, look, tidy
from ecrm.run.collective_check import collective_check, on_one_rank, own_folder
from ecrm.run.durable_state import DurableState, durable_state
from ecrm.run.plan import Start, find_starting_point
from ecrm.run.run_folder import RunFolder
from ecrm.run.run_lock import RunLock, check_run_dir
from ecrm.transport.base import Transport


@dataclass(frozen=True)
class Job:
    """The command line after `ecrm train`; `resume` may be AUTO_RESUME.

    `is_through`: a later session of the script has begun in an earlier start. This session is then
    complete, and is loaded for the script's work behind the loop.
    """

    config: Config
    run_dir: Path | None = None
    kills: Sequence[Kill] = ()
    resume: Path | None = None
    init_from: Path | None = None
    is_through: bool = False


@dataclass(frozen=True)
class RunContext:
    """A run in its folder, and its starting point: the same on all ranks.

    `resume` is the folder to go on from, `None` for a run beginning at step 0. `ended_before` says
    how the previous start of the run ended, if `--resume auto` found an earlier start. No other run
    takes the run folder or the mapped files as long as `held` is kept.
    """

    config: Config
    trained: Trained
    kills: Sequence[Kill]
    folder: RunFolder
    resume: Path | None
    init_from: Path | None
    ended_before: str
    start: Start
    durable: DurableState
    held: tuple[object, ...]

    @property
    def loads_tables(self) -> bool:
        """Whether tables are loaded at the start: tables of this run, or of a different run."""
        return self.resume is not None or self.start.begins_with is not None


def claim_run(
    transport: Transport, job: Job, trained: Trained, waiting: Callable[[str], None]
) -> RunContext | None:
    """Collective: take the run folder and settle the start; `None` if the run is complete already.

    Raises UsageError, DataError and Unrecoverable, each on every rank.
    """
    config, resume, ended_before = job.config, job.resume, ""
    folder, lock = _take_folder(transport, job)
    waiting("what the run goes on from is looked for" if resume else "the run folder is checked")
    if resume == AUTO_RESUME:
        resume, complete, ended_before = _earlier_start(transport, trained, folder, job.is_through)
        if complete:
            return None
    start = collective_check(
        transport,
        lambda: find_starting_point(config, job.run_dir, resume, job.kills, job.init_from, trained),
    )
    mapped = None
    if start.mapped is not None:
        _make_mapped_folder(transport, job, start.mapped, start.identity)
        mapped = hold(start.mapped)
    return RunContext(
        config,
        trained,
        job.kills,
        folder,
        resume,
        job.init_from,
        ended_before,
        start,
        durable_state(config, job.run_dir, start),
        held=(lock, mapped),
    )


def _take_folder(transport: Transport, job: Job) -> tuple[RunFolder, RunLock | None]:
    """Collective: the run folder, and this rank's lock on the folder, `None` without --run-dir."""
    run_dir, auto = job.run_dir, job.resume == AUTO_RESUME
    folder = collective_check(transport, lambda: RunFolder(run_dir))
    if run_dir is None:
        return folder, None
    lock, strangers = own_folder(
        transport,
        run_dir,
        host_name(),
        lambda: None if auto else check_run_dir(run_dir, mine=True),
    )
    check_shared(job.config, run_dir, strangers, transport.live)
    return folder, lock


def check_shared(
    config: Config, run_dir: Path, strangers: Sequence[int], live: Sequence[int]
) -> None:
    """Raise UsageError on every rank if a run writes checkpoints into a folder not shared.

    `strangers` are the ranks with a different folder under this name than the rest of `live`.
    """
    if strangers and (config.checkpoints or config.checkpoint.at_end):
        never = {"every_steps": 0, "every_minutes": 0, "at_end": False, "keep_best": "none"}
        without = {f"checkpoint.{key}": value for key, value in never.items()}
        raise UsageError(
            f"--run-dir {run_dir}: rank {strangers[0]} sees another folder there than rank "
            f"{live[0]}, and checkpoints need one",
            *([] if config.kind.needs_checkpoints else [without]),
            otherwise="name a folder on storage that all ranks share",
        ).on_all_ranks(live[0])


def _earlier_start(
    transport: Transport, trained: Trained, folder: RunFolder, is_through: bool
) -> tuple[Path | None, bool, str]:
    """Collective, once this run holds the folder: the remains of an earlier start of the run.

    Returns the folder to go on from, whether the run is complete, and how the earlier start ended.
    Removes files left half-written by the earlier start.
    """
    run_dir = folder.path

    def decide() -> list[Any]:
        found = look(run_dir, AUTO_RESUME, mine=True)
        assert run_dir is not None  # `look` refuses to go on without a folder
        check_same(run_dir, trained.about())
        complete = found.complete and not is_through
        if complete:
            say(f"{run_dir} holds the complete run: nothing is left to do")
        ended = "" if complete else tidy(run_dir)
        return [str(found.resume or ""), complete, ended, len(folder.all_events())]

    resume, complete, ended, folder.earlier = on_one_rank(transport, decide)
    return Path(resume) if resume else None, complete, ended


def _make_mapped_folder(
    transport: Transport, job: Job, mapped: Path, identity: dict[str, Any]
) -> None:
    """Collective: make the folder of mapped files, and a link to the folder in the run folder."""
    first = transport.rank == transport.live[0]
    run_dir = job.run_dir
    if run_dir is not None:
        collective_check(transport, lambda: leave_link(run_dir, mapped) if first else None)
    collective_check(
        transport, lambda: make_folder(mapped, job.config.cluster.servers, identity, first)
    )
