"""decode: every backend and instruction set against the numpy code."""

from itertools import combinations

import numpy as np
import pytest
import torch

from ecrm.kernels import native
from ecrm.kernels.decode import decode
from ecrm.protection.coding import ReedSolomon

CPU = native.supported_instruction_sets()


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def as_matrix(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(rows.copy())


def encoded(code: ReedSolomon, n: int, width: int) -> torch.Tensor:
    """All units uint8 [k + m, n, W] of random data."""
    data = random_bytes(code.k, n, width)
    parity = torch.from_numpy(code.encode(data.reshape(code.k, -1).numpy())).reshape(
        code.m, n, width
    )
    return torch.cat([data, parity])


@pytest.mark.parametrize("instruction_set", CPU)
@pytest.mark.parametrize("k, m", [(2, 1), (4, 2), (3, 3), (6, 4)])
def test_every_erasure_pattern(instruction_set, k, m):
    code = ReedSolomon(k, m)
    units = encoded(code, 3, 37)
    with native.forced(instruction_set):
        for lost in combinations(range(k + m), m):
            present = tuple(unit for unit in range(k + m) if unit not in lost)
            found = decode(
                units[list(present)], as_matrix(code.decode_matrix(present, lost)), backend="cpu"
            )
            assert torch.equal(found, units[list(lost)]), lost


@pytest.mark.parametrize("backend", ["reference", *CPU])
@pytest.mark.parametrize("width", [1, 15, 16, 33, 64, 100, 260])
@pytest.mark.parametrize("wanted", [1, 2, 3, 4, 5, 9])
def test_encoding_of_ragged_widths(backend, width, wanted):
    k, n = 5, 7
    matrix, data = random_bytes(wanted, k, seed=3), random_bytes(k, n, width)
    matrix[0] = torch.tensor([0, 1, 2, 1, 0])
    expected = torch.from_numpy(_multiply(matrix.numpy(), data.reshape(k, -1).numpy())).reshape(
        wanted, n, width
    )
    if backend == "reference":
        assert torch.equal(decode(data, matrix, backend=backend), expected)
        return
    with native.forced(backend):
        assert torch.equal(decode(data, matrix, backend="cpu"), expected)


@pytest.mark.parametrize("instruction_set", CPU)
@pytest.mark.parametrize("offset", [0, 1, 13])
def test_a_list_of_misaligned_views(instruction_set, offset):
    storage = [random_bytes(6, 90, seed=seed) for seed in range(3)]
    planes = [plane[:, offset : offset + 70] for plane in storage]
    matrix = random_bytes(2, 3, seed=9)
    expected = _multiply(matrix.numpy(), np.stack([plane.numpy().reshape(-1) for plane in planes]))
    with native.forced(instruction_set):
        found = decode(planes, matrix, backend="cpu")
    assert torch.equal(found, torch.from_numpy(expected).reshape(2, 6, 70))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("n, width, wanted", [(0, 8, 1), (3, 0, 1), (3, 8, 0)])
def test_nothing_to_do(backend, n, width, wanted):
    out = decode(random_bytes(2, n, width), random_bytes(wanted, 2), backend=backend)
    assert out.shape == (wanted, n, width)


@pytest.mark.parametrize(
    "units, matrix, error, message",
    [
        ([], random_bytes(1, 1), ValueError, "0 units given, needed: 1..255"),
        (
            random_bytes(2, 3, 4),
            random_bytes(1, 3),
            ValueError,
            r"matrix has shape \[1, 3\], needed: \[1, 2\]",
        ),
        (
            [random_bytes(3, 4), random_bytes(2, 4)],
            random_bytes(1, 2),
            ValueError,
            r"units\[1\] has shape \[2, 4\]",
        ),
        (
            random_bytes(2, 3, 4).float(),
            random_bytes(1, 2),
            TypeError,
            r"units\[0\] is torch.float32",
        ),
        (random_bytes(2, 3, 4), random_bytes(1, 2).long(), TypeError, "matrix is torch.int64"),
        (random_bytes(2, 3, 4), random_bytes(256, 2), ValueError, "256 units wanted, at most 255"),
    ],
)
def test_wrong_arguments_are_refused(units, matrix, error, message):
    with pytest.raises(error, match=message):
        decode(units, matrix)


def _multiply(matrix: np.ndarray, units: np.ndarray) -> np.ndarray:
    from ecrm.protection.coding.gf256 import multiply_matrices

    return multiply_matrices(matrix, units)
