"""Jobs of bench_kernels.py on rows: decode, gather records, sum gradients, update with a log."""

from __future__ import annotations

import ctypes
import hashlib

import numpy as np
import torch

from ecrm.kernels.decode import decode
from ecrm.kernels.divide import divide
from ecrm.kernels.records import RecordLog, gather_records, merge_records
from ecrm.kernels.row_digest import row_digest
from ecrm.kernels.scatter_add import scatter_add
from ecrm.kernels.sparse_update import sparse_update
from ecrm.protection.coding.code import ReedSolomon
from lib.kernel_case import Batches, Case, Contender, load_isa_l, zeros

K = 4


def decode_case(rows: int, width: int) -> Case:
    """One lost unit of k = 4 from three others and parity, beside ISA-L on the same bytes."""
    generator = torch.Generator().manual_seed(4)
    units = zeros(K, rows, width, dtype=torch.uint8).random_(0, 256, generator=generator)
    code = ReedSolomon(K, 1)
    matrix = torch.tensor(code.decode_matrix((1, 2, 3, 4), (0,)))
    isa_l, tables, out = (
        load_isa_l(),
        np.zeros(32 * K, np.uint8),
        zeros(1, rows, width, dtype=torch.uint8),
    )
    coefficients = matrix.numpy().copy()
    isa_l.ec_init_tables(
        K, 1, ctypes.c_void_p(coefficients.ctypes.data), ctypes.c_void_p(tables.ctypes.data)
    )
    inputs = (ctypes.c_void_p * K)(*(unit.data_ptr() for unit in units))
    found = [torch.empty(0)]

    def ours() -> None:
        found[0] = decode(list(units), matrix, backend="cpu")

    def theirs() -> None:
        isa_l.ec_encode_data(
            rows * width,
            K,
            1,
            ctypes.c_void_p(tables.ctypes.data),
            inputs,
            (ctypes.c_void_p * 1)(out.data_ptr()),
        )

    ours()
    theirs()
    if not torch.equal(found[0], out):
        raise SystemExit("decode and ISA-L disagree")
    counted = (K + 1) * rows * width
    contenders = [Contender("decode", ours, counted), Contender("isa-l", theirs, counted)]
    return Case(f"decode, one unit of k = {K}", rows, width, contenders, lambda: found[0])


