"""messages: the C++ against the definition, byte for byte, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ecrm.kernels.messages import order_parts, read_messages, write_messages
from ecrm.kernels.messages.codes import CAME_NUMBERS, HEAD, PICKED, SHARED

SIZES = (1, 2, 4, 8, 16)


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


def _written(seed: int, backend: str) -> tuple[bytes, list[int]]:
    """Messages of random parts, some of them empty."""
    random = np.random.default_rng(seed)
    words = random.integers(-9, 9, 40)
    source = random.integers(0, 256, 40 * 37, np.uint8)
    picked = random.integers(0, 40, 60)
    parts, starts = [], [0]
    for _ in range(9):
        for _ in range(random.integers(0, 5)):
            head = HEAD, 3, _address(words) + 8 * int(random.integers(0, 37)), 3
            width, count = int(random.integers(0, 38)), int(random.integers(0, 40))
            rows = int(random.integers(0, 2)) * (_address(picked) + 8 * int(random.integers(0, 20)))
            parts += [
                (*head, 0, 0, 0, 0, 0),
                (0, 9, 0, 0, _address(source), 40, width, rows, count),
            ]
        starts.append(len(parts))
    table = np.array(parts, np.int64).reshape(-1, 9)

    def dirty(size: int) -> np.ndarray:
        return np.full(size, 255, np.uint8)

    buffer, ends = write_messages(table, np.array(starts), dirty, backend)
    assert len(buffer) == ends[-1]
    return buffer.tobytes(), ends.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_messages_are_written_as_the_definition_says(backend, seed):
    assert _written(seed, backend) == _written(seed, "reference")


def _read(messages_in: list[np.ndarray], backend: str) -> np.ndarray:
    addresses = np.array([_address(message) for message in messages_in], np.int64)
    sizes = np.array([message.nbytes for message in messages_in], np.int64)
    return read_messages(addresses, sizes, SIZES, backend)


def test_parts_are_described_with_their_first_words(backend):
    first = np.array([3, HEAD, 5, 2, 2, 1 + SHARED, 2, 10, 11, 12, 13, 14, 640, 77], np.int64)
    second = np.array([1, 3 + PICKED, 8, 64, 4, 2, 1, 0], np.int64)
    found = _read([first, np.empty(0, np.int64), second], backend)
    assert found.tolist() == [
        [0, HEAD, 5, 10, 11, 12, 13, 0],
        [0, 2, 2, 0, 0, 0, 0, _address(first) + 8 * 13],
        [0, 1 + SHARED, 2, 640, 0, 0, 0, 0],
        [2, 3 + PICKED, 8, 64, 4, 2, 0, _address(second) + 8 * 6],
    ]
    assert _read([], backend).shape == (0, CAME_NUMBERS)


@pytest.mark.parametrize(
    "words",
    [
        [0],
        [2, 3, 0],
        [-1, 3, 0],
        [1, 3, 2, 7],
        [1, 3, 1, 7, 7],
        [1, 3, -1],
        [1, 9, 1, 7],
        [1, -2, 1, 7],
        [1, HEAD, 2, 7],
        [1, 3 + SHARED, 2],
        [1, 3 + PICKED, 2, 0, 1],
        [1, 3 + PICKED, 2, 0, 1, -1],
        [1, 3 + PICKED, 2, 0, 1, 2, 0],
        [1, 3, 1 << 62, 7],
        [1, HEAD, (1 << 63) - 1, 7],
    ],
)
def test_words_that_are_no_message_are_refused_with_the_messages_number(backend, words):
    good = np.array([1, 3, 1, 7], np.int64)
    with pytest.raises(ValueError, match="message 1 of 3 was not written"):
        _read([good, np.array(words, np.int64), good], backend)


def test_wrong_arguments_are_refused_before_memory_is_asked_for(backend):
    rows, picked = np.zeros(4, np.int64), np.array([0, 2])
    part = [3, 2, 0, 0, _address(rows), 2, 8, _address(picked), 2]
    with pytest.raises(
        ValueError, match="part 0: of 2 rows of 8 bytes some are picked that do not"
    ):
        write_messages(np.array([part]), np.array([0, 1]), lambda size: 1 / 0, backend)
    with pytest.raises(ValueError, match="parts are int64 .3, 2."):
        write_messages(np.zeros((3, 2), np.int64), np.array([0, 3]), lambda size: 1 / 0, backend)
    with pytest.raises(ValueError, match="do not go from 0 to 1"):
        write_messages(np.array([part]), np.array([0, 2]), lambda size: 1 / 0, backend)
    with pytest.raises(ValueError, match="message 1 has 9 bytes, no multiple of 8"):
        read_messages(np.array([8, 8]), np.array([0, 9]), SIZES, backend)


def _ordered(seed: int, backend: str) -> tuple[list[list[int]], list[int], list[int]]:
    """Two runs of groups, of an array and of picked rows, some without a message, and parts."""
    random = np.random.default_rng(seed)
    number, messages = 12, 5
    array, source = random.random(200, np.float32), random.random((30, 4), np.float32)
    picked, places = random.integers(0, 30, 200), np.full((number, 3), -7)
    single = np.arange(4 * 9).reshape(4, 9)
    runs, kept = [], []
    for rows in (0, _address(picked)):
        of = random.integers(-1, messages, number)
        heads = random.integers(-5, 5, (number, 3))
        counts, reads = (
            random.integers(0, 9, number),
            random.integers(0, 2, number).astype(np.uint8),
        )
        kept += [of, heads, counts, reads]
        row = (4, _address(source), 30, 16) if rows else (1, _address(array), 200, 4)
        shared = (
            (_address(reads), 640, 120, _address(places)) if rows and seed % 2 else (0, 0, 0, 0)
        )
        addresses = number, _address(of), _address(heads), 3, _address(counts)
        runs.append((*addresses, 7, *row, rows, *shared))
    table, starts = order_parts(np.array(runs), single, np.array([0, 1, 0, 3, 0]), backend)
    buffers = array, source, picked, places, *kept

    def named(number: int) -> int:
        """An address in a buffer, without the place of the buffer."""
        for place, buffer in enumerate(buffers):
            if _address(buffer) <= number < _address(buffer) + max(buffer.nbytes, 1):
                return 10**6 * (place + 1) + number - _address(buffer)
        return number

    found = [[named(number) for number in part] for part in table.tolist()]
    return found, starts.tolist(), places.flatten().tolist()


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_put_in_the_order_of_messages_as_the_definition_says(backend, seed):
    found, starts, places = _ordered(seed, backend)
    assert (found, starts, places) == _ordered(seed, "reference")
    assert len(found) == starts[-1] > 4 and found[starts[2] - 1] == list(range(9))
    assert (max(places) > 0) == (seed % 2 == 1)


def test_counts_of_single_parts_are_checked(backend):
    none = np.empty((0, 15), np.int64)
    with pytest.raises(ValueError, match="counts int64 .2,. are not of 1 parts"):
        order_parts(none, np.zeros((1, 9), np.int64), np.array([1, 1]), backend)
    with pytest.raises(ValueError, match="groups are int64 .1, 2., needed: int64 .any, 15."):
        order_parts(np.zeros((1, 2), np.int64), none, np.array([0]), backend)
