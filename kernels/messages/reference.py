"""The definition, part by part."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ecrm.kernels.messages.codes import (
    APART,
    CAME_NUMBERS,
    HEAD,
    PART_NUMBERS,
    PICKED,
    SHARED,
)


def order(
    groups: np.ndarray, parts: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As in the package."""
    found: list[list[tuple[int, ...]]] = [[] for _ in counts]
    for run in groups.tolist():
        number, messages, heads, words, elements, code, of_row, *source = run
        memory, height, width, picked, shared, offset, source_elements, places = source
        ahead = 0
        for group, (message, count) in enumerate(
            zip(_words(messages, number), _words(elements, number), strict=True)
        ):
            head = HEAD, words, heads + 8 * words * group, words, 0, 0, 0, 0, 0
            here, length = picked + 8 * ahead, count * of_row
            if not picked:
                tensor = code, length, 0, 0, memory + width * ahead, count, width, 0, count
            elif not shared or not ctypes.string_at(shared + group, 1)[0]:
                tensor = code, length, 0, 0, memory, height, width, here, count
            else:
                place = places + 24 * group
                ctypes.memmove(place, np.array([offset, of_row, count]).tobytes(), 24)
                tensor = code + PICKED, source_elements, place, 3, here, count, 8, 0, count
            if message >= 0:
                found[message] += (head, tensor)
            ahead += count
    ends = counts.cumsum()
    for message, (end, count) in enumerate(zip(ends.tolist(), counts.tolist())):
        found[message] += map(tuple, parts[end - count : end].tolist())
    lengths = [len(of_message) for of_message in found]
    table = np.array([part for of_message in found for part in of_message], np.int64)
    return table.reshape(-1, PART_NUMBERS), np.concatenate([[0], np.cumsum(lengths, dtype=int)])


def write(out: np.ndarray, parts: np.ndarray, starts: np.ndarray) -> None:
    """As in the package, into a buffer of the right size."""
    at = 0
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist()):
        mine = parts[first:last].tolist()
        numbers = [len(mine)] if mine else []
        for code, length, *_ in mine:
            numbers += (code, length)
        for _, _, address, count, *_ in mine:
            numbers += _words(address, count)
        run = np.array(numbers, np.int64).tobytes()
        for _, _, _, _, source, height, width, picked, count in mine:
            rows = _words(picked, count) if picked else range(count)
            assert all(0 <= row < height for row in rows if picked)
            run += b"".join(ctypes.string_at(source + row * width, width) for row in rows if width)
            run += bytes(-len(run) % 8)
        out[at : at + len(run)] = np.frombuffer(run, np.uint8)
        at += len(run)


def read(addresses: np.ndarray, sizes: np.ndarray, item_bytes: Sequence[int]) -> np.ndarray:
    """As in the package."""
    table = []
    for number, (base, size) in enumerate(zip(addresses.tolist(), sizes.tolist())):
        if not size:
            continue
        words = _words(base, size // 8)
        wrong = ValueError(f"message {number} of {len(sizes)} was not written by write_messages")
        count = words[0]
        if not 0 < count <= (len(words) - 1) // 2:
            raise wrong
        parts = list(zip(words[1 : 1 + 2 * count : 2], words[2 : 2 + 2 * count : 2]))
        more = [
            length if code == HEAD else 3 if code >= PICKED else 1 if code >= SHARED else 0
            for code, length in parts
        ]
        head = 1 + 2 * count
        at = head + sum(more)
        if min(length for _, length in parts) < 0 or at > len(words):
            raise wrong
        for (code, length), extra in zip(parts, more):
            first = (words[head : head + min(extra, 4)] + [0] * 4)[:4]
            head, address = head + extra, 0
            if 0 <= code < len(item_bytes) or code >= PICKED:
                payload = 8 * first[2] if code >= PICKED else length * item_bytes[code]
                if payload < 0 or payload > 8 * (len(words) - at):
                    raise wrong
                address, at = base + 8 * at, at + (payload + 7) // 8
            elif code != HEAD and code < APART:
                raise wrong
            table.append([number, code, length, *first, address])
        if at != len(words):
            raise wrong
    return np.array(table, np.int64).reshape(-1, CAME_NUMBERS)


def _words(address: int, count: int) -> list[int]:
    """The int64 numbers at an address."""
    return np.frombuffer(ctypes.string_at(address, 8 * count), np.int64).tolist() if count else []
