"""A small training job for the engine, drawn from a seed: real embeddings and a tiny dense part.

The job runs on any transport. As in a real run, the finished model depends on the seed, tables,
slots, steps, batches and optimizers only, not on the cluster.
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
"""Number of committed steps with notes remembered by every dense holder."""


class TinyDense:
    """A dense replica of a few floats: a running sum. Every later gradient depends on the sum."""

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
    """The present dense state of a dense holder, float32 [DENSE_WIDTH]."""
    dense = engine.state.dense
    assert isinstance(dense, TinyDense)
    return dense.value


@dataclass(frozen=True)
class Workload:
    """A job: the training, the protection, and the cluster.

    - `optimizer`, `rate`: for tables without their own. `falls`: whether the learning rates of all
      rows fall from step to step.
    - `folder`: for mapped files, or for the checkpoints of stateless servers. `durable`: whether
      every commit of mapped files reaches the disk.
    - `look_ahead`: whether ranks name the rows of the next step in advance. `right_hints`: whether
      every rank rightly names the rows of the step after the next; else hints may be missing or
      wrong.
    - `looks_between`: whether some steps begin with an unused lookup of rows, as an evaluation
      would make.
    - `rows_on`: the place of rows and redundancy: "cpu", or "imitated" for an imitated GPU, or
      "cuda" for a real GPU. `on_cpu`: ranks with rows on the CPU all the same.
    - `gpu_kernels`: the backend of kernels on a GPU, as in `kernels.backend`; `None` keeps the
      present setting.
    - `whole_tables`: whether small tables lie whole on shards.
    - `rounds`: whether a session has bfloat16 on the wire.
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
    shards_per_server: int = 1
    commit_interval: int = 1
    rebuild_rows_per_step: int = 8
    rebuild_share: float = 1.0
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
    whole_tables: bool = False
    rounds: bool = False

    @property
    def world_size(self) -> int:
        busy = (
            self.servers + self.trainers
            if self.layout == "dedicated"
            else max(self.servers, self.trainers)
        )
        return busy + self.spares

    def device_of(self, rank: int) -> torch.device:
        """The device of a rank's rows."""
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
            protection.shape.shards // self.servers,
        )

    def policy(self, protection: Protection) -> EnginePolicy:
        return EnginePolicy(
            commit_interval=self.commit_interval,
            rebuild_rows_per_step=self.rebuild_rows_per_step,
            rebuild_share=self.rebuild_share,
            dense_replicas=protection.dense_replicas,
            scrub_rows_per_step=self.scrub_rows_per_step,
            reshape=self.reshape,
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
            shards_per_server=self.shards_per_server,
            copies=self.m + 1,
            last_seen_rows=self.last_seen_rows,
        )
        folder = Path(self.folder)
        rows = CheckpointRows(CheckpointFolder(folder))
        return make_protection(settings, self.servers, folder, rows, durable=self.durable)


@dataclass(frozen=True)
class Outcome:
    """The result of a rank: digests of tables (on the reporter), parity check, failures."""

    tables: dict[str, str] | None
    dense: str | None
    verified: VerifyReport
    failures: int
    failures_left: int


class Job(Protocol):
    """The training job of a simulated cluster's ranks."""

    @property
    def remembered(self) -> int:
        """Number of committed steps with notes remembered by every dense holder."""

    def dense_value(self, engine: Engine) -> Tensor:
        """The present dense state of a dense holder. The tensor may change with the replica."""

    def run(
        self,
        workload: Workload,
        transport: Transport,
        hooks: Hooks,
        after_start: Callable[[Engine], None],
        after_step: Callable[[Engine], None],
        report: Callable[[dict[str, str]], None],
    ) -> Outcome:
        """Run one rank's part, from the new engine to the check of parity at the end.

        `after_start` gets the new engine. `report` gets the digests of the finished tables, on the
        reporter, before the ranks agree that the job is done. Raises Unrecoverable.
        """


def make_engine(
    workload: Workload,
    transport: Transport,
    hooks: Hooks,
    clock: Callable[[], float],
    durable: Durable | None = None,
    allocate: Allocate = lazy_zeros,
) -> Engine:
    """Make this rank's engine, at the undisturbed start.

    For rows on an imitated GPU, the caller imitates the GPU as long as the engine is in use.
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
        whole_tables=workload.whole_tables,
    )
    if workload.skip_undo:
        leave_updates_in_place(engine)
    return engine


def falling(step: int) -> float:
    """The factor of falling learning rates at a step."""
    return 4 / (4 + step)


def rows_of(workload: Workload, step: int, slot: int) -> list[Tensor]:
    """Unique rows of a slot in a step, by row space; the draw is skewed, so some rows recur."""
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
    """Run one step of the job.

    Row gradients and the contribution to the dense replica are functions of the rows' values and
    the dense state. `computed` keeps both for a redone step.
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
    # notes of several sizes
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

    Raises Unrecoverable when too much is lost; with `durable`, only the death of all ranks is too
    much. `resume` starts from `durable`. `make_checkpoints` makes the writer of checkpoints, if
    any. `report` gets the digests of the finished tables, on the reporter, before the ranks agree
    that the job is done.
    """
    with imitated_gpu() if workload.rows_on == "imitated" else nullcontext():
        engine = make_engine(workload, transport, hooks or Hooks(), clock, durable, allocate)
        if transport.joined:
            engine.recovery.join()
        after_start(engine)
        if resume and not transport.joined:
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
    """Finish a run, as a collective call: return digests of tables (on the reporter) and the check.

    The check compares parity with all rows. Raises StepAborted after a failure.
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
    """The outcome of a rank after `finish`."""
    dense = (
        None
        if engine.state.dense is None
        else hashlib.sha256(dense_value(engine).numpy().tobytes()).hexdigest()
    )
    return Outcome(
        tables, dense, verified, len(engine.state.failures.failures), engine.state.failures_left
    )


class TinyJob:
    """The small job of this module, as a `Job`."""

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
