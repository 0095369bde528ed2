"""Compile all GPU kernels of a run before the run, so that no step waits for the compiler.

A compiled Triton kernel serves one choice of row width, optimizer and options. Row counts, strides
and addresses may change. Addresses and row strides of matrices must be multiples of 16 bytes. The
matrices of a run comply if rows have a multiple of four floats. Else Triton compiles kernels for
shorter pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from ecrm.kernels.decode import decode
from ecrm.kernels.dot_interaction import dot_interaction, dot_interaction_backward
from ecrm.kernels.hash_uniform import begin_rows, hash_uniform
from ecrm.kernels.parity_apply import parity_apply
from ecrm.kernels.records import (
    RecordLog,
    gather_records,
    merge_records,
    scatter_records,
    xor_records,
)
from ecrm.kernels.scatter_add import scatter_add
from ecrm.kernels.sparse_update import sparse_update, state_widths

__all__ = ["Shapes", "warm_up"]


@dataclass(frozen=True)
class Shapes:
    """The sizes and options of a run's kernels.

    Args:
        dimension: Floats of a row, D.
        optimizer: One of `ecrm.kernels.sparse_update.OPTIMIZERS`.
        l2: Whether gradients get weight decay added.
        features: Embedding rows of a sample, F. `None`: the model has no dot interaction.
    """

    dimension: int
    optimizer: str
    l2: bool = False
    features: int | None = None

    @property
    def stride(self) -> int:
        """Floats of a record, rounded up to 16 bytes: row, state, zeros, and mark."""
        state = sum(state_widths(self.optimizer, self.dimension))
        return -(-(self.dimension + state + 1) // 4) * 4

    def parts(self, records: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Rows, optimizer state and marks, as views of float32 [R, stride]."""
        widths = (self.dimension, *state_widths(self.optimizer, self.dimension))
        cuts = [0, *accumulate(widths)]
        rows, *state = (records[:, first:end] for first, end in pairwise(cuts))
        return rows, state, records[:, -1]


def warm_up(shapes: Shapes, device: torch.device | str, backend: str = "auto") -> None:
    """Call every operation of a run on two rows, with all options that the run uses.

    The call changes no data of the run. Every kernel missing in Triton's cache on disk costs a
    tenth of a second.
    """
    rows = torch.arange(2, device=device)
    _warm_storage(shapes, rows, backend)
    _warm_protection(shapes, rows, backend)
    _warm_sums(shapes, rows, backend)
    if shapes.features is not None:
        _warm_model(shapes, shapes.features, rows, backend)


def _warm_storage(shapes: Shapes, rows: torch.Tensor, backend: str) -> None:
    """Lookups, and updates with a delta (kept in a log) and without a delta."""
    records, sums, values = (
        torch.zeros(2, width, device=rows.device)
        for width in (shapes.stride, shapes.stride, shapes.dimension)
    )
    weights, state, marks = shapes.parts(records)
    bounds = torch.ones(2, device=rows.device)
    hash_uniform(1, rows, rows, shapes.dimension, bounds, backend)
    begin_rows(values, marks, rows, 1, rows, rows, bounds, backend)
    scatter_records(values, (), rows, values.clone().view(torch.uint8), backend)
    for with_delta in (False, True):
        sparse_update(
            weights,
            state,
            rows,
            sums[:, : shapes.dimension],
            shapes.optimizer,
            lr=0.0,
            weight_decay=0.5 if shapes.l2 else 0.0,
            delta=sums.view(torch.uint8) if with_delta else None,
            marks=marks if with_delta else None,
            backend=backend,
        )


def _warm_protection(shapes: Shapes, rows: torch.Tensor, backend: str) -> None:
    """Copies, XOR, log, parity and decoding of whole records and of records without rows."""
    matrix = torch.zeros(2, shapes.stride, device=rows.device)
    records = matrix.view(torch.uint8)
    gather_records(matrix[:, shapes.dimension :], (), rows, backend)
    delta = gather_records(matrix, (), rows, backend)
    scatter_records(matrix, (), rows, delta, backend)
    xor_records(matrix, (), rows, delta, backend)
    log = RecordLog(
        torch.zeros(4, dtype=torch.int64, device=rows.device),
        torch.zeros(4, 4 * shapes.stride, dtype=torch.uint8, device=rows.device),
        torch.zeros(2, dtype=torch.int32, device=rows.device),
        counter=torch.zeros(1, dtype=torch.int64, device=rows.device),
    )
    merge_records(log, rows, delta, backend)
    for coefficient in (1, 2):
        parity_apply(records, rows, coefficient, delta, backend, unique=True)
    decode([records, delta], torch.ones(1, 2, dtype=torch.uint8), backend)


def _warm_sums(shapes: Shapes, rows: torch.Tensor, backend: str) -> None:
    """Sums of gradients: over slots at the place of the rows, over samples on trainers."""
    values, wide = (
        torch.zeros(2, width, device=rows.device) for width in (shapes.dimension, shapes.stride)
    )
    seen = torch.zeros(2, dtype=torch.uint8, device=rows.device)
    for sums in (values, wide):
        scatter_add(sums, rows, values.clone(), backend, seen, unique=True)
    scatter_add(values, rows, values.clone(), backend)
    for picked in (None, rows):
        scatter_add(values, rows, values.clone(), backend, seen, picked)


def _warm_model(shapes: Shapes, features: int, rows: torch.Tensor, backend: str) -> None:
    dense = torch.zeros(2, shapes.dimension, device=rows.device)
    places = rows[:1].repeat(2 * features)
    out = dot_interaction(dense, dense, places, backend)
    dot_interaction_backward(out, dense, dense, places, backend)
