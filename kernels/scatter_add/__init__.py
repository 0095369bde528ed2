"""Sum rows into rows, in a fixed order."""

from __future__ import annotations

import torch

from ecrm.kernels import check, dispatch, native

__all__ = ["scatter_add"]


def scatter_add(
    out: torch.Tensor,
    index: torch.Tensor,
    values: torch.Tensor,
    backend: str = "auto",
    seen: torch.Tensor | None = None,
    picked: torch.Tensor | None = None,
    unique: bool = False,
) -> None:
    """Add rows to rows, in order: `out[index[i]] += values[i]` for i = 0, 1, ... n-1.

    The bits are the same on every machine, but for the sign and payload of NaNs. Matrices may be
    views with a row stride if rows are contiguous.

    Legend: U rows of D floats, n rows added.

    Args:
        out: float32 [U, D], changed. Not checked: that `out` and `values` share no memory.
        index: int64 [n], contiguous; may repeat.
        values: float32 [n, D].
        seen: uint8 [U], contiguous, changed. A row of `out` with `seen` of 0 counts as zeros,
            whatever its content. The first addition to a row sets `seen` to 1. Rows without
            addition stay as before. With `seen`, `out` may be wider than D; the columns beyond
            `values` become zeros. `None`: `seen` is 1 for all rows.
        picked: int64 [n], contiguous; may repeat. `values[picked[i]]` is added in place of
            `values[i]`; `values` may then have any number of rows.
        unique: Whether no index comes twice (not checked). A GPU then skips a sort. A CPU ignores
            `unique`.

    Raises TypeError or ValueError, with the numbers, before anything is written.
    """
    check.matrix("out", out, (torch.float32,), written=True)
    check.matrix("values", values, (torch.float32,))
    check.row_numbers("index", index, out.shape[0])
    width = (
        values.shape[1] if seen is not None and values.shape[1] <= out.shape[1] else out.shape[1]
    )
    check.shape("values", values, (index.shape[0] if picked is None else values.shape[0], width))
    tensors = {"out": out, "index": index, "values": values}
    if picked is not None:
        check.shape("picked", picked, index.shape)
        check.row_numbers("picked", picked, values.shape[0])
        tensors["picked"] = picked
    if seen is not None:
        check.shape("seen", seen, (out.shape[0],))
        if seen.dtype != torch.uint8 or not seen.is_contiguous():
            raise TypeError(
                f"seen is {seen.dtype} with strides {seen.stride()}, "
                "needed: torch.uint8, contiguous"
            )
        tensors["seen"] = seen
    chosen = dispatch.choose("scatter_add", backend, check.one_device(tensors))
    if index.shape[0] == 0 or values.numel() == 0:
        return
    if chosen == "triton":
        from ecrm.kernels.scatter_add import triton

        triton.add(out, index, values, seen, picked, unique)
        return
    if chosen == "reference":
        from ecrm.kernels.scatter_add.reference import add

        add(out, index, values if picked is None else values[picked], seen)
        return
    native.library().ecrm_scatter_add(
        out.data_ptr(),
        check.row_stride(out),
        out.shape[1],
        index.data_ptr(),
        index.shape[0],
        values.data_ptr(),
        check.row_stride(values),
        None if picked is None else picked.data_ptr(),
        width,
        None if seen is None else seen.data_ptr(),
    )
