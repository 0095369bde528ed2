"""The loop of a run: slots out to whoever computes them, engine steps between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from ecrm.engine.computed import Computed
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StepAborted, StopAgreed
from ecrm.errors import DataError

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class SlotResult:
    """What one slot's part of a step has come to.

    - `gradients`: by row space, float32 [U, dim], of the U rows that the slot has looked up.
    - `contribution`: float32 [P], summed over slots for the dense replicas; None of a slot without
      a batch.
    - `note`: uint8 [N], what the log of the run keeps of the slot.
    - `trouble`: where something is not finite, in words; empty where all is.
    - `state`: uint8 [N], goes whole to every dense replica; None for nothing.
    - `over`: the slot has no batch in the next step, nor in a later one.
    - `sits_out`: the slot changes no row in this step.
    - `stops`: this step is to be the last one.
    """

    gradients: Sequence[Tensor]
    contribution: Tensor | None
    note: Tensor
    trouble: str = ""
    state: Tensor | None = None
    over: bool = False
    sits_out: bool = False
    stops: bool = False


@dataclass
class SlotStep(Generic[Batch]):
    """One slot's part of a step, to be computed.

    `values` are its rows by row space, float32 [U, dim]. Whoever computes it sets `result`.
    """

    step: int
    slot: int
    batch: Batch
    values: Sequence[Tensor]
    result: SlotResult | None = None


class Batches(Protocol[Batch]):
    """Where batches come from. They depend on step and slot alone.

    `reusable` says whether a batch is still good after somebody has computed with it.
    """

    reusable: bool

    def batch(self, step: int, slot: int) -> Batch:
        """The batch of a slot in a step."""

    def rows(self, batch: Batch, /) -> Sequence[Tensor]:
        """The unique rows that it uses by row space, int64 [U]."""

    def went_back(self) -> bool:
        """A recovery is through. Returns whether batches that were given before are still good."""


class Due(Protocol):
    """What all ranks do together after some of the steps, such as an evaluation."""

    def is_due(self, step: int, /) -> bool:
        """Whether it is to be done after `step` steps, and has not been."""

    def do(self) -> bool:
        """Collective: do it now. Returns whether training ends with it, the same on all ranks.

        Raises StepAborted after a failure, StopAgreed where a rank asks to stop.
        """

    def went_back(self) -> None:
        """A recovery is through: steps may have been undone."""


class Rehearsal(Protocol[Batch]):
    """Slots of a step that other ranks compute, too, before the step, to see what they come to."""

    def is_due(self, step: int, /) -> bool:
        """Whether a step is rehearsed, and has not been. The same on all ranks."""

    def run(self) -> Iterator[list[SlotStep[Batch]]]:
        """Collective: give what this rank computes. Raises StepAborted after a failure."""

    def went_back(self) -> None:
        """A recovery is through: a step is rehearsed again."""


class Doubts(Protocol):
    """What becomes of data that a rank cannot read: is it bad everywhere, or only here?"""

    def failed(self, error: DataError, /) -> None:
        """This rank has met an error: bring all ranks into a recovery."""

    def compare(self) -> None:
        """Collective, after that recovery. Raises DataError where the run, or this rank, ends."""


class Run(Protocol):
    """One rank's part in a run. Every live rank calls the same methods in the same order.

    All but `engine` may raise StepAborted after a failure, and StopAgreed.
    """

    @property
    def engine(self) -> Engine:
        """This rank's engine."""

    def between_steps(self) -> None:
        """Collective, before a step: what is due, such as a checkpoint."""

    def worth_saying(self, step: int, troubles: dict[int, str], /) -> dict[int, str]:
        """The part of what slots have in trouble in a step that all ranks must know."""

    def restart_clock(self) -> None:
        """The time since the last step belongs to no step."""

    def step_finished(self) -> None:
        """A step is done on this rank: count it, and tell when that is due."""

    def keep_best(self) -> None:
        """Collective, at a commit: keep the model as the best so far."""

    def keep(self) -> None:
        """Collective, after the last step: see to it that a failure undoes no step any more."""

    def went_back(self) -> None:
        """A recovery is through: steps may have been undone."""

    def stop(self) -> None:
        """Collective, at a commit: end the run on all ranks since one has asked for that.

        Returns where there is no reason to stop any more: all ranks then ask each other again. Does
        not return otherwise, unless by StepAborted.
        """


