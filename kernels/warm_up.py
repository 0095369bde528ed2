"""Compile all GPU kernels of a run before it begins, so that none is compiled in the middle of it.

A Triton kernel is compiled for the widths that a run has, for its optimizer and its options; row
counts, strides and addresses may change. Matrices must begin at multiples of 16 bytes, and have row
strides that are such multiples: else kernels for shorter pieces are compiled when they come.
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
from ecrm.kernels.unit_order import unique_by_unit

__all__ = ["Shapes", "warm_up"]


@dataclass(frozen=True)
class Shapes:
    """What the kernels of a run are compiled for.

    Args:
        dimension: Floats of a row, D.
        optimizer: One of `ecrm.kernels.sparse_update.OPTIMIZERS`.
        l2: Whether there is weight decay that is added to gradients.
        lost: Units of a stripe that may be lost at once, m.
        features: Embedding rows of a sample, F. None: there is no dot interaction.
    """

    dimension: int
    optimizer: str
    l2: bool = False
    lost: int = 1
    features: int | None = None

    @property
    def state(self) -> int:
        """Floats of optimizer state."""
        return sum(state_widths(self.optimizer, self.dimension))

    @property
    def stride(self) -> int:
        """Floats from one record to the next: row, state and mark, up to a multiple of 16 bytes."""
        return -(-(self.dimension + self.state + 1) // 4) * 4

    def parts(self, records: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Rows, optimizer state and marks, as views of float32 [R, stride]."""
        widths = (self.dimension, *state_widths(self.optimizer, self.dimension))
        cuts = [0, *accumulate(widths)]
        rows, *state = (records[:, first:end] for first, end in pairwise(cuts))
        return rows, state, records[:, cuts[-1]]


def warm_up(shapes: Shapes, device: torch.device | str, backend: str = "auto") -> None:
    """Call every operation in each way that a run of these shapes does, on a row or two.

    Changes nothing. It takes a tenth of a second for each kernel that Triton's cache on disk does
    not have yet.
    """
    rows = torch.arange(2, device=device)
    _warm_storage(shapes, rows, backend)
    _warm_protection(shapes, rows, backend)
    if shapes.features is not None:
        _warm_model(shapes, shapes.features, rows, backend)


def _warm_storage(shapes: Shapes, rows: torch.Tensor, backend: str) -> None:
    records, sums, values = (
        torch.zeros(2, width, device=rows.device)
        for width in (shapes.stride, shapes.stride, shapes.dimension)
    )
    weights, state, marks = shapes.parts(records)
    hash_uniform(1, rows, rows, shapes.dimension, torch.ones_like(marks), backend)
    for target in (weights, values):
        begin_rows(target, marks, rows, 1, rows, rows, torch.ones_like(marks), backend)
    gather_records(weights, (), rows, backend)
    unique_by_unit(rows, 1, backend)
    seen = torch.zeros(2, dtype=torch.uint8, device=rows.device)
    for picked in (None, rows):
        for unique in (True, False):
            scatter_add(sums, rows, values, backend, seen, picked, unique)
    changed = 4 * (shapes.dimension + shapes.state + 1)
    for delta in (None, sums.view(torch.uint8)[:, :changed]):
        sparse_update(
            weights,
            state,
            rows,
            sums[:, : shapes.dimension],
            shapes.optimizer,
            lr=0.0,
            weight_decay=0.5 if shapes.l2 else 0.0,
            delta=delta,
            marks=marks,
            backend=backend,
        )


def _warm_protection(shapes: Shapes, rows: torch.Tensor, backend: str) -> None:
    matrix = torch.zeros(2, shapes.stride, device=rows.device)
    records = matrix.view(torch.uint8)
    delta = gather_records(matrix, (), rows, backend)
    xor_records(matrix, (), rows, delta, backend)
    for picked in (None, rows):
        scatter_records(matrix, (), rows, delta, backend, picked)
    log = RecordLog(
        torch.zeros(4, dtype=torch.int64, device=rows.device),
        torch.zeros(4, 4 * shapes.stride, dtype=torch.uint8, device=rows.device),
        torch.zeros(2, dtype=torch.int32, device=rows.device),
        counter=torch.zeros(1, dtype=torch.int64, device=rows.device),
    )
    merge_records(log, rows, delta, backend)
    for coefficient in (1, 2):
        parity_apply(records, rows, coefficient, delta, backend, unique=True)
    for wanted in range(1, min(shapes.lost, 4) + 1):
        decode([records, delta], torch.ones(wanted, 2, dtype=torch.uint8), backend)


def _warm_model(shapes: Shapes, features: int, rows: torch.Tensor, backend: str) -> None:
    dense = torch.zeros(2, shapes.dimension, device=rows.device)
    places = rows[:1].repeat(2 * features)
    out = dot_interaction(dense, dense, places, backend)
    dot_interaction_backward(out, dense, dense, places, backend)
