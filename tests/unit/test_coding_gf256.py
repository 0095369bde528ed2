"""The field GF(2^8) against its definition, over all values."""

import numpy as np
import pytest

from ecrm.protection.coding import gf256

ALL = np.arange(256)


def carryless_product(a: int, b: int) -> int:
    """Multiplication of polynomials over GF(2), then the remainder modulo 0x11d."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


def test_all_65536_products_equal_the_definition():
    expected = np.array([[carryless_product(a, b) for b in range(256)] for a in range(256)])
    assert np.array_equal(gf256.PRODUCT, expected)


def test_field_axioms_hold_for_all_values():
    p = gf256.PRODUCT.astype(np.int64)
    assert np.array_equal(p, p.T)
    assert np.array_equal(p[1], ALL)
    assert not p[0].any()
    for a in range(256):
        assert np.array_equal(p[p[a]], p[a][p])  # (a b) c = a (b c) for all b, c
        # a (b + c) = a b + a c
        assert np.array_equal(p[a][ALL[:, None] ^ ALL[None, :]], p[a][:, None] ^ p[a][None, :])


def test_each_nonzero_element_has_one_inverse():
    for a in range(1, 256):
        assert gf256.multiply(a, gf256.inverse(a)) == 1
        assert np.count_nonzero(gf256.PRODUCT[a] == 1) == 1
    with pytest.raises(ZeroDivisionError):
        gf256.inverse(0)


def test_two_generates_every_nonzero_element():
    assert sorted(gf256.EXP[:255].tolist()) == list(range(1, 256))
    assert all(gf256.EXP[gf256.LOG[a]] == a for a in range(1, 256))


def test_powers_equal_repeated_products():
    for a in (0, 1, 2, 3, 4, 29, 142, 255):
        value = 1
        for exponent in range(300):
            assert gf256.power(a, exponent) == value
            value = gf256.multiply(value, a)


def test_the_kernels_use_the_same_products():
    from ecrm.kernels.field import products

    assert np.array_equal(products().numpy(), gf256.PRODUCT)
