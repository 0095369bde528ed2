"""Optimizers of embedding rows, with the changed bits of every row from the same pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ecrm.kernels import check, dispatch, native
from ecrm.kernels.records import RecordLog, merge_records, record_bytes

__all__ = ["OPTIMIZERS", "sparse_update", "state_widths"]

_LOGGED_BYTES = 1 << 18
"""Bytes of deltas computed at a time, before the merging into a log.

The deltas stay in a second-level cache. With 16 KiB the update takes an eighth longer.
"""

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")


@dataclass(frozen=True)
class Hyper:
    """The optimizer's numbers, rounded once to float32 for all backends."""

    learning_rate: float
    eps: float
    beta1: float
    beta2: float
    one_minus_beta1: float
    one_minus_beta2: float
    correction1: float  # 1 - beta1^step
    correction2: float  # 1 - beta2^step
    l2: float  # weight decay added to gradients
    keep: float  # factor of weights: 1 - lr * decoupled weight decay

    @classmethod
    def of(
        cls,
        lr: float,
        eps: float,
        betas: tuple[float, float],
        step: int,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> Hyper:
        beta1, beta2 = betas
        exact = (lr, eps, beta1, beta2, 1 - beta1, 1 - beta2, 1 - beta1**step, 1 - beta2**step)
        decay = (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
        return cls(*(ctypes.c_float(value).value for value in (*exact, *decay)))


class _Update(ctypes.Structure):
    """`ecrm::Update` of cpu.cpp, field by field."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("weights_stride", ctypes.c_int64),
        ("state", ctypes.c_void_p * 2),
        ("state_stride", ctypes.c_int64 * 2),
        ("rows", ctypes.c_void_p),
        ("gradients", ctypes.c_void_p),
        ("gradient_stride", ctypes.c_int64),
        ("delta", ctypes.c_void_p),
        ("delta_stride", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("rows_there", ctypes.c_int64),
        ("dimension", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("optimizer", ctypes.c_int32),
        ("hyper", ctypes.c_float * 10),
        ("decayed", ctypes.c_void_p),
    ]


def state_widths(optimizer: str, dimension: int) -> tuple[int, ...]:
    """Floats of optimizer state per row, one number per state tensor.

    () for sgd, (1,) for rowwise_adagrad, (D,) for adagrad, (D, D) for adam.
    """
    widths = {
        "sgd": (),
        "rowwise_adagrad": (1,),
        "adagrad": (dimension,),
        "adam": (dimension, dimension),
    }
    if optimizer not in widths:
        raise ValueError(f"optimizer {optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
    return widths[optimizer]


def sparse_update(
    weights: torch.Tensor,
    state: Sequence[torch.Tensor],
    rows: torch.Tensor,
    gradients: torch.Tensor,
    optimizer: str,
    *,
    lr: float,
    eps: float = 1e-8,
    betas: tuple[float, float] = (0.9, 0.999),
    step: int = 1,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    delta: torch.Tensor | None = None,
    log: RecordLog | None = None,
    marks: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Do one optimizer step on the given rows, in place; changed bits go to `delta` or `log`.

    All backends agree to the last bit, but for the sign and payload of NaNs. README.md has the
    formulas, the order of operations, and a comparison with FBGEMM. All matrices may be views with
    a row stride if rows are contiguous.

    Legend: R rows of D elements, n rows touched, B bytes per record (see `ecrm.kernels.records`).

    Args:
        weights: float32, float16 or bfloat16 [R, D], changed.
        state: float32, changed. () for "sgd"; ([R] or [R, 1],) for "rowwise_adagrad"; ([R, D],) for
            "adagrad"; ([R, D] first moment, [R, D] second moment) for "adam".
        rows: int64 [n], contiguous, without repetitions (not checked).
        gradients: float32 [n, D], already summed over all occurrences of a row.
        step: Counts from 1. Only "adam" uses `step` and `betas`.
        weight_decay: Decay of the given rows alone. Zero gives the same bits as no decay.
        decoupled: True: weights first shrink by lr * weight_decay, as in AdamW. False: gradients
            get weight_decay times the weights added (L2).
        delta: uint8 [n, B], overwritten by old bits XOR new bits of the records. `None`: no delta.
            With float32 weights `delta` may begin at the address of `gradients`, with the same row
            stride, and replaces the gradients. Other overlaps are not checked.
        log: A log that gets the deltas, as by `merge_records`, with zeros beyond B bytes. `None`:
            no log. Not together with `delta`.
        marks: float32 [R], changed; elements may be apart. 0 for a row never updated, else 1. For a
            row never updated the delta counts the old weights as zeros, because the row's record
            was zeros before `begin_rows`. Marks of all `rows` become 1. With marks a record has
            four bytes more, the mark at the end. In a wider delta or log the mark is also at the
            end. The bytes between state and mark stay unchanged in a delta, and are zeros in a log.
            `None`: no marks.

    Raises TypeError or ValueError, with the numbers, before anything is written.
    """
    widths = state_widths(optimizer, weights.shape[1] if weights.dim() == 2 else 0)
    check.matrix("weights", weights, check.WEIGHT_TYPES, written=True)
    states = check.states(weights, state, widths)
    check.matrix("gradients", gradients, (torch.float32,))
    height, dimension = weights.shape
    check.row_numbers("rows", rows, height)
    check.shape("gradients", gradients, (rows.shape[0], dimension))
    changed = record_bytes(weights, states)
    if marks is not None:
        check.matrix("marks", marks[:, None], (torch.float32,), written=True)
        check.shape("marks", marks, (height,))
        changed += marks.element_size()
    if delta is not None:
        check.matrix("delta", delta, (torch.uint8,), written=True)
        padded = marks is not None and delta.shape[1] > changed
        check.shape("delta", delta, (rows.shape[0], delta.shape[1] if padded else changed))
    if log is not None:
        log.check_room(rows)
        if delta is not None:
            raise ValueError("a delta and a log are given, needed: one of them, or none")
        if log.width < changed:
            raise ValueError(f"a log of records of {log.width} bytes, needed: at least {changed}")
    if step < 1:
        raise ValueError(f"step is {step}, needed: at least 1")
    tensors = {"weights": weights, "rows": rows, "gradients": gradients}
    tensors |= {f"state[{s}]": tensor for s, tensor in enumerate(states)}
    tensors |= {} if delta is None else {"delta": delta}
    tensors |= {} if marks is None else {"marks": marks}
    tensors |= {} if log is None else log.tensors
    device = check.one_device(tensors)
    chosen = dispatch.choose("sparse_update", backend, device)
    if log is not None:
        dispatch.choose("merge_records", chosen, device)
    if rows.shape[0] == 0 or dimension == 0:
        return
    hyper = Hyper.of(lr, eps, betas, step, weight_decay, decoupled)
    if chosen == "cpu":
        if marks is None:
            _update_on_cpu(weights, states, rows, gradients, optimizer, hyper, delta, log)
            return
        fresh = (marks[rows] == 0).nonzero().squeeze(1)
        some = None if delta is None else delta[:, :-4]
        _update_on_cpu(weights, states, rows, gradients, optimizer, hyper, some, log)
        _mark(weights, rows, fresh, marks, delta, log)
        return
    if chosen == "triton":
        from ecrm.kernels.sparse_update.triton import update
    else:
        from ecrm.kernels.sparse_update.reference import update
    if log is None:
        update(weights, states, rows, gradients, optimizer, hyper, delta, marks)
        return
    records = torch.zeros(rows.shape[0], log.width, dtype=torch.uint8, device=rows.device)
    update(
        weights,
        states,
        rows,
        gradients,
        optimizer,
        hyper,
        records if marks is not None else records[:, :changed],
        marks,
    )
    merge_records(log, rows, records, backend=chosen)


def _mark(
    weights: torch.Tensor,
    rows: torch.Tensor,
    fresh: torch.Tensor,
    marks: torch.Tensor,
    delta: torch.Tensor | None,
    log: RecordLog | None,
) -> None:
    """Mark rows, and replace the deltas at the places `fresh` by the rows' new records.

    `_update_on_cpu` wrote the bits of states already: the states were zeros before.
    """
    marks[rows] = 1.0
    records, places = delta, fresh
    if delta is not None:
        delta[:, -4:] = 0
    elif log is not None:
        records, places = log.records, log.places[rows[fresh]].long() - 1
    if records is None:
        return
    now = weights[rows[fresh]].view(torch.uint8)
    records[places, : now.shape[1]] = now
    records[places, -4:] = torch.ones(1).view(torch.uint8)


def _update_on_cpu(
    weights: torch.Tensor,
    states: list[torch.Tensor],
    rows: torch.Tensor,
    gradients: torch.Tensor,
    optimizer: str,
    hyper: Hyper,
    delta: torch.Tensor | None,
    log: RecordLog | None,
) -> None:
    if log is not None:
        delta = torch.zeros(
            min(rows.shape[0], max(_LOGGED_BYTES // log.width, 1)), log.width, dtype=torch.uint8
        )
    decayed = torch.empty(weights.shape[1] if hyper.l2 else 0)
    update = _Update(
        weights=weights.data_ptr(),
        weights_stride=check.row_stride_bytes(weights),
        rows=rows.data_ptr(),
        gradients=gradients.data_ptr(),
        gradient_stride=check.row_stride(gradients),
        delta=None if delta is None else delta.data_ptr(),
        delta_stride=0 if delta is None else check.row_stride_bytes(delta),
        n=rows.shape[0],
        rows_there=rows.shape[0],
        dimension=weights.shape[1],
        type=check.WEIGHT_TYPES.index(weights.dtype),
        optimizer=OPTIMIZERS.index(optimizer),
        hyper=(ctypes.c_float * 10)(
            hyper.learning_rate,
            hyper.eps,
            hyper.beta1,
            hyper.beta2,
            hyper.one_minus_beta1,
            hyper.one_minus_beta2,
            hyper.correction1,
            hyper.correction2,
            hyper.l2,
            hyper.keep,
        ),
        decayed=decayed.data_ptr(),
    )
    for s, tensor in enumerate(states):
        update.state[s] = tensor.data_ptr()
        update.state_stride[s] = check.row_stride_bytes(tensor)
    if log is None or delta is None:
        native.library().ecrm_sparse_update(ctypes.byref(update))
        return
    log.count = native.library().ecrm_sparse_update_logged(
        ctypes.byref(update),
        delta.shape[0],
        log.places.data_ptr(),
        log.rows.data_ptr(),
        log.records.data_ptr(),
        log.count,
    )
