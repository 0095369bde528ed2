"""The product table of GF(2^8) modulo 0x11d as a torch tensor, for the references.

The table is built from the definition, bit by bit. The kernels do not import
`ecrm.protection.coding`; a test compares both tables.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def products(device: torch.device | str = "cpu") -> torch.Tensor:
    """The products of all bytes, uint8 [256, 256]: entry [a, b] is a times b."""
    a = torch.arange(256, dtype=torch.int32)[:, None].expand(256, 256).clone()
    b = torch.arange(256, dtype=torch.int32)[None, :]
    product = torch.zeros(256, 256, dtype=torch.int32)
    for bit in range(8):
        product ^= torch.where((b >> bit) & 1 == 1, a, 0)
        a = (a << 1) ^ torch.where(a & 0x80 != 0, 0x11D, 0)
    return product.to(torch.uint8).to(device)
