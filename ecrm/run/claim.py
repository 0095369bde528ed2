"""Take a run folder for a run on all ranks, and settle the starting point of the run.

The lowest rank takes the folder and decides where the run begins. Every other rank then joins, and
opens the files named by the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ecrm.base.console import say
from ecrm.base.errors import DataError, Unrecoverable, UsageError
from ecrm.checkpoint.folder import Checkpoint
from ecrm.checkpoint.mapped_folder import hold, leave_link, make_folder
from ecrm.checkpoint.trained import Trained
from ecrm.config.schema import Config
from ecrm.process.preflight import host_name
from ecrm.run.auto_resume import AUTO_RESUME, check_same, complete_in_words, look, tidy
from ecrm.run.durable_state import DurableState, durable_state
from ecrm.run.gather import decide, gather_results
from ecrm.run.plan import Start, find_starting_point
from ecrm.run.run_folder import RunFolder
from ecrm.run.run_lock import RunLock, check_run_dir
from ecrm.run.spec import RunSpec
from ecrm.transport.base import Transport


@dataclass(frozen=True)
class RunContext:
    """A run in its folder, and its starting point: the same on all ranks.

    `resume` is the folder to go on from, `None` for a run beginning at step 0. `ended_before` says
    how the previous start of the run ended, if `--resume auto` found an earlier start. No other run
    takes the run folder or the mapped files as long as `held` is kept.
    """

    spec: RunSpec
    trained: Trained
    folder: RunFolder
    resume: Path | None
    ended_before: str
    start: Start
    durable: DurableState
    held: tuple[object, ...]

    @property
    def config(self) -> Config:
        """The config of the run."""
        return self.spec.config

    @property
    def loads_tables(self) -> bool:
        """Whether tables are loaded at the start: tables of this run, or of a different run."""
        return self.resume is not None or self.start.begins_with is not None


MakeReady = Callable[[RunContext], Any]
"""(run) -> a JSON value for all ranks: the local work of a rank for a claimed run."""


def claim_run(
    transport: Transport,
    spec: RunSpec,
    trained: Trained,
    make_ready: MakeReady,
    waiting: Callable[[str], None],
) -> tuple[RunContext, dict[int, Any]] | None:
    """Collective: take the run folder and settle the start; `None` if the run is complete already.

    Also returns the results of `make_ready` on all ranks. If the deciding rank dies before it has
    the folder, the next rank decides. Raises UsageError, DataError and Unrecoverable, each on every
    rank.
    """
    waiting(
        "what the run goes on from is looked for" if spec.resume else "the run folder is checked"
    )
    claim = _Claim(transport, spec, trained)
    while True:
        decided = decide(transport, claim.decide)
        if decided["complete"]:
            return None
        said = gather_results(transport, partial(claim.join, decided, make_ready))
        if _is_taken(spec, decided["rank"], said, transport.live):
            assert claim.run is not None
            return claim.run, {rank: each["ready"] for rank, each in said.items()}


class _Claim:
    """The claim of one rank: the decision, on the lowest rank, and the join, on every rank."""

    def __init__(self, transport: Transport, spec: RunSpec, trained: Trained) -> None:
        self._rank, self._spec, self._trained = transport.rank, spec, trained
        self._folder: RunFolder | None = None
        self._lock: RunLock | None = None
        self._start: Start | None = None
        self.run: RunContext | None = None

    def decide(self) -> dict[str, Any]:
        """Take the folder for this run, and decide where the run begins."""
        spec, resume = self._spec, self._spec.resume
        folder = self._open()
        decided = {"rank": self._rank, "complete": False, "ended": "", "earlier": 0}
        if self._lock is not None:
            self._lock.take()
        if resume == AUTO_RESUME:
            resume, decided["complete"] = self._earlier_start()
            if decided["complete"]:
                return decided
            assert spec.run_dir is not None  # `look` refuses to go on without a folder
            decided["ended"] = tidy(spec.run_dir)
            decided["earlier"] = sum(1 for _ in folder.all_events())
        elif spec.run_dir is not None:
            check_run_dir(spec.run_dir, mine=True)
        self._start = start = find_starting_point(
            spec.config, spec.run_dir, resume, spec.kills, spec.init_from, self._trained
        )
        return {**decided, "resume": None if resume is None else str(resume), **_said(start)}

    def _open(self) -> RunFolder:
        """The run folder; the first call makes the folder, and opens the file of its lock."""
        if self._folder is None:
            self._folder = RunFolder(self._spec.run_dir)
            if self._spec.run_dir is not None:
                self._lock = RunLock(self._spec.run_dir, host_name())
        return self._folder

    def _earlier_start(self) -> tuple[Path | None, bool]:
        """The folder to go on from, and whether the run is complete. Prints the completion."""
        run_dir = self._spec.run_dir
        found = look(run_dir, AUTO_RESUME, mine=True)
        assert run_dir is not None  # `look` refuses to go on without a folder
        check_same(run_dir, self._trained.about())
        complete = found.complete and not self._spec.is_through
        if complete:
            say(complete_in_words(run_dir))
        return found.resume, complete

    def join(self, decided: Mapping[str, Any], make_ready: MakeReady) -> dict[str, Any]:
        """Join the taken folder, open the files of the start, and make this rank ready."""
        folder, spec, first = self._open(), self._spec, decided["rank"] == self._rank
        if self._lock is not None:
            self._lock.join()
        start = self._start if first and self._start is not None else _start_of(decided)
        folder.earlier = decided["earlier"]
        mapped = None
        if start.mapped is not None:
            if first and spec.run_dir is not None:
                leave_link(spec.run_dir, start.mapped)
            make_folder(start.mapped, spec.config.cluster.servers, start.identity, first)
            mapped = hold(start.mapped)
        self.run = RunContext(
            spec,
            self._trained,
            folder,
            None if decided["resume"] is None else Path(decided["resume"]),
            decided["ended"],
            start,
            durable_state(spec.config, spec.run_dir, start),
            held=(self._lock, mapped),
        )
        mine = self._lock is None or self._lock.is_mine
        return {"mine": mine, "ready": make_ready(self.run)}


def _said(start: Start) -> dict[str, Any]:
    """A start as JSON values: checkpoints by folder and checksum."""
    return {
        "steps": start.steps,
        "identity": start.identity,
        "checkpoints": [_of_checkpoint(each) for each in start.checkpoints],
        "refused": start.refused,
        "mapped": None if start.mapped is None else str(start.mapped),
        "changed": start.changed,
        "begins_with": None if start.begins_with is None else _of_checkpoint(start.begins_with),
    }


def _of_checkpoint(checkpoint: Checkpoint) -> list[Any]:
    return [str(checkpoint.path), checkpoint.manifest.checksum]


def _start_of(decided: Mapping[str, Any]) -> Start:
    """The decided start, with the checkpoints opened by this rank.

    Raises UsageError and DataError if this rank finds other checkpoints.
    """
    mapped, begins = decided["mapped"], decided["begins_with"]
    return Start(
        decided["steps"],
        decided["identity"],
        [_opened(*each) for each in decided["checkpoints"]],
        decided["refused"],
        None if mapped is None else Path(mapped),
        decided["changed"],
        None if begins is None else _opened(*begins),
    )


def _opened(path: str, checksum: int) -> Checkpoint:
    try:
        checkpoint = Checkpoint.open(Path(path))
    except (DataError, OSError) as error:
        said = f"{error.strerror}" if isinstance(error, OSError) else f"{error}"
        raise _another(path, f" ({said})") from None
    if checkpoint.manifest.checksum != checksum:
        raise _another(path, "")
    return checkpoint


def _another(path: str, said: str) -> UsageError:
    return UsageError(
        f"host {host_name()} finds another checkpoint at {path} than the first rank{said}",
        otherwise="put it on storage that all ranks share, or copy the folder to every host",
    )


def _is_taken(
    spec: RunSpec, taker: int, said: Mapping[int, Mapping[str, Any]], live: Sequence[int]
) -> bool:
    """Whether the run has its folder; the ranks `said` if they see the run as the owner.

    Raises UsageError if ranks see different folders and checkpoints need one folder.
    """
    if spec.run_dir is None:
        return True
    strangers = [rank for rank, each in said.items() if not each["mine"]]
    if len(strangers) == len(said):
        if taker in said:
            raise Unrecoverable(
                f"rank {taker} has taken {spec.run_dir}, and finds it taken by no run"
            ).on_all_ranks(min(said))
        return False
    check_shared(spec.config, spec.run_dir, strangers, live)
    return True


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
