"""Jobs of bench_gpu.py: one call of every kernel of a GPU, and the bytes that it has to move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ecrm.kernels.decode import decode
from ecrm.kernels.dot_interaction import dot_interaction, dot_interaction_backward
from ecrm.kernels.hash_uniform import begin_rows, hash_uniform
from ecrm.kernels.parity_apply import parity_apply
from ecrm.kernels.records import (
    RecordLog,
    gather_records,
    merge_records,
    record_bytes,
    scatter_records,
    xor_records,
)
from ecrm.kernels.scatter_add import scatter_add
from ecrm.kernels.sparse_update import OPTIMIZERS, sparse_update, state_widths
from ecrm.kernels.unit_order import unique_by_unit
from ecrm.kernels.warm_up import Shapes

BACKEND = "triton"
HALVES = (torch.float16, torch.bfloat16)
K = 4


def nothing() -> None:
    """What most jobs need before a call."""


@dataclass(frozen=True)
class GpuCase:
    """One kernel's job. `prepare` comes before each call and is not timed.

    `counted_bytes` cross the memory bus once, row numbers included.
    """

    name: str
    rows: int
    row_bytes: int
    counted_bytes: int
    call: Callable[[], object]
    prepare: Callable[[], object] = nothing
    dtype: str = "float32"


@dataclass(frozen=True)
class Sizes:
    """Of the jobs: rows of a table, rows touched, floats of a row, samples of a batch."""

    height: int
    touched: int
    dimension: int
    batch: int
    features: int = 26


def cases(device: torch.device, sizes: Sizes) -> Iterator[GpuCase]:
    """All jobs, those that matter most to a step first; memory is made for one at a time."""
    random = torch.Generator(device).manual_seed(1)
    rows = torch.randperm(sizes.height, generator=random, device=device)[: sizes.touched]
    yield from _records(device, sizes, rows)
    for optimizer in OPTIMIZERS:
        yield _update(device, sizes, rows, optimizer)
    yield from _sums(device, sizes, rows, random)
    for optimizer in OPTIMIZERS:
        for dtype in HALVES:
            yield _update(device, sizes, rows, optimizer, dtype)
    yield from _initial(device, sizes, rows)
    yield from _interaction(device, sizes, random)


def _records(device: torch.device, sizes: Sizes, rows: Tensor) -> Iterator[GpuCase]:
    """Jobs on whole records of row-wise Adagrad."""
    shapes = Shapes(sizes.dimension, "rowwise_adagrad")
    n, width = sizes.touched, 4 * shapes.stride
    table = torch.zeros(sizes.height, shapes.stride, device=device)
    records, bytes_of = table.view(torch.uint8), 8 * n
    delta = torch.randint(0, 256, (n, width), dtype=torch.uint8, device=device)
    for coefficient in (1, 29):

        def apply(coefficient: int = coefficient) -> None:
            parity_apply(records, rows, coefficient, delta, BACKEND, unique=True)

        yield GpuCase(
            f"parity_apply, {'xor' if coefficient == 1 else 'product'}",
            n,
            width,
            3 * n * width + bytes_of,
            apply,
        )
    matrix = torch.arange(1, 2 * K + 1, dtype=torch.uint8).view(2, K)
    units = [delta[: n // K].roll(number, 0) for number in range(K)]
    for lost in (1, 2):

        def multiply(lost: int = lost) -> Tensor:
            return decode(units, matrix[:lost].contiguous(), BACKEND)

        counted = (K + lost) * (n // K) * width
        yield GpuCase(f"decode, {lost} of k = {K}", n // K, width, counted, multiply)
    twice = 2 * n * width + bytes_of
    out = torch.empty_like(delta)
    yield GpuCase(
        "gather_records", n, width, twice, lambda: gather_records(table, (), rows, BACKEND, out)
    )
    yield GpuCase(
        "scatter_records", n, width, twice, lambda: scatter_records(table, (), rows, delta, BACKEND)
    )
    yield GpuCase(
        "xor_records",
        n,
        width,
        twice + n * width,
        lambda: xor_records(table, (), rows, delta, BACKEND),
    )
    log = RecordLog(
        torch.zeros(2 * n, dtype=torch.int64, device=device),
        torch.zeros(2 * n, width, dtype=torch.uint8, device=device),
        torch.zeros(sizes.height, dtype=torch.int32, device=device),
        counter=torch.zeros(1, dtype=torch.int64, device=device),
    )

    def half() -> None:
        """Half of the rows are in the log."""
        log.places.zero_()
        log.counter.zero_()  # type: ignore[union-attr]
        log.count = 0
        merge_records(log, rows[: n // 2], delta[: n // 2], BACKEND)

    # row number and place; delta read, record written, half of them read; places and rows written
    counted = n * (8 + 4 + 2 * width) + n // 2 * (width + 12)
    yield GpuCase(
        "merge_records", n, width, counted, lambda: merge_records(log, rows, delta, BACKEND), half
    )


def _update(
    device: torch.device,
    sizes: Sizes,
    rows: Tensor,
    optimizer: str,
    dtype: torch.dtype = torch.float32,
) -> GpuCase:
    """An update with its delta, which takes the place of the gradients where these are as wide."""
    shapes, dim, n = Shapes(sizes.dimension, optimizer), sizes.dimension, sizes.touched
    gradients = torch.randn(n, dim, device=device)
    if dtype == torch.float32:
        weights, state, marks = shapes.parts(
            torch.zeros(sizes.height, shapes.stride, device=device)
        )
        sums = torch.zeros(n, shapes.stride, device=device)
        given, changed = sums[:, :dim], 4 * shapes.stride
        delta = sums.view(torch.uint8)

        def prepare() -> None:
            given.copy_(gradients)  # they have just been summed, as in a step

        options = {"marks": marks}
    else:
        weights = torch.zeros(sizes.height, dim, dtype=dtype, device=device)
        state = [
            torch.zeros(sizes.height, width, device=device)
            for width in state_widths(optimizer, dim)
        ]
        given, changed = gradients, record_bytes(weights, state)
        delta, prepare = torch.empty(n, changed, dtype=torch.uint8, device=device), nothing
        options = {}

    def call() -> None:
        sparse_update(
            weights, state, rows, given, optimizer, lr=0.01, delta=delta, backend=BACKEND, **options
        )

    # row number, gradient, record read and written, delta
    counted = n * (8 + 4 * dim + 3 * changed)
    name = str(dtype).removeprefix("torch.")
    return GpuCase(f"sparse_update {optimizer}", n, changed, counted, call, prepare, name)


def _sums(
    device: torch.device, sizes: Sizes, rows: Tensor, random: torch.Generator
) -> Iterator[GpuCase]:
    """Gradients summed by row, and the rows of a step in the order of their units."""
    n, width = sizes.touched, 4 * sizes.dimension
    sums = torch.zeros(sizes.height, sizes.dimension, device=device)
    values = torch.randn(n, sizes.dimension, device=device)
    seen = torch.zeros(sizes.height, dtype=torch.uint8, device=device)
    skewed = (torch.rand(n, generator=random, device=device) ** 4 * sizes.height).long()
    for name, index in (("unique rows", rows), ("skewed rows", skewed)):
        different = n if name == "unique rows" else int(skewed.unique().numel())

        def add(index: Tensor = index, unique: bool = name == "unique rows") -> None:
            scatter_add(sums, index, values, BACKEND, seen, unique=unique)

        counted = n * (8 + width) + different * (width + 2)  # all rows are new, and only written
        yield GpuCase(f"scatter_add, {name}", n, width, counted, add, seen.zero_)
    different = int(skewed.unique().numel())
    yield GpuCase(
        "unique_by_unit",
        n,
        8,
        8 * (2 * n + different),
        lambda: unique_by_unit(skewed, K, BACKEND),
    )


def _initial(device: torch.device, sizes: Sizes, rows: Tensor) -> Iterator[GpuCase]:
    """Initial values of rows."""
    n, width = sizes.touched, 4 * sizes.dimension
    yield GpuCase(
        "hash_uniform",
        n,
        width,
        n * (8 + width),
        lambda: hash_uniform(1, 2, rows, sizes.dimension, 0.5, BACKEND),
    )
    shapes = Shapes(sizes.dimension, "rowwise_adagrad")
    weights, _, marks = shapes.parts(torch.zeros(sizes.height, shapes.stride, device=device))
    bounds = torch.full((n,), 0.5, device=device)
    yield GpuCase(
        "begin_rows",
        n,
        width,
        n * (3 * 8 + 4 + 4 + width),  # target, table and row; bound and mark; the row is written
        lambda: begin_rows(weights, marks, rows, 1, rows, rows, bounds, BACKEND),
    )


def _interaction(device: torch.device, sizes: Sizes, random: torch.Generator) -> Iterator[GpuCase]:
    """DLRM's interaction of rows as skewed as a batch's, both ways."""
    batch, features, dim = sizes.batch, sizes.features, sizes.dimension
    most = max(sizes.height // features, 1)
    drawn = torch.rand(batch, features, generator=random, device=device) ** 4 * most
    ids = drawn.long() + most * torch.arange(features, device=device)
    unique, places = ids.unique(return_inverse=True)
    places = places.reshape(-1)
    values = torch.randn(len(unique), dim, device=device)
    dense = torch.randn(batch, dim, device=device)
    out = dot_interaction(dense, values, places, BACKEND)
    read = 8 * places.numel() + dense.nbytes + values.nbytes
    yield GpuCase(
        "dot_interaction",
        batch,
        4 * dim,
        read + out.nbytes,
        lambda: dot_interaction(dense, values, places, BACKEND),
    )
    yield GpuCase(
        "dot_interaction_backward",
        batch,
        4 * dim,
        read + out.nbytes + dense.nbytes + values.nbytes,
        lambda: dot_interaction_backward(out, dense, values, places, BACKEND),
    )
