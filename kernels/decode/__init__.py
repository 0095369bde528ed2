"""A matrix times units over GF(2^8), for many stripes at once: decoding, and full encoding."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ecrm.kernels import check, dispatch, native

__all__ = ["decode"]

MOST_UNITS = 255


def decode(
    units: torch.Tensor | Sequence[torch.Tensor], matrix: torch.Tensor, backend: str = "auto"
) -> torch.Tensor:
    """Decode lost units, or encode parity: multiply a matrix with units, over GF(2^8).

    `out[w, i] = XOR over u of matrix[w, u] * units[u][i]`, modulo 0x11d.

    Legend: k units, w wanted units, n stripes, W bytes per unit; k from 1 to 255, w at most 255.

    Args:
        units: uint8 [k, n, W], or k tensors uint8 [n, W]. Rows of W bytes contiguous; all strides
            allowed.
        matrix: uint8 [w, k], contiguous, on the CPU. `ReedSolomon.decode_matrix`, or its
            `coefficients` to encode.

    Returns a new uint8 [w, n, W] on the units' device.

    Raises TypeError or ValueError, with the numbers.
    """
    planes = list(units)
    if not 1 <= len(planes) <= MOST_UNITS:
        raise ValueError(f"{len(planes)} units given, needed: 1..{MOST_UNITS}")
    for u, plane in enumerate(planes):
        check.matrix(f"units[{u}]", plane, (torch.uint8,))
        check.shape(f"units[{u}]", plane, planes[0].shape)
    if matrix.device.type != "cpu":
        raise ValueError(f"matrix is on {matrix.device}, needed: cpu")
    check.matrix("matrix", matrix, (torch.uint8,))
    wanted = matrix.shape[0]
    check.shape("matrix", matrix, (wanted, len(planes)))
    if wanted > MOST_UNITS:
        raise ValueError(f"{wanted} units wanted, at most {MOST_UNITS}")
    device = check.one_device({f"units[{u}]": plane for u, plane in enumerate(planes)})
    chosen = dispatch.choose("decode", backend, device)
    n, width = planes[0].shape
    out = torch.empty(wanted, n, width, dtype=torch.uint8, device=device)
    if out.numel() == 0:
        return out
    if chosen == "cpu":
        _decode_on_cpu(planes, matrix.contiguous(), out)
        return out
    if chosen == "triton":
        from ecrm.kernels.decode.triton import multiply
    else:
        from ecrm.kernels.decode.reference import multiply
    multiply(planes, matrix, out)
    return out


def _decode_on_cpu(planes: list[torch.Tensor], matrix: torch.Tensor, out: torch.Tensor) -> None:
    k, wanted = len(planes), out.shape[0]
    n, width = planes[0].shape
    strides = [check.row_stride_bytes(plane) for plane in planes]
    if all(stride == width for stride in strides):
        n, width, strides = 1, n * width, [n * width] * k
    native.library().ecrm_decode(
        (ctypes.c_void_p * k)(*(plane.data_ptr() for plane in planes)),
        (ctypes.c_int64 * k)(*strides),
        k,
        matrix.data_ptr(),
        wanted,
        (ctypes.c_void_p * wanted)(*(plane.data_ptr() for plane in out)),
        (ctypes.c_int64 * wanted)(*[width] * wanted),
        n,
        width,
    )
