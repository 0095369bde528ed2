"""Add multiples of deltas to scattered parity rows, over GF(2^8)."""

from __future__ import annotations

import torch

from ecrm.kernels import check, dispatch, native

__all__ = ["parity_apply"]


def parity_apply(
    parity: torch.Tensor,
    rows: torch.Tensor,
    coefficients: torch.Tensor | int,
    delta: torch.Tensor,
    backend: str = "auto",
    unique: bool = False,
) -> None:
    """Add multiples of deltas to parity rows, over GF(2^8), in place.

    `parity[rows[i]] ^= coefficients[i] * delta[i]`, modulo 0x11d. A second equal call undoes the
    first call.

    Legend: P parity rows of W bytes, n deltas.

    Args:
        parity: uint8 [P, W], changed. Rows contiguous; may be a view with a row stride.
        rows: int64 [n], contiguous. In any order; may repeat.
        coefficients: uint8 [n], contiguous, or one int from 0 to 255 for all. 1 is a plain XOR, 0
            does nothing.
        delta: uint8 [n, W], rows contiguous. Not checked: that `delta` and `parity` share no
            memory.
        unique: Whether no row comes twice (not checked). A GPU then needs no atomics. A CPU ignores
            `unique`.

    Raises TypeError or ValueError, with the numbers, before anything is written.
    """
    if isinstance(coefficients, int) and not 0 <= coefficients <= 255:
        raise ValueError(f"coefficient {coefficients} is outside 0..255")
    device = check.one_device({"parity": parity, "rows": rows, "delta": delta})
    check.matrix("parity", parity, (torch.uint8,), written=True)
    check.matrix("delta", delta, (torch.uint8,))
    check.row_numbers("rows", rows, parity.shape[0])
    n, width = rows.shape[0], parity.shape[1]
    check.shape("delta", delta, (n, width))
    if isinstance(coefficients, torch.Tensor):
        _check_coefficients(coefficients, n)
    chosen = dispatch.choose("parity_apply", backend, device)
    if n == 0 or width == 0:
        return
    if chosen == "triton":
        from ecrm.kernels.parity_apply.triton import apply

        if not isinstance(coefficients, int) or coefficients:
            apply(parity, rows, coefficients, delta, unique)
        return
    step = 0 if isinstance(coefficients, int) else 1
    if isinstance(coefficients, int):
        coefficients = torch.full((1,), coefficients, dtype=torch.uint8, device=device)
    if chosen == "cpu":
        native.library().ecrm_parity_apply(
            parity.data_ptr(),
            check.row_stride_bytes(parity),
            rows.data_ptr(),
            n,
            coefficients.data_ptr(),
            step,
            delta.data_ptr(),
            check.row_stride_bytes(delta),
            width,
        )
        return
    from ecrm.kernels.parity_apply import reference

    reference.apply(parity, rows, coefficients.expand(n), delta)


def _check_coefficients(coefficients: torch.Tensor, n: int) -> None:
    if coefficients.dtype != torch.uint8:
        raise TypeError(f"coefficients are {coefficients.dtype}, needed: torch.uint8 or an int")
    check.shape("coefficients", coefficients, (n,))
    if not coefficients.is_contiguous():
        raise ValueError(
            f"coefficients: elements are {coefficients.stride(0)} apart, needed: contiguous"
        )
