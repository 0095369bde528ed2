"""Initial values of embedding rows, as a pure function of (seed, table, row, column)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ecrm.kernels import check, dispatch, native
from ecrm.kernels.hash_uniform.reference import fill, signed

__all__ = ["begin_rows", "hash_uniform"]

_LARGEST = 2**64 - 1


def hash_uniform(
    seed: int,
    table: int | torch.Tensor,
    rows: torch.Tensor,
    dimension: int,
    bound: float | torch.Tensor,
    backend: str = "auto",
) -> torch.Tensor:
    """Initial values of rows, uniform in [-bound, bound).

    The value of (row, column) depends neither on D nor on the choice of rows. The formula is in
    README.md.

    Legend: n rows, D columns.

    Args:
        seed: From 0 to 2^64 - 1.
        table: A number from 0 to 2^64 - 1 for all rows, or a number per row: int64 [n], contiguous.
        rows: int64 [n], contiguous, not negative. In any order; may repeat.
        dimension: D, at least 0.
        bound: A bound for all rows, or float32 [n], contiguous.

    Returns a new float32 [n, D].

    Raises TypeError or ValueError, with the numbers.
    """
    if dimension < 0:
        raise ValueError(f"dimension is {dimension}, needed: at least 0")
    given = _Given.checked(seed, table, rows, bound)
    chosen = dispatch.choose("hash_uniform", backend, given.device)
    out = torch.empty(rows.shape[0], dimension, dtype=torch.float32, device=rows.device)
    if out.numel() == 0:
        return out
    if chosen == "reference":
        fill(seed, given.tables, rows, given.bounds, out)
    elif chosen == "triton":
        from ecrm.kernels.hash_uniform import triton

        triton.fill(seed, *given.strided, out)
    else:
        tables, table_step, _, bounds, bound_step = given.strided
        native.library().ecrm_hash_uniform(
            seed,
            tables.data_ptr(),
            table_step,
            rows.data_ptr(),
            rows.shape[0],
            dimension,
            bounds.data_ptr(),
            bound_step,
            out.data_ptr(),
        )
    return out


def begin_rows(
    weights: torch.Tensor,
    touched: torch.Tensor,
    targets: torch.Tensor,
    seed: int,
    table: int | torch.Tensor,
    rows: torch.Tensor,
    bound: float | torch.Tensor,
    backend: str = "auto",
) -> None:
    """Write initial values into the never updated rows among some rows.

    `weights[targets[i]]` becomes the initial value of `rows[i]` if `touched[targets[i]]` is 0. A
    GPU needs one launch, and nobody waits for the number of new rows.

    Legend: R rows of D floats, n named rows.

    Args:
        weights: float32 [R, D], changed. May be a view with a row stride.
        touched: float32 [R]; elements may be apart. Not changed.
        targets: int64 [n], contiguous, without repetitions (not checked).
        seed: As in `hash_uniform`.
        table: As in `hash_uniform`.
        rows: As in `hash_uniform`: row numbers in the table.
        bound: As in `hash_uniform`.

    Raises TypeError or ValueError, with the numbers, before anything is written.
    """
    check.matrix("weights", weights, (torch.float32,), written=True)
    check.row_numbers("targets", targets, weights.shape[0])
    check.shape("touched", touched, (weights.shape[0],))
    if touched.dtype != torch.float32:
        raise TypeError(f"touched is {touched.dtype}, needed: torch.float32")
    check.shape("rows", rows, targets.shape)
    given = _Given.checked(seed, table, rows, bound)
    tensors = {"weights": weights, "touched": touched, "targets": targets, "rows": rows}
    chosen = dispatch.choose("begin_rows", backend, check.one_device(tensors))
    if rows.shape[0] == 0 or weights.shape[1] == 0:
        return
    if chosen == "triton":
        from ecrm.kernels.hash_uniform import triton

        triton.fill(seed, *given.strided, weights, (targets, touched))
        return
    fresh = (touched[targets] == 0).nonzero().squeeze(1)
    weights[targets[fresh]] = hash_uniform(
        seed,
        given.tables[fresh] if given.table_step else table,
        rows[fresh],
        weights.shape[1],
        given.bounds[fresh] if given.bound_step else bound,
        chosen,
    )


@dataclass(frozen=True)
class _Given:
    """Checked arguments; a step is 0 if all rows share one element."""

    tables: torch.Tensor
    table_step: int
    rows: torch.Tensor
    bounds: torch.Tensor
    bound_step: int

    @classmethod
    def checked(
        cls,
        seed: int,
        table: int | torch.Tensor,
        rows: torch.Tensor,
        bound: float | torch.Tensor,
    ) -> _Given:
        for name, number in (("seed", seed), ("table", table)):
            if isinstance(number, int) and not 0 <= number <= _LARGEST:
                raise ValueError(f"{name} is {number}, outside 0..2^64-1")
        check.row_numbers("rows", rows, 2**63 - 1)
        tables, table_step = _per_row(
            "table", signed(table) if isinstance(table, int) else table, torch.int64, rows
        )
        bounds, bound_step = _per_row("bound", bound, torch.float32, rows)
        return cls(tables, table_step, rows, bounds, bound_step)

    @property
    def device(self) -> torch.device:
        return check.one_device({"rows": self.rows, "table": self.tables, "bound": self.bounds})

    @property
    def strided(self) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, int]:
        return self.tables, self.table_step, self.rows, self.bounds, self.bound_step


def _per_row(
    name: str, given: float | torch.Tensor, dtype: torch.dtype, rows: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """`given` as a tensor, and the step from one row's value to the next: 0 for a shared value."""
    if not isinstance(given, torch.Tensor):
        return torch.full((1,), given, dtype=dtype, device=rows.device), 0
    if given.dtype != dtype:
        raise TypeError(f"{name} is {given.dtype}, needed: {dtype} or a number")
    check.shape(name, given, rows.shape)
    if not given.is_contiguous():
        raise ValueError(f"{name}: elements are {given.stride(0)} apart, needed: contiguous")
    return given, 1
