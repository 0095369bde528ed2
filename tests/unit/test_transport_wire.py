"""The wire format: everything that is packed comes out again, and nothing else is accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ecrm.transport import wire
from ecrm.transport.message import Picked, copied


def random_tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for dtype in wire.DTYPES:
        elements = int(torch.randint(0, 40, (), generator=generator))
        raw = torch.randint(
            0, 2 if dtype is torch.bool else 256, (elements * dtype.itemsize,), generator=generator
        )
        tensors.append(raw.to(torch.uint8).view(dtype))
    order = torch.randperm(len(tensors), generator=generator)[: seed % (len(tensors) + 1)]
    return [tensors[place] for place in order.tolist()]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def told(part: torch.Tensor | tuple[int, ...]) -> bytes | tuple[int, ...]:
    return part if isinstance(part, tuple) else raw_bytes(part)


@pytest.mark.parametrize("seed", range(40))
def test_every_dtype_and_length_comes_back_bit_for_bit(seed: int) -> None:
    tensors = random_tensors(seed)
    buffer = wire.pack(tensors)
    assert (
        buffer.dtype == np.uint8
        and buffer.size == wire.packed_bytes(tensors)
        and buffer.size % 8 == 0
    )
    received = wire.unpack(buffer)
    assert [tensor.dtype for tensor in received] == [tensor.dtype for tensor in tensors]
    assert [raw_bytes(tensor) for tensor in received] == [raw_bytes(tensor) for tensor in tensors]


def test_heads_come_back_as_they_were_among_tensors() -> None:
    sent = [
        (1, -2, 1 << 62),
        torch.arange(3),
        (),
        (-(1 << 63),),
        torch.empty(0),
        Picked(torch.arange(4.0), torch.tensor([3, 1])),
        (7, True),
    ]
    buffer = wire.pack(sent)
    assert buffer.size == wire.packed_bytes(sent) == 8 * (1 + 2 * 7 + 6) + 24 + 8
    received = wire.unpack(buffer)
    assert [received[place] for place in (0, 2, 3, 6)] == [
        (1, -2, 1 << 62),
        (),
        (-(1 << 63),),
        (7, 1),
    ]
    assert [received[place].tolist() for place in (1, 4, 5)] == [[0, 1, 2], [], [3.0, 1.0]]
    assert copied(sent[6]) == received[6] and copied(sent[2]) == ()
    for pack in (lambda part: wire.pack([part]), copied):
        with pytest.raises(OverflowError):
            pack((1 << 63,))


def test_shapes_are_flattened_and_nothing_is_shared_with_the_sender() -> None:
    sent = [
        torch.arange(6.0).reshape(2, 3).requires_grad_(),
        torch.tensor(7),
        torch.from_numpy(np.empty(0)),
    ]
    received = wire.unpack(wire.pack(sent))
    with torch.no_grad():
        sent[0].zero_()
    assert [list(tensor.shape) for tensor in received] == [[6], [1], [0]]
    assert received[0].tolist() == [0, 1, 2, 3, 4, 5] and not received[0].requires_grad


def test_received_tensors_are_separate_views_of_the_buffer() -> None:
    buffer = wire.pack([torch.zeros(3), torch.zeros(3)])
    first, second = wire.unpack(buffer)
    first.fill_(1)
    assert second.tolist() == [0, 0, 0]
    assert wire.unpack(buffer)[0].tolist() == [1, 1, 1]


def test_packing_overwrites_all_of_the_memory_given() -> None:
    tensors = [torch.ones(3, dtype=torch.uint8), torch.ones(1, dtype=torch.int16)]
    memory = np.full(wire.packed_bytes(tensors), 255, np.uint8)
    wire.pack_all([tensors], [()], [{}], lambda size: memory[:size])
    assert memory.tobytes() == wire.pack(tensors).tobytes()
    words = memory.view(np.int64).tolist()
    assert words == [
        2,
        wire.CODE_OF_DTYPE[torch.uint8],
        3,
        wire.CODE_OF_DTYPE[torch.int16],
        1,
        0x010101,
        1,
    ]


def test_no_tensors_take_no_bytes() -> None:
    assert wire.pack([]).size == 0
    assert wire.unpack(np.empty(0, np.uint8)) == []
    assert len(wire.unpack(wire.pack([torch.empty(0)]))) == 1


@pytest.mark.parametrize(
    "tensor, complaint",
    [
        (torch.ones(4, 4).t(), "contiguous"),
        (torch.ones(4, dtype=torch.complex64).conj(), "plain memory"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.empty(2, dtype=torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
    ],
)
def test_what_cannot_travel_is_refused(tensor: torch.Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"tensor 1.*{complaint}"):
        wire.packed_bytes([torch.ones(1), tensor])


@pytest.mark.parametrize(
    "words, complaint",
    [
        ([0, 0, 0], "0 announced"),
        ([-1, 0, 0], "-1 announced"),
        ([2, 4, 1, 4], "2 announced in 32"),
        ([1, 99, 1, 0], "dtype code 99"),
        ([1, -2, 1, 0], "dtype code -2"),
        ([1, -1, 2, 0], "heads up to word 5 announced in 32"),
        ([1, -1, -1, 0], "lengths down to -1 "),
        ([2, -1, 1 << 62, -1, 1 << 62, 0], "announced"),
        ([1, 4, 2, 0], "2 elements"),
        ([1, 4, -1, 0], "lengths down to -1 "),
        ([1, 4, 1, 0, 0], "only 32 announced"),
    ],
)
def test_bytes_that_nobody_packed_are_refused(words: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        wire.unpack(np.array(words, np.int64).view(np.uint8))


def test_a_torn_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 8"):
        wire.unpack(wire.pack([torch.ones(3)])[:-1])


def test_large_tensors_travel_apart_from_where_they_lie() -> None:
    large = torch.arange(wire.APART_BYTES // 8)
    odd = torch.ones(wire.APART_BYTES + 1, dtype=torch.uint8)  # no multiple of 4 bytes
    picked = Picked(large.view(-1, 4), torch.arange(wire.APART_BYTES // 32))
    # MPI takes no words that begin between words
    shifted = torch.ones(wire.APART_BYTES + 1, dtype=torch.uint8)[1:]
    sent = [(7,), large, odd, picked, (), shifted, large.neg(), torch.empty(0), (1, 2)]
    places = wire.places_of(sent, wire.APART_BYTES)
    assert places == [1, 6]
    buffer = wire.pack(sent, apart=places)
    assert (
        buffer.size == wire.packed_bytes(sent, places) == wire.packed_bytes(sent) - 2 * large.nbytes
    )
    apart = [wire.bytes_of(sent[place]) for place in places]
    assert apart[0].ctypes.data == large.data_ptr()
    received = wire.unpack(buffer, [memory.copy() for memory in apart])
    assert [told(part) for part in received] == [
        told(part) for part in wire.unpack(wire.pack(sent))
    ]
    assert [received[place] for place in (0, 4, 8)] == [(7,), (), (1, 2)]
    with pytest.raises(ValueError, match="announced apart, nothing came"):
        wire.unpack(buffer, [apart[0]])
    with pytest.raises(ValueError, match="announced apart, 8 came"):
        wire.unpack(buffer, [apart[0], apart[0][:8]])
    with pytest.raises(ValueError, match="3 came apart, fewer announced"):
        wire.unpack(buffer, [*apart, apart[0]])


def test_what_is_lent_is_read_where_it_lies() -> None:
    memory = np.arange(4 << 10, dtype=np.uint8)
    first, second = (
        torch.from_numpy(memory[8:24]).view(torch.int32),
        torch.from_numpy(memory[100:103]),
    )
    sent, shared = [(7, 8), first, torch.tensor([1.5]), second, (9,)], {1: 8, 3: 100}
    buffer = wire.pack(sent, shared)
    assert buffer.size == wire.packed_bytes(sent, (), shared) == 8 * (1 + 2 * 5 + 3 + 2) + 8
    received = wire.unpack(buffer, (), memory)
    assert [told(part) for part in received] == [told(part) for part in sent]
    assert [received[place].data_ptr() for place in (1, 3)] == [first.data_ptr(), second.data_ptr()]
    for there, said in (
        (memory[:102], "3 elements of dtype code 0 shared at byte 100, 102 bytes can be read"),
        (None, "4 elements .* 0 bytes can be read"),
    ):
        with pytest.raises(ValueError, match=said):
            wire.unpack(buffer, (), there)


def test_rows_picked_from_what_is_lent_are_picked_by_who_gets_them() -> None:
    memory = np.arange(4 << 10, dtype=np.uint8)
    matrix = torch.from_numpy(memory[16:96]).view(torch.int16).view(10, 4)
    sent = [
        (7,),
        Picked(matrix, torch.tensor([9, 0, 9])),
        torch.tensor([1.5]),
        Picked(matrix[1:], torch.arange(0)),
        (8,),
    ]
    buffer = wire.pack(sent, {1: 16, 3: 24})
    assert (
        buffer.size
        == wire.packed_bytes(sent, (), {1: 16, 3: 24})
        == 8 * (1 + 2 * 5 + 2 + 2 * 3 + 3 + 1)
    )
    head, first, number, second, last = wire.unpack(buffer, (), memory)
    assert (head, number.tolist(), last) == ((7,), [1.5], (8,))
    assert (
        first.source.data_ptr() == matrix.data_ptr()
        and torch.equal(first.source, matrix)
        and first.rows.tolist() == [9, 0, 9]
    )
    assert torch.equal(second.source, matrix[1:]) and second.rows.numel() == 0
    for place, wrong, said in (
        (13, 0, "3 rows of 0 of 40 elements"),
        (13, 7, "3 rows of 7 of 40 elements"),
        (14, -1, "-1 rows of 4 of 40 elements"),
        (14, 1 << 40, "elements of torch.int64 at byte"),
    ):
        broken = buffer.copy()
        broken.view(np.int64)[place] = wrong
        with pytest.raises(ValueError, match=said):
            wire.unpack(broken, (), memory)
    with pytest.raises(
        ValueError, match="40 elements of dtype code 2 shared at byte 16, 90 bytes can be read"
    ):
        wire.unpack(buffer, (), memory[:90])


def test_what_is_worth_sharing() -> None:
    """What makes a message shorter by enough."""
    rows, narrow = torch.zeros(1000, 4), torch.zeros(1000, 2)
    parts = [
        (1,),
        rows,
        rows[:1],
        Picked(rows, torch.arange(132)),
        Picked(rows, torch.arange(130)),
        rows[:64],
        rows[:65],
        Picked(narrow, torch.arange(1000)),
    ]
    assert [
        (place, memory.data_ptr() == rows.data_ptr()) for place, memory in wire.worth_sharing(parts)
    ] == [(1, True), (3, True), (6, True)]
    for place in (1, 3, 6):
        assert wire.spared(parts[place]) == wire.packed_bytes(parts) - wire.packed_bytes(
            parts, (), {place: 0}
        )


def test_what_is_picked_is_numbered_by_int64() -> None:
    with pytest.raises(ValueError, match="tensor 1: picked are torch.int32"):
        wire.pack([(1,), Picked(torch.zeros(3, 4), torch.arange(2, dtype=torch.int32))])
