"""One call of each operation of the kernels, as a run makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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
from ecrm.kernels.sparse_update import sparse_update
from ecrm.kernels.unit_order import unique_by_unit
from ecrm.kernels.warm_up import Shapes

BACKEND = "triton"


def calls(
    shapes: Shapes, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of each operation, with tensors on a device."""
    zeros = partial(torch.zeros, device=device)
    rows, ones = torch.arange(6, device=device), torch.ones(6, device=device)
    records, sums = zeros(6, shapes.stride), zeros(6, shapes.stride)
    (weights, state, marks), delta = shapes.parts(records), sums.view(torch.uint8)
    gradients = sums[:, : shapes.dimension]
    log = RecordLog(
        zeros(20, dtype=torch.int64),
        zeros(20, 4 * shapes.stride, dtype=torch.uint8),
        zeros(6, dtype=torch.int32),
        counter=zeros(1, dtype=torch.int64),
    )

    def update(**wanted: Any) -> None:
        sparse_update(
            weights, state, rows, gradients, shapes.optimizer, lr=0.1, backend=BACKEND, **wanted
        )

    parity = torch.zeros_like(delta)
    yield "update", lambda: update()
    yield "update_with_delta", lambda: update(delta=delta, marks=marks)
    yield "update_logged", lambda: update(log=log, marks=marks)
    yield "parity_apply", lambda: parity_apply(parity, rows, 3, delta, BACKEND, unique=True)
    yield "decode", lambda: decode([delta] * 4, torch.ones(2, 4, dtype=torch.uint8), BACKEND)
    yield "gather_records", lambda: gather_records(records, (), rows, BACKEND)
    yield "scatter_records", lambda: scatter_records(records, (), rows, delta, BACKEND)
    yield "xor_records", lambda: xor_records(records, (), rows, delta, BACKEND)
    yield "merge_records", lambda: merge_records(log, rows, delta, BACKEND)
    values, seen = zeros(6, shapes.dimension), zeros(6, dtype=torch.uint8)
    yield "scatter_add", lambda: scatter_add(sums, rows, values, BACKEND, seen)
    yield "scatter_add unique", lambda: scatter_add(sums, rows, values, BACKEND, seen, unique=True)
    yield "hash_uniform", lambda: hash_uniform(1, 2, rows, shapes.dimension, 0.5, BACKEND)
    yield "begin_rows", lambda: begin_rows(weights, marks, rows, 1, rows, rows, ones, BACKEND)
    yield "unique_by_unit", lambda: unique_by_unit(rows, 2, BACKEND)
    places = zeros(2 * (shapes.features or 0), dtype=torch.int64)
    two = values[:2].clone()
    out = dot_interaction(two, values, places, BACKEND)
    yield "dot_interaction", lambda: dot_interaction(two, values, places, BACKEND)
    yield (
        "dot_interaction_backward",
        lambda: dot_interaction_backward(out, two, values, places, BACKEND),
    )
