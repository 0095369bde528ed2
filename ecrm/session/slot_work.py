"""The work of a session on a slot: the batch, the user's code, and the results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ecrm.base.console import say
from ecrm.base.errors import ChangedDataError, UsageError
from ecrm.device.copies import coming, on_device
from ecrm.engine.engine import Engine
from ecrm.kernels.divide import divide
from ecrm.model.determinism import aligned, seed_slot
from ecrm.model.module_replica import ModuleReplica
from ecrm.model.unseen_state import (
    CUT,
    Seen,
    first_change,
    first_growth,
    of_module,
    used_by,
)
from ecrm.protection.pooled import BagValues, SlotBags
from ecrm.protection.routing import FoundRows
from ecrm.protection.wire_dtype import round_to
from ecrm.run.finite import NO_SCALE
from ecrm.run.slot_faults import BATCH, Place
from ecrm.run.step_loop import SlotResult, SlotStep
from ecrm.run.user_frames import whole_numbers
from ecrm.session.asked_before import AskedBefore
from ecrm.session.batch_digest import batch_digest
from ecrm.session.body_watch import BodyWatch, Modes
from ecrm.session.determinism_check import check_same
from ecrm.session.feed import DrawnBatch, Feed
from ecrm.session.streams import ENDED
from ecrm.tables.batch_rows import BatchRows
from ecrm.tables.pooling import BagGradients
from ecrm.tables.row_source import FetchedRows, RowSource
from ecrm.transport.message import Received

MOST_TOLD = 3
"""The number of warnings on every rank, such as of slots without a gradient."""

Doing = Callable[[Place | str], None]
"""Called with the work begun by the user's code; called with "" at its end."""


@dataclass(frozen=True)
class SessionBatch:
    """A user's batch, and the rows looked up by the model for the batch."""

    batch: Any
    rows: BatchRows
    over: bool = False
    """Whether the slot has no batch, and no part in the step."""
    digest: int = 0
    """The digest of all content of the batch."""


