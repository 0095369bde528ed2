"""Sum values row by row, divide the sums, and test for finite results, in one pass."""

from __future__ import annotations

import ctypes

import torch

from ecrm.kernels import check, dispatch, native
from ecrm.kernels.unit_order import Uses

__all__ = ["segment_sum"]


class _Sums(ctypes.Structure):
    """`ecrm::Sums` of cpu.cpp, field by field."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("dimension", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("value_stride", ctypes.c_int64),
        ("picked", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("divisor", ctypes.c_float),
        ("bfloat16", ctypes.c_int32),
    ]


def segment_sum(
    out: torch.Tensor,
    uses: Uses,
    values: torch.Tensor,
    picked: torch.Tensor | None = None,
    divisor: float = 1.0,
    weights: torch.Tensor | None = None,
    rounded_to: torch.dtype = torch.float32,
    backend: str = "auto",
) -> bool:
    """Sum values row by row, and return whether all results are finite.

    Row u of `out` becomes the sum of `values[picked[use]]` over the row's uses, in the order of
    uses, from zero on, divided by `divisor`, and rounded to `rounded_to`. With `weights` each value
    is first multiplied by the weight of the use, and rounded. A row without uses becomes zeros.
    Matrices may be views with a row stride if rows are contiguous.

    Legend: U rows of D floats, n uses.

    Args:
        out: float32 [U, D], overwritten. Not checked: that `out` and `values` share no memory.
        uses: The uses of the U rows, n in all.
        values: float32 [n, D]; with `picked` any number of rows.
        picked: int64 [n], contiguous; may repeat. `None`: use i has `values[i]`.
        divisor: Rounded to float32.
        weights: float32 [n], contiguous.
        rounded_to: torch.float32 or torch.bfloat16.

    Raises TypeError or ValueError, with the numbers, before anything is written.
    """
    count = uses.order.shape[0]
    check.matrix("out", out, (torch.float32,), written=True)
    check.matrix("values", values, (torch.float32,))
    check.shape("starts", uses.starts, (out.shape[0] + 1,))
    check.shape("values", values, (count if picked is None else values.shape[0], out.shape[1]))
    tensors = {"out": out, "values": values, "starts": uses.starts, "order": uses.order}
    if picked is not None:
        check.shape("picked", picked, (count,))
        check.row_numbers("picked", picked, values.shape[0])
        tensors["picked"] = picked
    if weights is not None:
        check.shape("weights", weights, (count,))
        if weights.dtype != torch.float32 or not weights.is_contiguous():
            raise TypeError(
                f"weights are {weights.dtype} with strides {weights.stride()}, "
                "needed: torch.float32, contiguous"
            )
        tensors["weights"] = weights
    for name, tensor in (("starts", uses.starts), ("order", uses.order)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise TypeError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, "
                "needed: torch.int32 of one dimension, contiguous"
            )
    rounds, device = check.rounds(rounded_to), check.one_device(tensors)
    chosen = dispatch.choose("segment_sum", backend, device, has_triton=False)
    if device.type == "cpu" and not native.library().ecrm_uses_fit(
        uses.starts.data_ptr(), out.shape[0], uses.order.data_ptr(), count
    ):
        raise ValueError(f"uses are not {count} places in the order of {out.shape[0]} rows")
    if chosen == "reference":
        from ecrm.kernels.segment_sum import reference

        of_uses = values if picked is None else values[picked]
        of_uses = of_uses if weights is None else of_uses * weights.unsqueeze(1)
        return reference.segment_sum(out, uses, of_uses, divisor, rounded_to)
    sums = _Sums(
        out=out.data_ptr(),
        out_stride=check.row_stride(out),
        rows=out.shape[0],
        dimension=out.shape[1],
        starts=uses.starts.data_ptr(),
        order=uses.order.data_ptr(),
        values=values.data_ptr(),
        value_stride=check.row_stride(values),
        picked=None if picked is None else picked.data_ptr(),
        weights=None if weights is None else weights.data_ptr(),
        divisor=divisor,
        bfloat16=rounds,
    )
    return bool(native.library().ecrm_segment_sum(ctypes.byref(sums)))
