"""Spreads, kept as arrays from routing to the wire and back, against the same parts as objects."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from ecrm.placement.assignment import initial_view
from ecrm.placement.stripes import RowLayout, StripeShape
from ecrm.protection.routing import DENSE, MARK, REPAIR, ROWS, FoundRows, SlotRequests, StepReplies
from ecrm.transport import outbox as outbox_module
from ecrm.transport import wire
from ecrm.transport.inbox import Inbox, Packed
from ecrm.transport.message import Part, Picked, Received
from ecrm.transport.outbox import Outbox, Spread, to_all
from ecrm.transport.packed import PackedTransport
from ecrm.transport.piggyback import exchange

RANKS, WIDTH = 7, 6


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays for few ranks, too."""
    monkeypatch.setattr(outbox_module, "MANY", 1)


class Carried(PackedTransport):
    """Rank 2 of seven; the messages to other ranks come back as theirs."""

    rank, live = 2, (0, 2, 3, 4, 6)

    def __init__(self, readers: tuple[int, ...] = ()) -> None:
        super().__init__(RANKS)
        self.shared_memory.readers = frozenset(readers)
        for reader in readers:
            self.shared_memory._of[reader] = self.shared_memory.memory
        self.packed: dict[int, np.ndarray] = {}

    def _deliver(
        self, kind: int, packed: list[np.ndarray], apart: list[list[np.ndarray]]
    ) -> Mapping[int, tuple[np.ndarray, list[np.ndarray]]]:
        self.packed = {rank: words.copy() for rank, words in zip(self.live, packed)}
        return {rank: (words.copy(), []) for rank, words in zip(self.live, packed)}

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        return flag, True

    def shrink(self) -> None: ...

    def close(self) -> None: ...


def _told(parts: list[Received]) -> list[object]:
    return [
        part
        if isinstance(part, tuple)
        else (part.gathered() if isinstance(part, Picked) else part).flatten().tolist()
        for part in parts
    ]


def _outbox(source: torch.Tensor, seed: int) -> Outbox:
    """Two spreads, a mark and single parts, in and out of the order of ranks."""
    random = np.random.default_rng(seed)
    spreads = []
    for number, live in enumerate((Carried.live, (6, 0, 2, 2))):
        counts = random.integers(0, 90, len(live))
        rows = torch.from_numpy(random.integers(0, len(source), counts.sum()))
        payload = Picked(source, rows) if number else rows
        heads = random.integers(-5, 5, (len(live), 4))
        spreads.append(Spread(np.array(live), heads, counts, payload))
    outbox = Outbox(spreads)
    outbox.spread(to_all(outbox.ranks, (MARK, 0, 1 << 62)))
    outbox.add(3, (DENSE, 1), torch.arange(3.0))
    outbox.add(0, torch.arange(5, dtype=torch.uint8), Picked(source, torch.tensor([1, 0])))
    return outbox


@pytest.mark.parametrize(("seed", "readers"), list(enumerate([(), (), (0, 4), (0, 4, 6)])))
def test_the_wire_has_the_bytes_of_the_same_parts_as_objects(seed, readers):
    transport = Carried(readers)
    source = transport.allocate_shared(40, WIDTH)
    source[:] = torch.rand(40, WIDTH)
    outbox = _outbox(source, seed)
    came = transport.exchange(outbox)
    sent, twin = transport.packed, Carried(readers)
    twin._shared_memory = transport.shared_memory
    lists: dict[int, list[Part]] = {rank: list(parts) for rank, parts in outbox.items()}
    plain = twin.exchange(lists)
    assert {rank: words.tobytes() for rank, words in sent.items()} == {
        rank: words.tobytes() for rank, words in twin.packed.items()
    }
    assert transport.sent_bytes == twin.sent_bytes
    assert sorted(came) == sorted(plain) == sorted(lists)
    for rank, parts in came.items():
        assert _told(parts) == _told(plain[rank]) == _told(lists[rank])
    shared = any(isinstance(part, Picked) for parts in came.values() for part in parts)
    assert shared == (transport.shared_memory.offset(source) is not None)


def test_few_ranks_get_the_same_bytes_by_objects(monkeypatch):
    transport = Carried((0, 4))
    spreads = _outbox(transport.allocate_shared(40, WIDTH), 5).spreads
    sent = []
    for many in (1, 100):
        monkeypatch.setattr(outbox_module, "MANY", many)
        outbox = Outbox(spreads)
        came = transport.exchange(outbox)
        assert bool(outbox.spreads) == isinstance(came, Inbox) == (many == 1)
        sent.append({rank: words.tobytes() for rank, words in transport.packed.items()})
    assert sent[0] == sent[1] and any(sent[0].values())


def test_a_receiver_that_is_not_live_is_refused_before_anything_is_sent():
    transport = Carried()
    for stranger in (1, -1, 9):
        spread = to_all(np.array([0, stranger]), (MARK,))
        with pytest.raises(ValueError, match=rf"ranks \[{stranger}\], which are not live"):
            transport.exchange(Outbox([spread]))
        with pytest.raises(ValueError, match=rf"ranks \[{stranger}\], which are not live"):
            transport.exchange({stranger: []})
    assert not transport.packed and transport.sent_bytes == 0
    outside = Spread(
        np.array([0]),
        np.zeros((1, 1), np.int64),
        np.array([1]),
        Picked(torch.ones(2, 2), torch.tensor([2])),
    )
    with pytest.raises(ValueError, match="2 rows of 8 bytes some are picked that do not exist"):
        transport.exchange(Outbox([outside]))


