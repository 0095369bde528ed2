"""Sums and means of the rows of bags, without a copy of scattered rows to one matrix."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from ecrm.kernels import check, dispatch, native
from ecrm.kernels.pieces import Piece, Pieces, copy_pieces, piece_addresses

__all__ = ["RowPieces", "bag_sum"]


@dataclass(frozen=True)
class RowPieces:
    """The rows of a matrix, scattered over several source matrices.

    Args:
        rows: The number of rows.
        dimension: Floats of a row.
        pieces: As for `copy_pieces`, at byte 0, with `to`. Sources are float32; every row is in a
            piece.
    """

    rows: int
    dimension: int
    pieces: Pieces

    def copy_into(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the rows into `out`, float32 [rows, dimension], contiguous; returns `out`."""
        copy_pieces(out, self.pieces)
        return out


class _Bags(ctypes.Structure):
    """`ecrm::Bags` of cpu.cpp, field by field."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("addresses", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("uses", ctypes.c_int64),
        ("samples", ctypes.c_int64),
        ("features", ctypes.c_int64),
        ("dimension", ctypes.c_int64),
        ("mean", ctypes.c_int64),
        ("bfloat16", ctypes.c_int64),
    ]


def bag_sum(
    rows: torch.Tensor | RowPieces,
    places: torch.Tensor,
    lengths: torch.Tensor,
    features: int = 1,
    mean: bool = False,
    weights: torch.Tensor | None = None,
    rounded_to: torch.dtype = torch.float32,
    backend: str = "auto",
) -> torch.Tensor:
    """Sum the rows of every bag, in the order of the uses, from zero on.

    Bags are ordered by feature, then by sample. The sums of a sample's bags come out side by side.
    An empty bag gives zeros. With `mean` a sum is divided by the number of uses. With `weights`
    each step is `fma(weight, row, sum)`, rounded once.

    With `rounded_to` bfloat16, every row is rounded to bfloat16 first, and every result last. The
    sums between are float32.

    Legend: U rows of D floats, n uses, B bags.

    Args:
        rows: float32 [U, D], contiguous, on the CPU; or the pieces of the rows.
        places: int64 [n], contiguous: the row of every use, bag after bag.
        lengths: int64 [B], contiguous: the number of uses of every bag.
        features: A divisor of B.
        mean: Whether to divide.
        weights: float32 [n], contiguous: the factor of every use. Only for sums.
        rounded_to: torch.float32 or torch.bfloat16.

    Returns a new float32 [B / features, features * D].

    Raises TypeError or ValueError, with the numbers.
    """
    if isinstance(rows, torch.Tensor):
        check.matrix("rows", rows, (torch.float32,))
        height, dimension = rows.shape
        rows = RowPieces(height, dimension, [Piece(rows, 0, None, torch.arange(height))])
    check.row_numbers("places", places, rows.rows)
    check.row_numbers("lengths", lengths, places.shape[0] + 1)
    if features < 1 or lengths.shape[0] % features:
        raise ValueError(f"{lengths.shape[0]} bags of {features} features, needed: a multiple")
    if mean and weights is not None:
        raise ValueError("a mean has no weights")
    if weights is not None:
        check.shape("weights", weights, places.shape)
        if weights.dtype != torch.float32 or not weights.is_contiguous() or not weights.is_cpu:
            raise TypeError(
                f"weights are {weights.dtype} with strides {weights.stride()} on {weights.device}, "
                "needed: torch.float32, contiguous, cpu"
            )
    rounds = check.rounds(rounded_to)
    chosen = dispatch.choose("bag_sum", backend, places.device, has_triton=False)
    if not native.library().ecrm_lengths_fit(lengths.data_ptr(), lengths.shape[0], places.shape[0]):
        raise ValueError(f"lengths of {int(lengths.sum())} uses in all, needed: {places.shape[0]}")
    if chosen == "reference":
        from ecrm.kernels.bag_sum import reference

        whole = rows.copy_into(torch.empty(rows.rows, rows.dimension))
        sums = reference.bag_sum(
            whole.to(rounded_to).float(), places, lengths, features, mean, weights
        )
        return sums.to(rounded_to).float()
    samples = lengths.shape[0] // features
    out, addresses = (
        torch.empty(samples, features * rows.dimension),
        piece_addresses(rows.pieces, rows.rows, 4 * rows.dimension),
    )
    bags = _Bags(
        out=out.data_ptr(),
        addresses=addresses.ctypes.data,
        places=places.data_ptr(),
        lengths=lengths.data_ptr(),
        weights=None if weights is None else weights.data_ptr(),
        uses=places.shape[0],
        samples=samples,
        features=features,
        dimension=rows.dimension,
        mean=mean,
        bfloat16=rounds,
    )
    native.library().ecrm_bag_sum(ctypes.byref(bags))
    return out
