"""The definition, part by part."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ecrm.kernels.messages.codes import APART, CAME_NUMBERS, HEAD, PICKED, SHARED


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