class SessionBatches:
    """The user's batches for the slots of an engine.

    `feed` draws a batch, `rows_of(batch)` returns the rows used by the batch.

    The dense replica has the state of a stream before the engine's step. A batch drawn further
    ahead begins with the state after the batch before.
    """

    reusable = False  # the loop's body may change a batch

    def __init__(
        self,
        feed: Feed,
        rows_of: Callable[[Any], BatchRows],
        engine: Engine,
        seed: int,
        doing: Doing,
    ) -> None:
        self._feed, self._rows_of, self._engine = feed, rows_of, engine
        self._seed, self._doing = seed, doing
        self._asked = AskedBefore()
        hooks = engine.state.hooks
        hooks.marks, hooks.changed = self._asked.marks, self._changed
        self._ahead: dict[tuple[int, int], SessionBatch] = {}
        self._after: dict[tuple[int, int], bytes] = {}

    def batch(self, step: int, slot: int) -> SessionBatch:
        """The batch of a slot in a step."""
        known = self._ahead.pop((step, slot), None)
        return self._drawn(step, slot) if known is None else known

    def draw_ahead(self, step: int, slot: int) -> None:
        """Draw a batch early, to detect a batch sharing memory with the next batch."""
        if (step, slot) not in self._ahead:
            self._ahead[step, slot] = self._drawn(step, slot)

    def once_more(self, step: int, slot: int) -> SessionBatch:
        """The batch of a slot in the engine's step, made anew for a comparison."""
        return self._drawn(step, slot, compared=True)

    def rows(self, batch: SessionBatch) -> Sequence[Tensor]:
        """The unique rows used by a batch, by row space, int64 [U]."""
        return batch.rows.rows

    def bags(self, batch: SessionBatch) -> Sequence[SlotBags | None]:
        """The bags of the rows used by a batch, by row space; `None` for rows with another use."""
        sums = self._engine.may_sum_bags and replica_of(self._engine).device.type == "cpu"
        return batch.rows.bags if sums else (None,) * len(batch.rows.rows)

    def on_recovery(self) -> bool:
        """After a recovery, continue streams from the states of the next step.

        Returns whether earlier batches are still good.
        """
        self._feed.on_recovery()
        if self._feed.streams:
            self._ahead.clear()
            self._after.clear()
        return not self._feed.streams

    def after(self, step: int, slot: int) -> bytes | None:
        """The state of a slot's stream after a step, ENDED after its last; `None` without streams.

        The next batch is drawn to find the end.
        """
        if not self._feed.streams:
            return None
        if (step + 1, slot) not in self._ahead:
            self._ahead[step + 1, slot] = self._drawn(step + 1, slot)
        return ENDED if self._ahead[step + 1, slot].over else self._after[step, slot]

    @property
    def slots(self) -> list[int]:
        """The slots with a batch in the engine's step, on any rank."""
        streams = replica_of(self._engine).streams
        there = self._feed.slots_in(self._engine.step)
        return [slot for slot in there if slot not in streams or streams[slot].numel()]

    def of_another_rank(self, step: int, slot: int) -> SessionBatch:
        """The batch in the engine's step of a slot run by another rank."""
        self._doing(Place(step, slot, BATCH))
        made = self._made(self._feed.draw_here(step, slot, self._before(step, slot)), step, slot)
        self._doing("")
        return made

    def _drawn(self, step: int, slot: int, compared: bool = False) -> SessionBatch:
        """Draw a batch now. Ends the run if the batch differs from an earlier draw."""
        engine = self._engine
        engine.enter("input")
        self._doing(Place(step, slot, BATCH))
        before = self._before(step, slot)
        drawn = self._feed.draw(step, slot, engine.slots, before)
        if drawn.over and step == engine.step and slot in self.slots:
            raise UsageError(
                f"the stream of slot {slot} has no batch for step {step}, and had one before",
                otherwise="keep all that decides its batches in its state_dict",
            )
        if drawn.before is not None and not compared:
            self._after[step - 1, slot] = drawn.before
        if drawn.after is not None and not compared:
            self._after = {
                place: state for place, state in self._after.items() if place[0] >= engine.step - 1
            }
            self._after[step, slot] = drawn.after
        made = self._made(drawn, step, slot)
        self._doing("")
        new = not made.over and not compared
        if new and (problem := self._asked.drew(step, slot, made.digest)):
            engine.recovery.refuse(problem, ChangedDataError)
        return made

    def _changed(self, step: int, requests: Mapping[int, Sequence[Received]]) -> str:
        """The first change of requests for a step done again, in words; "" for no change."""
        self._asked.forget(self._engine.committed)
        return self._asked.problem(step, requests, self._engine.state.layouts)

    def _made(self, drawn: DrawnBatch, step: int, slot: int) -> SessionBatch:
        if drawn.over:
            none = [torch.empty(0, dtype=torch.int64) for _ in self._engine.state.spaces]
            return SessionBatch(None, BatchRows(none, {}, ()), over=True)
        seed_slot(self._seed, step, -1 - slot)
        batch = aligned(drawn.batch)
        rows = self._rows_of(batch)
        return SessionBatch(batch, rows, digest=batch_digest(batch, rows.digests))

    def _before(self, step: int, slot: int) -> bytes | None:
        """The state of a slot's stream before a step; `None` without a stream, or if unknown."""
        if not self._feed.streams:
            return None
        if step > self._engine.step:
            return self._after.get((step - 1, slot))
        state = replica_of(self._engine).streams.get(slot)
        return None if state is None else state.numpy().tobytes()


def first_rows(feed: Feed, rows_of: Callable[[Any], BatchRows], spaces: int) -> list[int]:
    """The numbers of distinct rows looked up by all slots of step 0, by row space.

    `rows_of(batch)` are the rows of a batch, `spaces` is the number of row spaces.
    """
    found: list[list[Tensor]] = [[torch.empty(0, dtype=torch.int64)] for _ in range(spaces)]
    for slot in feed.slots_in(0):
        drawn = feed.draw_here(0, slot, None)
        if not drawn.over:
            for rows, more in zip(found, rows_of(aligned(drawn.batch)).rows):
                rows.append(more)
    return [torch.cat(rows).unique().numel() for rows in found]