def test_attached_messages_come_apart_as_they_do_from_objects():
    attached = {0: [(1, 2), torch.ones(2)], 3: [(5,), torch.zeros(1)]}
    outgoing = {3: [(7,), torch.ones(1)], 6: [(9,), torch.empty(0)]}
    received, collected = exchange(Carried(), outgoing, attached)
    assert isinstance(received, Inbox) and isinstance(collected, Inbox)
    for came, sent in ((received, outgoing), (collected, attached)):
        assert {rank: _told(parts) for rank, parts in came.items()} == {
            rank: _told(parts) for rank, parts in sent.items()
        }
    assert 0 not in received and len(received) == 2


def _replies(shards: int, of_shard, shared: bool, attach: bool) -> tuple[SlotRequests, Packed]:
    shape = StripeShape(shards, 2, 1)
    view = initial_view("colocated", shape, shards, 0, shards, 5)
    layouts = [RowLayout(shape, 400), RowLayout(shape, 90)]
    rows = {slot: [torch.randperm(400)[:60], torch.randperm(90)[:20]] for slot in (0, 3)}
    asked = SlotRequests.of(rows, layouts, [WIDTH, 4], view)
    memory = np.zeros(1 << 16, np.uint8)
    lists: dict[int, list[Part]] = {rank: [] for rank in range(shards)}
    places: dict[int, dict[int, int]] = {rank: {} for rank in range(shards)}
    end = 0
    for (slot, space), split in asked._parts.items():
        width = (WIDTH, 4)[space]
        for shard, _, local in split.parts():
            values, picked = of_shard(slot, space, shard, local, width)
            if shared and shard % 2:
                here = memory[end : end + values.nbytes]
                here[:] = values.numpy().view(np.uint8).reshape(-1)
                places[shard][len(lists[shard]) + 1] = end
                end += values.nbytes
            lists[shard] += [(ROWS, slot, shard, space), Picked(values, picked)]
    if attach:
        lists[1] += [(DENSE,), torch.ones(3)]
        lists[2] = [(REPAIR, 4), torch.ones(2), *lists[2]]
    packed = [wire.pack(lists[rank], places[rank]) for rank in range(shards)]
    ranks = list(range(shards))
    return asked, Packed(ranks, packed, [[] for _ in ranks], lambda rank: memory)


def _rows(slot: int, space: int, shard: int, local: torch.Tensor, width: int):
    """Rows that tell where they are from, and the places of the wanted ones among them."""
    values = torch.arange(2 * len(local) * width).float().view(-1, width) + 1000 * shard + slot
    return values, torch.arange(len(local)) * 2 + 1


@pytest.mark.parametrize(("shared", "attach"), list(itertools.product((False, True), repeat=2)))
def test_rows_are_collected_from_the_bytes_as_from_objects(shared, attach):
    asked, packed = _replies(5, _rows, shared, attach)
    inbox = Inbox(packed)
    replies = StepReplies.of(inbox)
    plain = StepReplies.of({rank: list(parts) for rank, parts in inbox.items()})
    assert {key: _told([part]) for key, part in replies.dense.items()} == {
        key: _told([part]) for key, part in plain.dense.items()
    }
    assert bool(replies.dense) == bool(replies.repairs) == attach
    assert {rank: _told(parts) for rank, parts in replies.repairs.items()} == {
        rank: _told(parts) for rank, parts in plain.repairs.items()
    }
    assert {rank: _told(parts) for rank, parts in replies.replies.items()} == {
        rank: _told(parts) for rank, parts in plain.replies.items()
    }
    found, expected = asked.collect(replies.replies), asked.collect(plain.replies)
    assert found.keys() == expected.keys() == {0, 3}
    for slot, spaces in found.items():
        for mine, theirs in zip(spaces, expected[slot], strict=True):
            assert isinstance(mine, FoundRows) and not isinstance(mine.pieces, list)
            assert torch.equal(mine.copied(), theirs.copied())
            assert (
                mine.pieces[1].source.data_ptr() == theirs.pieces[1].source.data_ptr() or not shared
            )


def test_rows_of_another_width_or_number_or_place_are_refused():
    def wide(slot, space, shard, local, width):
        return _rows(slot, space, shard, local, width + (shard == 3))

    asked, packed = _replies(5, wide, False, False)
    with pytest.raises(
        ValueError, match="floats came for|rows of 7 torch.float32 came for rows of"
    ):
        asked.collect(StepReplies.of(Inbox(packed)).replies)
    asked, packed = _replies(5, _rows, True, False)
    small = Packed(packed.ranks, packed.messages, packed.apart, lambda rank: np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="floats shared at byte .*, 8 bytes can be read"):
        asked.collect(StepReplies.of(Inbox(small)).replies)
    cut = Packed(
        packed.ranks,
        [packed.messages[0][:-8], *packed.messages[1:]],
        *(packed.apart, packed.memory_of),
    )
    with pytest.raises(ValueError, match="message 0 of 5 was not written"):
        StepReplies.of(Inbox(cut))
