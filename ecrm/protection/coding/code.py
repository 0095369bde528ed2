"""A systematic Reed-Solomon code over bytes: encoding, decoding, and finding a wrong unit.

Legend: k data units and m parity units per stripe; t counts parity units, d counts data units.
(ISA-L writes m for k + m.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ecrm.protection.coding import gf256

LARGEST_STRIPE = 255

_CACHED_DECODE_MATRICES = 4096


class ReedSolomon:
    """k data units and m parity units of equal length; any k of the k + m give back the rest.

    Units are numbered 0..k-1 (data) and k..k+m-1 (parity). m = 0 is valid and protects nothing.
    Parity bytes equal the payload of pyeclib for the same data with `isa_l_rs_vand` (m <= 3) or
    `isa_l_rs_cauchy` (m > 3). The class is the plain numpy definition; `ecrm.kernels.decode` and
    `ecrm.kernels.parity_apply` are the fast routines, tested against the class.

    Raises ValueError for k < 1, m < 0 or k + m > 255; every other (k, m) decodes all losses of up
    to m units.
    """

    def __init__(self, k: int, m: int):
        self.k = k
        self.m = m
        self.coefficients = make_coefficients(k, m)
        """uint8 [m, k], read-only: parity t is the XOR over d of `coefficients[t, d] * data_d`."""
        self.coefficients.setflags(write=False)
        self._generator = np.concatenate([np.eye(k, dtype=np.uint8), self.coefficients])
        self._decode_matrices: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}

    def __repr__(self) -> str:
        return f"ReedSolomon(k={self.k}, m={self.m})"

    def encode(self, data: np.ndarray) -> np.ndarray:
        """The parity, uint8 [m, n], of data, uint8 [k, n]; n may be 0.

        Raises ValueError for another shape or dtype.
        """
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[0] != self.k:
            raise ValueError(
                f"encode needs uint8 [{self.k}, n], got {data.dtype} {list(data.shape)}"
            )
        return _apply(self.coefficients, list(data))

    def decode_matrix(self, present: Sequence[int], wanted: Sequence[int]) -> np.ndarray:
        """The uint8 [len(wanted), k] matrix M with `wanted_w = XOR_i M[w, i] * present_i`.

        `present` is k different unit numbers in the order of the bytes to be given; `wanted` may
        name any unit, parity included. The result is cached and read-only. Raises ValueError for
        unit numbers out of range, and for `present` numbers repeated or not k in number.
        """
        key = (tuple(present), tuple(wanted))
        found = self._decode_matrices.get(key)
        if found is None:
            self._check(*key)
            inverse = gf256.invert_matrix(self._generator[list(key[0])])
            found = gf256.multiply_matrices(self._generator[list(key[1])], inverse)
            found.setflags(write=False)
            if len(self._decode_matrices) >= _CACHED_DECODE_MATRICES:
                self._decode_matrices.clear()
            self._decode_matrices[key] = found
        return found

    def reconstruct(
        self, units: Mapping[int, np.ndarray], wanted: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """The bytes uint8 [n] of wanted units from at least k `units`, {unit number: uint8 [n]}.

        Of more than k units the k lowest numbers are used: copying data units needs no arithmetic.
        Raises ValueError for fewer than k units, used units not uint8 vectors of one length, or
        unit numbers out of range.
        """
        if len(units) < self.k:
            raise ValueError(
                f"stripe: {len(units)} of {self.k} needed units left "
                f"(present {sorted(units)}, wanted {sorted(wanted)})"
            )
        present = tuple(sorted(units))[: self.k]
        lengths = sorted({units[unit].shape for unit in present})
        if (
            len(lengths) > 1
            or len(lengths[0]) != 1
            or any(units[unit].dtype != np.uint8 for unit in present)
        ):
            found = [(unit, str(units[unit].dtype), units[unit].shape) for unit in present]
            raise ValueError(f"units must be uint8 vectors of one length, got {found}")
        recovered = _apply(
            self.decode_matrix(present, tuple(wanted)), [units[unit] for unit in present]
        )
        return dict(zip(wanted, recovered))

    def _check(self, present: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        total = self.k + self.m
        outside = [unit for unit in present + wanted if not 0 <= unit < total]
        if outside:
            raise ValueError(
                f"unit numbers {outside} are outside 0..{total - 1} (k={self.k}, m={self.m})"
            )
        if len(set(present)) != len(present):
            raise ValueError(f"unit numbers {list(present)} repeat")
        if len(present) < self.k:
            raise ValueError(
                f"stripe: {len(present)} of {self.k} needed units left "
                f"(present {list(present)}, wanted {list(wanted)})"
            )
        if len(present) > self.k:
            raise ValueError(
                f"{len(present)} units given, exactly k={self.k} are used: choose which"
            )


def _apply(rows: np.ndarray, units: list[np.ndarray]) -> np.ndarray:
    """`rows` uint8 [w, k] times k units uint8 [n]: uint8 [w, n]."""
    result = np.zeros((rows.shape[0], units[0].shape[0]), dtype=np.uint8)
    for w, row in enumerate(rows):
        for coefficient, unit in zip(row, units):
            if coefficient == 1:
                result[w] ^= unit
            elif coefficient:
                result[w] ^= gf256.PRODUCT[coefficient][unit]
    return result


def find_wrong_unit(
    coefficients: np.ndarray, syndromes: np.ndarray
) -> tuple[int, np.ndarray] | None:
    """The wrong unit of a stripe, and the unit's error, uint8 [n]; `None` if unknown.

    XOR of the unit with the error makes the stripe whole.

    `coefficients`, uint8 [m, k], are the code's; `syndromes`, uint8 [m, n], are parity as held XOR
    parity encoded from the data, not all zero. A single unit is taken to be wrong. With m >= 2 the
    unit is always found, since any two whole stripes differ in m + 1 units or more; with m = 1
    never.
    """
    m, k = coefficients.shape
    wrong = np.flatnonzero(syndromes.any(axis=1))
    if m < 2:
        return None
    if wrong.size == 1:
        return k + int(wrong[0]), syndromes[wrong[0]]
    if wrong.size == m:
        for unit in range(k):
            error = gf256.PRODUCT[gf256.inverse(int(coefficients[0, unit]))][syndromes[0]]
            if all(
                np.array_equal(gf256.PRODUCT[coefficients[t, unit]][error], syndromes[t])
                for t in range(1, m)
            ):
                return unit, error
    return None


def make_coefficients(k: int, m: int) -> np.ndarray:
    """The uint8 [m, k] matrix C with `parity_t = XOR_d C[t, d] * data_d`.

    m <= 3: `(2^t)^d`, the Vandermonde matrix of ISA-L's `gf_gen_rs_matrix`; the first row is all
    ones, so the first parity is a plain XOR. m > 3: `1 / ((k + t) XOR d)`, the Cauchy matrix of
    ISA-L's `gf_gen_cauchy1_matrix`.

    The two matrices decode every loss of m units, because every square part has an inverse: in a
    Cauchy matrix always; in three Vandermonde rows because x = 2^d is non-zero and different for
    each d < 255, and x^2 too (squaring is one-to-one in the field). A fourth row has parts without
    an inverse (x^3 is not one-to-one), hence the limit of 3. Raises ValueError if k or m is out of
    range: the matrix could not decode.
    """
    if k < 1 or m < 0 or k + m > LARGEST_STRIPE:
        raise ValueError(
            f"a stripe needs k >= 1, m >= 0 and k + m <= {LARGEST_STRIPE}: "
            f"k={k}, m={m}, k + m = {k + m}"
        )
    if m <= 3:
        entries = [[gf256.power(gf256.power(2, t), d) for d in range(k)] for t in range(m)]
    else:
        entries = [[gf256.inverse((k + t) ^ d) for d in range(k)] for t in range(m)]
    return np.array(entries, dtype=np.uint8).reshape(m, k)
