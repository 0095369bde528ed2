"""Initial values of embedding rows, as a pure function of (seed, table, row, column)."""

from __future__ import annotations

import torch

from ecrm.kernels import check, dispatch, native

_LARGEST = 2**64 - 1


def hash_uniform(
    seed: int, table: int, rows: torch.Tensor, dimension: int, bound: float, backend: str = "auto"
) -> torch.Tensor:
    """The values float32 [n, D] of the given rows, uniform in [-bound, bound); a new tensor.

    seed, table: integers 0..2^64-1. rows: int64 [n], contiguous, >= 0, in any order, may repeat. dimension: D >= 0.
    The value of (row, column) does not depend on which other rows are asked for, nor on D. Formula: README.md.
    Raises TypeError or ValueError, with the numbers.
    """
    for name, number in (("seed", seed), ("table", table)):
        if not 0 <= number <= _LARGEST:
            raise ValueError(f"{name} is {number}, outside 0..2^64-1")
    if dimension < 0:
        raise ValueError(f"dimension is {dimension}, needed: at least 0")
    check.row_numbers("rows", rows, 2**63 - 1)
    chosen = dispatch.choose("hash_uniform", backend, rows.device, has_triton=False)
    out = torch.empty(rows.shape[0], dimension, dtype=torch.float32, device=rows.device)
    if out.numel() == 0:
        return out
    if chosen == "reference":
        from ecrm.kernels.hash_uniform.reference import fill

        fill(seed, table, rows, bound, out)
        return out
    native.library().ecrm_hash_uniform(
        seed, table, rows.data_ptr(), rows.shape[0], dimension, bound, out.data_ptr()
    )  # fmt: skip
    return out
