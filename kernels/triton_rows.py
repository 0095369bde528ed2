"""Rows for Triton kernels, cut into pieces that one instruction moves.

A piece has four elements, or two or one where width, strides and addresses ask for that. Strides
are counted in pieces, so that the compiler sees that pieces are aligned. Nothing else about the
numbers and addresses of a call is compiled in. Triton by itself makes further kernels for row
counts of 1, or for addresses that 16 happens to divide: in the middle of training.
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
"""Of a program that works on pieces: 16 of each of its 128 threads."""


def kernel(function: Callable[..., None]) -> Any:
    """A Triton kernel that is compiled once for all values of what is not in capitals."""
    names = [name for name in inspect.signature(function).parameters if not name.isupper()]
    return triton.jit(do_not_specialize=names)(function)


def vector_of(*matrices: Tensor) -> int:
    """Elements of a piece, the same in all matrices, of as many columns: 4, 2 or 1."""
    numbers = [matrices[0].shape[1]]
    for matrix in matrices:
        numbers += [matrix.stride(0), *divmod(matrix.data_ptr(), matrix.element_size())]
    return next(size for size in (4, 2, 1) if all(number % size == 0 for number in numbers))


def as_words(*matrices: Tensor) -> list[Tensor]:
    """The same memory as int32, or as bytes where not all widths, strides and addresses fit."""
    rows = [matrix.view(torch.uint8) for matrix in matrices]
    numbers = [number for row in rows for number in (row.shape[1], row.stride(0), row.data_ptr())]
    fit = all(number % 4 == 0 for number in numbers)
    return [row.view(torch.int32) for row in rows] if fit else rows


def programs(n: int, per_row: int, vector: int, elements: int = ELEMENTS) -> tuple[int]:
    """The grid for n rows of `per_row` pieces."""
    return (triton.cdiv(n * per_row, elements // vector),)


@triton.jit
def row_and_piece(per_row, COUNT: tl.constexpr):
    """Of this program's pieces: the row of each, int64, and its place in the row, uint32."""
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
