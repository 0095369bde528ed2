"""Reed-Solomon over GF(2^8): knows bytes only, no ranks, no clocks."""

from ecrm.protection.coding.code import ReedSolomon

__all__ = ["ReedSolomon"]