class SlotWork:
    """The user's code, run on slot after slot.

    `source` hands the rows of the running slot to the collections of the `module`. `skips`: whether
    steps with a nonfinite gradient are skipped.
    """

    def __init__(
        self,
        engine: Engine,
        batches: SessionBatches,
        seed: int,
        source: RowSource,
        doing: Doing,
        module: nn.Module,
        skips: bool = False,
        averages: bool = True,
    ) -> None:
        self._engine, self._batches, self._seed = engine, batches, seed
        self._averages = averages
        self._source, self._doing, self.skips = source, doing, skips
        self._logged: dict[str, float] | None = None
        self._leaves: list[Tensor] = []
        self._unsummed: dict[int, BagGradients] = {}
        self._scaler_calls: int | None = None
        self._hook: RemovableHandle | None = None
        self._skipped = self._stops = False
        self._had_gradients, self._told = False, 0
        self._watch = BodyWatch(self._tell)
        self._modes = Modes(module)
        self._recoveries, self._look_until = engine.recovery.completed, 0
        self._seen: Seen = {}
        self._used: Seen = {}
        self._counts: dict[str, int] = {}

    @property
    def _replica(self) -> ModuleReplica:
        return replica_of(self._engine)

    @property
    def running(self) -> bool:
        """Whether the user's code is at work on a slot."""
        return self._logged is not None

    def skip(self) -> None:
        """Have the running slot sit the step out."""
        self._check_running("skip")
        self._skipped = True

    def stop(self) -> None:
        """Make the step of the running slot the last step."""
        self._stops = True

    def _check_running(self, what: str) -> None:
        if not self.running:
            raise UsageError(f"session.{what} belongs into the body of the loop over session.steps")

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Note values of the running slot; a repeated name replaces the earlier value."""
        self._check_running("log")
        assert self._logged is not None
        for name, value in values.items():
            number = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
            if number.numel() != 1:
                raise UsageError(
                    f"session.log({name}=...) got {number.numel()} values: give one number, "
                    f"such as {name}.mean()"
                )
            self._logged[name] = float(number)

    def begin(self, part: SlotStep[SessionBatch]) -> Any:
        """Prepare the user's code for a slot; returns the batch of the slot."""
        device = self._replica.device
        found, values = dict[int, FoundRows](), list[Tensor]()
        for space, each in enumerate(part.values):
            if isinstance(each, FoundRows) and device.type == "cpu":
                found[space] = each
                values.append(each.memory(each.rows, each.dimension))
            else:
                values.append(each.copied() if isinstance(each, FoundRows) else each)
        self._leaves = [on_device(device, each).requires_grad_() for each in values]
        self._engine.enter("forward")
        self._replica.begin_slot(part.slot)
        seed_slot(self._seed, part.step, part.slot)
        self._close_source()
        buffers = [
            self._engine.gradient_buffer(part.slot, space, len(leaf))
            for space, leaf in enumerate(self._leaves)
        ]
        memory = {
            space: buffer for space, buffer in enumerate(buffers) if self._leaves[space].is_cpu
        }
        self._source.current = FetchedRows(
            self._leaves,
            part.batch.rows,
            memory,
            found,
            rounded_to=self._engine.wire_dtype,
        )
        self._logged, self._skipped, self._stops = {}, False, False
        self._watch.begin(self._replica, part.step)
        self._scaler_calls = self._replica.scaler_calls
        self._check_as_drawn(part)
        self._modes.check(f"step {part.step}, slot {part.slot}")
        self._await_forward()
        self._doing(Place(part.step, part.slot))
        return part.batch.batch

    def _await_forward(self) -> None:
        """Enter the phase `backward` once the model's forward is through.

        The hook is there for one forward only: a copy or a file of the model gets no hook.
        """

        def through(*_: object) -> None:
            if not torch.compiler.is_compiling():
                self._end_forward()
                self._engine.enter("backward")

        self._hook = self._replica.module.register_forward_hook(through)

    def _end_forward(self) -> bool:
        """Remove the hook of `_await_forward`; whether the hook was still there."""
        if self._hook is None:
            return False
        self._hook.remove()
        self._hook = None
        return True

    def _check_as_drawn(self, part: SlotStep[SessionBatch]) -> None:
        """Raise UsageError for a batch changed since the batch was drawn.

        Checked in first steps, as often as the dense part, and after failures.
        """
        completed = self._engine.recovery.completed
        if completed != self._recoveries:
            self._recoveries, self._look_until = completed, part.step + 3
        if not (self._watch.looks or part.step < self._look_until):
            return
        if batch_digest(part.batch.batch) != part.batch.digest:
            raise UsageError(
                f"step {part.step}, slot {part.slot}: the batch has changed since it was made",
                otherwise="give each batch memory of its own, such as torch.tensor(array) in the "
                "place of torch.from_numpy(array)",
            )

    def seed_between(self, number: int) -> None:
        """Seed random numbers for a function between steps, equal in every call for a step."""
        engine = self._engine
        seed_slot(self._seed, engine.step, len(engine.view.slots) + 1 + number)

    def again(self, part: SlotStep[SessionBatch], batch: SessionBatch) -> None:
        """Have a slot computed again, on a batch made anew. UsageError for a different batch."""
        pairs = zip(part.batch.rows.rows, batch.rows.rows, strict=True)
        same_rows = all(torch.equal(one, other) for one, other in pairs)
        if not same_rows or part.batch.digest != batch.digest:
            other = "has other numbers or words" if same_rows else "asked for other rows"
            raise UsageError(
                f"the batch of step {part.step}, slot {part.slot} was made twice, and {other}",
                otherwise="let the batch depend on step and slot alone: seed each generator of a "
                "dataset anew for each sample, or draw from torch, random or numpy, which are "
                "seeded; a stream keeps all that decides its batches in its state_dict",
            )
        part.batch = batch
        part.values = [
            values.detach() if isinstance(values, Tensor) else values for values in part.values
        ]
        module = self._replica.module
        self._seen, self._used, self._counts = of_module(module), used_by(module), whole_numbers()

    def check_same(
        self, part: SlotStep[SessionBatch], first: SlotResult, second: SlotResult
    ) -> None:
        """Raise UsageError if two computations of a slot differ, or add state outside commits."""
        place = str(Place(part.step, part.slot))
        if first.sits_out != second.sits_out:
            say(
                f"! {place} was computed twice, and sat the step out one time only: let what is in "
                "a batch alone decide whether it is left out, or a failure changes the model"
            )
            return
        if changed := first_change(self._seen, of_module(self._replica.module)):
            raise UsageError(
                f"{place} was computed twice, and the model keeps what no commit has: {changed}",
                otherwise="register it by register_buffer in the module, or leave it out",
            )
        spaces = self._engine.state.spaces
        check_same(place, first, second, self._replica, spaces, part.batch.rows.rows)
        if part.step == 0 and part.slot == min(self._engine.slots):
            self._tell_of_kept()

    def _tell_of_kept(self) -> None:
        """Warn of changes by a slot's second computation, possibly only in a log."""
        module = self._replica.module
        used, seen = used_by(module), of_module(module)
        found = first_change(self._used, used) or first_growth({**self._seen, **self._used}, used)
        if found := found or first_growth(self._seen, seen):
            say(
                f"! each time that a slot is computed the model changes {found}: where a result "
                "depends on it, a failure changes the trained model; keep it in a buffer then"
            )
        for name, number in whole_numbers().items():
            if self._counts.get(name, number) != number:
                say(
                    f"! {name} went from {self._counts[name]} to {number} as the slot was computed "
                    "twice: it counts batches of this rank; where a result depends on the step, "
                    "use session.step"
                )
        if CUT in seen or CUT in used:
            say("! not all attributes of the model are compared: it has more than 20,000 values")

    def finish(self, part: SlotStep[SessionBatch], goes_on: bool = True) -> SlotResult:
        """The result of the user's code on a slot; averaged gradients are divided by the slots.

        `goes_on`: the result includes the state of the slot's stream after the step. Raises
        UsageError for changed parameters, for an unscaled loss, and for a slot of step 0 without a
        gradient, if no slot had a gradient before. Any other slot without a gradient sits the step
        out.
        """
        self._doing("")
        if self._end_forward():  # a part of the model was called, not the model
            self._engine.enter("backward")
        note = json.dumps(self._logged)
        self._close_source()
        self._logged = None
        self._check(part)
        if self._skipped:
            self._replica.begin_slot(part.slot)  # drops the results of the slot
            for leaf in self._leaves:
                leaf.grad = None
            self._unsummed = {}
        slots = self._batches.slots
        share = (len(slots) if self._averages else 1) * self._replica.loss_scale
        of_bags = {
            space: BagValues(each.in_order(), share)
            for space, each in self._unsummed.items()
            if self._engine.sums_elsewhere(part.slot, space)
        }
        gradients, known = self._gradients(part.slot, share)
        contribution = self._replica.contribution(share)  # ends copies begun from a GPU
        finite = [
            _finite(each) if good is None else good
            for good, each in zip(known, gradients, strict=True)
        ]
        trouble, leads = self._trouble(finite, contribution), part.slot == slots[0]
        after = self._batches.after(part.step, part.slot) if goes_on else None
        stream = None if after is None else _bytes(after)
        ends_at = part.step + 1 if self._stops else -1
        return SlotResult(
            gradients,
            contribution,
            _bytes(note.encode()),
            trouble,
            self._replica.slot_state(leads, stream, ends_at),
            over=after == ENDED,
            sits_out=self._skipped,
            stops=self._stops,
            of_bags=of_bags,
        )

    def _close_source(self) -> None:
        """Have no rows fetched from now on, and no memory for a late backward."""
        self._unsummed = {}
        if self._source.current is not None:
            self._source.current.memory.clear()
            self._unsummed = dict(self._source.current.unsummed)
            self._source.current.unsummed.clear()
        self._source.current = None

    def absent(self, part: SlotStep[SessionBatch]) -> SlotResult:
        """The result of a slot without a batch."""
        nothing = [
            self._engine.gradient_buffer(part.slot, space, 0) for space in range(len(part.values))
        ]
        return SlotResult(nothing, None, _bytes(b""), over=True)

    def _check(self, part: SlotStep[SessionBatch]) -> None:
        place = f"step {part.step}, slot {part.slot}"
        self._watch.check(place)
        self._modes.check(place)
        if self._skipped:
            return
        nothing = all(leaf.grad is None for leaf in (*self._leaves, *self._replica.parameters))
        if nothing and not self._unsummed:
            if part.step == 0 and not self._had_gradients:
                raise UsageError(
                    f"{place}: nothing has a gradient",
                    otherwise="call session.model and loss.backward() in the body of the loop; to "
                    "leave a batch out, call session.skip()",
                )
            self._skipped = True
            self._tell(
                f"! {place}: nothing has a gradient, so the slot sits the step out (session.skip() "
                "says so without a word)"
            )
            return
        self._had_gradients = True
        if self._scaler_calls is not None and self._scaler_calls == self._replica.scaler_calls:
            raise UsageError(
                f"step {part.step}, slot {part.slot}: the loss was not scaled, and gradients are "
                "divided by the scale of grad_scaler",
                otherwise="call grad_scaler.scale(loss).backward() in the body of the loop",
            )

    def _tell(self, line: str) -> None:
        """Print a warning of a likely mistake, at most `MOST_TOLD` times."""
        self._told += 1
        if self._told <= MOST_TOLD:
            say(f"{line}{'; no further lines like this' if self._told == MOST_TOLD else ''}")

    def _trouble(self, finite: Sequence[bool], contribution: Tensor) -> str:
        """A nonfinite divided gradient or a bad loss scale, in words; "" without trouble.

        `finite`: whether the gradients of the rows are, by row space.
        """
        scale = self._replica.loss_scale
        if not scale or not math.isfinite(scale):
            return f"{NO_SCALE} {scale}"
        for space, good in zip(self._engine.state.spaces, finite, strict=True):
            if not good:
                return f"in the gradients of rows of {space.tables[0].name} or tables like it"
        if not _finite(contribution):
            for name, gradient in self._replica.parts_of(contribution):
                if not _finite(gradient):
                    return f"in the gradient of {name}"
        return ""

    def _gradients(self, slot: int, divisor: float) -> tuple[list[Tensor], list[bool | None]]:
        """The slot's share of the rows' gradients, by row space, in memory for sending.

        Shares are rounded to the dtype of the wire. Also returns whether each share is finite.
        `None` stands for a copy from a GPU, complete once the replica's contribution is. Gradients
        of bags left by backward are summed, divided and tested in one pass; a gradient left in that
        memory is divided in place.
        """
        shares: list[Tensor] = []
        finite: list[bool | None] = []
        to = self._engine.wire_dtype
        for space, leaf in enumerate(self._leaves):
            share = self._engine.gradient_buffer(slot, space, len(leaf))
            if space in self._unsummed:
                assert leaf.grad is None, "gradients of several uses were settled"
                finite.append(self._unsummed.pop(space).sum_into(share, divisor, to))
            elif leaf.grad is None:
                share.zero_()
                finite.append(True)
            elif leaf.grad.is_cpu:
                good = divide(leaf.grad.contiguous(), divisor, share)
                # the largest numbers of float32 become infinite in bfloat16
                finite.append(good if to == share.dtype else _finite(round_to(share, to)))
            else:
                coming(round_to(leaf.grad / divisor, to), share)
                finite.append(None)
            leaf.grad = None  # a late backward adds to no gradient under way
            shares.append(share)
        return shares, finite


def replica_of(engine: Engine) -> ModuleReplica:
    """The dense replica of a rank with slots."""
    dense = engine.state.dense
    assert isinstance(dense, ModuleReplica)
    return dense


def _bytes(data: bytes) -> Tensor:
    """Bytes as a tensor, uint8 [N]."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; after an overflow of the sum, check number by number."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
