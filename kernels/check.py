"""Checks of tensor arguments, made before the first write. Every message carries the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ecrm.kernels import native

WEIGHT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def matrix(
    name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], written: bool = False
) -> None:
    """Check for a matrix with contiguous rows; written rows must not overlap."""
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} is {tensor.dtype}, needed: {' or '.join(str(dtype) for dtype in dtypes)}"
        )
    if tensor.dim() != 2:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, needed: two dimensions")
    height, width = tensor.shape
    if width > 1 and tensor.stride(1) != 1:
        raise ValueError(
            f"{name}: elements of a row are {tensor.stride(1)} apart, needed: contiguous rows"
        )
    if written and height > 1 and tensor.stride(0) < width:
        raise ValueError(
            f"{name}: rows of {width} elements are {tensor.stride(0)} apart and overlap"
        )


def shape(name: str, tensor: torch.Tensor, expected: Sequence[int]) -> None:
    """Check for exactly the expected shape."""
    if list(tensor.shape) != list(expected):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, needed: {list(expected)}")


def row_numbers(name: str, rows: torch.Tensor, limit: int) -> None:
    """Check for contiguous int64 [n], with all numbers within 0..limit-1.

    The range is not checked on a GPU, because the check would wait for all work of the GPU.
    """
    if rows.dtype != torch.int64:
        raise TypeError(f"{name} is {rows.dtype}, needed: torch.int64")
    if rows.dim() != 1:
        raise ValueError(f"{name} has shape {list(rows.shape)}, needed: one dimension")
    if not rows.is_contiguous():
        raise ValueError(f"{name}: elements are {rows.stride(0)} apart, needed: contiguous")
    at = -1 if rows.is_cuda else _first_outside(rows, limit)
    if at >= 0:
        raise ValueError(f"{name}[{at}] is {int(rows[at])}, outside 0..{limit - 1}")


def rounds(dtype: torch.dtype) -> bool:
    """Whether results are rounded to `dtype`, bfloat16; float32 needs no rounding."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"rounded to {dtype}, needed: torch.float32 or torch.bfloat16")
    return dtype == torch.bfloat16


def one_device(tensors: dict[str, torch.Tensor]) -> torch.device:
    """The device of all tensors. Raises ValueError for tensors on several devices."""
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        places = {name: str(tensor.device) for name, tensor in tensors.items()}
        raise ValueError(f"tensors on several devices: {places}")
    return devices.pop()


def row_stride(tensor: torch.Tensor) -> int:
    """Elements from one row to the next; for a tensor with a single row, the row's width."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1]


def row_stride_bytes(tensor: torch.Tensor) -> int:
    """Bytes from one row to the next."""
    return row_stride(tensor) * tensor.element_size()


def _first_outside(rows: torch.Tensor, limit: int) -> int:
    if rows.device.type == "cpu" and native.built():
        return int(native.library().ecrm_first_outside(rows.data_ptr(), rows.shape[0], limit))
    outside = torch.nonzero((rows < 0) | (rows >= limit)).flatten()
    return int(outside[0]) if outside.numel() else -1


def states(
    weights: torch.Tensor, state: Sequence[torch.Tensor], widths: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """The optimizer state of `weights`, [R, D], as float32 matrices, [R, width].

    A vector [R] becomes [R, 1]. `widths` are the expected widths; `None` allows any width. The
    result shares memory with `state`.
    """
    if widths is not None and len(state) != len(widths):
        raise ValueError(f"{len(state)} state tensors given, needed: {len(widths)}")
    result = []
    for s, tensor in enumerate(state):
        if tensor.dim() == 1:
            tensor = tensor[:, None]
        matrix(f"state[{s}]", tensor, (torch.float32,), written=True)
        shape(
            f"state[{s}]",
            tensor,
            (weights.shape[0], tensor.shape[1] if widths is None else widths[s]),
        )
        result.append(tensor)
    return result
