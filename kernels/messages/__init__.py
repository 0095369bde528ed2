"""Write the messages to all ranks in one call, and read the messages of all ranks in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ecrm.kernels import dispatch, native
from ecrm.kernels.messages.codes import (
    CAME_NUMBERS,
    CODES,
    GROUP_NUMBERS,
    PART_NUMBERS,
)

__all__ = ["order_parts", "read_messages", "write_messages"]

_CPU = torch.device("cpu")


def order_parts(
    groups: np.ndarray, parts: np.ndarray, counts: np.ndarray, backend: str = "auto"
) -> tuple[np.ndarray, np.ndarray]:
    """Put the parts of many messages in order, for `write_messages`.

    A group is a head and a tensor: elements of an array, or rows picked from a matrix. A message
    has its groups first, in the given order, and then its single parts. Not checked: addresses, and
    that messages exist.

    Legend: S runs of groups, G groups of a run, M messages, P single parts.

    Args:
        groups: int64 [S, 15], contiguous. Of each run: G; the address of the message of each group,
            int64 [G], below 0 for no message; the address of the heads, int64 [G, H], and H; the
            address of the elements or picked rows of each group, int64 [G]; the code; the elements
            of a row, 1 for an array; the address of the source, its rows, and the bytes of a row;
            the address of the picked rows of all groups, or 0 for an array; the address of a byte
            for each group, whether the receiver reads the source, or 0 for no group; the offset of
            the source in the memory of this rank; the elements of the source; the address of memory
            for words of groups that the receiver reads, int64 [G, 3].
        parts: int64 [P, 9], contiguous, as for `write_messages`, message by message.
        counts: The single parts of each message, int64 [M].

    Returns the parts, int64 [all parts, 9], and `starts`, int64 [M + 1], for `write_messages`.
    """
    _check("groups", groups, GROUP_NUMBERS)
    _check("parts", parts, PART_NUMBERS)
    if counts.dtype != np.int64 or counts.ndim != 1 or counts.sum() != len(parts):
        raise ValueError(f"counts {counts.dtype} {counts.shape} are not of {len(parts)} parts")
    if dispatch.choose("order_parts", backend, _CPU, has_triton=False) == "reference":
        from ecrm.kernels.messages import reference

        return reference.order(groups, parts, counts)
    starts, order = np.empty(len(counts) + 1, np.int64), native.library().ecrm_order_parts
    given = (groups.ctypes.data, len(groups), parts.ctypes.data, counts.ctypes.data, len(counts))
    table = np.empty((order(*given, starts.ctypes.data, None), PART_NUMBERS), np.int64)
    order(*given, starts.ctypes.data, table.ctypes.data)
    return table, starts


def write_messages(
    parts: np.ndarray,
    starts: np.ndarray,
    memory: Callable[[int], np.ndarray],
    backend: str = "auto",
) -> tuple[np.ndarray, np.ndarray]:
    """Write messages one after the other into one buffer.

    Not checked: addresses. The caller keeps the memory at the addresses unchanged.

    Legend: M messages of P parts in all.

    Args:
        parts: int64 [P, 9], contiguous. Of each part the code and the length; the address and the
            number of its words among the heads; the address, the number of rows and the bytes of a
            row of the payload's source; the address of the picked row numbers, or 0 for all rows
            in order; the number of rows in the payload.
        starts: int64 [M + 1]. Message i has the parts from `starts[i]` to `starts[i + 1]`.
        memory: Gives memory for the buffer, uint8, 8-byte aligned, for a number of bytes.

    Returns the buffer, and the end of each message in the buffer, int64 [M].

    Raises ValueError for picked rows outside of their source, before asking for memory.
    """
    _check("parts", parts, PART_NUMBERS)
    if starts.dtype != np.int64 or not len(starts) or starts[0] or starts[-1] != len(parts):
        raise ValueError(f"starts {starts.dtype} {starts.shape} do not go from 0 to {len(parts)}")
    chosen = dispatch.choose("write_messages", backend, _CPU, has_triton=False)
    ends = np.empty(len(starts) - 1, np.int64)
    bad = native.library().ecrm_message_ends(
        parts.ctypes.data, starts.ctypes.data, len(ends), ends.ctypes.data
    )
    if bad >= 0:
        raise ValueError(
            f"part {bad}: of {parts[bad, 5]} rows of {parts[bad, 6]} bytes some are picked that do "
            "not exist"
        )
    out = memory(int(ends[-1]) if len(ends) else 0)
    if chosen == "reference":
        from ecrm.kernels.messages import reference

        reference.write(out, parts, starts)
    else:
        native.library().ecrm_write_messages(
            out.ctypes.data, parts.ctypes.data, starts.ctypes.data, len(ends)
        )
    return out, ends


def read_messages(
    addresses: np.ndarray, sizes: np.ndarray, item_bytes: Sequence[int], backend: str = "auto"
) -> np.ndarray:
    """Describe all parts of messages, without an object for a part.

    Not checked: addresses, nor payloads.

    Legend: M messages of P parts in all.

    Args:
        addresses: Where each message lies, 8-byte aligned, int64 [M].
        sizes: The bytes of each message, int64 [M]; a message of 0 bytes has no parts.
        item_bytes: The bytes of an element of each dtype, by code; at most 32.

    Returns int64 [P, 8], the parts of the first message first: the number of the message, the code
    and the length; four numbers, the first words of the part among the heads, or 0; the address of
    the payload, or 0.

    Raises ValueError for a message that no `write_messages` wrote.
    """
    for name, numbers in (("addresses", addresses), ("sizes", sizes)):
        if numbers.dtype != np.int64 or numbers.shape != sizes.shape or numbers.ndim != 1:
            raise ValueError(f"{name} are {numbers.dtype} {list(numbers.shape)}, needed: int64 [M]")
    if len(sizes) and (sizes % 8).any():
        bad = int((sizes % 8).argmax())
        raise ValueError(f"message {bad} has {sizes[bad]} bytes, no multiple of 8")
    chosen = dispatch.choose("read_messages", backend, _CPU, has_triton=False)
    if chosen == "reference":
        from ecrm.kernels.messages import reference

        return reference.read(addresses, sizes, item_bytes)
    of_codes = np.zeros(CODES, np.int64)
    of_codes[: len(item_bytes)] = item_bytes
    words, library = sizes // 8, native.library()
    where = addresses.ctypes.data, words.ctypes.data, len(sizes)
    count = library.ecrm_count_parts(*where)
    table = np.empty((max(count, 0), CAME_NUMBERS), np.int64)
    if count > 0:
        count = library.ecrm_read_messages(*where, of_codes.ctypes.data, table.ctypes.data)
    if count < 0:
        raise ValueError(f"message {-1 - count} of {len(sizes)} was not written by write_messages")
    return table


def _check(name: str, table: np.ndarray, columns: int) -> None:
    if table.dtype != np.int64 or table.shape[1:] != (columns,) or not table.flags.c_contiguous:
        raise ValueError(
            f"{name} are {table.dtype} {list(table.shape)}, "
            f"needed: int64 [any, {columns}], contiguous"
        )
