"""scatter_add equals a sequential loop to the bit."""

import numpy as np
import pytest
import torch

from ecrm.kernels.scatter_add import scatter_add


def sequential(out, index, values):
    result = out.numpy().copy()
    for i, row in enumerate(index.tolist()):
        result[row] = (result[row] + values[i].numpy()).astype(np.float32)
    return torch.from_numpy(result)


@pytest.mark.parametrize("dimension", [1, 3, 8, 13, 64, 1024])
def test_equals_a_loop_in_index_order(backend, dimension):
    random = torch.Generator().manual_seed(dimension)
    out = torch.randn(9, dimension, generator=random)
    index = torch.randint(0, 9, (100,), generator=random)
    values = torch.randn(100, dimension, generator=random) * 10.0 ** torch.randint(
        -4, 5, (100, 1), generator=random
    )
    expected = sequential(out, index, values)
    scatter_add(out, index, values, backend=backend)
    assert torch.equal(out, expected)


def test_the_order_matters_to_the_bits():
    """The twin: another order gives other bits, so the test above can fail."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(100, 64, generator=random)
    out, reverse = torch.zeros(1, 64), torch.zeros(1, 64)
    scatter_add(out, torch.zeros(100, dtype=torch.int64), values)
    scatter_add(reverse, torch.zeros(100, dtype=torch.int64), values.flip(0).contiguous())
    assert not torch.equal(out, reverse)


def test_strided_views(backend):
    storage, wide = torch.zeros(4, 10), torch.randn(6, 9)
    index = torch.tensor([3, 0, 3, 3, 1, 0])
    expected = sequential(torch.zeros(4, 7), index, wide[:, 2:])
    scatter_add(storage[:, 1:8], index, wide[:, 2:], backend=backend)
    assert torch.equal(storage[:, 1:8], expected)
    assert storage[:, [0, 8, 9]].abs().sum() == 0


@pytest.mark.parametrize("dimension, width", [(1, 1), (8, 8), (13, 16), (64, 66)])
def test_rows_not_seen_yet_need_hold_nothing(backend, dimension, width):
    random = torch.Generator().manual_seed(dimension)
    index = torch.randint(0, 9, (60,), generator=random)
    index[index == 4] = 5
    values = torch.randn(60, dimension, generator=random)
    values[::7] = -0.0
    storage, seen = torch.full((9, width + 1), torch.nan), torch.zeros(9, dtype=torch.uint8)
    out = storage[:, :width]
    for part in (slice(0, 20), slice(20, 60)):
        scatter_add(out, index[part], values[part], backend=backend, seen=seen)
    expected = sequential(torch.zeros(9, dimension), index, values)
    there = torch.arange(9) != 4
    assert seen.tolist() == there.int().tolist()
    assert torch.equal(out[there, :dimension].view(torch.int32), expected[there].view(torch.int32))
    assert (
        not out[there, dimension:].any()
        and storage[4].isnan().all()
        and storage[:, width].isnan().all()
    )


@pytest.mark.parametrize("dimension", [1, 13, 64])
@pytest.mark.parametrize("count", [5, 200])
def test_values_are_picked(backend, dimension, count):
    random = torch.Generator().manual_seed(dimension)
    index, picked = (
        torch.randint(0, 9, (60,), generator=random),
        torch.randint(0, count, (60,), generator=random),
    )
    values = torch.randn(count, dimension + 2, generator=random)[:, 1:-1]
    out, seen = torch.full((9, dimension), torch.nan), torch.zeros(9, dtype=torch.uint8)
    scatter_add(out, index, values, backend=backend, seen=seen, picked=picked)
    there = seen == 1
    assert torch.equal(
        out[there], sequential(torch.zeros(9, dimension), index, values[picked])[there]
    )
    zeros = torch.zeros(9, dimension)
    scatter_add(zeros, index, values, backend=backend, picked=picked)
    assert torch.equal(zeros[there], out[there])


def test_nothing_to_do(backend):
    out = torch.ones(3, 4)
    scatter_add(out, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4), backend=backend)
    assert (out == 1).all()
    scatter_add(
        out,
        torch.zeros(0, dtype=torch.int64),
        torch.ones(5, 4),
        backend=backend,
        picked=torch.zeros(0, dtype=torch.int64),
    )
    assert (out == 1).all()
    scatter_add(
        torch.ones(3, 0), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 0), backend=backend
    )


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"index": torch.tensor([0, 3])}, ValueError, r"index\[1\] is 3, outside 0..2"),
        ({"values": torch.ones(2, 5)}, ValueError, r"values has shape \[2, 5\], needed: \[2, 4\]"),
        ({"values": torch.ones(2, 4).double()}, TypeError, "values is torch.float64"),
        ({"values": torch.ones(2, 3)}, ValueError, r"values has shape \[2, 3\], needed: \[2, 4\]"),
        (
            {"values": torch.ones(2, 5), "seen": torch.zeros(3, dtype=torch.uint8)},
            ValueError,
            r"values has shape \[2, 5\], needed: \[2, 4\]",
        ),
        ({"picked": torch.tensor([0, 2])}, ValueError, r"picked\[1\] is 2, outside 0..1"),
        ({"picked": torch.tensor([0])}, ValueError, r"picked has shape \[1\], needed: \[2\]"),
        (
            {"seen": torch.zeros(2, dtype=torch.uint8)},
            ValueError,
            r"seen has shape \[2\], needed: \[3\]",
        ),
        ({"seen": torch.zeros(3, dtype=torch.bool)}, TypeError, "seen is torch.bool"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_write(change, error, message):
    out = torch.ones(3, 4)
    with pytest.raises(error, match=message):
        scatter_add(
            **({"out": out, "index": torch.tensor([0, 1]), "values": torch.ones(2, 4)} | change)
        )
    assert (out == 1).all()