def logged_case(height: int, dimension: int, touched: int) -> Case:
    """Updates whose deltas go to a log that has half of the rows.

    Beside the same with the deltas written over the gradients, and merged after that.
    """
    batches, generator = Batches(height, touched), torch.Generator().manual_seed(7)
    weights, state = zeros(height, dimension).normal_(generator=generator), [zeros(height)]
    gradients, record = zeros(touched, dimension).normal_(generator=generator), 4 * dimension + 4
    narrow, wide = zeros(touched, dimension), zeros(touched, dimension + 1)
    delta = wide.view(torch.uint8)
    room = touched + (touched + 1) // 2
    log = RecordLog(
        zeros(room, dtype=torch.int64),
        zeros(room, record, dtype=torch.uint8),
        zeros(height, dtype=torch.int32),
    )

    def prepare(sums: torch.Tensor) -> None:
        """As in a step: half of the rows are in the log, and gradients have just been summed."""
        batches.advance()
        log.places[log.rows[: log.count]] = 0
        log.count = 0
        merge_records(log, batches.rows[::2].contiguous(), delta[::2], backend="cpu")
        sums[:, :dimension] = gradients

    def ours() -> None:
        sparse_update(
            weights, state, batches.rows, narrow, "rowwise_adagrad", lr=0.01, log=log, backend="cpu"
        )

    def theirs() -> None:
        sparse_update(
            weights,
            state,
            batches.rows,
            wide[:, :dimension],
            "rowwise_adagrad",
            lr=0.01,
            delta=delta,
            backend="cpu",
        )
        merge_records(log, batches.rows, delta, backend="cpu")

    same: list[list[torch.Tensor]] = []
    for call, sums in ((ours, narrow), (theirs, wide)):
        batches.rewind()
        weights.normal_(generator=torch.Generator().manual_seed(8))
        state[0].zero_()
        delta.zero_()
        prepare(sums)
        call()
        same.append(
            [weights.clone(), log.rows[: log.count].clone(), log.records[: log.count].clone()]
        )
    if not all(torch.equal(one, other) for one, other in zip(*same, strict=True)):
        raise SystemExit("sparse_update into a log and merge_records after it disagree")
    # Row, gradient, record both ways; place and row in the log, record written there, half of them
    # read.
    counted = touched * (8 + 4 * dimension + 2 * record + 20 + record + record // 2)
    contenders = [
        Contender("sparse_update", ours, counted, lambda: prepare(narrow)),
        Contender("merged-after", theirs, counted, lambda: prepare(wide)),
    ]
    return Case(
        f"sparse_update rowwise_adagrad into a log, of {height} rows",
        touched,
        record,
        contenders,
        lambda: log.records,
    )


def gather_case(height: int, dimension: int, touched: int) -> Case:
    """Records of distinct random rows with row-wise Adagrad's state, beside torch's gathers."""
    batches, generator = Batches(height, touched), torch.Generator().manual_seed(5)
    weights, state = (
        zeros(height, dimension).normal_(generator=generator),
        zeros(height).normal_(generator=generator),
    )
    found = [torch.empty(0), torch.empty(0)]

    def ours() -> None:
        found[0] = gather_records(weights, [state], batches.rows, backend="cpu")

    def theirs() -> None:
        found[1] = torch.cat(
            [
                weights.index_select(0, batches.rows),
                state.index_select(0, batches.rows).unsqueeze(1),
            ],
            dim=1,
        )

    ours()
    theirs()
    if not torch.equal(found[0].view(torch.float32), found[1]):
        raise SystemExit("gather_records and torch disagree")
    record = 4 * dimension + 4
    counted = touched * (8 + 2 * record)
    contenders = [
        Contender("gather_records", ours, counted, batches.advance),
        Contender("torch", theirs, counted, batches.advance),
    ]
    return Case(f"gather_records, of {height} rows", touched, record, contenders, lambda: found[0])


def scatter_add_case(rows: int, dimension: int, added: int) -> Case:
    """Gradients of a slot's samples summed by skewed rows, beside torch's index_add_."""
    generator = torch.Generator().manual_seed(6)
    index = (torch.rand(added, generator=generator) ** 4 * rows).long()
    values, sums = (
        zeros(added, dimension).normal_(generator=generator),
        [zeros(rows, dimension), zeros(rows, dimension)],
    )

    def ours() -> None:
        scatter_add(sums[0], index, values, backend="cpu")

    def theirs() -> None:
        sums[1].index_add_(0, index, values)

    ours()
    theirs()
    if not torch.allclose(sums[0], sums[1], rtol=1e-4, atol=1e-3):
        raise SystemExit("scatter_add and torch disagree")
    width = 4 * dimension
    counted = added * (8 + width) + 2 * index.unique().numel() * width
    empty = (lambda: sums[0].zero_()), (lambda: sums[1].zero_())
    contenders = [
        Contender("scatter_add", ours, counted, empty[0]),
        Contender("torch", theirs, counted, empty[1]),
    ]
    return Case(f"scatter_add to {rows} rows", added, width, contenders, lambda: sums[0])


def digest_case(rows: int, dimension: int) -> Case:
    """The digest of a table's rows, beside SHA-256 of the same bytes."""
    generator = torch.Generator().manual_seed(9)
    values = zeros(rows, dimension).normal_(generator=generator)
    numbers = torch.arange(rows)

    def ours() -> None:
        row_digest(values, numbers, backend="cpu")

    def theirs() -> None:
        hashlib.sha256(values.numpy().data)

    contenders = [
        Contender("row_digest", ours, values.nbytes),
        Contender("sha256", theirs, values.nbytes),
    ]
    return Case("digest of rows", rows, 4 * dimension, contenders, lambda: values)


def divide_case(rows: int, dimension: int) -> Case:
    """A slot's gradients divided by the slots and tested, beside torch's division, sum and test."""
    generator = torch.Generator().manual_seed(9)
    values = zeros(rows, dimension).normal_(generator=generator)
    mine, other = zeros(rows, dimension), zeros(rows, dimension)
    found = [False, False]

    def ours() -> None:
        found[0] = divide(mine, 3.0, backend="cpu")

    def theirs() -> None:
        other.div_(3.0)
        found[1] = bool(other.sum().isfinite())

    def again(target: torch.Tensor) -> None:
        target.copy_(values)

    again(mine)
    again(other)
    ours()
    theirs()
    if not (torch.equal(mine, other) and all(found)):
        raise SystemExit("divide and torch disagree")
    counted = 8 * rows * dimension
    contenders = [
        Contender("divide", ours, counted, lambda: again(mine)),
        Contender("torch", theirs, counted, lambda: again(other)),
    ]
    return Case("divide by 3 slots, in place", rows, 4 * dimension, contenders, lambda: mine)
