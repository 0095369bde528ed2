"""Records: the bytes of a row, followed by the bytes of the row's optimizer state.

Legend: R rows, n named rows, B bytes per record: the row's D elements, then the row's part of every
state tensor. `weights` is float32, float16 or bfloat16 [R, D]. State tensors are float32, [R] or
[R, width]. All may be views with a row stride, if rows are contiguous. `rows` is int64 [n],
contiguous. All functions raise TypeError or ValueError, with the numbers, before the first write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ecrm.kernels import check, dispatch, native

__all__ = [
    "RecordLog",
    "gather_records",
    "merge_records",
    "record_bytes",
    "scatter_records",
    "xor_records",
]


@dataclass
class RecordLog:
    """A log of unique rows, with the XOR of all deltas of a row since the row was appended.

    Not checked: that `places` agrees with the log.

    Legend: room for C rows, B bytes per record, row numbers below R.

    Args:
        rows: int64 [C], contiguous.
        records: uint8 [C, B], contiguous.
        places: int32 [R], contiguous. A row's place in the log plus 1, or 0 for a row not in the
            log. Logs without common rows may share `places`.
        count: The number of rows in the log. On a GPU `count` may be too large until `settle`, and
            only `counter` is exact.
        counter: int64 [1], the number of rows in the log. The "triton" backend needs `counter` and
            keeps it current on the GPU, so nobody waits for the number. `None`: `count` is exact.
    """

    rows: torch.Tensor
    records: torch.Tensor
    places: torch.Tensor
    count: int = 0
    counter: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """B, the bytes of one record."""
        return self.records.shape[1]

    def settle(self) -> None:
        """Make `count` exact. Waits for the GPU if the log lies there."""
        if self.counter is not None:
            self.count = int(self.counter)

    def check_room(self, rows: torch.Tensor) -> None:
        """Check that the log is valid, and has room to append all `rows`, int64 [n].

        Raises TypeError or ValueError, with the numbers.
        """
        check.matrix("log", self.records, (torch.uint8,), written=True)
        check.row_numbers("rows", rows, self.places.shape[0])
        check.shape("log_rows", self.rows, (self.records.shape[0],))
        check.shape("places", self.places, (self.places.shape[0],))
        if self.places.dtype != torch.int32 or self.rows.dtype != torch.int64:
            raise TypeError(
                f"places are {self.places.dtype} and log_rows {self.rows.dtype}, "
                "needed: torch.int32 and torch.int64"
            )
        if not (
            self.records.is_contiguous()
            and self.rows.is_contiguous()
            and self.places.is_contiguous()
        ):
            raise ValueError("log, log_rows and places are not all contiguous")
        room, needed = self.records.shape[0], self.count + rows.shape[0]
        if not 0 <= self.count <= room - rows.shape[0] or room >> 31:
            raise ValueError(
                f"a log of {self.count} rows has room for {room}, needed: {needed}, below 2^31"
            )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the log by name, for messages."""
        tensors = {"log_rows": self.rows, "log": self.records, "places": self.places}
        return tensors if self.counter is None else {**tensors, "counter": self.counter}


def record_bytes(weights: torch.Tensor, state: Sequence[torch.Tensor]) -> int:
    """The bytes of one record, B."""
    return sum(part.shape[1:].numel() * part.element_size() for part in (weights, *state))


