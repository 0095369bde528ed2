"""Multiplication in GF(2^8) modulo 0x11d for Triton kernels, and the words they work on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def times(value, coefficient):
    """Each byte of the uint32 words times one coefficient (uint32, 0 to 255).

    Shift and add, four bytes at a time.
    """
    product = value & 0
    for bit in tl.static_range(8):
        product ^= value & (0 - ((coefficient >> bit) & 1))  # all bits or none
        top = value & 0x80808080
        carry = (top << 1) - (top >> 7)  # 0xff in each byte whose top bit was set
        value = ((value ^ top) << 1) ^ (carry & 0x1D1D1D1D)
    return product


def as_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same memory as int32 if the words fit, else unchanged.

    They fit where last dimensions, strides and addresses of all tensors are multiples of 4.
    """
    if all(t.shape[-1] % 4 == 0 and t.data_ptr() % 4 == 0 and _strides_fit(t) for t in tensors):
        return tuple(t.view(torch.int32) for t in tensors)
    return tensors


def _strides_fit(tensor: torch.Tensor) -> bool:
    return tensor.storage_offset() % 4 == 0 and all(
        stride % 4 == 0 for stride in tensor.stride()[:-1]
    )
