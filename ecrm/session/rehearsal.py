"""Slots of the first steps computed on a second rank: results must not depend on the rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ecrm.base.errors import UsageError
from ecrm.engine.engine import Engine
from ecrm.model.nested_state import unpacked
from ecrm.run.step_loop import SlotResult, SlotStep
from ecrm.session.slot_work import SessionBatch, SessionBatches, SlotWork, replica_of
from ecrm.transport.digests import tensor_digest

_SITS_OUT = "whether the slot sits out"


class SlotsElsewhere:
    """Before each step up to `until`, a second dense holder computes each slot.

    `check` compares the results with the results of the step itself. With a single dense holder, no
    slot is computed elsewhere.
    """

    def __init__(self, engine: Engine, batches: SessionBatches, work: SlotWork, until: int) -> None:
        self._engine, self._batches, self._work, self._until = engine, batches, work, until
        self._done = -1
        self._found: dict[int, tuple[int, dict[str, int]]] = {}

    def is_due(self, step: int) -> bool:
        return self._done < step < self._until and len(self._engine.view.dense) > 1

    def on_recovery(self) -> None:
        self._done, self._found = -1, {}

    def run(self) -> Iterator[list[SlotStep[SessionBatch]]]:
        engine = self._engine
        step, mine = engine.step, [s for s, rank in self._places().items() if rank == engine.rank]
        engine.enter("input")
        batches = {slot: self._batches.of_another_rank(step, slot) for slot in mine}
        values = engine.lookup({slot: batch.rows.rows for slot, batch in batches.items()})
        parts = [SlotStep(step, slot, batch, values[slot]) for slot, batch in batches.items()]
        yield [part for part in parts if not part.batch.over]
        said = {part.slot: part.result and self._digests(part, part.result) for part in parts}
        with engine.recovery.recovering():
            heard = engine.state.transport.gather(said)
        self._found = {
            int(slot): (rank, digests)
            for rank, told in heard.items()
            for slot, digests in told.items()
            if digests is not None
        }
        self._done = step

    def _places(self) -> dict[int, int]:
        """The second rank of every slot."""
        view = self._engine.view
        places = {}
        for slot, host in enumerate(view.slots):
            others = [rank for rank in view.dense if rank != host]
            places[slot] = others[slot % len(others)]
        return places

    def check(self, part: SlotStep[SessionBatch], result: SlotResult) -> None:
        """Raise UsageError if a slot had a different result on the second rank."""
        rank, theirs = self._found.pop(part.slot, (0, None))
        if theirs is None or theirs.get(_SITS_OUT) != int(result.sits_out):
            return  # the second time on this rank reports the difference
        for name, digest in self._digests(part, result).items():
            if theirs.get(name) != digest:
                raise UsageError(
                    f"step {part.step}, slot {part.slot} was computed on rank {rank}, too, and "
                    f"{name} differs",
                    otherwise="leave out whatever depends on the rank or its process, such as "
                    "session.is_main, hash() of objects, and generators of one's own",
                )

    def _digests(self, part: SlotStep[SessionBatch], result: SlotResult) -> dict[str, int]:
        """Digests of a batch, and of all results of a slot, by name."""
        found = {"the batch": part.batch.digest, _SITS_OUT: int(result.sits_out)}
        named: dict[str, Tensor | None] = {}
        for space, rows in zip(self._engine.state.spaces, part.batch.rows.rows, strict=True):
            named[f"the set of rows of {space.tables[0].name} or tables like it"] = rows
        if result.contribution is not None:
            replica = replica_of(self._engine)
            for name, has in replica.flags_of(result.contribution).items():
                found[f"whether {name} has a gradient"] = int(has)
            parts = replica.parts_of(result.contribution)
            named |= {f"the gradient of {name}": gradient for name, gradient in parts}
        for space, gradient in zip(self._engine.state.spaces, result.gradients, strict=True):
            named[f"the gradient of rows of {space.tables[0].name} or tables like it"] = gradient
        if result.state is not None:
            state = unpacked(result.state)  # stream states are left out: their bytes may differ
            named |= {f"buffer {name}": buffer for name, buffer in state.items() if name}
        named["what session.log was given"] = result.note
        found |= {name: tensor_digest(t) for name, t in named.items() if t is not None}
        return found
