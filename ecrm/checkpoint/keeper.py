"""When a run writes checkpoints, and how the ranks agree that a checkpoint is complete.

Every rank decides by values known alike to all ranks: values shared and then agreed on. A rank's
death clears the values (`on_recovery`). A checkpoint interrupted by a death is given up; the next
checkpoint is full.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.checkpoint.folder import CheckpointFolder, name_of
from ecrm.checkpoint.manifest import NAME as MANIFEST
from ecrm.checkpoint.manifest import Manifest
from ecrm.checkpoint.write import Buffers, Part
from ecrm.engine import events
from ecrm.engine.engine import Engine

GIVE_UP_SECONDS = 600.0
"""Longest wait for the disk, at the end of a run or at a best evaluation, before giving up."""
POLL_SECONDS = 0.01
PATIENCE = 0.5
"""Intervals for which a due checkpoint waits for a rebuild to end."""


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are due: by steps, by minutes (the first to come counts), and at the end.

    0 steps or 0 minutes switch the rule off. The end is the last of `steps` steps, or the step at
    which the run is asked to stop. The remaining fields are as in config section [checkpoint].
    """

    steps: int
    every_steps: int = 0
    every_minutes: float = 0.0
    mode: str = "sync"
    kind: str = "full"
    full_every: int = 8
    keep: int = 2
    at_end: bool = True
    keep_best: str = "none"


def _in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="checkpoint", daemon=True).start()


