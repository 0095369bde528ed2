"""Encoding and decoding: every erasure pattern of the shipped shapes, compared with pyeclib."""

from itertools import combinations

import numpy as np
import pytest

from ecrm.protection.coding import ReedSolomon
from ecrm.protection.coding.code import find_wrong_unit, make_coefficients

SHAPES = [
    (2, 1),
    (3, 1),
    (4, 1),
    (8, 1),
    (2, 2),
    (3, 2),
    (4, 2),
    (6, 2),
    (8, 2),
    (2, 3),
    (4, 3),
    (8, 3),
    (4, 4),
    (6, 4),
]
FRAGMENT_HEADER_BYTES = 80


def random_data(k: int, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=(k, n), dtype=np.uint8)


def all_units(code: ReedSolomon, data: np.ndarray) -> dict[int, np.ndarray]:
    return dict(enumerate(np.concatenate([data, code.encode(data)])))


@pytest.mark.parametrize("k, m", SHAPES)
def test_every_erasure_pattern_up_to_m_is_decoded(k, m):
    code = ReedSolomon(k, m)
    units = all_units(code, random_data(k, 7))
    for count in range(m + 1):
        for lost in combinations(range(k + m), count):
            left = {unit: row for unit, row in units.items() if unit not in lost}
            found = code.reconstruct(left, lost)
            assert sorted(found) == sorted(lost)
            for unit in lost:
                assert np.array_equal(found[unit], units[unit]), (lost, unit)


@pytest.mark.parametrize("k, m", SHAPES)
def test_every_erasure_pattern_beyond_m_is_refused_with_the_numbers(k, m):
    code = ReedSolomon(k, m)
    units = all_units(code, random_data(k, 3))
    for lost in combinations(range(k + m), m + 1):
        left = {unit: row for unit, row in units.items() if unit not in lost}
        with pytest.raises(ValueError, match=f"stripe: {k - 1} of {k} needed units left"):
            code.reconstruct(left, lost)


@pytest.mark.parametrize("k, m", [(2, 1), (4, 2), (4, 3), (4, 4)])
def test_every_choice_of_k_units_gives_every_unit(k, m):
    code = ReedSolomon(k, m)
    units = all_units(code, random_data(k, 5))
    for present in combinations(range(k + m), k):
        for order in (present, present[::-1]):
            rows = code.decode_matrix(order, tuple(range(k + m)))
            assert rows.shape == (k + m, k) and rows.dtype == np.uint8
            single = ReedSolomon(k, m).reconstruct(
                {unit: units[unit] for unit in order}, tuple(range(k + m))
            )
            for unit in range(k + m):
                assert np.array_equal(single[unit], units[unit])


@pytest.mark.parametrize("k, m", SHAPES)
def test_a_delta_of_one_data_unit_updates_the_parity(k, m):
    code = ReedSolomon(k, m)
    old, new = random_data(k, 9), random_data(k, 9)
    new[k - 1] = random_data(1, 9, seed=5)
    from ecrm.protection.coding.gf256 import PRODUCT

    delta = old[k - 1] ^ new[k - 1]
    updated = code.encode(old) ^ PRODUCT[code.coefficients[:, k - 1 :], delta[None, :]]
    assert np.array_equal(updated, code.encode(new))


