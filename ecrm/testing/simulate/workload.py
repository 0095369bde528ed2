"""A small training job for the engine, drawn from a seed: real embedding and tiny dense maths.

Runs on any transport; what it computes depends on (seed, tables, slots, steps) only, as a real run
does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ecrm.base.allocate import CPU, Allocate, ZerosOn, lazy_zeros
from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.checkpoint.keeper import Checkpoints
from ecrm.checkpoint.lost_rows import CheckpointRows
from ecrm.config.schema import ProtectionConfig
from ecrm.device.imitation import IMITATED_GPU
from ecrm.engine.computed import Computed
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import EnginePolicy, Hooks, StepAborted
from ecrm.engine.rollback import Durable
from ecrm.engine.step_input import StepInput
from ecrm.engine.table_digest import table_digests
from ecrm.placement.assignment import initial_view
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table, row_spaces
from ecrm.placement.view import View
from ecrm.protection.base import Protection, VerifyReport
from ecrm.protection.kinds import KINDS, Kind
from ecrm.protection.registry import make_protection
from ecrm.testing.faults.without_undo import leave_updates_in_place
from ecrm.testing.imitated_gpu import imitated_gpu
from ecrm.transport.base import Transport

DENSE_WIDTH = 5
REMEMBERED = 3
"""Committed steps whose notes every holder of the dense replica remembers."""


class TinyDense:
    """A dense replica of a few floats: a running sum that every later gradient depends on."""

    def __init__(self) -> None:
        self.value = torch.zeros(DENSE_WIDTH)
        self._saved = self.value.clone()

    memory_bytes = 2 * DENSE_WIDTH * 4
    over, ends_at = False, -1

    def end_at(self, step: int) -> None:
        raise AssertionError("nobody asks for an early end")

    def apply(self, total: Tensor, states: Mapping[int, Tensor]) -> None:
        self.value = (self.value * 0.9 + total).clamp(-8, 8)

    def skip(self, states: Mapping[int, Tensor]) -> None:
        raise AssertionError("no step is skipped")

    def commit(self) -> None:
        self._saved = self.value.clone()

    def undo(self) -> None:
        self.value = self._saved.clone()

    def export(self) -> list[Tensor]:
        return [self._saved]

    def present(self) -> list[Tensor]:
        return [self.value]

    def is_finite(self, state: Sequence[Tensor]) -> bool:
        return bool(state[0].isfinite().all())

    @property
    def entries(self) -> list[tuple[str, object]]:
        return [("value", self.value)]

    def load(self, state: Sequence[Tensor]) -> None:
        self._saved = state[0].clone()
        self.undo()


def dense_value(engine: Engine) -> Tensor:
    """The dense state of a rank that holds it, as it is now, float32 [DENSE_WIDTH]."""
    dense = engine.state.dense
    assert isinstance(dense, TinyDense)
    return dense.value


@dataclass(frozen=True)
class Workload:
    """What a job computes, and how it is protected and laid out.

    It computes by tables, slots, steps, batch, optimizer and seed. `optimizer` and `rate` are for
    tables without their own; `falls` says whether the rates of all rows fall from step to step.
    `folder` is for mapped files (`durable`: on the device), or for the checkpoints of stateless
    servers. `right_hints` says
    whether all ranks always say what rows they will ask for soon. `rows_on` is where rows and
    redundancy lie: on the "cpu", on an "imitated" GPU, or by "cuda" on a real one. On a GPU
    `gpu_kernels` run, as `kernels.backend` names them; None leaves that as it is. The ranks of
    `on_cpu` have theirs on the CPU all the same. `looks_between` says whether rows are looked up
    before some steps without being used, as an evaluation does.
    """

    seed: int = 0
    tables: tuple[Table, ...] = (Table("a", 40, 8), Table("b", 7, 8), Table("c", 90, 4))
    slots: int = 2
    steps: int = 6
    ids_per_slot: int = 12
    optimizer: str = "rowwise_adagrad"
    rate: float = 0.05
    falls: bool = False
    servers: int = 4
    trainers: int = 2
    spares: int = 1
    layout: str = "dedicated"
    protection: str = "erasure"
    folder: str = ""
    durable: bool = False
    k: int = 3
    m: int = 1
    commit_interval: int = 1
    rebuild_rows_per_step: int = 8
    scrub_rows_per_step: int = 0
    last_seen_rows: int = 1000
    domains: tuple[int, ...] | None = None
    reshape: bool = True
    look_ahead: bool = True
    right_hints: bool = False
    looks_between: bool = False
    skip_undo: bool = False
    rows_on: str = "cpu"
    gpu_kernels: str | None = None
    on_cpu: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        busy = (
            self.servers + self.trainers
            if self.layout == "dedicated"
            else max(self.servers, self.trainers)
        )
        return busy + self.spares

    def device_of(self, rank: int) -> torch.device:
        """Where a rank has its rows."""
        return CPU if self.rows_on == "cpu" or rank in self.on_cpu else IMITATED_GPU

    def initial_view(self) -> View:
        protection = self.make_protection()
        return initial_view(
            self.layout,
            protection.shape,
            self.trainers,
            self.spares,
            self.slots,
            protection.dense_replicas,
            self.domains,
        )

    def policy(self, protection: Protection) -> EnginePolicy:
        return EnginePolicy(
            self.commit_interval,
            self.rebuild_rows_per_step,
            protection.dense_replicas,
            self.scrub_rows_per_step,
            self.reshape,
        )

    @property
    def kind(self) -> Kind:
        """The kind of protection."""
        return KINDS[self.protection]

    def make_protection(self) -> Protection:
        settings = ProtectionConfig(
            name=self.protection,
            k=self.k,
            m=self.m,
            copies=self.m + 1,
            last_seen_rows=self.last_seen_rows,
        )
        folder = Path(self.folder)
        rows = CheckpointRows(CheckpointFolder(folder))
        return make_protection(settings, self.servers, folder, rows, durable=self.durable)


@dataclass(frozen=True)
class Outcome:
    """What a rank knows at the end: digests (on the reporter), parity check, failures survived."""

    tables: dict[str, str] | None
    dense: str | None
    verified: VerifyReport
    failures: int
    failures_left: int


class Job(Protocol):
    """What the ranks of a simulated cluster compute."""

    @property
    def remembered(self) -> int:
        """Committed steps whose notes every holder of the dense replica remembers."""

    def dense_value(self, engine: Engine) -> Tensor:
        """The dense state of a rank that holds it, as it is now; may be live."""

    def run(
        self,
        workload: Workload,
        transport: Transport,
        hooks: Hooks,
        after_start: Callable[[Engine], None],
        after_step: Callable[[Engine], None],
        report: Callable[[dict[str, str]], None],
    ) -> Outcome:
        """One rank's part, from its engine to the check of parity at the end.

        `after_start` gets the new engine. `report` gets the digests of the finished tables, on the
        reporter, before the ranks agree that all is done. Raises Unrecoverable.
        """


def make_engine(
    workload: Workload,
    transport: Transport,
    hooks: Hooks,
    clock: Callable[[], float],
    durable: Durable | None = None,
    allocate: Allocate = lazy_zeros,
) -> Engine:
    """This rank's engine at the undisturbed start.

    Whoever has rows on an imitated GPU imitates it while the engine is used.
    """
    protection = workload.make_protection()
    engine = Engine(
        transport=transport,
        tables=workload.tables,
        view=workload.initial_view(),
        protection=protection,
        optimizer=SparseOptimizer(workload.optimizer, workload.rate),
        make_dense=TinyDense,
        seed=workload.seed,
        policy=workload.policy(protection),
        hooks=hooks,
        clock=clock,
        durable=durable,
        allocate=allocate if workload.rows_on == "cpu" else ZerosOn(CPU),
        device=workload.device_of(transport.rank),
        sparse_rate=falling if workload.falls else None,
    )
    if workload.skip_undo:
        leave_updates_in_place(engine)
    return engine


def falling(step: int) -> float:
    """The factor on learning rates that fall."""
    return 4 / (4 + step)


def rows_of(workload: Workload, step: int, slot: int) -> list[Tensor]:
    """Unique rows that a slot uses in a step, by row space; skewed, so that some rows recur."""
    generator = torch.Generator().manual_seed(hash((workload.seed, step, slot)) & 0x7FFFFFFF)
    rows = []
    for space in row_spaces(workload.tables):
        skewed = torch.rand(workload.ids_per_slot, generator=generator) ** 3
        rows.append((skewed * space.rows).long().unique())
    return rows


def _looks_between(workload: Workload, step: int) -> bool:
    return workload.looks_between and hash((workload.seed, step)) % 3 == 0


def train_step(
    workload: Workload, engine: Engine, computed: Computed[tuple[list[Tensor], Tensor]]
) -> None:
    """One step of the job.

    Row gradients and the contribution to the dense replica are a function of the rows' values and
    of the dense state. `computed` keeps them.
    """
    step = engine.step
    engine.enter("input")
    computed.begin(engine)
    rows = {slot: rows_of(workload, step, slot) for slot in engine.slots}
    if _looks_between(workload, step):
        engine.lookup(rows)
    values = engine.lookup(rows, computed.keys() & rows.keys(), apply_follows=True)
    engine.enter("forward")
    engine.enter("backward")
    for slot, spaces in values.items():
        pull = 0.1 * float(dense_value(engine).sum()) + slot
        total = torch.stack([value.sum() for value in spaces]).sum()
        contribution = torch.sin(total + torch.arange(DENSE_WIDTH, dtype=torch.float32) + step)
        rooms = (
            engine.gradient_buffer(slot, space, len(value)) for space, value in enumerate(spaces)
        )
        computed[slot] = (
            [
                torch.sin(value * 3 + pull, out=room)
                for value, room in zip(spaces, rooms, strict=True)
            ],
            contribution,
        )
    gradients = {slot: computed[slot][0] for slot in rows}
    contributions = {slot: computed[slot][1] for slot in rows}
    last = step + 1 == workload.steps
    ahead = (
        None
        if last or not workload.look_ahead or _looks_between(workload, step + 1)
        else {slot: rows_of(workload, step + 1, slot) for slot in engine.slots}
    )
    kind = 0 if workload.right_hints else hash((workload.seed, step, engine.rank)) % 4
    # a hint: right, left out, or wrong
    later = (step + 2, step + 2, None, step + 3)[kind] if engine.repairs_ahead else None
    soon = (
        None if later is None else {slot: rows_of(workload, later, slot) for slot in engine.slots}
    )
    # of several sizes
    notes = {
        slot: contribution.view(torch.uint8)[slot:] for slot, contribution in contributions.items()
    }
    engine.apply(
        StepInput(
            gradients, contributions, notes=notes, commit=last, rows_ahead=ahead, rows_soon=soon
        )
    )
    engine.state.log.forget(engine.committed - REMEMBERED)


def run_workload(
    workload: Workload,
    transport: Transport,
    hooks: Hooks | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    after_start: Callable[[Engine], None] = lambda engine: None,
    after_step: Callable[[Engine], None] = lambda engine: None,
    report: Callable[[dict[str, str]], None] = lambda tables: None,
    durable: Durable | None = None,
    make_checkpoints: Callable[[Engine], Checkpoints] | None = None,
    resume: bool = False,
    allocate: Allocate = lazy_zeros,
) -> Outcome:
    """Run the whole job on one rank and check parity at the end.

    Raises Unrecoverable when too much is lost. With `durable` that takes the death of all ranks;
    `resume` starts from it. `make_checkpoints` writes it. `report` gets the digests of the finished
    tables, on the reporter, before the ranks agree that all is done.
    """
    with imitated_gpu() if workload.rows_on == "imitated" else nullcontext():
        engine = make_engine(workload, transport, hooks or Hooks(), clock, durable, allocate)
        after_start(engine)
        if resume:
            engine.recovery.resume()
        checkpoints = make_checkpoints(engine) if make_checkpoints is not None else None
        computed: Computed[tuple[list[Tensor], Tensor]] = Computed()
        while True:
            try:
                while engine.step < workload.steps:
                    if checkpoints is not None:
                        checkpoints.between_steps()
                        after_step(engine)
                    train_step(workload, engine, computed)
                    after_step(engine)
                tables, verified = finish(engine, report, checkpoints)
                break
            except StepAborted:
                if checkpoints is not None:
                    checkpoints.on_recovery()
        return outcome(engine, tables, verified, dense_value)


def finish(
    engine: Engine,
    report: Callable[[dict[str, str]], None],
    checkpoints: Checkpoints | None = None,
) -> tuple[dict[str, str] | None, VerifyReport]:
    """Collective, after the last step: (digests of the tables on the reporter, check of parity).

    Raises StepAborted after a failure.
    """
    engine.enter("finish")
    engine.rebuild_all()
    engine.scrub_all()
    if checkpoints is not None:
        checkpoints.finish()
    verified = engine.verify_parity()
    with engine.recovery.recovering():
        tables = table_digests(engine, engine.view.reporter)
        if tables is not None:
            report(tables)
        engine.state.transport.agree(True)
    return tables, verified


def outcome(
    engine: Engine,
    tables: dict[str, str] | None,
    verified: VerifyReport,
    dense_value: Callable[[Engine], Tensor],
) -> Outcome:
    """What a rank knows once all is done."""
    dense = (
        None
        if engine.state.dense is None
        else hashlib.sha256(dense_value(engine).numpy().tobytes()).hexdigest()
    )
    return Outcome(
        tables, dense, verified, len(engine.state.failures.failures), engine.state.failures_left
    )


class TinyJob:
    """The `Job` of this module."""

    remembered = REMEMBERED

    def dense_value(self, engine: Engine) -> Tensor:
        return dense_value(engine)

    def run(
        self,
        workload: Workload,
        transport: Transport,
        hooks: Hooks,
        after_start: Callable[[Engine], None],
        after_step: Callable[[Engine], None],
        report: Callable[[dict[str, str]], None],
    ) -> Outcome:
        return run_workload(
            workload,
            transport,
            hooks,
            after_start=after_start,
            after_step=after_step,
            report=report,
        )


TINY = TinyJob()
