"""Initial values of embedding rows, as a pure function of (seed, table, row, column)."""

from __future__ import annotations

import torch

from ecrm.kernels import check, dispatch, native
from ecrm.kernels.hash_uniform.reference import fill, signed

__all__ = ["hash_uniform"]

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

    The value of (row, column) depends neither on D nor on which other rows are asked for. The
    formula is in README.md.

    Legend: n rows, D columns.

    Args:
        seed: From 0 to 2^64 - 1.
        table: From 0 to 2^64 - 1 for all rows, or one number per row: int64 [n], contiguous.
        rows: int64 [n], contiguous, none negative. In any order; may repeat.
        dimension: D, at least 0.
        bound: One for all rows, or float32 [n], contiguous.

    Returns a new float32 [n, D].

    Raises TypeError or ValueError, with the numbers.
    """
    for name, number in (("seed", seed), ("table", table)):
        if isinstance(number, int) and not 0 <= number <= _LARGEST:
            raise ValueError(f"{name} is {number}, outside 0..2^64-1")
    if dimension < 0:
        raise ValueError(f"dimension is {dimension}, needed: at least 0")
    check.row_numbers("rows", rows, 2**63 - 1)
    tables, table_step = _per_row(
        "table", signed(table) if isinstance(table, int) else table, torch.int64, rows
    )
    bounds, bound_step = _per_row("bound", bound, torch.float32, rows)
    device = check.one_device({"rows": rows, "table": tables, "bound": bounds})
    chosen = dispatch.choose("hash_uniform", backend, device, has_triton=False)
    out = torch.empty(rows.shape[0], dimension, dtype=torch.float32, device=rows.device)
    if out.numel() == 0:
        return out
    if chosen == "reference":
        fill(seed, tables, rows, bounds, out)
        return out
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


def _per_row(
    name: str, given: float | torch.Tensor, dtype: torch.dtype, rows: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """`given` as a tensor, and the step from one row's value to the next: 0 if all share one."""
    if not isinstance(given, torch.Tensor):
        return torch.tensor([given], dtype=dtype, device=rows.device), 0
    if given.dtype != dtype:
        raise TypeError(f"{name} is {given.dtype}, needed: {dtype} or a number")
    check.shape(name, given, rows.shape)
    if not given.is_contiguous():
        raise ValueError(f"{name}: elements are {given.stride(0)} apart, needed: contiguous")
    return given, 1
