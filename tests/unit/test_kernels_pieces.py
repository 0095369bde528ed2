"""pieces: the C++ against torch, byte for byte, and pieces that do not fit."""

from __future__ import annotations

import pytest
import torch

from ecrm.kernels.pieces import Piece, copy_pieces


def _bytes(count: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=random, dtype=torch.uint8)


@pytest.mark.parametrize("width", [1, 3, 4, 8, 16, 37, 64, 100, 260, 512])
def test_rows_are_picked_and_placed_as_torch_does(backend, width):
    source, out = _bytes(40 * width).view(40, width), _bytes(60 * width + 5, seed=1)
    random = torch.Generator().manual_seed(width)
    picked, to = torch.randint(0, 40, (30,), generator=random), torch.randperm(60)[:30]
    expected = out.clone()
    expected[5:].view(60, width)[to] = source[picked]
    copy_pieces(out, [Piece(source, 5, picked, to)], backend=backend)
    assert torch.equal(out, expected)
    expected[: 30 * width] = source[picked].flatten()
    expected[: 40 * width].view(40, width)[to.clamp(max=39)[:1]] = source[:1]
    first = to.clamp(max=39)[:1].contiguous()
    pieces = [Piece(source, 0, picked), Piece(source[:1], 0, None, first)]
    copy_pieces(out, pieces, backend=backend)
    assert torch.equal(out, expected)


def test_pieces_are_copied_one_after_the_other(backend):
    out = torch.zeros(4, dtype=torch.int64)
    words = torch.tensor([7, 8, 9])
    copy_pieces(
        out,
        [Piece(words, 0), Piece(torch.tensor([5.0]), 12), Piece(words[:0], 32)],
        backend=backend,
    )
    assert out[[0, 2, 3]].tolist() == [7, 9, 0]
    assert out.view(torch.float32)[3] == 5.0 and out.view(torch.int32)[2] == 8
    copy_pieces(out, [], backend=backend)


def test_no_rows_and_rows_of_no_bytes_copy_nothing(backend):
    none, out = torch.empty(0, dtype=torch.int64), torch.ones(2, 3)
    pieces = [
        Piece(torch.empty(0, 3), 0, None, none),
        Piece(torch.zeros(4, 3), 0, none, none),
        Piece(torch.zeros(4, 0), 0, torch.tensor([3])),
    ]
    copy_pieces(out, pieces, backend=backend)
    assert (out == 1).all()


@pytest.mark.parametrize(
    "bad",
    [
        Piece(torch.zeros(3), -1),
        Piece(torch.zeros(3), 5),
        Piece(torch.zeros(2, 1), 0, torch.tensor([2])),
        Piece(torch.zeros(2, 1), 0, torch.tensor([-1])),
        Piece(torch.zeros(2, 1), 4, torch.tensor([1]), torch.tensor([3])),
        Piece(torch.zeros(1), 0, None, torch.tensor([-1])),
        Piece(torch.zeros(2, 2), 4, torch.tensor([0, 1])),
    ],
)
def test_a_piece_outside_is_refused_before_anything_is_written(backend, bad):
    out = torch.ones(4)
    with pytest.raises(ValueError, match="piece 1 does not fit: .* of 16"):
        copy_pieces(out, [Piece(torch.zeros(1)), bad], backend=backend)
    assert (out == 1).all()


def test_wrong_arguments_are_refused_with_their_numbers():
    out, one = torch.zeros(4), torch.tensor([1])
    with pytest.raises(TypeError, match="picked of piece 0 is torch.int32"):
        copy_pieces(out, [Piece(out, 0, one.int())])
    with pytest.raises(TypeError, match=r"to of piece 0 is torch.int64 \[1, 1\]"):
        copy_pieces(out, [Piece(out, 0, None, one.view(1, 1))])
    with pytest.raises(ValueError, match="16 bytes, for 3 rows"):
        copy_pieces(out, [Piece(torch.zeros(4), 0, None, torch.arange(3))])
    with pytest.raises(ValueError, match="1 rows picked for 2 places"):
        copy_pieces(out, [Piece(out, 0, one, torch.arange(2))])
    with pytest.raises(ValueError, match="source of piece 0 has strides"):
        copy_pieces(out, [Piece(torch.zeros(4, 2)[:, :1])])
    with pytest.raises(ValueError, match="out has strides"):
        copy_pieces(torch.zeros(4, 2)[:, :1], [])
