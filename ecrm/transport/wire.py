"""A list of tensors as one run of bytes, and back: the format both ends of a message agree on.

Layout, everything little-endian int64 words, so that a buffer can travel as int64:

    word 0                      number of tensors, n
    words 1 .. 2n               for each tensor its dtype code and its number of elements
    then for each tensor        its elements, padded with zero bytes to a multiple of 8

A tensor may travel apart, from where it lies: APART is added to its code then, and its elements are not in the run. An empty list
takes no bytes at all. Shapes do not travel: what comes out is one-dimensional. Nothing is pickled, so bytes from a peer can never run code.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import torch

from ecrm.transport.message import Part, Picked

WORD_BYTES = 8

# A dtype's code is its place here; append only, so that two versions can talk to each other.
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
APART = 1 << 16
APART_BYTES = 1 << 17
"""From this size on a tensor travels apart. What matters is the deltas of a step, megabytes in all; the size itself was not tuned."""

CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(DTYPES)}


def check(parts: Sequence[Part]) -> None:
    """Raises ValueError for a tensor that cannot travel: not on the CPU, not contiguous, unknown dtype."""
    for place, part in enumerate(parts):
        tensor = part.source if isinstance(part, Picked) else part
        if tensor.dtype not in CODE_OF_DTYPE:
            raise ValueError(f"tensor {place}: dtype {tensor.dtype} cannot be sent")
        if not tensor.is_cpu:
            raise ValueError(f"tensor {place} is on {tensor.device}; only CPU tensors can be sent")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"tensor {place} of shape {tuple(tensor.shape)} is not contiguous plain memory")


def places_apart(parts: Sequence[Part], most: int) -> tuple[int, ...]:
    """Places of those of `parts`, the first `most`, that should travel apart: large, and whole words of 4 bytes."""
    return tuple(itertools.islice((place for place, part in enumerate(parts) if not isinstance(part, Picked) and _goes_apart(part)), most))


def _goes_apart(tensor: torch.Tensor) -> bool:
    return tensor.nbytes >= APART_BYTES and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor, uint8: what is sent of one that travels apart."""
    if tensor.numel() == 0:  # may have a stride that view refuses
        return np.empty(0, np.uint8)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def packed_bytes(tensors: Sequence[Part], apart: Collection[int] = ()) -> int:
    """Bytes that `tensors` take when packed, a multiple of 8, those at the places `apart` left out; raises as `check` does."""
    if not tensors:
        return 0
    check(tensors)
    total = WORD_BYTES * (1 + 2 * len(tensors))
    for place, tensor in enumerate(tensors):
        if place not in apart:
            total += padded(tensor.numel() * tensor.element_size())
    return total


def pack_into(buffer: np.ndarray, tensors: Sequence[Part], apart: Collection[int] = ()) -> None:
    """Write `tensors` over all of `buffer`: uint8, exactly `packed_bytes(tensors, apart)` long, 8-byte aligned.

    Does not check again what `packed_bytes` has checked.
    """
    if not tensors:
        return
    header_words = 1 + 2 * len(tensors)
    header = buffer[: header_words * WORD_BYTES].view(np.int64)
    header[0] = len(tensors)
    position = header_words * WORD_BYTES
    for place, tensor in enumerate(tensors):
        elements, dtype = tensor.numel(), (tensor.source if isinstance(tensor, Picked) else tensor).dtype
        header[1 + 2 * place] = CODE_OF_DTYPE[dtype]
        header[2 + 2 * place] = elements
        if place in apart:
            header[1 + 2 * place] += APART
            continue
        end = position + elements * dtype.itemsize
        if isinstance(tensor, Picked):
            if elements:
                tensor.gathered(_view(buffer, dtype, elements, position).view(tensor.rows.numel(), *tensor.source.shape[1:]))
        else:
            buffer[position:end] = bytes_of(tensor)
        position += padded(end - position)
        buffer[end:position] = 0


def pack(tensors: Sequence[Part]) -> np.ndarray:
    """`tensors` as one new uint8 buffer of `packed_bytes(tensors)` bytes; errors as there."""
    buffer = np.empty(packed_bytes(tensors), np.uint8)
    pack_into(buffer, tensors)
    return buffer


def unpack(buffer: np.ndarray, apart: Sequence[np.ndarray] = ()) -> list[torch.Tensor]:
    """The tensors packed in all of `buffer` (uint8, 8-byte aligned), as one-dimensional views of it, and of `apart`, what came apart, uint8.

    The views keep their memory alive and do not overlap. Raises ValueError for bytes that no `pack` wrote
    (a wrong length, count or dtype code); payload bytes are not checked.
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
    tensors, came = [], iter(apart)
    position = WORD_BYTES * (1 + 2 * count)
    for code, elements in zip(header[::2], header[1::2]):
        if code >= APART:
            tensors.append(_came_apart(code - APART, elements, next(came, None)))
            continue
        if not 0 <= code < len(DTYPES):
            raise ValueError(f"packed tensors: unknown dtype code {code}")
        dtype = DTYPES[code]
        end = position + padded(elements * dtype.itemsize)
        if elements < 0 or end > buffer.size:
            raise ValueError(f"packed tensors: {elements} elements of {dtype} at byte {position} of {buffer.size}")
        tensors.append(_view(buffer, dtype, elements, position))
        position = end
    if position != buffer.size:
        raise ValueError(f"packed tensors: {buffer.size} bytes, only {position} announced")
    if next(came, None) is not None:
        raise ValueError(f"packed tensors: {len(apart)} came apart, fewer announced")
    return tensors


def _came_apart(code: int, elements: int, memory: np.ndarray | None) -> torch.Tensor:
    if not 0 <= code < len(DTYPES) or memory is None or memory.nbytes != elements * DTYPES[code].itemsize:
        raise ValueError(f"packed tensors: {elements} elements of dtype code {code} announced apart, {'nothing' if memory is None else memory.nbytes} came")
    return _view(memory, DTYPES[code], elements, 0)


def padded(size: int) -> int:
    """Bytes that `size` bytes take in a run."""
    return -(-size // WORD_BYTES) * WORD_BYTES


def _view(buffer: np.ndarray, dtype: torch.dtype, elements: int, position: int) -> torch.Tensor:
    if elements == 0:  # frombuffer refuses it
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=elements, offset=position)