@pytest.mark.parametrize("k, m", SHAPES)
@pytest.mark.parametrize("n", [1, 16, 64, 100])
def test_parity_bytes_equal_pyeclib_and_pyeclib_decodes_our_stripes(k, m, n):
    ec_iface = pytest.importorskip("pyeclib.ec_iface")
    driver = ec_iface.ECDriver(k=k, m=m, ec_type="isa_l_rs_vand" if m <= 3 else "isa_l_rs_cauchy")
    data = random_data(k, n)
    fragments = driver.encode(data.tobytes())
    payloads = [np.frombuffer(fragment, np.uint8)[FRAGMENT_HEADER_BYTES:] for fragment in fragments]
    padded = np.zeros((k, payloads[0].size), dtype=np.uint8)  # pyeclib pads its payloads
    padded.reshape(-1)[: k * n] = data.reshape(-1)
    if payloads[0].size != n:  # its units then begin elsewhere in the message
        padded = np.stack(payloads[:k])
    assert np.array_equal(np.stack(payloads[:k]), padded)
    parity = ReedSolomon(k, m).encode(padded)
    assert np.array_equal(np.stack(payloads[k:]), parity)

    ours = [
        fragment[:FRAGMENT_HEADER_BYTES] + unit.tobytes()
        for fragment, unit in zip(fragments, [*padded, *parity])
    ]
    for lost in [
        tuple(range(m)),
        tuple(range(k, k + m)),
        tuple(range(k + m))[:: max(1, (k + m) // m)][:m],
    ]:
        left = [fragment for unit, fragment in enumerate(ours) if unit not in lost]
        assert driver.decode(left) == data.tobytes()


def test_no_protection_is_valid_and_recovers_nothing():
    code = ReedSolomon(3, 0)
    data = random_data(3, 4)
    assert code.encode(data).shape == (0, 4)
    assert code.reconstruct(dict(enumerate(data)), ()) == {}
    with pytest.raises(ValueError, match="stripe: 2 of 3 needed units left"):
        code.reconstruct({0: data[0], 2: data[2]}, (1,))


def test_empty_units_are_units():
    code = ReedSolomon(4, 2)
    assert code.encode(np.zeros((4, 0), dtype=np.uint8)).shape == (2, 0)
    assert code.reconstruct({u: np.zeros(0, dtype=np.uint8) for u in range(4)}, (5,))[5].shape == (
        0,
    )


def test_decode_matrices_are_cached_and_cannot_be_changed():
    code = ReedSolomon(4, 2)
    first = code.decode_matrix((0, 1, 2, 4), (3,))
    assert code.decode_matrix([0, 1, 2, 4], [3]) is first
    assert first.tolist() == [[1, 1, 1, 1]]
    for array in (first, code.coefficients):
        with pytest.raises(ValueError):
            array[0, 0] = 7


@pytest.mark.parametrize(
    "present, wanted, message",
    [
        ((0, 1, 2), (3,), "stripe: 3 of 4 needed units left"),
        ((0, 1, 2, 3, 4), (5,), "5 units given, exactly k=4 are used"),
        ((0, 1, 2, 2), (3,), "repeat"),
        ((0, 1, 2, 6), (3,), r"unit numbers \[6\] are outside 0..5"),
        ((0, 1, 2, 3), (-1,), r"unit numbers \[-1\] are outside 0..5"),
    ],
)
def test_wrong_units_are_refused_with_the_numbers(present, wanted, message):
    with pytest.raises(ValueError, match=message):
        ReedSolomon(4, 2).decode_matrix(present, wanted)


def test_wrong_bytes_are_refused():
    code = ReedSolomon(2, 1)
    with pytest.raises(ValueError, match=r"uint8 \[2, n\], got uint8 \[3, 4\]"):
        code.encode(np.zeros((3, 4), dtype=np.uint8))
    with pytest.raises(ValueError, match="got float32"):
        code.encode(np.zeros((2, 4), dtype=np.float32))
    with pytest.raises(ValueError, match="one length"):
        code.reconstruct({0: np.zeros(4, dtype=np.uint8), 1: np.zeros(5, dtype=np.uint8)}, (2,))
    with pytest.raises(ValueError, match="uint8 vectors"):
        code.reconstruct({unit: np.zeros((), dtype=np.uint8) for unit in (0, 1)}, (2,))


def syndromes(code: ReedSolomon, data: np.ndarray, errors: dict[int, np.ndarray]) -> np.ndarray:
    """Held parity XOR the parity of held data, with `errors` in some units of a whole stripe."""
    held = np.concatenate([data, code.encode(data)])
    for unit, error in errors.items():
        held[unit] ^= error
    return held[len(data) :] ^ code.encode(held[: len(data)])


@pytest.mark.parametrize("k, m", SHAPES)
def test_a_single_wrong_unit_is_found_with_its_error(k, m):
    code, data = ReedSolomon(k, m), random_data(k, 5)
    error = np.array([0, 7, 0, 0, 200], np.uint8)
    for unit in range(k + m):
        found = find_wrong_unit(make_coefficients(k, m), syndromes(code, data, {unit: error}))
        if m == 1:
            assert found is None
        else:
            assert found is not None and found[0] == unit
            assert np.array_equal(found[1], error)


@pytest.mark.parametrize("k, m", [shape for shape in SHAPES if shape[1] > 2])
def test_two_wrong_units_are_taken_for_none_of_one(k, m):
    """Whole stripes differ in four units or more, so two errors are never like one."""
    code, data = ReedSolomon(k, m), random_data(k, 5)
    errors = random_data(2, 5, seed=1) | 1
    for pair in combinations(range(k + m), 2):
        wrong = syndromes(code, data, dict(zip(pair, errors, strict=True)))
        assert find_wrong_unit(make_coefficients(k, m), wrong) is None
