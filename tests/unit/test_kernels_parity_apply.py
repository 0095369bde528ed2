"""parity_apply: every backend and instruction set against the definition."""

import pytest
import torch

from ecrm.kernels import native
from ecrm.kernels.parity_apply import parity_apply
from ecrm.protection.coding.gf256 import PRODUCT

CPU = native.supported_instruction_sets()
WIDTHS = (
    1,
    2,
    3,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    130,
    191,
    256,
    260,
    264,
    520,
    1000,
    1087,
    1088,
    4100,
)


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def random_rows(n: int, limit: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, limit, (n,), generator=torch.Generator().manual_seed(seed))


def expected(parity, rows, coefficients, delta):
    result = parity.clone()
    for i, row in enumerate(rows.tolist()):
        product = PRODUCT[int(coefficients[i])][delta[i].numpy()]
        result[row] ^= torch.from_numpy(product)
    return result


@pytest.mark.parametrize("instruction_set", CPU)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_with_repeated_rows(instruction_set, width):
    parity, delta = random_bytes(11, width), random_bytes(40, width, seed=1)
    rows, coefficients = random_rows(40, 11), random_bytes(40, seed=2)
    coefficients[:6] = torch.tensor([0, 1, 2, 255, 1, 0])
    wanted = expected(parity, rows, coefficients, delta)
    with native.forced(instruction_set):
        parity_apply(parity, rows, coefficients, delta, backend="cpu")
    assert torch.equal(parity, wanted)


@pytest.mark.parametrize("instruction_set", CPU)
def test_all_65536_products(instruction_set):
    parity = torch.zeros(256, 256, dtype=torch.uint8)
    every_byte = torch.arange(256, dtype=torch.uint8).expand(256, 256)
    with native.forced(instruction_set):
        parity_apply(
            parity,
            torch.arange(256),
            torch.arange(256, dtype=torch.uint8),
            every_byte,
            backend="cpu",
        )
    assert torch.equal(parity, torch.from_numpy(PRODUCT.copy()))


@pytest.mark.parametrize("instruction_set", CPU)
@pytest.mark.parametrize("offset", [0, 1, 3, 7, 33])
@pytest.mark.parametrize("width", [5, 64, 131])
def test_misaligned_views_leave_their_surroundings_alone(instruction_set, offset, width):
    storage, delta_storage = random_bytes(9, 200), random_bytes(20, 180, seed=1)
    parity, delta = storage[:, offset : offset + width], delta_storage[:, 7 : 7 + width]
    rows, coefficients = random_rows(20, 9), random_bytes(20, seed=2)
    wanted = storage.clone()
    wanted[:, offset : offset + width] = expected(parity, rows, coefficients, delta)
    with native.forced(instruction_set):
        parity_apply(parity, rows, coefficients, delta, backend="cpu")
    assert torch.equal(storage, wanted)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("coefficient", [0, 1, 2, 199])
def test_one_coefficient_for_all(backend, coefficient):
    parity, delta, rows = random_bytes(5, 77), random_bytes(30, 77, seed=1), random_rows(30, 5)
    wanted = expected(parity, rows, [coefficient] * 30, delta)
    parity_apply(parity, rows, coefficient, delta, backend=backend)
    assert torch.equal(parity, wanted)


@pytest.mark.parametrize("instruction_set", CPU)
def test_twice_is_not_at_all(instruction_set):
    parity, delta = random_bytes(50, 100), random_bytes(300, 100, seed=1)
    rows, coefficients, before = random_rows(300, 50), random_bytes(300, seed=2), parity.clone()
    with native.forced(instruction_set):
        parity_apply(parity, rows, coefficients, delta)
        assert not torch.equal(parity, before)
        parity_apply(parity, rows, coefficients, delta)
    assert torch.equal(parity, before)


@pytest.mark.parametrize("backend", ["reference", "cpu", "auto"])
@pytest.mark.parametrize("n, width", [(0, 8), (3, 0), (0, 0)])
def test_nothing_to_do(backend, n, width):
    parity = random_bytes(4, width)
    before = parity.clone()
    parity_apply(
        parity, torch.zeros(n, dtype=torch.int64), 1, random_bytes(n, width), backend=backend
    )
    assert torch.equal(parity, before)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"rows": torch.tensor([0, 4])}, ValueError, r"rows\[1\] is 4, outside 0..3"),
        ({"rows": torch.tensor([-1, 0])}, ValueError, r"rows\[0\] is -1, outside 0..3"),
        ({"rows": torch.tensor([0, 1], dtype=torch.int32)}, TypeError, "rows is torch.int32"),
        ({"rows": torch.tensor([[0, 1]])}, ValueError, "rows has shape"),
        ({"rows": torch.arange(4)[::2]}, ValueError, "rows: elements are 2 apart"),
        ({"rows": torch.tensor([0])}, ValueError, r"delta has shape \[2, 8\], needed: \[1, 8\]"),
        ({"delta": random_bytes(2, 9)}, ValueError, r"delta has shape \[2, 9\], needed: \[2, 8\]"),
        ({"delta": random_bytes(2, 8).to(torch.int8)}, TypeError, "delta is torch.int8"),
        ({"delta": random_bytes(8, 2).t()}, ValueError, "elements of a row are 2 apart"),
        (
            {"parity": random_bytes(8).expand(4, 8)},
            ValueError,
            "rows of 8 elements are 0 apart and overlap",
        ),
        ({"coefficients": 256}, ValueError, "coefficient 256 is outside 0..255"),
        (
            {"coefficients": random_bytes(3)},
            ValueError,
            r"coefficients has shape \[3\], needed: \[2\]",
        ),
        ({"coefficients": torch.tensor([1, 2])}, TypeError, "coefficients are torch.int64"),
        (
            {"backend": "gpu"},
            ValueError,
            "backend 'gpu' is not one of reference, cpu, triton, auto",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_write(change, error, message):
    parity = random_bytes(4, 8)
    before = parity.clone()
    arguments = {
        "parity": parity,
        "rows": torch.tensor([0, 1]),
        "coefficients": 3,
        "delta": random_bytes(2, 8),
    }
    with pytest.raises(error, match=message):
        parity_apply(**(arguments | change))
    assert torch.equal(parity, before)
