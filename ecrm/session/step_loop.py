"""The loop of a session: batches out to the user's code, engine steps between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ecrm.engine.computed import Computed
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StepAborted, StopAgreed
from ecrm.engine.sealed import sealed
from ecrm.errors import UsageError
from ecrm.model.determinism import aligned, seed_slot
from ecrm.model.module_replica import ModuleReplica
from ecrm.session.batch_rows import BatchRows
from ecrm.session.row_source import FetchedRows, RowSource
from ecrm.session.run import Run, too_late

Result = TypeVar("Result")

Logged = Mapping[int, Mapping[str, float]]
"""What slots have logged in a step: {slot: {name: value}}, slots ascending."""


@dataclass(frozen=True)
class Due:
    """Something that all ranks do after every `steps` steps, such as an evaluation."""

    steps: int
    work: Callable[[], object]

    def after(self, step: int) -> bool:
        """Whether it is due when `step` steps are done."""
        return step > 0 and step % self.steps == 0


@dataclass(frozen=True)
class SlotResult:
    """What the user's code has come to for one slot.

    `gradients` by row space, float32 [U, dim], and `contribution`, float32 [P], are already divided
    by the number of slots. `state` are bytes for the dense replicas, `note` what was logged,
    `trouble` says where a gradient is not finite.
    """

    gradients: list[Tensor]
    contribution: Tensor
    state: Tensor | None
    note: Tensor
    trouble: str


class StepLoop:
    """One rank's loop over the steps of a run.

    `batches(step, slot)` gives a batch, the same whenever it is asked, `rows_of(batch)` the rows
    that it uses. `source` hands the rows of the slot that runs to the collections of `module`.
    `tell(step, logged)` gets what slots have logged, once for each committed step, on each rank
    that holds the dense replica. What is `due` is done on every rank.
    """

    def __init__(
        self,
        run: Run,
        batches: Callable[[int, int], Any],
        steps: int,
        seed: int,
        module: nn.Module,
        rows_of: Callable[[Any], BatchRows],
        source: RowSource,
        tell: Callable[[int, Logged], None],
        due: Sequence[Due] = (),
    ) -> None:
        self._run, self._engine = run, run.engine
        self._batches, self._steps, self._seed = batches, steps, seed
        self._module, self._rows_of, self._source, self._tell = module, rows_of, source, tell
        self._due = due
        self._done_at = [-1] * len(due)
        self._kept: dict[tuple[int, int], tuple[Any, BatchRows]] = {}
        self._computed: Computed[SlotResult] = Computed()
        self._told = self._engine.committed
        self._logged: dict[str, float] | None = None
        self._over = False
        self.between_steps = False
        """Whether other things may be done together now: after the last step, or when due."""

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Note values of the slot that is running; a name given again replaces its value."""
        if self._logged is None:
            raise UsageError("session.log belongs into the body of the loop over session.steps")
        for name, value in values.items():
            number = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
            if number.numel() != 1:
                raise UsageError(
                    f"session.log({name}=...) got {number.numel()} values: give one number, "
                    f"such as {name}.mean()"
                )
            self._logged[name] = float(number)

    def __iter__(self) -> Iterator[Any]:
        """The batch of every (step, slot) that this rank runs; steps that are redone once more.

        All that ranks do together happens while the next batch is fetched.
        """
        engine, heard = self._engine, False
        while True:
            try:
                if not heard:
                    engine.heed_stop()
                elif engine.recovery.stopping:
                    raise StopAgreed
                self._do_what_is_due()
                while engine.step < self._steps:
                    self._run.between_steps()
                    yield from self._step()
                    self._deliver()
                    self._run.step_finished()
                    if engine.recovery.stopping:
                        raise StopAgreed
                    self._do_what_is_due()
                yield from sealed(engine, self._keep, self.went_back)
                self._over = self.between_steps = True
                return
            except StopAgreed:
                self._stop()
            except StepAborted:
                pass
            heard, self.between_steps = True, False
            self.went_back()

    def went_back(self) -> None:
        """After every recovery: steps may have been undone, and logs have become known."""
        self._done_at = [min(step, self._engine.step) for step in self._done_at]
        self._deliver()
        self._run.went_back()

    def _keep(self) -> Generator[Any, None, None]:
        self._run.steps_done()
        yield from ()

    def _do_what_is_due(self) -> None:
        """Do it once a step, and leave the model in the modes that it was in.

        Raises StepAborted where steps were undone meanwhile, also if the user's code has caught it.
        """
        step = self._engine.step
        for number, due in enumerate(self._due):
            if not due.after(step) or self._done_at[number] == step:
                continue
            modes = [(part, part.training) for part in self._module.modules()]
            self.between_steps = True
            try:
                due.work()
                if self._engine.step != step:
                    raise StepAborted
            except BaseException:
                for part, training in modes:
                    part.training = training
                raise
            self.between_steps = False
            self._done_at[number] = step
            self._run.restart_clock()

    def stoppable(
        self, work: Callable[[], Generator[Any, None, Result]]
    ) -> Generator[Any, None, Result]:
        """Collective: do `work` and return what it gives; where a rank asks to stop, stop.

        If the rank that asks dies meanwhile, and no other does, `work` is done again. Raises
        Unrecoverable where a failure has undone steps of a loop that is over.
        """
        step = self._engine.step
        while True:
            try:
                if self._engine.step != step:
                    raise StepAborted
                return (yield from work())
            except StopAgreed:
                self._stop()
            except StepAborted:
                if self._over:
                    raise too_late(self._engine, self._steps) from None
                raise

    def _stop(self) -> None:
        """Stop; returns where a failure came between. All ranks then ask each other again."""
        try:
            self._run.stop()
        except StopAgreed:
            return
        except StepAborted:
            self.went_back()

    def _step(self) -> Iterator[Any]:
        engine = self._engine
        step, last = engine.step, engine.step + 1 == self._steps
        engine.enter("input")
        asked = self._asked(step)
        results = yield from self._compute(asked)
        ahead = soon = None
        if not last and not any(due.after(step + 1) for due in self._due):
            ahead = self._rows(step + 1)
            if engine.repairs_ahead and step + 2 < self._steps:
                soon = self._rows(step + 2)
        troubles = {slot: result.trouble for slot, result in results.items() if result.trouble}
        engine.apply(
            {slot: result.gradients for slot, result in results.items()},
            {slot: result.contribution for slot, result in results.items()},
            commit=last,
            rows_ahead=ahead,
            rows_soon=soon,
            notes={slot: result.note for slot, result in results.items()},
            troubles=self._run.worth_saying(step, troubles) if troubles else None,
            slot_state={
                slot: result.state for slot, result in results.items() if result.state is not None
            },
        )

    def _compute(
        self, asked: Mapping[int, tuple[Any, BatchRows]]
    ) -> Generator[Any, None, dict[int, SlotResult]]:
        """Look up rows and let the user's code run; results of before a failure are kept."""
        engine = self._engine
        self._computed.begin(engine)
        rows = {slot: batch_rows.rows for slot, (_, batch_rows) in asked.items()}
        values = engine.lookup(rows, self._computed.keys() & asked.keys(), apply_follows=True)
        engine.enter("forward")
        for slot, of_spaces in sorted(values.items()):
            batch, batch_rows = asked[slot]
            leaves = [values.requires_grad_() for values in of_spaces]
            replica, slots = _replica(engine), len(engine.view.slots)
            replica.begin_slot(slot)
            seed_slot(self._seed, engine.step, slot)
            self._source.current, self._logged = FetchedRows(leaves, batch_rows), {}
            versions = replica.versions
            self._run.doing(f"step {engine.step}, slot {slot}")
            yield batch
            self._run.doing("")
            note = json.dumps(self._logged)
            self._source.current = self._logged = None
            del self._kept[engine.step, slot]  # the body may have changed it
            self._check(slot, leaves, replica, versions)
            self._computed[slot] = SlotResult(
                self._gradients(slot, leaves, slots),
                replica.contribution(slots),
                replica.slot_state(slot),
                torch.frombuffer(bytearray(note.encode()), dtype=torch.uint8),
                self._trouble(leaves, replica),
            )
        return {slot: self._computed[slot] for slot in asked}

    def _check(
        self, slot: int, leaves: Sequence[Tensor], replica: ModuleReplica, versions: int
    ) -> None:
        """Raise UsageError where the user's code has left no gradient, or changed parameters."""
        if replica.versions != versions:
            raise UsageError(
                f"step {self._engine.step}, slot {slot}: parameters were changed in the body of "
                "the loop",
                otherwise="leave out optimizer.step(), which the session does, and change "
                "parameters in before_step, alike on all ranks",
            )
        if all(part.grad is None for part in (*leaves, *replica.parameters)):
            raise UsageError(
                f"step {self._engine.step}, slot {slot}: nothing has a gradient",
                otherwise="call session.model and loss.backward() in the body of the loop",
            )

    def _trouble(self, leaves: Sequence[Tensor], replica: ModuleReplica) -> str:
        """Where a gradient is not finite, in words; empty where all are."""
        for space, leaf in zip(self._engine.state.spaces, leaves, strict=True):
            if leaf.grad is not None and not _finite(leaf.grad):
                return f"in the gradients of rows of {space.tables[0].name} or tables like it"
        for name, gradient in replica.gradients:
            if not _finite(gradient):
                return f"in the gradient of {name}"
        return ""

    def _gradients(self, slot: int, leaves: Sequence[Tensor], slots: int) -> list[Tensor]:
        """The slot's share of the rows' gradients, by space, in memory to be sent from."""
        shares = []
        for space, leaf in enumerate(leaves):
            share = self._engine.gradient_buffer(slot, space, len(leaf))
            if leaf.grad is None:
                share.zero_()
            else:
                torch.div(leaf.grad, slots, out=share)
            shares.append(share)
        return shares

    def _asked(self, step: int) -> dict[int, tuple[Any, BatchRows]]:
        """The batch and the rows of every slot that this rank runs; those around are kept."""
        engine = self._engine
        for slot in engine.slots:
            if (step, slot) not in self._kept:
                self._run.doing(f"the batch of step {step}, slot {slot}")
                seed_slot(self._seed, step, -1 - slot)
                batch = aligned(self._batches(step, slot))
                self._kept[step, slot] = batch, self._rows_of(batch)
                self._run.doing("")
        self._kept = {
            key: batch for key, batch in self._kept.items() if -1 <= key[0] - engine.step <= 2
        }
        return {slot: self._kept[step, slot] for slot in engine.slots}

    def _rows(self, step: int) -> dict[int, Sequence[Tensor]]:
        return {slot: batch_rows.rows for slot, (_, batch_rows) in self._asked(step).items()}

    def _deliver(self) -> None:
        """Tell what was logged in steps that are committed now, and let the engine forget it."""
        engine = self._engine
        for step in range(self._told, engine.committed):
            notes = engine.state.log.of(step)
            if notes:
                logged = {slot: _read(note) for slot, note in notes.items()}
                self._run.logged(step, logged)
                self._tell(step, logged)
        if self._told < engine.committed:
            self._told = engine.committed
            engine.state.log.forget(self._told)


def _replica(engine: Engine) -> ModuleReplica:
    dense = engine.state.dense
    assert isinstance(dense, ModuleReplica)
    return dense


def _finite(tensor: Tensor) -> bool:
    """Whether all numbers are; a sum that overflows is looked at one by one."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _read(note: Tensor) -> dict[str, float]:
    logged: dict[str, float] = json.loads(bytes(note.tolist()))
    return logged
