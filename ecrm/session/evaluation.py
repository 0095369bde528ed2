"""Evaluation of a session's model: batches for every rank, and tensors gathered from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ecrm.base.errors import UsageError
from ecrm.device.copies import on_device, on_host
from ecrm.engine.engine import Engine
from ecrm.model.determinism import aligned, seed_slot
from ecrm.model.module_replica import ModuleReplica
from ecrm.model.nested_state import packed, unpacked
from ecrm.run.sealed import sealed
from ecrm.run.slot_faults import EVALUATION, Place
from ecrm.session.data import Indexed, started
from ecrm.session.feed import DrawnBatch, Feed
from ecrm.session.other_data import no_batches
from ecrm.session.slot_work import Doing
from ecrm.tables.batch_rows import BatchRows
from ecrm.tables.row_source import FetchedRows, RowSource
from ecrm.transport.message import tensors

EvalBatches = Indexed | Sequence[Any]
"""The batches of an evaluation: every sample of `Indexed` once, or a sequence of batches."""


class NumberedSource:
    """`count` batches by number, `make(number)`, given to slots in turn, one a slot in a round.

    The random numbers for making a batch depend on `seed`, the training's `step` and the number.
    """

    streams = False

    def __init__(
        self, make: Callable[[int], Any], count: int, slots: int, seed: int, step: int
    ) -> None:
        self._make, self._count, self._slots = make, count, slots
        self._seed, self._step = seed, step

    def slots_in(self, step: int) -> range:
        """The slots with a batch in a round."""
        return range(min(self._slots, self._count - step * self._slots))

    def draw(self, step: int, slot: int, before: bytes | None) -> DrawnBatch:
        """The batch of a slot in a round."""
        number = step * self._slots + slot
        if number >= self._count:
            return DrawnBatch(None, over=True)
        seed_slot(self._seed, self._step, -1 - number)
        return DrawnBatch(self._make(number))


class Evaluation:
    """An evaluation on a rank: yields batches, gathers tensors, returns the tensors of all ranks.

    `rows_of(batch)` are the rows used by a batch. `source` gives the rows of the current batch to
    the model's collections. `replica` is the dense part. `on_recovery` is called after a failure,
    and `doing(place)` before the user's code. `session` is the number of the session in the script.
    """

    def __init__(
        self,
        engine: Engine,
        replica: ModuleReplica,
        seed: int,
        rows_of: Callable[[Any], BatchRows],
        source: RowSource,
        on_recovery: Callable[[], None],
        doing: Doing,
        session: int,
    ) -> None:
        self._engine, self._replica, self._doing = engine, replica, doing
        self._session = session
        self._seed, self._rows_of, self._source = seed, rows_of, source
        self._went_back = on_recovery
        self._parts: dict[str, Tensor] = {}
        self._number = -1

    def gather(self, named: Mapping[str, Tensor]) -> None:
        """Keep copies of tensors of the current batch, [B, ...] or single numbers.

        Raises UsageError outside of the loop over batches.
        """
        if self._number < 0:
            raise UsageError(
                "session.gather belongs into the body of the loop over session.eval_batches"
            )
        for name, tensor in named.items():
            (whole,) = on_host(torch.as_tensor(tensor).detach())
            self._parts[f"{self._number} {name}"] = whole.reshape(whole.shape or (1,)).clone()

    def run(self, batches: EvalBatches) -> Generator[Any, None, dict[str, Tensor]]:
        """Collective: yield the batches of this rank; after a failure begin again.

        Returns {name: gathered tensors, in the order of the batches}, the same on every rank.
        Raises as `sealed` does, and UsageError for unusable batches.
        """
        count, make = _counted(batches)
        engine = self._engine
        slots = len(engine.view.slots)
        source = NumberedSource(make, count, slots, self._seed, engine.step)
        workers = batches.workers if isinstance(batches, Indexed) else 0
        feed = Feed(source, lambda: started(source, workers, batches), -(-count // slots))
        try:
            result: dict[str, Tensor] = yield from sealed(
                engine,
                "session.eval_batches",
                lambda: self._once_through(count, feed),
                self._went_back,
                # stand-ins answer for a shard that is away, but for the finished model
                waits=engine.over or engine.state.protection.stand_in is None,
            )
        finally:
            feed.close()
        # from now on the same on all ranks; another number for each session, see `_after_loop`
        seed_slot(self._seed, engine.step, -1 - count - (self._session - 1 << 32))
        return result

    def _once_through(self, count: int, feed: Feed) -> Generator[Any, None, dict[str, Tensor]]:
        engine, slots = self._engine, len(self._engine.view.slots)
        self._parts = {}
        self._check_count(count)
        for at in range(-(-count // slots)):
            engine.check_stop()
            engine.enter("evaluate")
            there = feed.slots_in(at)
            mine = {
                slot: self._made(feed, at, slot) for slot in sorted(engine.slots) if slot in there
            }
            self._doing("")
            values = engine.lookup({slot: rows.rows for slot, (_, rows) in mine.items()})
            for slot, (batch, rows) in mine.items():
                here = [on_device(self._replica.device, of_space) for of_space in values[slot]]
                self._source.current = FetchedRows(here, rows, rounded_to=engine.wire_dtype)
                self._number = at * slots + slot
                self._replica.begin_slot(slot)  # with the buffers of the step
                seed_slot(self._seed, engine.step, -1 - self._number)
                self._doing(self._place(self._number))
                yield batch
                self._doing("")
                self._source.current, self._number = None, -1
        return self._shared()

    def _place(self, number: int) -> Place:
        return Place(self._engine.step, number, EVALUATION)

    def _made(self, feed: Feed, at: int, slot: int) -> tuple[Any, BatchRows]:
        """The batch of a slot in a round, and the rows used by the batch."""
        number = at * len(self._engine.view.slots) + slot
        self._doing(self._place(number))
        drawn = feed.draw(at, slot, self._engine.slots)
        seed_slot(self._seed, self._engine.step, -1 - number)
        batch = aligned(drawn.batch)
        return batch, self._rows_of(batch)

    def _check_count(self, count: int) -> None:
        """Collective: raise UsageError on every rank unless all have equally many batches."""
        engine = self._engine
        with engine.recovery.recovering():
            counts = engine.state.transport.gather(count)
        for rank, other in counts.items():
            if other != counts[min(counts)]:
                raise UsageError(
                    f"session.eval_batches has {counts[min(counts)]} batches on rank "
                    f"{min(counts)} and {other} on rank {rank}",
                    otherwise="give all ranks the same",
                )

    def _shared(self) -> dict[str, Tensor]:
        """Collective: the tensors gathered by all ranks, by name, in the order of the batches."""
        engine = self._engine
        with engine.recovery.recovering():
            shared = engine.state.transport.share([packed(self._parts)])
        of_all: dict[str, dict[int, Tensor]] = {}
        for _, parts in sorted(shared.items()):
            for key, tensor in unpacked(tensors(parts)[0]).items():
                number, _, name = key.partition(" ")
                assert tensor is not None
                of_all.setdefault(name, {})[int(number)] = tensor
        return {
            name: torch.cat([part for _, part in sorted(parts.items())])
            for name, parts in sorted(of_all.items())
        }


def _counted(batches: EvalBatches) -> tuple[int, Callable[[int], Any]]:
    """The number of batches, and a function from a number to its batch."""
    if isinstance(batches, Indexed):
        return batches.whole_batches, batches.whole_batch
    if isinstance(batches, Sequence):
        return len(batches), batches.__getitem__
    raise no_batches(batches, "eval_batches")
