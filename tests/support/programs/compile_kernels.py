"""Compile Triton kernels for a GPU that is not there; print what each case compiled, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
import triton
import triton.language as tl

from ecrm.kernels.decode import decode
from ecrm.kernels.parity_apply import parity_apply
from ecrm.kernels.records import (
    gather_records,
    record_bytes,
    xor_records,
)
from ecrm.kernels.scatter_add import scatter_add
from ecrm.kernels.sparse_update import sparse_update, state_widths
from ecrm.kernels.unit_order import unique_by_unit
from ecrm.kernels.warm_up import Shapes, _warm_storage, warm_up
from support.kernel_calls import BACKEND, calls
from support.kernel_compiler import Launches, compiling

RUN = Shapes(dimension=64, optimizer="rowwise_adagrad", features=26)
OTHERS = [*(Shapes(64, optimizer) for optimizer in ("sgd", "adagrad", "adam"))]
OTHERS.append(Shapes(64, "rowwise_adagrad", l2=True))


def rows_of(n: int, first: int = 0) -> torch.Tensor:
    """Row numbers that begin at an odd multiple of 8 bytes if `first` is odd."""
    return torch.arange(first + n)[first:]


def update_halves() -> None:
    """An update of rows of another type, as no run has it yet."""
    weights, optimizer = torch.zeros(8, 64, dtype=torch.bfloat16), "rowwise_adagrad"
    state = [torch.zeros(8, width) for width in state_widths(optimizer, 64)]
    delta = torch.zeros(5, 2 * 64 + 16, dtype=torch.uint8)[:, : record_bytes(weights, state)]
    gradients = torch.zeros(5, 64)
    sparse_update(
        weights, state, rows_of(5), gradients, optimizer,
        lr=0.1, delta=delta, backend=BACKEND,
    )  # fmt: skip


def later(shapes: Shapes) -> None:
    """Calls of the same run with other row counts, addresses and strides."""
    for n, first in ((1, 1), (16, 0), (17, 1)):
        rows = rows_of(n, first)
        records = torch.zeros(40, shapes.stride + 4)[first:, : shapes.stride]
        weights, state, marks = shapes.parts(records)
        sums = torch.zeros(n, shapes.stride)
        delta = sums.view(torch.uint8)
        gradients = sums[:, : shapes.dimension]
        sparse_update(
            weights, state, rows, gradients, shapes.optimizer,
            lr=0.1, step=n, delta=delta, marks=marks, backend=BACKEND,
        )  # fmt: skip
        seen = torch.zeros(n, dtype=torch.uint8)
        scatter_add(sums, rows - first, gradients.clone(), BACKEND, seen, unique=True)
        gather_records(records, (), rows, BACKEND)
        xor_records(records, (), rows, delta, BACKEND)
        parity = torch.zeros(40, 4 * shapes.stride, dtype=torch.uint8)
        for coefficient in (1, 3, 29):
            parity_apply(parity, rows, coefficient, delta, BACKEND, unique=True)
        decode([delta] * (n + 1), torch.ones(1, n + 1, dtype=torch.uint8), BACKEND)


@triton.jit
def _approximate(out, x):
    tl.store(out, tl.load(x) / tl.load(x + 1))


@triton.jit
def _unordered(out, x):
    tl.atomic_add(out, tl.load(x))


@triton.jit
def _crowded(out, x):
    at = tl.arange(0, 4096)
    tl.store(out + at, tl.load(x + tl.load(x + at).to(tl.int32)) + tl.load(x + at))


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    yield "run", lambda: warm_up(RUN, "cpu", BACKEND)
    yield "later", lambda: later(RUN)
    yield "other width", lambda: gather_records(torch.zeros(2, 8), (), rows_of(2), BACKEND)
    for shapes in OTHERS:  # what differs by more than the length of records
        name = "decayed" if shapes.l2 else shapes.optimizer
        yield f"update {name}", lambda shapes=shapes: _warm_storage(shapes, rows_of(2), BACKEND)
    for narrow in (1, 2, 4):
        shapes = Shapes(narrow, "rowwise_adagrad", features=2)
        yield f"narrow {narrow}", lambda shapes=shapes: warm_up(shapes, "cpu", BACKEND)
    yield "update halves", update_halves
    four = torch.ones(4, 2, dtype=torch.uint8)
    units = torch.zeros(2, 8, 64, dtype=torch.uint8)
    yield "decode of four", lambda: decode(units, four, BACKEND)
    yield "unique rows", lambda: unique_by_unit(rows_of(5), 2, BACKEND)
    yield (
        "parity repeats",
        lambda: parity_apply(
            torch.zeros(4, 64, dtype=torch.uint8), rows_of(2), torch.zeros(2, dtype=torch.uint8),
            torch.zeros(2, 64, dtype=torch.uint8), BACKEND,
        ),
    )  # fmt: skip
    x = torch.zeros(5000)
    yield "approximate", lambda: _approximate[(1,)](x, x, enable_fp_fusion=True)
    yield "unordered", lambda: _unordered[(1,)](x, x, enable_fp_fusion=True)
    yield (
        "crowded",
        lambda: _crowded[(1,)](x, x, num_warps=1, maxnreg=32, enable_fp_fusion=True),
    )


if __name__ == "__main__":
    found = {}
    for name, call in cases():
        with compiling() as new:
            call()
        found[name] = [asdict(kernel) for kernel in new]
    launches: dict[str, list[str]] = {}
    with compiling():
        for name, call in calls(RUN):
            with Launches() as noted:
                call()
            launches[name] = noted.launched
    print(json.dumps({"compiled": found, "launches": launches}))
