"""bag_sum: the C++ against a loop over the uses, to the bit, from rows in several places."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ecrm.kernels.bag_sum import RowPieces, bag_sum
from ecrm.kernels.pieces import Piece, piece_addresses


def _scattered(values: torch.Tensor, sources: int = 3) -> RowPieces:
    """Rows of `values` in several matrices, which hold other rows, too."""
    rows, dimension = values.shape
    pieces = []
    for source in range(sources):
        to = torch.arange(source, rows, sources)
        matrix = torch.full((2 * len(to) + 1, dimension), math.nan)
        picked = torch.arange(len(to)) * 2 + 1
        matrix[picked] = values[to]
        pieces.append(Piece(matrix, 0, picked, to))
    return RowPieces(rows, dimension, pieces)


def _looped(
    values: torch.Tensor, places: torch.Tensor, lengths: torch.Tensor, features: int
) -> torch.Tensor:
    samples, ends = lengths.numel() // features, lengths.cumsum(0).tolist()
    sums = np.zeros((samples, features, values.shape[1]), np.float32)
    for bag, (end, length) in enumerate(zip(ends, lengths.tolist())):
        for place in places[end - length : end].tolist():
            sums[bag % samples, bag // samples] += values[place].numpy()
    return torch.from_numpy(sums.reshape(samples, -1))


@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("dimension", [1, 3, 8, 13, 16, 60, 128, 250])
def test_equals_a_loop_in_the_order_of_uses(backend, dimension, features):
    random = torch.Generator().manual_seed(dimension)
    lengths = torch.randint(0, 5, (4 * features,), generator=random)
    lengths[0] = 0
    places = torch.randint(0, 7, (int(lengths.sum()),), generator=random)
    values = torch.randn(7, dimension, generator=random)
    values *= 10.0 ** torch.randint(-4, 5, (7, 1), generator=random)
    values[3] = -0.0
    expected = _looped(values, places, lengths, features)
    for rows in (values, _scattered(values)):
        sums = bag_sum(rows, places, lengths, features, backend=backend)
        assert torch.equal(sums.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("dimension", [1, 13, 16, 60, 128])
def test_means_and_weighted_sums_have_the_bits_of_torch(backend, dimension):
    random = torch.Generator().manual_seed(dimension)
    lengths = torch.randint(0, 9, (8,), generator=random)
    count = int(lengths.sum())
    places = torch.randint(0, 7, (count,), generator=random)
    values = torch.randn(7, dimension, generator=random)
    values *= 10.0 ** torch.randint(-4, 5, (7, 1), generator=random)
    weights = torch.randn(count, generator=random)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    for rows in (values, _scattered(values)):
        for mode, factors in (("mean", None), ("sum", weights)):
            found = bag_sum(
                rows, places, lengths, mean=mode == "mean", weights=factors, backend=backend
            )
            expected = torch.nn.functional.embedding_bag(
                places,
                values,
                ends,
                mode=mode,
                per_sample_weights=factors,
                include_last_offset=True,
            )
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    sides = bag_sum(values, places, lengths, 2, weights=weights, backend=backend)
    alone = bag_sum(values, places, lengths, weights=weights, backend=backend)
    assert torch.equal(sides, alone.view(2, 4, -1).transpose(0, 1).reshape(4, -1))


def test_a_fused_sum_is_rounded_once(backend):
    # the product is 2^-24 + 2^-70: one more than the middle of two floats, the middle in float64
    one, other = 8384513.0, 8392705.0 * 2.0**-70
    for sign in (1.0, -1.0):
        sums = bag_sum(
            torch.tensor([[sign] * 17, [sign * one] * 17]),
            torch.tensor([0, 1]),
            torch.tensor([2]),
            weights=torch.tensor([1.0, other]),
            backend=backend,
        )
        assert sums.tolist() == [[sign * (1 + 2.0**-23)] * 17]


def test_nothing_to_do(backend):
    none = torch.empty(0, dtype=torch.int64)
    assert bag_sum(torch.empty(0, 5), none, none, 2, backend=backend).shape == (0, 10)
    empty = bag_sum(torch.empty(0, 5), none, torch.tensor([0, 0]), 2, backend=backend)
    assert empty.tolist() == [[0.0] * 10]


def test_rows_in_pieces_are_copied_to_one_place():
    values = torch.randn(10, 4)
    assert torch.equal(_scattered(values).copy_into(torch.empty(10, 4)), values)
    source, to = torch.arange(6.0).view(3, 2), torch.tensor([1, 0])
    places = piece_addresses([Piece(source, 0, torch.tensor([2, 0]), to)], 2, 8)
    assert places.tolist() == [source[0].data_ptr(), source[2].data_ptr()]


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"places": torch.tensor([0, 2])}, ValueError, r"places\[1\] is 2, outside 0..1"),
        ({"places": torch.tensor([0, 1]).int()}, TypeError, "places is torch.int32"),
        ({"lengths": torch.tensor([1, -1])}, ValueError, r"lengths\[1\] is -1, outside 0..2"),
        ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths of 3 uses in all, needed: 2"),
        ({"lengths": torch.tensor([1, 0])}, ValueError, "lengths of 1 uses in all, needed: 2"),
        ({"weights": torch.ones(3)}, ValueError, r"weights has shape \[3\], needed: \[2\]"),
        ({"weights": torch.ones(2), "mean": True}, ValueError, "a mean has no weights"),
        ({"weights": torch.ones(2).double()}, TypeError, "weights are torch.float64"),
        ({"features": 3}, ValueError, "2 bags of 3 features, needed: a multiple"),
        ({"features": 0}, ValueError, "2 bags of 0 features, needed: a multiple"),
        ({"rows": torch.ones(2, 4).double()}, TypeError, "rows is torch.float64"),
        (
            {"rows": RowPieces(2, 4, [Piece(torch.ones(1, 4), 0, None, torch.tensor([1]))])},
            ValueError,
            "row 0 of 2 is in no piece",
        ),
        (
            {"rows": RowPieces(2, 4, [Piece(torch.ones(2, 4), 0, None, torch.tensor([1, 2]))])},
            ValueError,
            "piece 0 does not fit: 2 rows of 16 bytes from byte 0 on of 32, to 1..2",
        ),
        (
            {"rows": RowPieces(2, 4, [Piece(torch.ones(2, 2), 0, None, torch.tensor([0, 1]))])},
            ValueError,
            "rows of 8 bytes in piece 0, needed: 16",
        ),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    given = {"rows": torch.ones(2, 4), "places": torch.tensor([0, 1])}
    given["lengths"] = torch.tensor([1, 1])
    with pytest.raises(error, match=message):
        bag_sum(**(given | change))


@pytest.mark.parametrize("dimension", [1, 13, 16, 60, 128])
@pytest.mark.parametrize("mode", ["sum", "mean", "weights"])
def test_rounded_sums_are_torchs_casts_around_a_sum(backend, dimension, mode):
    random = torch.Generator().manual_seed(dimension)
    lengths = torch.randint(0, 9, (8,), generator=random)
    places = torch.randint(0, 7, (int(lengths.sum()),), generator=random)
    values = torch.randn(7, dimension, generator=random)
    values *= 10.0 ** torch.randint(-4, 5, (7, 1), generator=random)
    values[2] = torch.tensor(1.00390625)  # half between two numbers of 16 bits
    weights = torch.randn(places.numel(), generator=random) if mode == "weights" else None
    near = values.bfloat16().float()
    expected = bag_sum(near, places, lengths, 2, mode == "mean", weights).bfloat16().float()
    for rows in (values, _scattered(values)):
        found = bag_sum(
            rows, places, lengths, 2, mode == "mean", weights, torch.bfloat16, backend=backend
        )
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert not torch.equal(expected, bag_sum(values, places, lengths, 2, mode == "mean", weights))


def test_rounding_keeps_what_is_not_finite(backend):
    odd = [0x7FFFFFFF, 0x7F800001, -1, 0x7F800000, 0x7F7FFFFF, -0x80000000, 0x00000001]
    values = torch.tensor(odd, dtype=torch.int64).to(torch.int32).view(torch.float32).view(-1, 1)
    values = values.expand(-1, 20).contiguous()
    ones = torch.ones(len(odd), dtype=torch.int64)
    found = bag_sum(
        values, torch.arange(len(odd)), ones, rounded_to=torch.bfloat16, backend=backend
    )
    assert found[:3].isnan().all() and (found[3:5] == math.inf).all()
    assert (found[5:] == 0).all()
    with pytest.raises(TypeError, match="rounded to torch.float16"):
        bag_sum(values, torch.arange(len(odd)), ones, rounded_to=torch.float16)
