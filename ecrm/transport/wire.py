"""Pack a list of tensors and heads into a single run of bytes, and unpack the run.

Layout, everything little-endian int64 words, to let a buffer travel as int64:

    word 0                      number of parts, n
    words 1 .. 2n               for each part a code and a length: of a tensor its dtype's code and
                                its number of elements, of a head HEAD and its number of words
    then                        the words of all heads
    then for each tensor        its elements, padded with zero bytes to a multiple of 8

A tensor may travel apart, sent from its own memory: then APART is added to the code, and the
elements are not in the run. A tensor may also be shared: then SHARED is added to the code, and a
word among the heads gives the tensor's offset in the sender's memory, readable by the receiver. For
rows picked from shared memory (PICKED) three words give the offset of the matrix, the width of the
matrix and the number of picked rows; the run holds the row numbers, int64, in place of the rows. An
empty list takes no bytes at all. Shapes do not travel: unpacked tensors are one-dimensional, except
the matrix of picked rows. Nothing is pickled: bytes from a peer can never run code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ecrm.kernels.messages import order_parts, write_messages
from ecrm.kernels.messages.codes import (
    APART,
    GROUP_NUMBERS,
    HEAD,
    PART_NUMBERS,
    PICKED,
    SHARED,
)
from ecrm.transport.message import Part, Picked, Received
from ecrm.transport.outbox import Spread

WORD_BYTES = 8

# A dtype's code is its place here.
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
WORDS_OF_PICKED = 3
APART_BYTES = 1 << 17
"""From this size on a tensor travels apart.