class Checkpoints:
    """Writes the checkpoints of a run.

    Every live rank calls the same methods between the same steps.

    `tell(event)` gets the events, on every rank. `background(work)` runs `work` while training
    goes on. `written_bytes` counts the bytes of this rank's files once all ranks have finished
    their parts, without manifests. `first` is the step of the checkpoint from which the run began:
    by default the engine's step, 0 without a checkpoint. `not_finite(step, why)` is called on every
    rank if a NaN or an infinity kept a checkpoint from being written; the call may end the run.
    `began_from` is the checkpoint from which the run goes on, in any folder.
    """

    def __init__(
        self,
        engine: Engine,
        folder: CheckpointFolder,
        identity: dict[str, Any],
        policy: CheckpointPolicy,
        tell: Callable[[events.Event], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
        background: Callable[[Callable[[], None]], None] = _in_a_thread,
        first: int | None = None,
        not_finite: Callable[[int, str], None] = lambda step, why: None,
        began_from: Path | None = None,
    ) -> None:
        self._engine, self._folder, self._identity, self._policy = engine, folder, identity, policy
        self._tell, self._clock, self._background, self._not_finite = (
            tell,
            clock,
            background,
            not_finite,
        )
        self._began_from = began_from
        self._first = engine.step if first is None else first
        self._attempt = self.written_bytes = 0
        self._pruned = True
        self._kept = 0  # the step of the newest complete checkpoint in this run's own folder
        self._why = ""  # the reason of the last failed checkpoint
        self._stop_by: float | None = None
        self._last_at = -math.inf  # no checkpoint was agreed on yet
        self._part: Part | None = None
        self._forget()

    def _forget(self) -> None:
        # a thread may still write the part: it skips the remaining windows
        if self._part is not None:
            self._part.cancelled = True
        self._part = None
        self._tried: int | None = None  # the step of the last checkpoint begun
        # a part given up may still use the old buffers
        self._rooms: dict[tuple[int, int], Buffers] = {}
        # the step of the last checkpoint, None until known to all ranks
        self._last: int | None = None
        self._base: Manifest | None = None  # the base of the next incremental checkpoint
        self._look_at = 0  # the clock is not read before this step
        self._drafting = False  # whether the folder for drafts was made in this epoch
        self._ending = False  # whether `finish` was called, perhaps before the policy's last step

    def on_recovery(self) -> None:
        """After StepAborted: forget all values possibly unknown to the rest of the ranks."""
        self._forget()

    def between_steps(self) -> None:
        """Collective: go on with a checkpoint being written, or begin a due checkpoint.

        Raises StepAborted after a failure.
        """
        engine = self._engine
        # after a start or a failure, ranks may know different newest checkpoints
        if self._last is None:
            self._settle()
        # mode async: the parts are written while training goes on
        if self._part is not None:
            with engine.recovery.recovering():
                # without a rank's part the checkpoint would lack rows: wait for the slowest rank
                if engine.state.transport.agree(self._part.done):
                    self._count(self._part)
        # a checkpoint now would hold training up until all lost rows are rebuilt
        if self._part is None and self._overdue() >= (PATIENCE if engine.view.rebuilding else 0):
            self._begin()

    @property
    def newest(self) -> int:
        """The step of the newest complete checkpoint in this run's folder, 0 without any."""
        return self._folder.newest()

    @property
    def why_not_kept(self) -> str:
        """The reason for a missing checkpoint of this last step; "" if nothing wanted is missing.

        All ranks return the same text.
        """
        engine, wanted = self._engine, self._policy.at_end
        return (self._why or "it was not begun") if wanted and self._kept < engine.step else ""

    def stop(self, seconds: float) -> None:
        """Collective, at a commit: write a checkpoint, as the ranks were asked to stop.

        With `at_end`, lost rows are rebuilt first. If the rebuild takes longer than `seconds` from
        the first call on, no checkpoint is written.
        """
        engine = self._engine
        # a failure repeats the call, but the time counts from the first call
        if self._stop_by is None:
            self._stop_by = self._clock() + seconds
        stop_by = self._stop_by
        wanted = self._policy.at_end and engine.view.rebuilding
        # a checkpoint needs all rows, and the launcher kills the ranks after cluster.stop_seconds
        if wanted and not engine.rebuild_all(lambda: self._clock() < stop_by):
            left = sum(engine.state.rebuild_left.values())
            return self._failed(
                f"{left:,} lost rows were not rebuilt in {seconds:g} s, "
                "half of cluster.stop_seconds: set it higher"
            )
        self.finish()

    def finish(self) -> None:
        """Collective, after the last step: write a checkpoint to the end, if the disk allows."""
        self._ending = True
        self._see_through()
        self._drafting = False
        if self._engine.rank == self._engine.view.reporter:
            self._folder.drafts.end()

    def keep_best(self) -> None:
        """Collective, at the best evaluation so far: write a checkpoint of this step as `best`."""
        engine = self._engine
        self._see_through()
        # this step may have a checkpoint already, due by steps or by the clock
        if self._last != engine.step:
            self._begin()
            self._see_through()
        trouble = ""
        with engine.recovery.recovering():
            # only the reporter writes the run folder
            if engine.rank == engine.view.reporter:
                trouble = self._mark_best(engine.step)
            troubles = engine.state.transport.gather(trouble, "the best model was kept")
        # the model is unharmed, so training goes on without `best`
        if why := troubles[engine.view.reporter]:
            self._tell(events.CheckpointFailed(step=engine.step, why=why))

    def _mark_best(self, step: int) -> str:
        """Point `best` at the checkpoint of `step`; returns the reason for a failure, else "".

        Without a complete checkpoint of the step, nothing happens: all ranks know the reason
        already.
        """
        places = [self._folder.path / name_of(step)]
        places += [
            path for path in (self._began_from,) if path is not None and path.name == name_of(step)
        ]
        whole = [path for path in places if (path / MANIFEST).exists()]
        try:
            if whole:
                self._folder.mark_best(whole[0])
                self._folder.prune(self._policy.keep)
        except OSError as error:
            return f"cannot keep it as the best in {self._folder.path}: {error.strerror or error}"
        return ""

    def _see_through(self) -> None:
        """Collective: call `between_steps` until nothing is being written, if the disk allows."""
        self.between_steps()
        deadline = self._clock() + GIVE_UP_SECONDS
        while self._part is not None:
            with self._engine.recovery.recovering():
                # clocks of ranks differ: the first rank out of time decides for all
                if not self._engine.state.transport.agree(self._clock() < deadline):
                    return self._failed(f"not written within {GIVE_UP_SECONDS:g} s")
            # polling without a pause would slow the writing thread
            if not self._part.done:
                time.sleep(POLL_SECONDS)
            self.between_steps()
        # the end of the process would cut the pruning thread short
        while not self._pruned and self._clock() < deadline:
            time.sleep(POLL_SECONDS)

    def _settle(self) -> None:
        """Agree on the newest checkpoint."""
        engine = self._engine
        with engine.recovery.recovering():
            newest = 0
            if engine.rank == engine.view.reporter:
                if self._folder.has_epoch:
                    self._begin_epoch()
                # one rank reads the folder, so all ranks take the same checkpoint
                newest = self._folder.newest()
            known = engine.state.transport.gather(newest, "the newest checkpoint was looked for")
        self._kept = max(known.values())
        self._last = max(self._first, self._kept)
        # a recovery alone does not put the next checkpoint off
        if self._last_at == -math.inf or engine.step <= self._last:
            self._last_at = self._clock()

    def _begin_epoch(self) -> None:
        """On the reporter: from now on, ranks of earlier epochs publish nothing."""
        with contextlib.suppress(OSError):  # a draft cannot be made then, and tells it
            self._folder.begin_epoch(self._engine.view.epoch)

    def _overdue(self) -> float:
        """Collective: intervals for which the next checkpoint has been due; below 0 if not due."""
        policy, step = self._policy, self._engine.step
        if (
            # the end needs a checkpoint at once, but a failed try is not repeated
            policy.at_end
            and (self._ending or step >= policy.steps)
            and step > self._kept
            and step != self._tried
        ):
            return math.inf
        last = self._last
        assert last is not None
        # no step was added to the last checkpoint
        if step <= last:
            return -1.0
        every, overdue = policy.every_steps, -1.0
        # due at multiples of `every`: a late checkpoint delays no later checkpoint
        if every:
            overdue = (step - (last // every + 1) * every) / every
        # reading the clock is a collective call, needless if the steps decide
        if policy.every_minutes and overdue < 0:
            overdue = self._overdue_by_clock(step, last)
        return overdue

    def _overdue_by_clock(self, step: int, last: int) -> float:
        """Collective: `_overdue` by the lowest rank's clock; `last` is the last checkpoint's step.

        The clock is read rarely at first, and more often towards the due time.
        """
        # reading the clock is a collective call, too slow for every step
        if step < self._look_at:
            return -1.0
        engine = self._engine
        with engine.recovery.recovering():
            clocks = engine.state.transport.gather(
                self._clock() - self._last_at, "clocks were compared"
            )
        # clocks of ranks differ: all ranks take the lowest rank's
        gone, wanted = float(clocks[min(clocks)]), 60 * self._policy.every_minutes
        per_step = gone / (step - last)
        self._look_at = step + max(
            1, int(min((wanted - gone) / 2 / per_step, 1000.0)) if per_step > 0 else 1
        )
        return gone / wanted - 1

    def _begin(self) -> None:
        """Collective: commit, rebuild lost rows, and write this rank's part.

        With policy.mode "async" the part is only copied now, and written in the background.
        """
        engine, policy = self._engine, self._policy
        self._began = self._clock()
        engine.commit()
        # a checkpoint must hold all rows
        if engine.view.rebuilding:
            engine.rebuild_all()
        with engine.recovery.recovering():
            engine.enter("checkpoint")
            # without a base, or with a chain of full length, the checkpoint must be full
            adds = (
                policy.kind == "incremental"
                and self._base is not None
                and self._base.chain + 1 < policy.full_every
            )
            self._adds_to = self._base if adds else None
            self._attempt += 1
            self._last = self._tried = engine.step
            if not self._drafting:
                self._folder.drafts.epoch = engine.view.epoch
                if engine.rank == engine.view.reporter:
                    self._begin_epoch()
                engine.state.transport.agree(True)  # the folder for drafts is there, or cannot be
                self._drafting = True
            try:
                draft, trouble = self._folder.draft(engine.step), ""
            # not raised: the rank must stay in the collective calls, and all give up together
            except OSError as error:
                draft, trouble = (
                    self._folder.path,
                    f"cannot make {self._folder.path}: {error.strerror}",
                )
            noting, buffers = (
                policy.kind == "incremental",
                self._rooms if policy.mode == "async" else None,
            )
            self._part = Part(
                engine, draft, self._folder.disk, adds, noting, self._attempt, buffers
            )
            # no folder to write to: the count tells all ranks the reason
            if trouble:
                self._part.trouble, self._part.done = trouble, True
            # the copy lets training change rows while the part is written
            elif policy.mode == "async":
                self._part.copy()
                self._background(self._part.run)
            else:
                self._part.run()
            # training waits for writing or copying; `_count` adds its own time
            self._stalled = self._clock() - self._began
            # all parts are done or failed, so the count need not wait for the next step
            if policy.mode == "sync":
                self._count(self._part)

    def _count(self, part: Part) -> None:
        """Collective, after all ranks finished their parts: publish the checkpoint and agree on it.

        `part` is this rank's part.
        """
        engine, began = self._engine, self._clock()
        mine = [part.entries, part.trouble, part.finite]
        # after a death `gather` raises on some ranks: no rank may count alone
        said = engine.state.transport.gather(mine, "a checkpoint was counted")
        self.written_bytes += sum(entry["bytes"] for entry in part.entries)
        troubles = [f"rank {rank}: {trouble}" for rank, (_, trouble, _) in said.items() if trouble]
        # a part is missing: all ranks have the same messages, so all give up alike
        if troubles:
            self._failed(troubles[0], written=True)
            # a full disk lets training go on, a NaN or an infinity may have to end the run
            for wrong in [trouble for _, trouble, finite in said.values() if not finite][:1]:
                self._not_finite(part.step, wrong)
            return
        engine.enter("manifest")
        # the reporter alone has a part with dense parameters, and learns the names of the entries
        base, reports = self._adds_to, part.dense is not None
        manifest = Manifest(
            step=part.step,
            identity=self._identity,
            base=None if base is None else {"step": base.step, "checksum": base.checksum},
            chain=0 if base is None else base.chain + 1,
            record_bytes=list(engine.state.stores.kept_bytes),
            space_rows=[space.rows for space in engine.state.spaces],
            files=[entry for entries, _, _ in said.values() for entry in entries],
            dense=part.dense_shapes if reports else [],
        )
        written = [manifest.dense, ""]
        # the manifest makes the checkpoint complete, so a single rank publishes
        if reports:
            try:
                part.name_dense()
                self._folder.publish(manifest)
                # an earlier prune may still be freeing files: one thread at a time removes
                if self._pruned:
                    self._pruned = False
                    self._background(self._prune)
            # not raised: all ranks must learn of the missing manifest
            except OSError as error:
                written[1] = f"cannot write {self._folder.path}: {error.strerror or error}"
        # after a death the manifest may be on disk all the same: `_settle` reads the folder again
        published = engine.state.transport.gather(written, "a checkpoint was published")
        dense, trouble = published[engine.view.reporter]
        # without a manifest the written parts are no checkpoint
        if trouble:
            return self._failed(trouble, written=True)
        self._part, self._last_at, self._look_at, self._kept = None, self._clock(), 0, manifest.step
        self._base = Manifest(**{**vars(manifest), "dense": dense})
        self._tell(
            events.Checkpoint(
                step=manifest.step,
                kind=manifest.kind,
                rows=manifest.rows,
                bytes=manifest.bytes,
                seconds=self._clock() - self._began,
                stall_seconds=self._stalled + self._clock() - began,
            )
        )

    def _prune(self) -> None:
        """Prune on the reporter, beside training: a file system may free large files slowly."""
        with contextlib.suppress(OSError):
            self._folder.prune(self._policy.keep)
        self._pruned = True

    def _failed(self, why: str, written: bool = False) -> None:
        """Give this checkpoint up, and tell the reason.

        `written`: the parts of all ranks are written or have failed, so the reporter removes the
        files. The notes of touched rows are lost too: the next checkpoint is full.
        """
        step, self._why = self._engine.step, why
        # a writer may still be at work; once cancelled, it skips the remaining windows
        if self._part is not None:
            step, self._part.cancelled = self._part.step, True
        # a folder with a writer at work must stay; the reporter alone removes folders
        if written and self._engine.rank == self._engine.view.reporter:
            with contextlib.suppress(OSError):
                self._folder.give_up(step)
        self._part = self._base = None
        self._last_at, self._look_at = self._clock(), 0
        self._tell(events.CheckpointFailed(step=step, why=why))
