"""The loop of a run: give slots to the caller for computing, and run the engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from ecrm.engine.computed import Computed
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StepAborted, StopRequested
from ecrm.engine.step_input import StepInput
from ecrm.protection.pooled import BagValues, SlotBags
from ecrm.protection.routing import FoundRows

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class SlotResult:
    """The result of one slot's part of a step.

    - `gradients`: by row space, float32 [U, dim], of the U rows looked up by the slot.
    - `contribution`: float32 [P], summed over slots for the dense replicas; `None` for a slot
      without a batch.
    - `of_bags`: by row space, gradients of bags, where shards sum the slot's bags.
    - `note`: uint8 [N], the slot's entry in the log of the run.
    - `trouble`: the place of a nonfinite value, in words; empty if all values are finite.
    - `state`: uint8 [N], goes whole to every dense replica; `None` for no state.
    - `over`: the slot has no batch in the next step, nor in a later step.
    - `sits_out`: the slot changes no row in this step.
    - `stops`: this step is to be the last step.
    """

    gradients: Sequence[Tensor]
    contribution: Tensor | None
    note: Tensor
    trouble: str = ""
    state: Tensor | None = None
    over: bool = False
    sits_out: bool = False
    stops: bool = False
    of_bags: Mapping[int, BagValues] = field(default_factory=dict)


@dataclass
class SlotStep(Generic[Batch]):
    """One slot's part of a step, to be computed.

    `values` are the slot's rows by row space, float32 [U, dim], or where the rows lie until the
    next collective call. The caller computes and sets `result`.
    """

    step: int
    slot: int
    batch: Batch
    values: Sequence[Tensor | FoundRows]
    result: SlotResult | None = None


class Batches(Protocol[Batch]):
    """The source of batches; a batch depends on step and slot alone.

    `reusable` says whether a batch is still good after a computation with the batch.
    """

    reusable: bool

    def batch(self, step: int, slot: int) -> Batch:
        """The batch of a slot in a step."""

    def rows(self, batch: Batch, /) -> Sequence[Tensor]:
        """The unique rows used by a batch, by row space, int64 [U]."""

    def bags(self, batch: Batch, /) -> Sequence[SlotBags | None]:
        """The bags of the rows used by a batch, by row space; `None` for rows with another use."""

    def on_recovery(self) -> bool:
        """Take note of a finished recovery; return whether batches given earlier are still good."""


class Due(Protocol):
    """Work of all ranks together after some of the steps, such as an evaluation."""

    def is_due(self, step: int, /) -> bool:
        """Whether the work is due after `step` steps, and not yet done."""

    def do(self) -> bool:
        """Collective: do the work now. Return whether training ends, the same on all ranks.

        Raises StepAborted after a failure, StopRequested if a rank asks to stop.
        """

    def on_recovery(self) -> None:
        """Take note of a finished recovery: steps may have been undone."""


class Rehearsal(Protocol[Batch]):
    """Computes slots of a step on other ranks too, before the step, to compare results."""

    def is_due(self, step: int, /) -> bool:
        """Whether a step is to be rehearsed, and not yet rehearsed. The same on all ranks."""

    def run(self) -> Iterator[list[SlotStep[Batch]]]:
        """Collective: yield slots to compute on this rank. Raises StepAborted after a failure."""

    def on_recovery(self) -> None:
        """Take note of a finished recovery: a step is rehearsed again."""


class Run(Protocol):
    """One rank's part in a run. Every live rank calls the same methods in the same order.

    All but `engine` may raise StepAborted after a failure, and StopRequested.
    """

    @property
    def engine(self) -> Engine:
        """This rank's engine."""

    def between_steps(self) -> None:
        """Collective, before a step: do the work due, such as a checkpoint."""

    def troubles_to_report(self, step: int, troubles: dict[int, str], /) -> dict[int, str]:
        """The part of `troubles`, found by slots in a step, to report to every rank."""

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the times of steps."""

    def step_finished(self) -> None:
        """Count a step finished on this rank, and report when a report is due."""

    def keep_best(self) -> None:
        """Collective, at a commit: keep the model as the best so far."""

    def keep(self) -> None:
        """Collective, after the last step: make sure no later failure undoes a step."""

    def on_recovery(self) -> None:
        """Take note of a finished recovery: steps may have been undone."""

    def stop(self) -> None:
        """Collective, at a commit: end the run on all ranks, because a rank has asked to stop.

        Returns if the reason to stop is gone: all ranks then ask each rank again. Otherwise `stop`
        does not return, and raises StepAborted after a failure.
        """


class StepLoop(Generic[Batch]):
    """One rank's loop over the steps of a run, through all failures.

    The loop yields the slots run by this rank, step by step: an empty list on a rank without slots.
    Collective work between steps happens while the caller fetches the next step.

    - `due`: the work between steps. `finish()`, collective: the work after the last step; a failure
      in `finish()` may bring the loop back to training.
    - `heard()`: called after each step and each recovery, before the run counts the step: notes on
      steps have become known.
    - `skips`: whether all ranks skip a step with trouble in a slot.
    - `rehearsal`: the rehearsal before a step, `None` for no rehearsal.
    - `ends_at()`: the later step before which this rank wants training to end; -1 for no wish.
    """

    def __init__(
        self,
        run: Run,
        batches: Batches[Batch],
        steps: int,
        due: Due,
        finish: Callable[[], None],
        heard: Callable[[], None] = lambda: None,
        skips: bool = False,
        rehearsal: Rehearsal[Batch] | None = None,
        ends_at: Callable[[], int] = lambda: -1,
    ) -> None:
        self._run, self._engine, self._due = run, run.engine, due
        self._batches, self._steps, self._skips = batches, steps, skips
        self._finish, self._heard = finish, heard
        self._rehearsal, self._ends_at = rehearsal, ends_at
        self._kept: dict[tuple[int, int], Batch] = {}
        self._computed: Computed[SlotResult] = Computed()

    def __iter__(self) -> Iterator[list[SlotStep[Batch]]]:
        """Yield the slots of every step; again for a step redone.

        Raises Unrecoverable on every rank when too much is lost, and all errors raised by the run.
        """
        # if `resume` met a failure: ranks past `resume` by then have a recovery of this loop
        recovered = self._engine.recovery.resumed_by_recovery
        while True:
            try:
                heard, recovered = recovered, False
                yield from self._to_the_end(heard)
                return
            except StopRequested:
                recovered = self._stop()
            except StepAborted:
                recovered = True
            self.on_recovery()

    def on_recovery(self) -> None:
        """Reset after every recovery: steps may have been undone, and notes have become known."""
        if not self._batches.on_recovery():
            self._kept.clear()
        self._due.on_recovery()
        if self._rehearsal is not None:
            self._rehearsal.on_recovery()
        self._heard()
        self._run.on_recovery()

    def _to_the_end(self, heard: bool) -> Iterator[list[SlotStep[Batch]]]:
        """Train to the end of the steps.

        Ranks first ask all ranks about a stop, unless all have `heard` the answer in a recovery.
        """
        engine = self._engine
        if not heard:
            engine.check_stop()
        elif engine.recovery.stopping:
            raise StopRequested
        while engine.step < self._steps and not engine.over:
            self._run.between_steps()
            if self._due.is_due(engine.step):
                if self._due.do():
                    break
                continue  # a rank with a failure past here returns to between_steps too
            if self._rehearsal is not None and self._rehearsal.is_due(engine.step):
                yield from self._rehearsal.run()
            yield from self._step()
            self._heard()
            self._run.step_finished()
            if engine.recovery.stopping:
                raise StopRequested
        else:
            if self._due.is_due(engine.step):
                self._due.do()
        self._finish()
        self._heard()

    def _stop(self) -> bool:
        """Stop the run; if no reason to stop is left, return whether a failure has come between."""
        try:
            self._run.stop()
        except StepAborted:
            return True
        return False

    def _step(self) -> Iterator[list[SlotStep[Batch]]]:
        engine = self._engine
        step, last = engine.step, engine.step + 1 == self._steps
        engine.enter("input")
        results = yield from self._compute(self._asked(step))
        ahead = soon = None
        if not last and not self._stops_before(step + 1):
            ahead = self._rows(step + 1)
            within = step + 2 < self._steps and not self._stops_before(step + 2)
            if engine.repairs_ahead and within:
                soon = self._rows(step + 2)
        troubles = {slot: result.trouble for slot, result in results.items() if result.trouble}
        if troubles and not self._skips:
            troubles = self._run.troubles_to_report(step, troubles)
        over = [slot for slot, result in results.items() if result.over]
        if any(result.stops for result in results.values()):
            over = list(range(len(engine.view.slots)))
        given = StepInput(
            {slot: result.gradients for slot, result in results.items()},
            {
                slot: result.contribution
                for slot, result in results.items()
                if result.contribution is not None
            },
            slot_state={
                slot: result.state for slot, result in results.items() if result.state is not None
            },
            notes={slot: result.note for slot, result in results.items()},
            troubles=troubles,
            skip_troubled=self._skips,
            sit_out=[slot for slot, result in results.items() if result.sits_out],
            over=over,
            ends_at=self._ends_at(),
            commit=last,
            rows_ahead=ahead,
            rows_soon=soon,
            bag_gradients={slot: result.of_bags for slot, result in results.items()},
            bags_ahead={} if ahead is None else self._bags(step + 1),
        )
        engine.apply(given)

    def _stops_before(self, step: int) -> bool:
        """Whether collective work comes between a step and the step before."""
        rehearsed = self._rehearsal is not None and self._rehearsal.is_due(step)
        return rehearsed or self._due.is_due(step)

    def _compute(
        self, asked: dict[int, Batch]
    ) -> Generator[list[SlotStep[Batch]], None, dict[int, SlotResult]]:
        """Look up rows and have slots computed; results from before a failure are kept."""
        engine, step = self._engine, self._engine.step
        self._computed.begin(engine)
        rows = {slot: self._batches.rows(batch) for slot, batch in asked.items()}
        values = engine.find(
            rows,
            self._computed.keys() & asked.keys(),
            apply_follows=True,
            bags={slot: self._batches.bags(batch) for slot, batch in asked.items()},
        )
        engine.enter("forward")
        parts = [SlotStep(step, slot, asked[slot], of) for slot, of in sorted(values.items())]
        if not self._batches.reusable:
            for part in parts:
                del self._kept[step, part.slot]
        yield parts
        if not parts:  # a rank without slots goes through all phases, too
            engine.enter("backward")
        for part in parts:
            assert part.result is not None, "whoever iterates sets the results"
            self._computed[part.slot] = part.result
        return {slot: self._computed[slot] for slot in asked}

    def _asked(self, step: int) -> dict[int, Batch]:
        """The batch of every slot run by this rank; batches of neighboring steps are kept."""
        engine = self._engine
        for slot in engine.slots:
            if (step, slot) not in self._kept:
                self._kept[step, slot] = self._batches.batch(step, slot)
        self._kept = {
            key: batch for key, batch in self._kept.items() if -1 <= key[0] - engine.step <= 2
        }
        return {slot: self._kept[step, slot] for slot in engine.slots}

    def _rows(self, step: int) -> dict[int, Sequence[Tensor]]:
        return {slot: self._batches.rows(batch) for slot, batch in self._asked(step).items()}

    def _bags(self, step: int) -> dict[int, Sequence[SlotBags | None]]:
        return {slot: self._batches.bags(batch) for slot, batch in self._asked(step).items()}