Chosen for the deltas of a step, megabytes in all. The size itself was not tuned.
"""

SHARED_BYTES = 1 << 10
"""A tensor is shared, if possible, when the message gets shorter by so much. Not tuned."""

NOTHING_SHARED: Mapping[int, int] = {}

CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(DTYPES)}


def _new_bytes(size: int) -> np.ndarray:
    """New memory, uint8 [size]."""
    return np.empty(size, np.uint8)


def check(parts: Sequence[Part], sound: set[int] | None = None) -> None:
    """Raise ValueError for a tensor that cannot travel.

    Such a tensor is not on the CPU, not contiguous plain memory, or of an unknown dtype; or the
    picked rows are not int64, one-dimensional and contiguous. Heads are not checked: numbers of
    more than 64 bits raise OverflowError during packing.

    `sound` are ids of matrices of picked rows found sound before, for messages to many ranks.
    """
    for place, part in enumerate(parts):
        if isinstance(part, tuple):
            continue
        if not isinstance(part, Picked):
            _check_tensor(place, part)
            continue
        rows = part.rows
        if rows.dtype != torch.int64 or rows.dim() != 1 or not rows.is_contiguous():
            raise ValueError(
                f"tensor {place}: picked are {rows.dtype} {tuple(rows.shape)}, "
                "needed: torch.int64 of one dimension, contiguous"
            )
        if sound is None or id(part.source) not in sound:
            _check_tensor(place, part.source)
            if sound is not None:
                sound.add(id(part.source))


def _check_tensor(place: int, tensor: torch.Tensor) -> None:
    if tensor.dtype not in CODE_OF_DTYPE:
        raise ValueError(f"tensor {place}: dtype {tensor.dtype} cannot be sent")
    if not tensor.is_cpu:
        raise ValueError(f"tensor {place} is on {tensor.device}; only CPU tensors can be sent")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"tensor {place} of shape {tuple(tensor.shape)} is not contiguous plain memory"
        )


def places_of(parts: Sequence[Part], size: int) -> list[int]:
    """Places of `parts` that need no packing: tensors of `size` bytes or more in 4-byte words."""
    return [
        place
        for place, part in enumerate(parts)
        if not isinstance(part, (tuple, Picked)) and _is_words(part, size)
    ]


def worth_sharing(parts: Sequence[Part]) -> list[tuple[int, torch.Tensor]]:
    """Places of `parts` to send as shared memory if possible, with the tensor of a part."""
    return [
        (place, part.source if isinstance(part, Picked) else part)
        for place, part in enumerate(parts)
        if not isinstance(part, tuple) and spared(part) >= SHARED_BYTES
    ]


def spared(part: Part) -> int:
    """Bytes saved in a message by a tensor or picked rows in shared memory."""
    assert not isinstance(part, tuple)
    return padded(_size(part)) - WORD_BYTES * _words_of_shared(part)


def _words_of_shared(part: torch.Tensor | Picked) -> int:
    """The number of words for the place of a part in shared memory."""
    return WORDS_OF_PICKED + part.rows.numel() if isinstance(part, Picked) else 1


def _size(part: torch.Tensor | Picked) -> int:
    """Bytes of a tensor, or of the rows picked from a tensor."""
    return part.numel() * part.element_size()


def _is_words(tensor: torch.Tensor, size: int) -> bool:
    return tensor.nbytes >= size and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0


def bytes_of(tensor: Part) -> np.ndarray:
    """The memory of a contiguous tensor, uint8, as sent apart."""
    assert isinstance(tensor, torch.Tensor)
    if tensor.numel() == 0:  # view may refuse the stride of an empty tensor
        return np.empty(0, np.uint8)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def packed_bytes(
    parts: Sequence[Part], apart: Collection[int] = (), shared: Mapping[int, int] = NOTHING_SHARED
) -> int:
    """The number of bytes of packed `parts`, a multiple of 8.

    Tensors at the places `apart` and in `shared` are left out. Raises like `check`.
    """
    if not parts:
        return 0
    check(parts)
    total = WORD_BYTES * (1 + 2 * len(parts))
    for place, part in enumerate(parts):
        if isinstance(part, tuple):
            total += WORD_BYTES * len(part)
        elif place in shared:
            total += WORD_BYTES * _words_of_shared(part)
        elif place not in apart:
            total += padded(_size(part))
    return total


@dataclass(frozen=True)
class Addressed:
    """A spread for some messages of a call.

    Legend: G groups.

    Args:
        spread: The groups.
        messages: The place of each group's message among the lists of the call, int64 [G]; below 0
            for a group that is not of the call.
        offset: Where the picked rows' matrix lies in memory readable by some receivers, or `None`.
        readable: Whether a group's receiver reads that memory, bool [G].
    """

    spread: Spread
    messages: np.ndarray
    offset: int | None
    readable: np.ndarray

    @cached_property
    def shared(self) -> np.ndarray:
        """Whether a group travels as places in shared memory, bool [G], as `worth_sharing` says."""
        return self.spared >= SHARED_BYTES

    @cached_property
    def spared(self) -> np.ndarray:
        """The bytes saved in each message by shared memory, int64 [G]; below 0: not readable."""
        payload, counts = self.spread.payload, self.spread.counts
        if self.offset is None or not isinstance(payload, Picked):
            return np.full(len(counts), -1)
        size = -(-counts * payload.row_bytes() // WORD_BYTES) * WORD_BYTES
        here = self.readable & (self.messages >= 0)
        return np.where(here, size - WORD_BYTES * (WORDS_OF_PICKED + counts), -1)


def pack_all(
    lists: Sequence[Sequence[Part]],
    apart: Sequence[Collection[int]],
    shared: Sequence[Mapping[int, int]],
    memory: Callable[[int], np.ndarray] = _new_bytes,
    spreads: Sequence[Addressed] = (),
) -> list[np.ndarray]:
    """Return each list of parts packed, uint8, all in one piece of `memory`, 8-byte aligned.

    The groups of `spreads` come first in a message. Tensors at the places `apart` and in `shared`
    are left out. `shared` gives, by list and place, the offset of a tensor, or of the matrix of
    picked rows, in memory readable by the receiver. Raises like `check`, before asking for memory.
    """
    sound: set[int] = set()
    table, words = list[tuple[int, ...]](), list[int]()
    counts = np.zeros(len(lists), np.int64)
    for number, parts in enumerate(lists):
        if parts:
            check(parts, sound)
            _describe(parts, apart[number], shared[number], table, words)
            counts[number] = len(parts)
    # numbers of more than 64 bits raise OverflowError
    numbers = np.array(words, np.int64)
    rows = np.array(table, np.int64).reshape(-1, PART_NUMBERS)
    rows[:, 2] = numbers.ctypes.data + WORD_BYTES * rows[:, 2]
    if spreads:
        kept = [_groups_of(addressed, sound) for addressed in spreads]
        groups = np.array([run for run, _ in kept], np.int64).reshape(-1, GROUP_NUMBERS)
        rows, starts = order_parts(groups, rows, counts)
    else:
        starts = np.concatenate([[0], counts.cumsum()])
    buffer, ends = write_messages(rows, starts, memory)
    last = ends.tolist()
    return [buffer[begin:end] for begin, end in zip([0, *last], last)]


def _describe(
    parts: Sequence[Part],
    apart: Collection[int],
    shared: Mapping[int, int],
    table: list[tuple[int, ...]],
    words: list[int],
) -> None:
    """Append the parts of a message to `table`, and their words among the heads to `words`.

    As in `write_messages`, with the place in `words` for the address of words.
    """
    for place, part in enumerate(parts):
        at = len(words)
        if isinstance(part, tuple):
            words += part
            table.append((HEAD, len(part), at, len(part), 0, 0, 0, 0, 0))
            continue
        rows = part.rows if isinstance(part, Picked) else None
        tensor = part.source if isinstance(part, Picked) else part
        code, elements = CODE_OF_DTYPE[tensor.dtype], part.numel()
        if place in shared and rows is None:
            words.append(shared[place])
            table.append((code + SHARED, elements, at, 1, 0, 0, 0, 0, 0))
        elif place in shared and rows is not None:
            words += (shared[place], tensor[:1].numel(), rows.numel())
            here = rows.data_ptr(), 1, rows.nbytes, 0, 1
            table.append((code + PICKED, tensor.numel(), at, WORDS_OF_PICKED, *here))
        elif place in apart:
            table.append((code + APART, elements, at, 0, 0, 0, 0, 0, 0))
        elif not elements:
            table.append((code, 0, at, 0, 0, 0, 0, 0, 0))
        elif isinstance(part, Picked):
            of_source = tensor.data_ptr(), tensor.shape[0], part.row_bytes()
            of_rows = part.rows.data_ptr(), part.rows.numel()
            table.append((code, elements, at, 0, *of_source, *of_rows))
        else:
            table.append((code, elements, at, 0, tensor.data_ptr(), 1, tensor.nbytes, 0, 1))


def _groups_of(
    addressed: Addressed, sound: set[int]
) -> tuple[tuple[int, ...], tuple[np.ndarray, ...]]:
    """The groups of a spread, as for `order_parts`, and memory to keep for these.

    Raises like `check`.
    """
    spread = addressed.spread
    check([spread.payload], sound)
    messages, heads, counts = (
        np.ascontiguousarray(numbers, np.int64)
        for numbers in (addressed.messages, spread.heads, spread.counts)
    )
    of_groups = len(counts), messages.ctypes.data, heads.ctypes.data, heads.shape[1]
    payload = spread.payload
    if not isinstance(payload, Picked):
        memory = payload.data_ptr(), payload.numel(), payload.element_size(), 0, 0, 0, 0, 0
        code = CODE_OF_DTYPE[payload.dtype]
        return (*of_groups, counts.ctypes.data, code, 1, *memory), (messages, heads, counts)
    source, width = payload.source, payload.row_bytes()
    shared, places, here = addressed.shared, np.empty(0, np.int64), (0, 0, 0, 0)
    if addressed.offset is not None and shared.any():
        places = np.empty((len(counts), WORDS_OF_PICKED), np.int64)
        here = shared.ctypes.data, addressed.offset, source.numel(), places.ctypes.data
    row = CODE_OF_DTYPE[source.dtype], width // source.element_size()
    memory = source.data_ptr(), source.shape[0], width, payload.rows.data_ptr(), *here
    return (*of_groups, counts.ctypes.data, *row, *memory), (messages, heads, counts, places)


def pack(
    parts: Sequence[Part],
    shared: Mapping[int, int] = NOTHING_SHARED,
    apart: Collection[int] = (),
) -> np.ndarray:
    """Return `parts` as a new uint8 buffer of `packed_bytes(parts, apart, shared)` bytes."""
    return pack_all([parts], [apart], [shared])[0]


def unpack(
    buffer: np.ndarray, apart: Sequence[np.ndarray] = (), shared: np.ndarray | None = None
) -> list[Received]:
    """Return the heads and tensors packed in all of `buffer`, uint8, 8-byte aligned.

    Tensors are one-dimensional views of `buffer`; of `apart`, the memory received apart, uint8; or
    of `shared`, all readable memory of the sender, uint8. Rows picked from `shared` come as
    `Picked`.

    The views keep their memory alive and, except views of `shared`, do not overlap. Raises
    ValueError for bytes not written by `pack` (a wrong length, count, dtype code or place in
    `shared`); payload bytes are not checked.
    """
    if buffer.size == 0:
        return []
    if buffer.size % WORD_BYTES:
        raise ValueError(f"packed tensors: {buffer.size} bytes is no multiple of {WORD_BYTES}")
    words = buffer.view(np.int64)
    count = int(words[0])
    if not 0 < count <= (words.size - 1) // 2:
        raise ValueError(f"packed tensors: {count} announced in {buffer.size} bytes")
    header = words[1 : 1 + 2 * count].tolist()
    codes, lengths = header[::2], header[1::2]
    first = 1 + 2 * count
    last = first + sum(
        length if code == HEAD else _head_words_of_shared(code)
        for code, length in zip(codes, lengths)
    )
    if min(lengths) < 0 or last > words.size:
        raise ValueError(
            f"packed tensors: lengths down to {min(lengths)} and heads up to word {last} "
            f"announced in {buffer.size} bytes"
        )
    numbers = iter(words[first:last].tolist())
    parts: list[Received] = []
    came = iter(apart)
    position = WORD_BYTES * last
    for code, elements in zip(codes, lengths):
        if code == HEAD:
            parts.append(tuple(itertools.islice(numbers, elements)))
            continue
        picked = code >= PICKED
        if code >= SHARED:
            source = _shared_view(
                code - (PICKED if picked else SHARED), elements, next(numbers), shared
            )
            if not picked:
                parts.append(source)
                continue
            columns, rows = next(numbers), next(numbers)
            if rows < 0 or columns < 1 or elements % columns:
                raise ValueError(
                    f"packed tensors: {rows} rows of {columns} of {elements} elements picked"
                )
            code, elements = CODE_OF_DTYPE[torch.int64], rows
        if code >= APART:
            parts.append(_came_apart(code - APART, elements, next(came, None)))
            continue
        if not 0 <= code < len(DTYPES):
            raise ValueError(f"packed tensors: unknown dtype code {code}")
        dtype = DTYPES[code]
        end = position + padded(elements * dtype.itemsize)
        if end > buffer.size:
            raise ValueError(
                f"packed tensors: {elements} elements of {dtype} "
                f"at byte {position} of {buffer.size}"
            )
        came_here = _view(buffer, dtype, elements, position)
        parts.append(Picked(source.view(-1, columns), came_here) if picked else came_here)
        position = end
    if position != buffer.size:
        raise ValueError(f"packed tensors: {buffer.size} bytes, only {position} announced")
    if next(came, None) is not None:
        raise ValueError(f"packed tensors: {len(apart)} came apart, fewer announced")
    return parts


def _head_words_of_shared(code: int) -> int:
    """The number of words among the heads for the place of a shared part."""
    return WORDS_OF_PICKED if code >= PICKED else int(code >= SHARED)


def _came_apart(code: int, elements: int, memory: np.ndarray | None) -> torch.Tensor:
    if (
        not 0 <= code < len(DTYPES)
        or memory is None
        or memory.nbytes != elements * DTYPES[code].itemsize
    ):
        raise ValueError(
            f"packed tensors: {elements} elements of dtype code {code} announced apart, "
            f"{'nothing' if memory is None else memory.nbytes} came"
        )
    return _view(memory, DTYPES[code], elements, 0)


def _shared_view(
    code: int, elements: int, position: int, memory: np.ndarray | None
) -> torch.Tensor:
    there = -1 if memory is None else memory.nbytes
    if (
        memory is None
        or not 0 <= code < len(DTYPES)
        or not 0 <= position <= there - elements * DTYPES[code].itemsize
    ):
        raise ValueError(
            f"packed tensors: {elements} elements of dtype code {code} shared at byte {position}, "
            f"{max(there, 0)} bytes can be read"
        )
    return _view(memory, DTYPES[code], elements, position)


def padded(size: int) -> int:
    """The number of bytes for `size` bytes in a run."""
    return -(-size // WORD_BYTES) * WORD_BYTES


def _view(buffer: np.ndarray, dtype: torch.dtype, elements: int, position: int) -> torch.Tensor:
    if elements == 0:  # frombuffer refuses zero elements
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=elements, offset=position)
