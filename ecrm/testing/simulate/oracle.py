"""The oracle: rows, optimizer state and dense state of an undisturbed run, by step.

The undisturbed run is the engine's, on one rank. A second oracle gets the same gradients, and
updates rows with code of its own (`plain_rows.py`). Both must have the same records in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.engine.lookup import Bags
from ecrm.engine.step_input import Rows, StepInput
from ecrm.placement.initial_values import InitFunction, Uniform
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table
from ecrm.protection.routing import FoundRows
from ecrm.testing.simulate.plain_rows import (
    Floats,
    PlainOptimizer,
    PlainRows,
    PlainTable,
    bfloat16,
)
from ecrm.testing.simulate.promise import Violation
from ecrm.testing.simulate.workload import TINY, Job, Workload
from ecrm.transport.base import Transport
from ecrm.transport.membership import Admit
from ecrm.transport.message import Part, Received, copied


class Alone(Transport):
    """The transport of a cluster with a single rank. No failure is possible."""

    rank, live = 0, (0,)

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        parts = [copied(part) for part in outgoing.get(0, ())]
        return {0: parts} if parts else {}

    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        return {0: [copied(part) for part in tensors]}

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        return flag, True

    def shrink(self, admit: Admit = Admit.NO) -> None:
        raise AssertionError("nobody can die here")

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Truth:
    """The results of an undisturbed `job`, step by step.

    `records[s][space]` are all records of a row space after s steps, uint8 [rows, B]. `dense[s]` is
    the dense state after s steps. `notes[s]` maps slots to notes on step s. `tables` maps tables to
    their final digests.
    """

    records: list[list[Tensor]]
    dense: list[Tensor]
    notes: list[dict[int, Tensor]]
    tables: dict[str, str]
    job: Job = TINY


class SecondOracle:
    """The rows of an undisturbed engine on one rank, updated once more by `plain_rows.py`.

    Takes part in every `find` and `apply` of the engine. Raises Violation for different rows.
    """

    def __init__(self, engine: Engine) -> None:
        state, self._engine = engine.state, engine
        given = [
            (number, table)
            for space in state.spaces
            for number, table in zip(space.table_numbers, space.tables, strict=True)
        ]
        tables = [_plain_table(table) for _, table in sorted(given, key=lambda each: each[0])]
        self.rows = PlainRows(tables, _plain_optimizer(state.stores.optimizer), state.stores.seed)
        self._asked: Rows = {}
        self._find, self._apply = engine.find, engine.apply
        engine.find, engine.apply = self._finds, self._applies  # type: ignore[method-assign]

    def compare(self, records: Sequence[Tensor]) -> None:
        """Compare the records of all row spaces, uint8 [rows, B], with the plain ones."""
        for number, (space, theirs) in enumerate(zip(self.rows.spaces, records, strict=True)):
            mine = space.records()
            if mine.shape != tuple(theirs.shape):
                raise Violation(f"records of space {number} are {tuple(theirs.shape)}")
            wrong = (mine != theirs.numpy()).any(axis=1).nonzero()[0]
            if wrong.size:
                raise Violation(
                    f"step {self._engine.step}: {space.optimizer.name} of space {number} has "
                    f"different rows in plain numpy, row {wrong[0]} first"
                )

    def _finds(
        self,
        rows: Rows,
        computed: Collection[int] = (),
        apply_follows: bool = False,
        bags: Bags = MappingProxyType({}),
    ) -> dict[int, list[FoundRows]]:
        found = self._find(rows, computed, apply_follows, bags)
        if apply_follows:
            self._asked = rows
        for slot, spaces in found.items():
            for number, (asked, values) in enumerate(zip(rows[slot], spaces, strict=True)):
                mine = self._near(self.rows.spaces[number].weights[asked.numpy()])
                if mine.tobytes() != values.copied().numpy().tobytes():
                    raise Violation(
                        f"step {self._engine.step}: slot {slot} was given rows of space {number} "
                        "that are different in plain numpy"
                    )
        return found

    def _near(self, values: Floats) -> Floats:
        """Values as they travel: rounded if the engine's wire has two bytes."""
        return bfloat16(values) if self._engine.wire_dtype == torch.bfloat16 else values

    def _applies(self, given: StepInput) -> None:
        step, rate = self._engine.step, self._engine.state.stores.rate
        for slot in sorted(given.row_gradients.keys() - set(given.sit_out)):
            for gradients in given.row_gradients[slot]:
                there = gradients.detach().numpy()
                if not (given.troubles or np.array_equal(there, self._near(there))):
                    raise Violation(f"step {step}: slot {slot} gave gradients that do not travel")
        if not (given.skip_troubled and given.troubles):
            self.rows.step(
                {slot: [each.numpy() for each in spaces] for slot, spaces in self._asked.items()},
                {
                    slot: [each.detach().numpy() for each in spaces]
                    for slot, spaces in given.row_gradients.items()
                },
                step,
                1.0 if rate is None else rate(step),
                given.sit_out,
            )
        self._apply(given)


def _plain_optimizer(optimizer: SparseOptimizer) -> PlainOptimizer:
    return PlainOptimizer(
        optimizer.name,
        optimizer.learning_rate,
        optimizer.epsilon,
        optimizer.betas,
        optimizer.weight_decay,
        optimizer.decoupled,
    )


def _plain_table(table: Table) -> PlainTable:
    initial = table.initial

    def given(row: int, seed: int) -> Floats | None:
        """The value of a row by the table's function, or out of the table's values."""
        if isinstance(initial, InitFunction):
            value = torch.zeros(1, table.dim)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed)
                initial.function(value)
            return np.asarray(value[0].numpy())
        if initial is None or isinstance(initial, Uniform) or row >= len(initial.values):
            return None
        return np.asarray(initial.values[row].numpy())

    return PlainTable(
        table.rows,
        table.dim,
        None if table.optimizer is None else _plain_optimizer(table.optimizer),
        (initial.low, initial.high) if isinstance(initial, Uniform) else None,
        None if initial is None or isinstance(initial, Uniform) else given,
    )


def truth_of(
    workload: Workload,
    after_step: Callable[[Engine], None] | None = None,
    job: Job = TINY,
) -> Truth:
    """Run a job on one rank without protection, and return the results of every step.

    The results of a job depend neither on the cluster nor on the protection. `after_step` gets the
    engine after every step, and may change the engine's state. Without `after_step` the second
    oracle compares rows and optimizer state in every step. Raises Violation for a difference.
    """
    alone = replace(
        workload,
        servers=1,
        trainers=1,
        spares=0,
        layout="colocated",
        protection="none",
        k=1,
        m=0,
        commit_interval=1,
        scrub_rows_per_step=0,
        skip_undo=False,
        rows_on="cpu",
        gpu_kernels=None,
    )
    truth = Truth([], [], [], {}, job)
    second: list[SecondOracle] = []

    def start(engine: Engine) -> None:
        second.extend([SecondOracle(engine)] if after_step is None else [])
        note(engine)

    def note(engine: Engine) -> None:
        spaces = enumerate(engine.state.spaces)
        truth.records.append(
            [engine.state.hosted[0, s].store.read(torch.arange(space.rows)) for s, space in spaces]
        )
        truth.dense.append(job.dense_value(engine).clone())
        truth.notes.extend([dict(engine.state.log.of(engine.step - 1))] if engine.step else [])
        if after_step is not None:
            after_step(engine)
        for each in second:
            each.compare(truth.records[-1])

    job.run(alone, Alone(), Hooks(), start, note, truth.tables.update)
    return truth
