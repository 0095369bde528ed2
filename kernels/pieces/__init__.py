"""Copy many pieces of memory in one call, to collect rows from all ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ecrm.kernels import dispatch, native

__all__ = ["Piece", "PieceTable", "Pieces", "copy_pieces", "piece_addresses"]

_WORDS = 7
"""Numbers of a piece in C++: see `Piece` of cpu.cpp."""
_NOTHING = (0, 0, 0, 0, 0, 0, 0)


class Piece(NamedTuple):
    """Rows to copy: a contiguous CPU tensor, or some rows of the tensor.

    Legend: R rows of B bytes, n copied rows.

    Args:
        source: Contiguous, any dtype. Without `picked` the tensor counts as n rows.
        at: The byte of `out` at which the copied rows begin.
        picked: int64 [n], contiguous; may repeat. Row i of the copy is `source[picked[i]]`. `None`:
            all rows of `source` in order.
        to: int64 [n], contiguous. Row i goes to row `to[i]` of the rows of B bytes from `at` on.
            `None`: the copied rows lie one after the other.
    """

    source: Tensor
    at: int = 0
    picked: Tensor | None = None
    to: Tensor | None = None


@dataclass(frozen=True)
class PieceTable:
    """Many pieces without an object for each.

    Not checked: addresses.

    Legend: P pieces.

    Args:
        numbers: int64 [P, 7], contiguous. Of each piece the address, the number of rows and the
            bytes of a row of the source; `at`; the addresses of `picked` and of `to`, or 0 for
            `None`; the number of copied rows.
        kept: The memory at the addresses. The addresses are good while `kept` is.
    """

    numbers: np.ndarray
    kept: tuple[object, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Piece:
        """A piece as an object, without the dtype of the source."""
        source, height, width, at, picked, to, count = self.numbers[number].tolist()
        rows = _tensor_at(source, height * width, torch.uint8).view(height, width)
        return Piece(
            rows,
            at,
            _tensor_at(picked, count, torch.int64) if picked else None,
            _tensor_at(to, count, torch.int64) if to else None,
        )


def _tensor_at(address: int, elements: int, dtype: torch.dtype) -> Tensor:
    if not elements:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


Pieces = Sequence[Piece] | PieceTable


def copy_pieces(out: Tensor, pieces: Pieces, backend: str = "auto") -> None:
    """Copy pieces into `out`, one after the other.

    Not checked: that `out` shares no memory with a source.

    Args:
        out: Contiguous, on the CPU, any dtype; changed at the places of the pieces.
        pieces: Any number.

    Raises TypeError or ValueError, with the numbers, before anything is written.
    """
    if not out.is_contiguous() or not out.is_cpu:
        raise ValueError(f"out has strides {out.stride()} on {out.device}, needed: contiguous, cpu")
    chosen = dispatch.choose("copy_pieces", backend, out.device, has_triton=False)
    table = _checked(pieces, out.nbytes)
    if chosen == "reference":
        from ecrm.kernels.pieces import reference

        reference.copy(out, [pieces[number] for number in range(len(pieces))])
        return
    native.library().ecrm_copy_pieces(out.data_ptr(), table.ctypes.data, len(pieces))


def piece_addresses(pieces: Pieces, rows: int, width: int) -> np.ndarray:
    """Where each row of a matrix lies, int64 [rows], before anybody copies the pieces there.

    The matrix has `rows` rows of `width` bytes. Each piece has rows of as many bytes, `at` is 0 and
    `to` is given. The addresses are good while the sources are.

    Raises TypeError or ValueError as `copy_pieces`, and ValueError for a row in no piece or of
    another width.
    """
    table, found = _checked(pieces, rows * width), np.empty(rows, np.int64)
    for number, of_piece in enumerate(table.reshape(-1, _WORDS)[:, 2].tolist()):
        if of_piece not in (0, width):
            raise ValueError(f"rows of {of_piece} bytes in piece {number}, needed: {width}")
    if not native.library().ecrm_piece_addresses(
        found.ctypes.data, rows, table.ctypes.data, len(pieces)
    ):
        raise ValueError(f"row {int((found == 0).argmax())} of {rows} is in no piece")
    return found


def _checked(pieces: Pieces, size: int) -> np.ndarray:
    """The numbers of all pieces, as in cpu.cpp. Raises unless all fit `size` bytes."""
    if isinstance(pieces, PieceTable):
        table = pieces.numbers.reshape(-1)
    else:
        words: list[int] = []
        for number, piece in enumerate(pieces):
            words += _in_words(number, piece)
        table = np.array(words, np.int64)
    bad = native.library().ecrm_first_bad_piece(size, table.ctypes.data, len(pieces))
    if bad >= 0:
        raise ValueError(_outside(size, int(bad), pieces[bad], table[bad * _WORDS :].tolist()))
    return table


def _in_words(number: int, piece: Piece) -> tuple[int, ...]:
    """The numbers of a piece, as in cpu.cpp. Raises TypeError or ValueError."""
    source, at, picked, to = piece
    if not source.is_contiguous() or not source.is_cpu:
        raise ValueError(
            f"source of piece {number} has strides {source.stride()} on {source.device}, "
            "needed: contiguous, cpu"
        )
    size = source.nbytes
    if picked is None and to is None:
        return source.data_ptr(), 1, size, at, 0, 0, 1
    for name, rows in (("picked", picked), ("to", to)):
        if rows is not None and not (
            rows.dtype == torch.int64 and rows.dim() == 1 and rows.is_contiguous()
        ):
            raise TypeError(
                f"{name} of piece {number} is {rows.dtype} {list(rows.shape)}, "
                "needed: torch.int64 of one dimension, contiguous"
            )
    if picked is None:
        assert to is not None
        count = to.numel()
        if size % max(count, 1) or (size and not count):
            raise ValueError(f"source of piece {number} has {size} bytes, for {count} rows")
        if not count:
            return _NOTHING
        return source.data_ptr(), count, size // count, at, 0, to.data_ptr(), count
    count = picked.numel()
    if to is not None and to.numel() != count:
        raise ValueError(f"piece {number} has {count} rows picked for {to.numel()} places")
    if not count:  # an empty tensor has the address null, which means no tensor in C++
        return _NOTHING
    height = source.shape[0] if source.dim() else 0
    return (
        source.data_ptr(),
        height,
        size // max(height, 1),
        at,
        picked.data_ptr(),
        0 if to is None else to.data_ptr(),
        count,
    )


def _outside(size: int, number: int, piece: Piece, words: Sequence[int]) -> str:
    """A piece outside of its source or of a target of `size` bytes, in words."""
    _, height, width, at, *_ = words[:_WORDS]
    some = {"picked": piece.picked, "to": piece.to}
    told = ", ".join(
        f"{name} {int(rows.min())}..{int(rows.max())}"
        for name, rows in some.items()
        if rows is not None and rows.numel()
    )
    return (
        f"piece {number} does not fit: {height} rows of {width} bytes from byte {at} on "
        f"of {size}{told and ', ' + told}"
    )
