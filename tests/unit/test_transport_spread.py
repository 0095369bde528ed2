"""Spreads, kept as arrays from routing to the wire and back, against the same parts as objects."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from ecrm.placement.assignment import initial_view
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.stripes import RowLayout, StripeShape
from ecrm.protection.routing import (
    BAGS,
    COMPUTED,
    DENSE,
    GRADIENTS,
    MARK,
    NOTE,
    REPAIR,
    ROWS,
    FoundRows,
    GroupedGradients,
    ShardRequests,
    SlotRequests,
    StepReplies,
    StepResults,
)
from ecrm.protection.wire_dtype import EXACT, Wire
from ecrm.session.asked_before import AskedBefore
from ecrm.storage.base import NativeStore
from ecrm.storage.hosted import HostedShard
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


@pytest.mark.parametrize("late", [False, True])
def test_attached_arrays_come_apart_as_they_do_from_objects(late):
    source = torch.rand(40, WIDTH)
    attached = _outbox(source, 5)
    attached.single.pop(3, None)  # not live
    outgoing = Outbox(attached.spreads[:1]) if late else {2: [(7,), torch.ones(1)]}
    sent = []
    for some in (attached, {rank: list(parts) for rank, parts in attached.items()}):
        transport = Carried()
        received, collected = exchange(transport, outgoing, some)
        found = [
            {rank: _told(parts) for rank, parts in came.items()} for came in (received, collected)
        ]
        sent.append((transport.packed, found))
    assert {rank: words.tobytes() for rank, words in sent[0][0].items()} == {
        rank: words.tobytes() for rank, words in sent[1][0].items()
    }
    assert sent[0][1] == sent[1][1] and len(sent[0][1][1]) == len(Carried.live)


def _replies(
    shards: int, of_shard, shared: bool, attach: bool, wire_of: Wire = EXACT
) -> tuple[SlotRequests, Packed]:
    shape = StripeShape(shards, 2, 1)
    view = initial_view("colocated", shape, shards, 0, shards, 5)
    layouts = [RowLayout(shape, 400), RowLayout(shape, 90)]
    torch.manual_seed(5)
    rows = {slot: [torch.randperm(400)[:60], torch.randperm(90)[:20]] for slot in (0, 3)}
    asked = SlotRequests.of(rows, layouts, [WIDTH, 4], view, wire=wire_of)
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
                here[:] = values.view(torch.uint8).numpy().reshape(-1)
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


NEAR = Wire(torch.bfloat16, lambda rank: rank % 2 == 0)
"""Even ranks read the memory of this rank, and any other rank gets two bytes."""


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_two_bytes_and_of_four_are_collected_rounded(shared):
    def mixed(slot, space, shard, local, width):
        values, picked = _rows(slot, space, shard, local, width)
        return (values + 0.3).bfloat16() if shard % 2 else values + 0.3, picked

    asked, packed = _replies(5, mixed, shared, False, NEAR)
    _, exact = _replies(5, lambda *of: (_rows(*of)[0] + 0.3, _rows(*of)[1]), shared, False)
    found = asked.collect(StepReplies.of(Inbox(packed)).replies)
    expected = asked.collect(StepReplies.of(Inbox(exact)).replies)
    for slot, spaces in found.items():
        for mine, theirs in zip(spaces, expected[slot], strict=True):
            assert torch.equal(mine.copied(), theirs.copied())
            assert torch.equal(mine.copied(), mine.copied().bfloat16().float())
    with pytest.raises(ValueError, match="rows of . torch.bfloat16 came for rows of"):
        _replies(5, mixed, shared, False)[0].collect(StepReplies.of(Inbox(packed)).replies)


def test_gradients_travel_in_two_bytes_where_memory_is_not_at_hand():
    class Five(Carried):
        live = (0, 1, 2, 3, 4)

    transport, shape = Five((0, 4)), StripeShape(5, 2, 1)
    view = initial_view("colocated", shape, 5, 0, 5, 5)
    rows = torch.randperm(400)[:60]
    asked = SlotRequests.of({2: [rows]}, [RowLayout(shape, 400)], [WIDTH], view, wire=NEAR)
    gradients = transport.allocate_shared(60, WIDTH)
    gradients[:] = torch.rand(60, WIDTH).bfloat16().float()
    came = StepResults.of(transport.exchange(asked.gradients({2: [gradients]}))).gradients
    assert len(came) == 5
    for (_, shard, _), part in came.items():
        values = part.gathered() if isinstance(part, Picked) else part.view(-1, WIDTH)
        ((_, place, _),) = asked._parts[2, 0].among((shard,)).parts()
        assert torch.equal(values.float(), gradients[place])
        near = view.shards[shard] % 2 == 0
        assert values.dtype == (torch.float32 if near else torch.bfloat16)


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


def _step_results(shared: bool, sits_out: bool = False, bags: bool = False) -> Packed:
    """What slots of five ranks send to two shards of two spaces: gradients, and the next rows."""
    random = np.random.default_rng(11)
    memory, packed, end = np.zeros(1 << 16, np.uint8), [], 0
    for rank in range(5):
        parts: list[Part] = []
        places: dict[int, int] = {}
        for slot in (9 - rank, 20 + rank):
            for shard, space in ((3, 0), (1, 1), (3, 1)):
                rows = torch.from_numpy(random.permutation(30)[: random.integers(1, 20)])
                values = torch.from_numpy(random.random((40, (WIDTH, 4)[space]), np.float32))
                if shared and rank % 2:
                    places[len(parts) + 1] = end
                    memory[end : end + values.nbytes] = values.numpy().view(np.uint8).reshape(-1)
                    end += values.nbytes
                gradients = Picked(values, rows)
                none = sits_out and slot == 21
                parts += [(GRADIENTS, slot, shard, space), torch.empty(0) if none else gradients]
                if none:
                    places.pop(len(parts) - 1, None)
                kind = COMPUTED if slot == 8 else ROWS
                parts += [(kind, slot, shard, space), rows]
                if bags and slot == 8:
                    parts += [(BAGS, slot, shard, space, 0), torch.zeros(0, dtype=torch.int64)]
            parts += [(MARK, slot, 10**15 + slot), torch.empty(0), (NOTE, slot), torch.ones(2)]
        packed.append(wire.pack(parts, places))
    return Packed(list(range(5)), packed, [[] for _ in range(5)], lambda rank: memory)


def _lists(hosted: HostedShard) -> list[list[object]]:
    """The deltas of a shard since the commit."""
    return [[part.tolist() for part in some] for some in hosted.deltas_since_commit()]


def _hosted() -> dict[tuple[int, int], HostedShard]:
    optimizer = SparseOptimizer("rowwise_adagrad", 0.05)
    return {
        (shard, space): HostedShard(
            NativeStore(
                30, width, optimizer, lambda local, width=width: torch.ones(len(local), width)
            ),
            30,
            missing=False,
            units=2,
        )
        for shard, space, width in ((3, 0, WIDTH), (1, 1, 4), (3, 1, 4))
    }


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sits_out", [False, True])
def test_a_shard_sums_and_answers_from_the_bytes_as_from_objects(shared, sits_out):
    inbox = Inbox(_step_results(shared, sits_out))
    plain_inbox = {rank: list(parts) for rank, parts in inbox.items()}
    came, plain = StepResults.of(inbox), StepResults.of(plain_inbox)
    assert came.notes.keys() == plain.notes.keys() == set(range(5, 10)) | set(range(20, 25))
    found = []
    for results in (came, plain):
        hosted = _hosted()
        asked = ShardRequests.of(results.requests, hosted)
        replies = asked.replies()
        asked.update(results.gradients, True, 1)
        rows = torch.arange(30)
        found.append(
            (
                {rank: _told(parts) for rank, parts in replies.items()},
                {key: each.store.read(rows).tolist() for key, each in hosted.items()},
                {key: _lists(each) for key, each in hosted.items()},
            )
        )
    assert found[0] == found[1] and len(found[0][0]) == 5
    read = vars(came.gradients)
    assert isinstance(came.gradients, GroupedGradients) and ("_found" in read) == sits_out
    assert {key: _told([part]) for key, part in came.gradients.items()} == {
        key: _told([part]) for key, part in plain.gradients.items()
    }


@pytest.mark.parametrize("bags", [False, True])
def test_rows_travel_in_two_bytes_where_memory_is_not_at_hand(bags):
    inbox = Inbox(_step_results(False, bags=bags))
    hosted = _hosted()
    exact = ShardRequests.of(StepResults.of(inbox).requests, hosted).replies()
    asked = ShardRequests.of(StepResults.of(inbox).requests, hosted, NEAR)
    replies = asked.replies()
    assert sorted(replies) == sorted(exact) == list(range(5))
    for rank, parts in replies.items():
        pairs = zip(zip(parts[::2], parts[1::2]), zip(exact[rank][::2], exact[rank][1::2]))
        for (head, rows), (other, right) in pairs:
            assert head == other and rows.source.dtype == NEAR.of_rows(rank)
            assert torch.equal(rows.gathered(), right.gathered().to(rows.source.dtype))
    # arrays of each dtype, for each shard and space
    assert len(replies.spreads) == (0 if bags else 2 * len(hosted))
    again = asked.again({}, hosted)
    assert again._wire is NEAR


def test_requests_with_bags_are_read_as_objects():
    inbox = Inbox(_step_results(False, bags=True))
    asked = ShardRequests.of(StepResults.of(inbox).requests, _hosted())
    plain = ShardRequests.of({rank: _asks(parts) for rank, parts in inbox.items()}, _hosted())
    assert asked._bags.keys() == plain._bags.keys() == {(8, 3, 0), (8, 1, 1), (8, 3, 1)}
    assert asked._ranks == plain._ranks and asked._waiting == plain._waiting


def _asks(parts: list[Received]) -> list[Received]:
    groups = zip(parts[::2], parts[1::2], strict=True)
    kinds = (ROWS, COMPUTED, MARK, BAGS)
    return [part for group in groups if group[0][0] in kinds for part in group]


def test_a_change_of_requests_is_noticed_from_the_bytes_and_from_objects():
    first, second, third = (_step_results(False) for _ in range(3))
    asked = AskedBefore()
    requests = StepResults.of(Inbox(first)).requests
    assert asked.problem(4, requests, ()) == ""
    assert asked.problem(4, {rank: list(parts) for rank, parts in requests.items()}, ()) == ""
    assert asked.problem(4, StepResults.of(Inbox(second)).requests, ()) == ""
    _, rows = next(group for group in zip(*[iter(Inbox(third)[0])] * 2) if group[0][0] == ROWS)
    rows[0] += 1  # a view of the message
    assert "asks for other rows" in asked.problem(4, StepResults.of(Inbox(third)).requests, ())