def gather_records(
    weights: torch.Tensor,
    state: Sequence[torch.Tensor],
    rows: torch.Tensor,
    backend: str = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Copy the records of rows.

    Args:
        rows: May repeat.
        out: uint8 [n, B], overwritten. `None`: new memory.

    Returns uint8 [n, B].
    """
    parts = _parts(weights, state, rows)
    records = out
    if records is None:
        records = torch.empty(
            rows.shape[0], record_bytes(weights, state), dtype=torch.uint8, device=weights.device
        )
    else:
        _check_records(parts, rows.shape[0], records)
    _run("gather_records", parts, rows, records, backend)
    return records


def scatter_records(
    weights: torch.Tensor,
    state: Sequence[torch.Tensor],
    rows: torch.Tensor,
    records: torch.Tensor,
    backend: str = "auto",
    picked: torch.Tensor | None = None,
) -> None:
    """Overwrite rows and optimizer state with records.

    Not checked: that no row repeats.

    Args:
        records: uint8 [n, B].
        picked: int64 [n], contiguous; may repeat. `records[picked]` takes the place of `records`.
            `records` may then have any number of rows.
    """
    parts = _parts(weights, state, rows)
    if picked is None:
        _check_records(parts, rows.shape[0], records)
    else:
        check.shape("picked", picked, rows.shape)
        check.row_numbers("picked", picked, records.shape[0])
        _check_records(parts, records.shape[0], records)
    _run("scatter_records", parts, rows, records, backend, picked)


def xor_records(
    weights: torch.Tensor,
    state: Sequence[torch.Tensor],
    rows: torch.Tensor,
    delta: torch.Tensor,
    backend: str = "auto",
) -> None:
    """XOR deltas into rows and optimizer state: undo an update, or apply an update again.

    Args:
        rows: May repeat on "cpu". On other backends without repetitions (not checked).
        delta: uint8 [n, B].
    """
    parts = _parts(weights, state, rows)
    _check_records(parts, rows.shape[0], delta)
    _run("xor_records", parts, rows, delta, backend)


def merge_records(
    log: RecordLog, rows: torch.Tensor, delta: torch.Tensor, backend: str = "auto"
) -> None:
    """XOR the deltas of rows into a log, and append rows not yet in the log, in order.

    Args:
        rows: Without repetitions (not checked).
        delta: uint8 [n, B].
    """
    log.check_room(rows)
    check.matrix("delta", delta, (torch.uint8,))
    check.shape("delta", delta, (rows.shape[0], log.width))
    device = check.one_device({**log.tensors, "rows": rows, "delta": delta})
    chosen = dispatch.choose("merge_records", backend, device)
    if chosen == "triton":
        _merge_on_gpu(log, rows, delta)
        return
    log.settle()
    if chosen == "reference":
        from ecrm.kernels.records import reference

        reference.merge_records(log, rows, delta)
    else:
        _merge_on_cpu(log, rows, delta)
    if log.counter is not None:
        log.counter.fill_(log.count)


def _merge_on_cpu(log: RecordLog, rows: torch.Tensor, delta: torch.Tensor) -> None:
    log.count = native.library().ecrm_merge_records(
        log.places.data_ptr(),
        rows.data_ptr(),
        rows.shape[0],
        rows.shape[0],
        delta.data_ptr(),
        check.row_stride_bytes(delta),
        log.width,
        log.rows.data_ptr(),
        log.records.data_ptr(),
        log.count,
    )


def _merge_on_gpu(log: RecordLog, rows: torch.Tensor, delta: torch.Tensor) -> None:
    if log.counter is None:
        raise ValueError("merge_records: a log without a counter, which a GPU needs")
    if not rows.shape[0]:
        return
    from ecrm.kernels.records.triton import merge

    merge(log.rows, log.records, log.places, log.counter, rows, delta)
    log.count += rows.shape[0]


def _parts(
    weights: torch.Tensor, state: Sequence[torch.Tensor], rows: torch.Tensor
) -> list[torch.Tensor]:
    check.matrix("weights", weights, check.WEIGHT_TYPES, written=True)
    parts = [weights, *check.states(weights, state)]
    check.row_numbers("rows", rows, weights.shape[0])
    return [part for part in parts if part.shape[1] > 0]


def _check_records(parts: list[torch.Tensor], count: int, records: torch.Tensor) -> None:
    check.matrix("records", records, (torch.uint8,))
    check.shape("records", records, (count, record_bytes(parts[0], parts[1:]) if parts else 0))


def _run(
    operation: str,
    parts: list[torch.Tensor],
    rows: torch.Tensor,
    records: torch.Tensor,
    backend: str,
    *picked: torch.Tensor | None,
) -> None:
    tensors = {"rows": rows, "records": records} | {
        f"part {p}": part for p, part in enumerate(parts)
    }
    tensors |= {f"picked {p}": some for p, some in enumerate(picked) if some is not None}
    chosen = dispatch.choose(operation, backend, check.one_device(tensors))
    if rows.shape[0] == 0 or not parts:
        return
    if chosen == "triton":
        from ecrm.kernels.records.triton import move

        move(operation, parts, rows, records, *picked)
        return
    if chosen == "reference":
        from ecrm.kernels.records import reference

        getattr(reference, operation)(parts, rows, records, *picked)
        return
    count = len(parts)
    getattr(native.library(), f"ecrm_{operation}")(
        (ctypes.c_void_p * count)(*(part.data_ptr() for part in parts)),
        (ctypes.c_int64 * count)(*(check.row_stride_bytes(part) for part in parts)),
        (ctypes.c_int64 * count)(*(part.shape[1] * part.element_size() for part in parts)),
        count,
        rows.data_ptr(),
        rows.shape[0],
        records.data_ptr(),
        check.row_stride_bytes(records),
        *(None if some is None else some.data_ptr() for some in picked),
    )
