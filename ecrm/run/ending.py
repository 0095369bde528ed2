"""The end of a run: complete, with a summary, or stopped on request."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ecrm.base.console import say
from ecrm.base.errors import ParityMismatch
from ecrm.checkpoint.keeper import Checkpoints
from ecrm.config.schema import Config
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StopRequested
from ecrm.engine.memory_count import Memory
from ecrm.engine.table_digest import table_digests, table_sums
from ecrm.process.memory import resident_bytes
from ecrm.protection.base import VerifyReport
from ecrm.run.auto_resume import lives_of
from ecrm.run.profile import Profile, chrome_trace, gather_profiles, table
from ecrm.run.progress import StepProgress
from ecrm.run.run_folder import RunFolder
from ecrm.run.summary import (
    Outcome,
    checkpoint_json,
    stopped_in_words,
    stopped_json,
    summary_json,
)
from ecrm.run.traffic import Traffic, gather_traffic


@dataclass(frozen=True)
class Record:
    """The data written at the end of a run: fields `about` the run, its costs, and the folder."""

    folder: RunFolder
    about: dict[str, Any]
    traffic: Traffic
    profile: Profile | None = None


class SummaryFields(Protocol):
    """The facts of a training for the end of its run, on the reporter."""

    def digested(self) -> Sequence[Tensor]:
        """The dense part as digested for the summary."""

    def of_summary(self, steps: int, seconds: float) -> dict[str, Any]:
        """Fields of the summary, after `steps` steps in `seconds`."""

    def of_stopped(self) -> dict[str, Any]:
        """Fields of stopped.json."""


class Ending:
    """Ends a run; every live rank has an Ending and calls the same methods.

    `why_not_kept` is the reason why a due checkpoint of the last step is missing, else empty.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        steps: int,
        record: Record,
        checkpoints: Checkpoints | None,
        progress: StepProgress,
        words: SummaryFields,
    ) -> None:
        self._engine, self._config, self._steps = engine, config, steps
        self._record, self._folder = record, record.folder
        self._checkpoints, self._progress, self._words = checkpoints, progress, words
        self.why_not_kept = ""
        self._first_step, self._began = engine.step, time.monotonic()
        self._training_seconds: float | None = None

    @property
    def verifies(self) -> bool:
        """Whether parity or copies are compared with the rows before the model is kept."""
        verifies = self._config.protection.verify_parity_at_end
        return verifies and bool(self._engine.state.protection.redundancy)

    def trained(self) -> None:
        """End the training time: the last step is done."""
        if self._training_seconds is None:
            self._training_seconds = time.monotonic() - self._began

    def on_recovery(self) -> None:
        """Go on after StepAborted: training may go on."""
        if self._engine.step < self._steps and not self._engine.over:
            self._training_seconds = None  # rolled back from the end

    def finish(self) -> dict[str, Any] | None:
        """Collective, after the last step: verify and keep the model, and write the summary.

        Shards being rebuilt are rebuilt first. The reporter drafts summary.json; once all ranks
        have agreed, the first rank to get there renames the draft. With wrong parity the name is
        rejected.json, and every rank raises ParityMismatch. Returns the summary on the reporter,
        `None` elsewhere. Raises StepAborted after a failure, StopRequested if a rank asks to stop.
        """
        engine = self._engine
        engine.commit()
        self.trained()
        if self._record.profile is not None:
            self._show_profile(self._record.profile)
        engine.enter("finish")
        engine.rebuild_all()
        # before scrubbing, the digests, and the check of parity, all of which read all rows
        resident = resident_bytes(engine.state.transport.shared_memory)
        engine.scrub_all()
        verified = engine.verify_parity() if self._config.protection.verify_parity_at_end else None
        right = verified is None or not verified.mismatches
        if self._checkpoints is not None and right:
            self._checkpoints.finish()
            self.why_not_kept = self._checkpoints.why_not_kept
        with engine.recovery.recovering():
            summary = self._summary(verified, resident)
            if summary is not None:
                self._folder.draft_summary(summary, completed=right)
            self._agree_that_it_is_written()
        self._folder.publish_summary(completed=right)
        if verified is not None and verified.mismatches:
            raise self._mismatch(verified)
        return summary

    def stop(self, number: signal.Signals) -> None:
        """Collective, at a commit, after signal `number` on some rank: keep the model, report.

        Writes a checkpoint, if the run has any, and stopped.json in the way of summary.json.
        """
        engine = self._engine
        engine.commit()
        if self._checkpoints is not None:
            self._checkpoints.stop(self._config.cluster.stop_seconds / 2)  # the rest is for writing
            self.why_not_kept = self._checkpoints.why_not_kept
        stopped = None
        with engine.recovery.recovering():
            if engine.rank == engine.view.reporter:
                seconds = time.monotonic() - self._began
                stopped = {
                    **stopped_json(engine, self._words.of_stopped(), self._steps, number, seconds),
                    **self._checkpoint_json(),
                }
                self._folder.draft_stopped(stopped)
            self._agree_that_it_is_written()
        self._folder.publish_stopped()
        if stopped is not None:
            say(stopped_in_words(stopped, self._folder.path))

    def _agree_that_it_is_written(self) -> None:
        """Collective: raise StopRequested everywhere unless the reporter could write its draft."""
        engine = self._engine
        if not engine.state.transport.agree(
            self._folder.trouble is None or engine.rank != engine.view.reporter
        ):
            raise StopRequested

    def _show_profile(self, profile: Profile) -> None:
        """Collective: the reporter prints the profile's table, and writes trace.json."""
        engine, folder = self._engine, self._folder
        with engine.recovery.recovering():
            profiles = gather_profiles(profile, engine.state.transport, engine.view.reporter)
        if profiles is None:
            return
        say(table(profiles, engine.step))
        folder.trace(chrome_trace(profiles))
        if folder.path is not None and folder.trouble is None:
            trace = folder.path / "trace.json"
            say(f"trace of the last steps in {trace}, for chrome://tracing or ui.perfetto.dev")

    def _summary(
        self, verified: VerifyReport | None, resident: tuple[int, int]
    ) -> dict[str, Any] | None:
        """Collective: the summary on the reporter, `None` elsewhere."""
        engine = self._engine
        tables = table_digests(engine, engine.view.reporter)
        sums = table_sums(engine, engine.view.reporter)
        memory = engine.state.memory()
        self._add_resident(memory, resident)
        traffic = gather_traffic(engine.state.transport, self._record.traffic, self._written_bytes)
        if engine.rank != engine.view.reporter:
            return None
        seconds = self._training_seconds
        assert tables is not None and sums is not None and seconds is not None
        outcome = Outcome(
            tables,
            sums,
            verified,
            memory,
            traffic,
            seconds,
            self._progress.quantiles(),
        )
        own = self._words.of_summary(engine.step - self._first_step, seconds)
        lives = lives_of(self._folder.all_events(), "complete")
        checkpoint = self._checkpoint_json()
        return {
            **summary_json(engine, outcome, own, lives, checkpoint, self._words.digested()),
            **self._record.about,
        }

    def _add_resident(self, memory: Memory, mine: tuple[int, int]) -> None:
        """Collective: add to each rank's entry the memory held, the peak, and whether unused.

        `mine` has the memory held and the peak of this rank, in bytes.
        """
        view = self._engine.view
        held = self._engine.state.transport.gather(mine)
        for entry in memory.per_rank:
            entry["resident"], entry["resident_peak"] = held[entry["rank"]]
            entry["unused_spare"] = entry["rank"] in view.spares and entry["rank"] not in view.dense

    @property
    def _written_bytes(self) -> int:
        """Bytes written to disk by this rank for protection and checkpoints."""
        checkpoints = 0 if self._checkpoints is None else self._checkpoints.written_bytes
        return self._engine.state.protection.written_bytes + checkpoints

    def _checkpoint_json(self) -> dict[str, Any]:
        newest = 0 if self._checkpoints is None else self._checkpoints.newest
        return checkpoint_json(newest, self.why_not_kept)

    def _mismatch(self, verified: VerifyReport) -> ParityMismatch:
        folder = self._folder.path
        where = "" if folder is None else f"; what it came to is in {folder / 'rejected.json'}"
        return ParityMismatch(
            f"{verified.mismatches:,} of {verified.stripes:,} "
            f"{self._engine.state.protection.redundancy} do not match the rows they protect after "
            f"the last step: the model cannot be trusted{where}"
        )
