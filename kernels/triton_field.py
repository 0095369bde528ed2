"""Multiplication in GF(2^8) modulo 0x11d for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def times(value, coefficient):
    """Multiply every byte of uint32 words by a coefficient (uint32, 0 to 255).

    A step takes bit b of all bytes, and multiplies the bits by coefficient * x^b. The integer
    product of a single bit and a byte cannot carry into the next byte.
    """
    product = value & 0
    for bit in tl.static_range(8):
        product ^= ((value >> bit) & 0x01010101) * coefficient
        coefficient = (coefficient << 1) ^ ((coefficient >> 7) * 0x11D)
    return product
