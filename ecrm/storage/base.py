"""Storage of one shard's rows of one row space, with their optimizer state.

A never updated row is not stored at all: the record is all zeros, on pages not yet handed out by
the system, and the value is computed on request. So no work at the start grows with the tables, and
parity that starts as zeros is right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ecrm.base.allocate import Allocate, ZerosOn, lazy_zeros
from ecrm.device.copies import on_device, on_host
from ecrm.kernels.records import RecordLog, gather_records, scatter_records, xor_records
from ecrm.kernels.sparse_update import sparse_update
from ecrm.placement.sparse_optimizer import (
    NAMES,
    STATE_WIDTHS,
    SparseOptimizer,
    SparseRate,
    factor,
)

VECTOR = 4
"""Floats that a GPU loads at once, from an address that is a multiple of as many floats."""
_MARK_BYTES = 4


@runtime_checkable
class Begins(Protocol):
    """Initial values to be written by the device of the rows."""

    def begin(self, values: Tensor, touched: Tensor, targets: Tensor, rows: Tensor) -> None:
        """`InitialRows.begin` of local rows."""


class Store(ABC):
    """Rows and optimizer state, updated in place.

    A record is a row's bytes, the optimizer state's bytes, and a mark: a float, 1 once the row has
    been updated. Parity protects records, undo restores records, and a rebuild sends records.
    `initial` gives initial values of local rows, float32 [R, dim], contiguous. If `initial` is a
    `Begins`, a lookup or an update on a GPU waits only for the copy of row numbers. `allocate`
    gives the memory, as `lazy_zeros` does: zeros unless the memory holds a store of the same shape
    already. `rate` gives a factor on the learning rate by step.

    Everything lies on one `device`, the device of the memory. In plain CPU memory each part of all
    records lies together. In memory of `ZerosOn` each record lies together, with zeros before the
    mark to fill a multiple of 16 bytes: on a GPU, and on the CPU if other ranks have rows on a GPU.
    Records travel with the zeros; checkpoints keep records without the zeros, of `kept_bytes`.
    `memory` has the tensors of all records. Values, gradients and records are given and returned on
    `device`. Only row numbers, and the result of `updated`, are always on the CPU.

    Arguments named `rows` are int64 local row numbers, unique if written to; R is the number of
    rows, B is `record_bytes`. `step` is the run's step of an update, from 0. Ranges are not
    checked.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        optimizer: SparseOptimizer,
        initial: Callable[[Tensor], Tensor],
        allocate: Allocate | None = None,
        rate: SparseRate | None = None,
    ) -> None:
        allocate, shapes = allocate or lazy_zeros, state_shapes(optimizer.name, rows, dim)
        self._parts: tuple[Tensor, ...]
        if not isinstance(allocate, ZerosOn):
            self.weights = allocate(rows, dim)
            self.state = tuple(allocate(*shape) for shape in shapes)
            self._touched = allocate(rows)
            self.memory = self._parts = (self.weights, *self.state, self._touched)
        else:
            widths = [dim, *(shape[1] if len(shape) > 1 else 1 for shape in shapes)]
            padding = -(sum(widths) + 1) % VECTOR
            matrix = allocate(rows, sum(widths) + padding + 1)
            self.memory = self._parts = (matrix,)
            self.weights, *state, _, touched = matrix.split([*widths, padding, 1], dim=1)
            self.state = tuple(part.view(-1, *shape[1:]) for part, shape in zip(state, shapes))
            self._touched = touched.squeeze(1)
        self._initial, self._optimizer, self._rate = initial, optimizer, rate

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.weights.device

    @property
    def _begins(self) -> Begins | None:
        """The writer of initial values on a GPU; `None` on the CPU, or without such a writer."""
        initial = self._initial
        return initial if not self.weights.is_cpu and isinstance(initial, Begins) else None

    @property
    def dim(self) -> int:
        """Floats of a row."""
        return self.weights.shape[1]

    @property
    def record_bytes(self) -> int:
        return sum(part[:1].nbytes for part in self._parts)

    @property
    def kept_bytes(self) -> int:
        """Bytes of a record without padding."""
        return sum(part[:1].nbytes for part in (self.weights, *self.state, self._touched))

    @property
    def memory_bytes(self) -> int:
        """Bytes once every row has been updated."""
        return sum(part.nbytes for part in self.memory)

    def lookup(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy of the rows, float32 [R, dim], in `out`, contiguous, if given."""
        rows = self._here(rows)
        values = torch.index_select(self.weights, 0, rows, out=out)
        if self._begins is not None:
            touched = self._touched.index_select(0, rows)
            self._begins.begin(values, touched, torch.arange(len(rows), device=self.device), rows)
            return values
        fresh = self._fresh(rows)
        if fresh.numel():
            scatter_records(values, (), fresh, self._initial(rows[fresh]).view(torch.uint8))
        return values

    def lookup_state(self, rows: Tensor) -> Tensor:
        """Copy of the optimizer state of rows, float32 [R, floats]."""
        rows = self._here(rows)
        parts = [
            part.index_select(0, rows).flatten(1) if part.dim() > 1 else part[rows].unsqueeze(1)
            for part in self.state
        ]
        return (
            torch.cat(parts, dim=1) if parts else torch.empty(rows.numel(), 0, device=self.device)
        )

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Records, uint8 [R, B], in `out`, contiguous, if given."""
        first, *others = self._parts
        return gather_records(first, others, self._here(rows), out=out)

    def read_to_host(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Records on the CPU, without padding: uint8 [R, `kept_bytes`]."""
        if len(self._parts) > 1:
            return self.read(rows, out)
        records = without_padding(self.read(rows), self.kept_bytes)
        (here,) = on_host(records)
        return here if out is None else out.copy_(here)

    def read_tail(self, rows: Tensor) -> Tensor:
        """The bytes after the row in each record, uint8 [R, B - 4 dim]."""
        first, *others = (*self.state, self._touched)
        if len(self._parts) == 1:
            first, others = self._parts[0][:, self.dim :], []
        first = first if first.dim() > 1 else first.unsqueeze(1)
        return gather_records(first, others, self._here(rows))

    def updated(self, rows: Tensor) -> Tensor:
        """Bool [R]: whether each row was ever updated; never updated rows have records of zeros."""
        return on_host(self._touched.index_select(0, self._here(rows)) != 0)[0]

    def last_bytes(self, rows: slice) -> Tensor:
        """The last byte of each record, uint8 [R]: zero just for never updated rows."""
        touched = self._touched[rows].clone(memory_format=torch.contiguous_format)
        return touched.view(torch.uint8)[3::4].contiguous()

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Overwrite records, uint8 [R, B]."""
        first, *others = self._parts
        scatter_records(first, others, self._here(rows), records)

    def with_padding(self, records: Tensor) -> Tensor:
        """Records as stored, uint8 [R, B], from stored or kept records, on any device."""
        gap = self.record_bytes - records.shape[1]
        if not gap:
            return records
        zeros = records.new_zeros(len(records), gap)
        return torch.cat([records[:, :-_MARK_BYTES], zeros, records[:, -_MARK_BYTES:]], dim=1)

    def begun(self, records: Tensor) -> Tensor:
        """Records, uint8 [R, B], with the values of `records` and fresh optimizer state.

        `records` may be of any store with the same `dim`, on any device; so is the result.
        """
        fresh = torch.zeros(len(records), self.record_bytes // 4, device=records.device)
        fresh[:, : self.dim] = records[:, : 4 * self.dim].contiguous().view(torch.float32)
        fresh[:, -1] = 1.0  # updated once
        return fresh.view(torch.uint8)

    def xor(self, rows: Tensor, delta: Tensor) -> None:
        """XOR records with deltas, uint8 [R, B]: the same delta again undoes an update."""
        first, *others = self._parts
        xor_records(first, others, self._here(rows), delta)

    def update(self, rows: Tensor, gradients: Tensor, step: int = 0) -> None:
        """Run the optimizer on rows with summed gradients, float32 [R, dim], in place.

        Other rows do not change, neither by decay nor by moments.
        """
        rows = self._here(rows)
        if self._begins is None:
            self._materialise(rows)
        else:
            self._begins.begin(self.weights, self._touched, rows, rows)
            self._touched.index_fill_(0, rows, 1.0)
        self._step(rows, gradients, step)

    def update_with_delta(self, rows: Tensor, sums: Tensor, step: int = 0) -> Tensor:
        """`update`, to the same bits; returns old XOR new records, uint8 [R, B]: one pass.

        `sums`, float32 [R, B / 4], contiguous, has the summed gradients in the first dim columns
        and zeros in the rest. The result overwrites `sums`: the cache lines are read anyway.
        """
        rows, delta = self._here(rows), sums.view(torch.uint8)
        if self._begins is not None:
            self._begins.begin(self.weights, self._touched, rows, rows)
            gradients = sums[:, : self.dim]
            self._fused_step(rows, gradients, step, delta=delta, marks=self._touched)
            return delta
        fresh, values = self._materialise(rows)
        changed = sum(part[:1].nbytes for part in (self.weights, *self.state))
        self._fused_step(rows, sums[:, : self.dim], step, delta=delta[:, :changed])
        self._correct_fresh(sums, fresh, values)
        return delta

    def update_logged(self, rows: Tensor, gradients: Tensor, log: RecordLog, step: int = 0) -> None:
        """`update`, to the same bits; merges old XOR new records into a log with room."""
        rows = self._here(rows)
        if self._begins is not None:
            self._begins.begin(self.weights, self._touched, rows, rows)
            self._fused_step(rows, gradients, step, log=log, marks=self._touched)
            return
        fresh, values = self._materialise(rows)
        self._fused_step(rows, gradients, step, log=log)
        self._correct_fresh(
            log.records.view(torch.float32), log.places[rows[fresh]].long() - 1, values
        )

    def _correct_fresh(self, records: Tensor, places: Tensor, values: Tensor) -> None:
        """Mend deltas, float32 [R, B / 4], of rows updated for the first time.

        The old records, at `places`, were zeros, not the values, float32 [F, dim], taken as old by
        the kernel.
        """
        if places.numel():
            xor_records(records[:, : self.dim], (), places, values.view(torch.uint8))
            records[places, -1] = 1.0

    def _fused_step(
        self,
        rows: Tensor,
        gradients: Tensor,
        step: int,
        delta: Tensor | None = None,
        log: RecordLog | None = None,
        marks: Tensor | None = None,
    ) -> None:
        """`_step` by the project's kernel.

        `delta`, uint8, is overwritten by old XOR new row and state, or the same is merged into
        `log`: one of the two at most. With `marks`, the marks of the rows become 1, and belong to
        `delta` or `log`.
        """
        optimizer = self._optimizer
        sparse_update(
            self.weights,
            self.state,
            rows,
            gradients,
            optimizer.name,
            lr=optimizer.learning_rate * factor(self._rate, step),
            eps=optimizer.epsilon,
            betas=optimizer.betas,
            step=step + 1,
            weight_decay=optimizer.weight_decay,
            decoupled=optimizer.decoupled,
            delta=delta,
            log=log,
            marks=marks,
        )

    @abstractmethod
    def _step(self, rows: Tensor, gradients: Tensor, step: int) -> None:
        """Run the optimizer on rows with stored values."""

    def _here(self, rows: Tensor) -> Tensor:
        """Row numbers on the device of the rows, once per call, for the private methods."""
        return on_device(self.device, rows)

    def _fresh(self, rows: Tensor) -> Tensor:
        """Places in `rows` of the never updated rows, int64."""
        return (self._touched.index_select(0, rows) == 0).nonzero().squeeze(1)

    def _materialise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Store the initial values of never updated rows, and mark the rows.

        Returns the places of the rows in `rows` and the values, float32 [F, dim].
        """
        fresh = self._fresh(rows)
        if not fresh.numel():
            return fresh, torch.empty(0, self.dim, device=self.device)
        values = self._initial(rows[fresh])
        scatter_records(self.weights, (), rows[fresh], values.view(torch.uint8))
        self._touched[rows[fresh]] = 1.0
        return fresh, values


def without_padding(records: Tensor, kept_bytes: int) -> Tensor:
    """Records of any store, uint8 [R, B], in the kept form: uint8 [R, `kept_bytes`]."""
    if records.shape[1] == kept_bytes:
        return records
    values = records[:, : kept_bytes - _MARK_BYTES]
    return torch.cat([values, records[:, -_MARK_BYTES:]], dim=1)


def state_shapes(optimizer: str, rows: int, dim: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the optimizer state tensors; raises ValueError for an unknown optimizer."""
    if optimizer not in STATE_WIDTHS:
        raise ValueError(f"unknown sparse optimizer {optimizer!r}: one of {', '.join(NAMES)}")
    if optimizer == "rowwise_adagrad":  # a float a row is a vector
        return ((rows,),)
    return tuple((rows, width) for width in STATE_WIDTHS[optimizer](dim))


class NativeStore(Store):
    """Rows and state in plain memory, no library beneath."""

    def _step(self, rows: Tensor, gradients: Tensor, step: int) -> None:
        self._fused_step(rows, gradients, step)
