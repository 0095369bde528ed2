"""Divide numbers, and test in the same pass whether all quotients are finite."""

from __future__ import annotations

import torch

from ecrm.kernels import check, dispatch, native

__all__ = ["divide"]


def divide(
    values: torch.Tensor, divisor: float, out: torch.Tensor | None = None, backend: str = "auto"
) -> bool:
    """Divide `values` into `out`, and return whether all quotients are finite.

    Args:
        values: float32, contiguous, any shape.
        divisor: Rounded to float32.
        out: float32, contiguous, of the same shape, overwritten. `None`: `values` itself. Not
            checked: that `out` does not overlap `values` in part.

    Raises TypeError or ValueError, with the numbers, before anything is written.
    """
    target = values if out is None else out
    for name, tensor in (("values", values), ("out", target)):
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} is {tensor.dtype}, needed: torch.float32")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, needed: contiguous")
    check.shape("out", target, values.shape)
    device = check.one_device({"values": values, "out": target})
    chosen = dispatch.choose("divide", backend, device, has_triton=False)
    if chosen == "reference":
        from ecrm.kernels.divide import reference

        return reference.divide(target, values, divisor)
    return bool(
        native.library().ecrm_divide(target.data_ptr(), values.data_ptr(), values.numel(), divisor)
    )
