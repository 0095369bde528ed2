"""Sum of hashes of rows. Equal rows have equal sums, in any order and in any parts."""

from __future__ import annotations

from functools import cache

import torch

from ecrm.kernels import check, dispatch, native

__all__ = ["LANES", "row_digest"]

LANES = 4
"""Number of independent hashes of a row, of 64 bits each."""


@cache
def _keys(words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of the words of a row, int32 [LANES, 2 H], and odd factors, int64 [LANES].

    H is half of `words`, rounded up.
    """
    from ecrm.kernels.row_digest.reference import mixed

    half = -(-words // 2)
    drawn = mixed(torch.arange(1, LANES * (2 * half + 2) + 1, device="cpu")).view(
        LANES, 2 * half + 2
    )
    return drawn[:, : 2 * half].to(torch.int32).contiguous(), drawn[:, -1] | 1


def row_digest(rows: torch.Tensor, numbers: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """The sum of the hashes of numbered rows, int64 [LANES], modulo 2^64.

    Sums of parts of a table add up to the sum of the table. A changed bit, and two exchanged rows,
    change the sum, but for a chance of 2^-128. The hash finds mistakes, and does not resist an
    attacker in search of equal sums.

    Args:
        rows: float32 [R, F], contiguous, on the CPU. The bits count: 0.0 and -0.0 differ.
        numbers: int64 [R], contiguous: the row numbers in the table.

    Raises TypeError or ValueError for wrong arguments.
    """
    if rows.dtype != torch.float32:
        raise TypeError(f"rows is {rows.dtype}, needed: torch.float32")
    if rows.dim() != 2 or not rows.is_contiguous():
        raise ValueError(f"rows is {list(rows.shape)}, needed: [R, F], contiguous")
    check.row_numbers("numbers", numbers, 2**63 - 1)
    check.shape("numbers", numbers, rows.shape[:1])
    device = check.one_device({"rows": rows, "numbers": numbers})
    chosen = dispatch.choose("row_digest", backend, device, has_triton=False)
    keys, factors = _keys(rows.shape[1])
    if chosen == "reference":
        from ecrm.kernels.row_digest import reference

        return reference.row_digest(rows, numbers, keys, factors)
    sums = torch.zeros(LANES, dtype=torch.int64, device="cpu")
    native.library().ecrm_row_digest(
        sums.data_ptr(),
        rows.data_ptr(),
        numbers.data_ptr(),
        len(rows),
        rows.shape[1],
        keys.data_ptr(),
        factors.data_ptr(),
    )
    return sums
