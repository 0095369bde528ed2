"""When a run writes checkpoints, and how its ranks agree that one counts.

Everything a rank decides by is the same on all ranks: it was shared, and then agreed on, or it is
forgotten when a rank dies (`went_back`). A checkpoint that a death interrupts is given up; the next
one is full.
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
from ecrm.engine.engine import Engine

GIVE_UP_SECONDS = 600.0
"""How long the end of a run waits for the disk before it goes without its last checkpoint."""
POLL_SECONDS = 0.01
PATIENCE = 0.5
"""Intervals for which a checkpoint that is due waits for a rebuilding to end by itself."""


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a checkpoint is due: every so many steps or minutes, whichever is first, and at the end.

    0 steps or minutes: not for that. The end is the last step of `steps`, or where the run is asked
    to stop. The rest is as in config section [checkpoint].
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

    `tell(fields)` gets what happened, on every rank. `background(work)` has `work` done while
    training goes on. `written_bytes` counts this rank's share of the checkpoints that were written
    to their end, but for the manifest. `first` is the step whose checkpoint the run began from, the
    engine's step by default, 0 where there is none. `not_finite(step, why)` is called on every rank
    where a checkpoint would have held a NaN or an infinity, and was not written for that; it may
    end the run. `evaluations(step)` are those before a step, for its manifest. `began_from` is the
    checkpoint that the run goes on from, in whichever folder.
    """

    def __init__(
        self,
        engine: Engine,
        folder: CheckpointFolder,
        identity: dict[str, Any],
        policy: CheckpointPolicy,
        tell: Callable[[dict[str, Any]], None] = lambda fields: None,
        clock: Callable[[], float] = time.monotonic,
        background: Callable[[Callable[[], None]], None] = _in_a_thread,
        first: int | None = None,
        not_finite: Callable[[int, str], None] = lambda step, why: None,
        evaluations: Callable[[int], list[list[float | None]]] = lambda step: [],
        began_from: Path | None = None,
    ) -> None:
        self._engine, self._folder, self._identity, self._policy = engine, folder, identity, policy
        self._tell, self._clock, self._background, self._not_finite = (
            tell,
            clock,
            background,
            not_finite,
        )
        self._evaluations, self._began_from = evaluations, began_from
        self._first = engine.step if first is None else first
        self._attempt = self.written_bytes = 0
        self._pruned = True
        self._kept = 0  # the step of the newest complete checkpoint in this run's own folder
        self._why = ""  # the last one that failed did so
        self._stop_by: float | None = None
        self._last_at = -math.inf  # no checkpoint was agreed on yet
        self._part: Part | None = None
        self._forget()

    def _forget(self) -> None:
        if self._part is not None:
            self._part.cancelled = True
        self._part = None
        self._tried: int | None = None  # the step of the last one begun
        # a part that was given up may still use the old ones
        self._rooms: dict[tuple[int, int], Buffers] = {}
        # the step of the last checkpoint, None while that is not known to all
        self._last: int | None = None
        self._base: Manifest | None = None  # what the next one may add to
        self._look_at = 0  # the step to look at the clock again
        self._ending = False  # whether this step is the last, though not that of the policy

    def went_back(self) -> None:
        """After StepAborted: what this rank knew may not be what the others know."""
        self._forget()

    def between_steps(self) -> None:
        """Collective: go on with a checkpoint being written, or begin one if it is due.

        Raises StepAborted after a failure.
        """
        engine = self._engine
        if self._last is None:
            self._settle()
        if self._part is not None:
            with engine.recovery.recovering():
                if engine.state.transport.agree(self._part.done):
                    self._count(self._part)
        if self._part is None and self._overdue() >= (PATIENCE if engine.view.rebuilding else 0):
            self._begin()

    @property
    def newest(self) -> int:
        """The step of the newest complete checkpoint in this run's folder, 0 without any."""
        return self._folder.newest()

    @property
    def unkept(self) -> str:
        """Why there is no checkpoint of this last step, "" if there is one or was to be none.

        The same on all ranks.
        """
        engine, wanted = self._engine, self._policy.at_end
        return (self._why or "it was not begun") if wanted and self._kept < engine.step else ""

    def stop(self, seconds: float) -> None:
        """Collective, at a commit: write a checkpoint of this step, because all were asked to stop.

        What is rebuilding is rebuilt first. Where that takes longer than `seconds` from the first
        call on, there is no checkpoint.
        """
        engine = self._engine
        if self._stop_by is None:
            self._stop_by = self._clock() + seconds
        stop_by = self._stop_by
        wanted = self._policy.at_end and engine.view.rebuilding
        if wanted and not engine.rebuild_all(lambda: self._clock() < stop_by):
            left = sum(engine.state.rebuild_left.values())
            return self._failed(
                f"{left:,} lost rows were not rebuilt in {seconds:g} s, "
                "half of cluster.stop_seconds: set it higher"
            )
        self.finish()

    def finish(self) -> None:
        """Collective, after the last step: write its checkpoint to the end, if the disk lets it."""
        self._ending = True
        self._see_through()

    def keep_best(self) -> None:
        """Collective, at the best evaluation yet: write a checkpoint of this step, as `best`."""
        engine = self._engine
        self._see_through()
        if self._last != engine.step:
            self._begin()
            self._see_through()
        trouble = ""
        with engine.recovery.recovering():
            if engine.rank == engine.view.reporter:
                trouble = self._mark_best(engine.step)
            troubles = engine.state.transport.gather(trouble, "the best model was kept")
        if why := troubles[engine.view.reporter]:
            self._tell({"event": "checkpoint_failed", "step": engine.step, "why": why})

    def _mark_best(self, step: int) -> str:
        """Let `best` lead to the checkpoint of `step`; returns why it could not, else "".

        Without a complete checkpoint of the step, all have been told why already.
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
        """Collective: `between_steps` until no checkpoint is being written, if the disk lets it."""
        self.between_steps()
        deadline = self._clock() + GIVE_UP_SECONDS
        while self._part is not None:
            with self._engine.recovery.recovering():
                if not self._engine.state.transport.agree(self._clock() < deadline):
                    return self._failed(f"not written within {GIVE_UP_SECONDS:g} s")
            if not self._part.done:
                time.sleep(POLL_SECONDS)
            self.between_steps()
        while not self._pruned and self._clock() < deadline:
            time.sleep(POLL_SECONDS)

    def _settle(self) -> None:
        """Agree on what the newest checkpoint is."""
        engine = self._engine
        with engine.recovery.recovering():
            newest = self._folder.newest() if engine.rank == engine.view.reporter else 0
            known = engine.state.transport.gather(newest, "the newest checkpoint was looked for")
        self._kept = max(known.values())
        self._last = max(self._first, self._kept)
        # a recovery alone does not put the next one off
        if self._last_at == -math.inf or engine.step <= self._last:
            self._last_at = self._clock()

    def _overdue(self) -> float:
        """Collective: for how many intervals the next checkpoint has been due; below 0 if not."""
        policy, step = self._policy, self._engine.step
        if (
            policy.at_end
            and (self._ending or step >= policy.steps)
            and step > self._kept
            and step != self._tried
        ):
            return math.inf
        last = self._last
        assert last is not None
        if step <= last:
            return -1.0
        every, overdue = policy.every_steps, -1.0
        if every:
            overdue = (step - (last // every + 1) * every) / every
        if policy.every_minutes and overdue < 0:
            overdue = self._overdue_by_clock(step, last)
        return overdue

    def _overdue_by_clock(self, step: int, last: int) -> float:
        """Collective: the same by the lowest rank's clock, `last` being the last one's step.

        The clock is asked rarely at first and more often towards the end.
        """
        if step < self._look_at:
            return -1.0
        engine = self._engine
        with engine.recovery.recovering():
            clocks = engine.state.transport.gather(
                self._clock() - self._last_at, "clocks were compared"
            )
        gone, wanted = float(clocks[min(clocks)]), 60 * self._policy.every_minutes
        per_step = gone / (step - last)
        self._look_at = step + max(
            1, int(min((wanted - gone) / 2 / per_step, 1000.0)) if per_step > 0 else 1
        )
        return gone / wanted - 1

    def _begin(self) -> None:
        """Collective: commit, rebuild what is lost, and write this rank's part.

        With policy.mode "async" it is only copied, and written in the background.
        """
        engine, policy = self._engine, self._policy
        self._began = self._clock()
        engine.commit()
        if engine.view.rebuilding:
            engine.rebuild_all()
        with engine.recovery.recovering():
            engine.enter("checkpoint")
            adds = (
                policy.kind == "incremental"
                and self._base is not None
                and self._base.chain + 1 < policy.full_every
            )
            self._adds_to = self._base if adds else None
            self._attempt += 1
            self._last = self._tried = engine.step
            try:
                draft, trouble = self._folder.draft(engine.step), ""
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
            if trouble:
                self._part.trouble, self._part.done = trouble, True
            elif policy.mode == "async":
                self._part.copy()
                self._background(self._part.run)
            else:
                self._part.run()
            # of training, by writing or copying, and then by counting it
            self._stalled = self._clock() - self._began
            if policy.mode == "sync":
                self._count(self._part)

    def _count(self, part: Part) -> None:
        """Collective, once all have written their parts: publish the checkpoint, and agree on it.

        `part` is this rank's.
        """
        engine, began = self._engine, self._clock()
        mine = [part.entries, part.trouble, part.finite]
        said = engine.state.transport.gather(mine, "a checkpoint was counted")
        self.written_bytes += sum(entry["bytes"] for entry in part.entries)
        troubles = [f"rank {rank}: {trouble}" for rank, (_, trouble, _) in said.items() if trouble]
        if troubles:
            self._failed(troubles[0], written=True)
            for wrong in [trouble for _, trouble, finite in said.values() if not finite][:1]:
                self._not_finite(part.step, wrong)
            return
        engine.enter("manifest")
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
            evaluations=self._evaluations(part.step),
        )
        written = [manifest.dense, ""]
        if reports:
            try:
                part.name_dense()
                self._folder.publish(manifest)
                if self._pruned:
                    self._pruned = False
                    self._background(self._prune)
            except OSError as error:
                written[1] = f"cannot write {self._folder.path}: {error.strerror or error}"
        published = engine.state.transport.gather(written, "a checkpoint was published")
        dense, trouble = published[engine.view.reporter]
        if trouble:
            return self._failed(trouble, written=True)
        self._part, self._last_at, self._look_at, self._kept = None, self._clock(), 0, manifest.step
        self._base = Manifest(**{**vars(manifest), "dense": dense})
        self._tell(
            {
                "event": "checkpoint",
                "step": manifest.step,
                "kind": manifest.kind,
                "rows": manifest.rows,
                "bytes": manifest.bytes,
                "seconds": self._clock() - self._began,
                "stall_seconds": self._stalled + self._clock() - began,
            }
        )

    def _prune(self) -> None:
        """On the reporter, beside training: a file system may need long to free large files."""
        with contextlib.suppress(OSError):
            self._folder.prune(self._policy.keep)
        self._pruned = True

    def _failed(self, why: str, written: bool = False) -> None:
        """Give this checkpoint up, and tell why.

        The notes of touched rows went with it, so the next one is full. Its files are removed where
        all ranks' parts are `written`, or have failed.
        """
        step, self._why = self._engine.step, why
        if self._part is not None:
            step, self._part.cancelled = self._part.step, True
        if written and self._engine.rank == self._engine.view.reporter:
            with contextlib.suppress(OSError):
                self._folder.give_up(step)
        self._part = self._base = None
        self._last_at, self._look_at = self._clock(), 0
        self._tell({"event": "checkpoint_failed", "step": step, "why": why})
