"""Rows for Triton kernels, cut into pieces; one instruction moves a piece.

A piece has four elements, or fewer if widths, strides or addresses are not multiples of four.
Strides count pieces, so the compiler knows the alignment of pieces. No other property of numbers
and addresses is compiled in. Left alone, Triton would compile further kernels in the middle of
training: for row counts of 1, or for addresses divisible by 16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Elements of a program: 16 for each of the program's 128 threads."""


def kernel(function: Callable[..., None]) -> Any:
    """A Triton kernel, compiled once for all values of the parameters without capital names."""
    names = [name for name in inspect.signature(function).parameters if not name.isupper()]
    return triton.jit(do_not_specialize=names)(function)


def vector_of(*matrices: Tensor) -> int:
    """Elements of a piece, 4, 2 or 1, for matrices of equal width."""
    numbers = [matrices[0].shape[1]]
    for matrix in matrices:
        numbers += [matrix.stride(0), *divmod(matrix.data_ptr(), matrix.element_size())]
    return next(size for size in (4, 2, 1) if all(number % size == 0 for number in numbers))


def as_words(*matrices: Tensor) -> list[Tensor]:
    """The same memory as int32; as bytes unless 4 divides all widths, strides and addresses."""
    rows = [matrix.view(torch.uint8) for matrix in matrices]
    numbers = [number for row in rows for number in (row.shape[1], row.stride(0), row.data_ptr())]
    fit = all(number % 4 == 0 for number in numbers)
    return [row.view(torch.int32) for row in rows] if fit else rows


def programs(n: int, per_row: int, vector: int, elements: int = ELEMENTS) -> tuple[int]:
    """The grid for n rows of `per_row` pieces."""
    return (triton.cdiv(n * per_row, elements // vector),)


@triton.jit
def row_and_piece(per_row, COUNT: tl.constexpr):
    """The rows of a program's pieces, int64, and the pieces' places in the rows, uint32."""
    first = tl.program_id(0).to(tl.int64) * COUNT
    first_row = first // per_row
    piece = (first - first_row * per_row).to(tl.uint32) + tl.arange(0, COUNT).to(tl.uint32)
    width = tl.cast(per_row, tl.uint32)
    return first_row + (piece // width).to(tl.int64), piece % width


@triton.jit
def pieces(base, row, stride, piece, VECTOR: tl.constexpr):
    """Pointers to the elements of pieces, [pieces, VECTOR]; `stride` counts pieces."""
    SIZE: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    at = (row * stride + piece) * VECTOR
    place = base + at[:, None] + tl.arange(0, VECTOR)[None, :]
    return tl.multiple_of(place, [SIZE, SIZE * VECTOR])


@triton.jit
def columns(base, row, stride, column, VECTOR: tl.constexpr):
    """Pointers to columns of rows, [rows, columns]; `stride` counts pieces."""
    SIZE: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    at = row * stride * VECTOR
    place = base + at[:, None] + column[None, :]
    return tl.multiple_of(place, [SIZE, SIZE * VECTOR])
