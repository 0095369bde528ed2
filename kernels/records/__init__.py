"""Records: the bytes of a row followed by the bytes of its optimizer state.

Legend: R rows, n of them named, B bytes per record: the row's D elements, then each state's part.
`weights` is float32, float16 or bfloat16 [R, D]; each state float32 [R] or [R, width]; all may be views with a row
stride, if rows are contiguous. `rows` is int64 [n], contiguous. All functions raise TypeError or ValueError, with the
numbers, before anything is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ecrm.kernels import check, dispatch, native


def record_bytes(weights: torch.Tensor, state: Sequence[torch.Tensor]) -> int:
    """B, the bytes of one record."""
    return sum(part.shape[1:].numel() * part.element_size() for part in (weights, *state))


def gather_records(
    weights: torch.Tensor, state: Sequence[torch.Tensor], rows: torch.Tensor, backend: str = "auto"
) -> torch.Tensor:
    """The records of the named rows, as a new uint8 [n, B]; rows may repeat."""
    parts = _parts(weights, state, rows)
    records = torch.empty(rows.shape[0], record_bytes(weights, state), dtype=torch.uint8, device=weights.device)
    _run("gather_records", parts, rows, records, backend)
    return records


def scatter_records(
    weights: torch.Tensor,
    state: Sequence[torch.Tensor],
    rows: torch.Tensor,
    records: torch.Tensor,
    backend: str = "auto",
) -> None:
    """Overwrite the named rows and their state with `records` uint8 [n, B]. Not checked: that no row repeats."""
    parts = _parts(weights, state, rows)
    _check_records(parts, rows, records)
    _run("scatter_records", parts, rows, records, backend)


def xor_records(
    weights: torch.Tensor,
    state: Sequence[torch.Tensor],
    rows: torch.Tensor,
    delta: torch.Tensor,
    backend: str = "auto",
) -> None:
    """XOR `delta` uint8 [n, B] into the named rows and their state: takes an update back, or applies it again.

    Rows may repeat on "cpu"; on "reference" each at most once (not checked).
    """
    parts = _parts(weights, state, rows)
    _check_records(parts, rows, delta)
    _run("xor_records", parts, rows, delta, backend)


def merge_records(
    log_rows: torch.Tensor,
    log: torch.Tensor,
    count: int,
    places: torch.Tensor,
    rows: torch.Tensor,
    delta: torch.Tensor,
    backend: str = "auto",
) -> int:
    """XOR `delta` uint8 [n, B] of `rows`, none twice, into a log of unique rows; how many the log has then.

    Legend: the log has room for C rows, `count` of which are there.
    log_rows: int64 [C], contiguous; log: uint8 [C, B], contiguous: rows not there yet are appended, in the order given.
    places: int32 [R], contiguous: 1 more than the place in the log of each row there may be, 0 of those not there; changed.
    Not checked: that no row repeats, and that places agree with the log. Raises TypeError or ValueError, with the numbers, before anything is written.
    """
    check.matrix("delta", delta, (torch.uint8,))
    check.matrix("log", log, (torch.uint8,), written=True)
    check.row_numbers("rows", rows, places.shape[0])
    check.shape("delta", delta, (rows.shape[0], log.shape[1]))
    check.shape("log_rows", log_rows, (log.shape[0],))
    check.shape("places", places, (places.shape[0],))
    if places.dtype != torch.int32 or log_rows.dtype != torch.int64:
        raise TypeError(f"places are {places.dtype} and log_rows {log_rows.dtype}, needed: torch.int32 and torch.int64")
    if not (log.is_contiguous() and log_rows.is_contiguous() and places.is_contiguous()):
        raise ValueError("log, log_rows and places are not all contiguous")
    if not 0 <= count <= log.shape[0] - rows.shape[0] or log.shape[0] >> 31:
        raise ValueError(f"a log of {count} rows has room for {log.shape[0]}, needed: {count + rows.shape[0]}, below 2^31")
    device = check.one_device({"log_rows": log_rows, "log": log, "places": places, "rows": rows, "delta": delta})
    if dispatch.choose("merge_records", backend, device, has_triton=False) == "reference":
        from ecrm.kernels.records import reference

        return reference.merge_records(log_rows, log, count, places, rows, delta)
    return native.library().ecrm_merge_records(
        places.data_ptr(), rows.data_ptr(), rows.shape[0], delta.data_ptr(), check.row_stride_bytes(delta), log.shape[1],
        log_rows.data_ptr(), log.data_ptr(), count,
    )  # fmt: skip


def _parts(weights: torch.Tensor, state: Sequence[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    check.matrix("weights", weights, check.WEIGHT_TYPES, written=True)
    parts = [weights, *check.states(weights, state)]
    check.row_numbers("rows", rows, weights.shape[0])
    return [part for part in parts if part.shape[1] > 0]


def _check_records(parts: list[torch.Tensor], rows: torch.Tensor, records: torch.Tensor) -> None:
    check.matrix("records", records, (torch.uint8,))
    check.shape("records", records, (rows.shape[0], record_bytes(parts[0], parts[1:]) if parts else 0))


def _run(operation: str, parts: list[torch.Tensor], rows: torch.Tensor, records: torch.Tensor, backend: str) -> None:
    tensors = {"rows": rows, "records": records} | {f"part {p}": part for p, part in enumerate(parts)}
    chosen = dispatch.choose(operation, backend, check.one_device(tensors), has_triton=False)
    if rows.shape[0] == 0 or not parts:
        return
    if chosen == "reference":
        from ecrm.kernels.records import reference

        getattr(reference, operation)(parts, rows, records)
        return
    count = len(parts)
    getattr(native.library(), f"ecrm_{operation}")(
        (ctypes.c_void_p * count)(*(part.data_ptr() for part in parts)),
        (ctypes.c_int64 * count)(*(check.row_stride_bytes(part) for part in parts)),
        (ctypes.c_int64 * count)(*(part.shape[1] * part.element_size() for part in parts)),
        count, rows.data_ptr(), rows.shape[0], records.data_ptr(), check.row_stride_bytes(records),
    )  # fmt: skip
