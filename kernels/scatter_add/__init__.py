"""Sum rows into rows, in a fixed order."""

from __future__ import annotations

import torch

from ecrm.kernels import check, dispatch, native


def scatter_add(out: torch.Tensor, index: torch.Tensor, values: torch.Tensor, backend: str = "auto") -> None:
    """`out[index[i]] += values[i]` for i = 0, 1, ... n-1 in that order: the same bits on every machine.

    Legend: U rows of D floats, n rows added.
    out: float32 [U, D], changed. index: int64 [n], contiguous, may repeat. values: float32 [n, D].
    Matrices may be views with a row stride, if rows are contiguous. Not checked: that `out` and `values` are different
    memory. Raises TypeError or ValueError, with the numbers, before anything is written.
    """
    check.matrix("out", out, (torch.float32,), written=True)
    check.matrix("values", values, (torch.float32,))
    check.row_numbers("index", index, out.shape[0])
    check.shape("values", values, (index.shape[0], out.shape[1]))
    device = check.one_device({"out": out, "index": index, "values": values})
    chosen = dispatch.choose("scatter_add", backend, device, has_triton=False)
    if values.numel() == 0:
        return
    if chosen == "reference":
        from ecrm.kernels.scatter_add.reference import add

        add(out, index, values)
        return
    native.library().ecrm_scatter_add(
        out.data_ptr(), check.row_stride(out), index.data_ptr(), index.shape[0],
        values.data_ptr(), check.row_stride(values), out.shape[1],
    )  # fmt: skip