class StepLoop(Generic[Batch]):
    """One rank's loop over the steps of a run, whatever dies on the way.

    It gives the slots that this rank runs, step by step: none on a rank without. All that ranks do
    together happens while the next step is fetched.

    - `due`: what is done between steps. `finish()`, collective: what comes after the last one; a
      failure in it may bring the loop back to training.
    - `heard()`: called after each step and each recovery, before the run counts the step: notes on
      steps have become known.
    - `doubts`: what becomes of a DataError; None for an error like any other.
    - `skips`: whether a step is skipped, on all ranks, in which a slot is in trouble.
    - `rehearsal`: what comes before a step, None for nothing.
    - `ends_at()`: before which step this rank wants training to end, a later one; -1 for none.
    """

    def __init__(
        self,
        run: Run,
        batches: Batches[Batch],
        steps: int,
        due: Due,
        finish: Callable[[], None],
        heard: Callable[[], None] = lambda: None,
        doubts: Doubts | None = None,
        skips: bool = False,
        rehearsal: Rehearsal[Batch] | None = None,
        ends_at: Callable[[], int] = lambda: -1,
    ) -> None:
        self._run, self._engine, self._due = run, run.engine, due
        self._batches, self._steps, self._skips = batches, steps, skips
        self._finish, self._heard, self._doubts = finish, heard, doubts
        self._rehearsal, self._ends_at = rehearsal, ends_at
        self._kept: dict[tuple[int, int], Batch] = {}
        self._computed: Computed[SlotResult] = Computed()

    def __iter__(self) -> Iterator[list[SlotStep[Batch]]]:
        """The slots of every step; those of steps that are redone once more.

        Raises Unrecoverable on every rank when too much is lost, and what the run raises.
        """
        # some may have come through it, and are in a recovery of the loop's by now
        recovered = self._engine.recovery.began_with_one
        while True:
            try:
                if recovered and self._engine.recovery.doubted and self._doubts is not None:
                    self._doubts.compare()
                heard, recovered = recovered, False
                yield from self._to_the_end(heard)
                return
            except StopAgreed:
                recovered = self._stop()
            except StepAborted:
                recovered = True
            except DataError as error:
                if recovered or self._doubts is None:
                    raise
                self._doubts.failed(error)
                recovered = True
            self.went_back()

    def went_back(self) -> None:
        """After every recovery: steps may have been undone, and notes have become known."""
        if not self._batches.went_back():
            self._kept.clear()
        self._due.went_back()
        if self._rehearsal is not None:
            self._rehearsal.went_back()
        self._heard()
        self._run.went_back()

    def _to_the_end(self, heard: bool) -> Iterator[list[SlotStep[Batch]]]:
        """Train to the end of the steps.

        Unless all have `heard` in a recovery whether one asks to stop, they ask each other first.
        """
        engine = self._engine
        if not heard:
            engine.heed_stop()
        elif engine.recovery.stopping:
            raise StopAgreed
        while engine.step < self._steps and not engine.over:
            self._run.between_steps()
            if self._due.is_due(engine.step):
                if self._due.do():
                    break
                continue  # a rank that a failure finds past this begins with between_steps, too
            if self._rehearsal is not None and self._rehearsal.is_due(engine.step):
                yield from self._rehearsal.run()
            yield from self._step()
            self._heard()
            self._run.step_finished()
            if engine.recovery.stopping:
                raise StopAgreed
        else:
            if self._due.is_due(engine.step):
                self._due.do()
        self._finish()
        self._heard()

    def _stop(self) -> bool:
        """Stop. Where there is no reason any more, returns whether a failure has come between."""
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
            troubles = self._run.worth_saying(step, troubles)
        over = [slot for slot, result in results.items() if result.over]
        if any(result.stops for result in results.values()):
            over = list(range(len(engine.view.slots)))
        engine.apply(
            {slot: result.gradients for slot, result in results.items()},
            {
                slot: result.contribution
                for slot, result in results.items()
                if result.contribution is not None
            },
            commit=last,
            rows_ahead=ahead,
            rows_soon=soon,
            notes={slot: result.note for slot, result in results.items()},
            troubles=troubles,
            slot_state={
                slot: result.state for slot, result in results.items() if result.state is not None
            },
            skip_troubled=self._skips,
            over=over,
            sit_out=[slot for slot, result in results.items() if result.sits_out],
            ends_at=self._ends_at(),
        )

    def _stops_before(self, step: int) -> bool:
        """Whether something comes between a step and the one before."""
        rehearsed = self._rehearsal is not None and self._rehearsal.is_due(step)
        return rehearsed or self._due.is_due(step)

    def _compute(
        self, asked: dict[int, Batch]
    ) -> Generator[list[SlotStep[Batch]], None, dict[int, SlotResult]]:
        """Look up rows and have slots computed; results of before a failure are kept."""
        engine, step = self._engine, self._engine.step
        self._computed.begin(engine)
        rows = {slot: self._batches.rows(batch) for slot, batch in asked.items()}
        values = engine.lookup(rows, self._computed.keys() & asked.keys(), apply_follows=True)
        engine.enter("forward")
        parts = [SlotStep(step, slot, asked[slot], of) for slot, of in sorted(values.items())]
        if not self._batches.reusable:
            for part in parts:
                del self._kept[step, part.slot]
        yield parts
        for part in parts:
            assert part.result is not None, "whoever iterates sets the results"
            self._computed[part.slot] = part.result
        return {slot: self._computed[slot] for slot in asked}

    def _asked(self, step: int) -> dict[int, Batch]:
        """The batch of every slot that this rank runs; those of steps around are kept."""
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
