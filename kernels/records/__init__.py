"""Records: the bytes of a row followed by the bytes of its optimizer state.

Legend: R rows, n of them named, B bytes per record: the row's D elements, then each state's part.
`weights` is float32, float16 or bfloat16 [R, D]; each state float32 [R] or [R, width]; all may be
views with a row stride, if rows are contiguous. `rows` is int64 [n], contiguous. All functions
raise TypeError or ValueError, with the numbers, before anything is written.
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
    """A log of rows, each with the XOR of all its deltas since it was appended.

    No row is in it twice. Not checked: that `places` agrees with the log.

    Legend: room for C rows, B bytes per record, row numbers below R.

    Args:
        rows: int64 [C], contiguous.
        records: uint8 [C, B], contiguous.
        places: int32 [R], contiguous. 1 more than a row's place in the log, 0 for a row that is not
            in it. Several logs may share it if none has a row of another.
        count: How many rows are there, from the first on. On a GPU it may be too large until
            `settle`: only `counter` is exact.
        counter: int64 [1], with `count` in it. The "triton" backend needs it, and counts in it, so
            that nobody waits for a number that the GPU has. None: `count` is exact.
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
        """Check that this is a log to which all `rows`, int64 [n], can be appended.

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
        """All of them by name, for messages."""
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
        out: uint8 [n, B], overwritten. None: new memory.

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
    """Overwrite rows and their state with records.

    Not checked: that no row repeats.

    Args:
        records: uint8 [n, B].
        picked: int64 [n], contiguous; may repeat. `records[picked]` is taken in place of `records`,
            which may then have any number of rows.
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
    """XOR deltas into rows and their state: undo an update, or apply it again.

    Args:
        rows: May repeat on "cpu". Elsewhere each is there at most once (not checked).
        delta: uint8 [n, B].
    """
    parts = _parts(weights, state, rows)
    _check_records(parts, rows.shape[0], delta)
    _run("xor_records", parts, rows, delta, backend)


def merge_records(
    log: RecordLog, rows: torch.Tensor, delta: torch.Tensor, backend: str = "auto"
) -> None:
    """XOR the deltas of rows into a log; rows that it does not have are appended, in their order.

    Args:
        rows: None twice (not checked).
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
