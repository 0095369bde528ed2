"""Jobs of bench_kernels.py on a slot: its messages, its ids in order, the sums of its bags."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ecrm.kernels.bag_sum import RowPieces, bag_sum
from ecrm.kernels.divide import divide
from ecrm.kernels.pieces import Piece, copy_pieces
from ecrm.kernels.scatter_add import scatter_add
from ecrm.kernels.segment_sum import segment_sum
from ecrm.kernels.unit_order import unique_with_uses
from ecrm.placement.assignment import initial_view
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.stripes import RowLayout, StripeShape
from ecrm.protection.routing import (
    GRADIENTS,
    MARK,
    ROWS,
    ShardRequests,
    SlotRequests,
    StepReplies,
    StepResults,
)
from ecrm.session.asked_before import AskedBefore
from ecrm.storage.base import NativeStore
from ecrm.storage.hosted import HostedShard
from ecrm.transport import wire
from ecrm.transport.inbox import Inbox, Packed
from ecrm.transport.message import Part
from lib.kernel_case import Case, Contender, zeros

DIM = 16


def messages_cases(ranks: int, wanted: int) -> list[Case]:
    """The messages of a slot's rows to as many ranks as there are shards.

    The first case has the rows alone: packed rank by rank, and placed again. The second case is a
    slot's whole work: split, requests, gradients, messages packed, replies read, rows collected.
    """
    shape, generator = StripeShape(ranks, 10, 4), torch.Generator().manual_seed(10)
    view, layout = initial_view("colocated", shape, ranks, 0, ranks, 5), RowLayout(shape, 10**7)
    rows = torch.randint(0, layout.rows, (wanted,), generator=generator).unique()
    gradients = zeros(len(rows), DIM).normal_(generator=generator)
    counts, places, _ = layout.split(rows)
    parts = places.split(counts)
    packed, collected = zeros(len(rows), DIM), [zeros(len(rows), DIM), zeros(len(rows), DIM)]
    cuts = packed.split(counts)
    ends = (4 * DIM * torch.tensor(counts).cumsum(0)).tolist()

    def ours() -> None:
        pieces = [Piece(gradients, at, part) for at, part in zip([0, *ends], parts)]
        copy_pieces(packed, pieces, backend="cpu")
        copy_pieces(
            collected[0], [Piece(cut, 0, None, part) for cut, part in zip(cuts, parts)], "cpu"
        )

    def theirs() -> None:
        for cut, part in zip(cuts, parts):
            torch.index_select(gradients, 0, part, out=cut)
        for cut, part in zip(cuts, parts):
            collected[1].index_copy_(0, part, cut)

    ours()
    theirs()
    if not (torch.equal(*collected) and torch.equal(collected[0], gradients)):
        raise SystemExit("pieces and torch disagree")
    came = [
        wire.pack([(ROWS, 0, shard, 0), cut.flatten()]).copy() for shard, cut in enumerate(cuts)
    ]
    place_of, reads = np.arange(ranks), np.zeros(ranks, np.bool_)

    def whole() -> None:
        slot = SlotRequests.of({0: [rows]}, [layout], [DIM], view)
        outgoing = slot.gradients({0: [gradients]})
        outgoing.include(slot.requests())
        spreads = [
            wire.Addressed(spread, place_of[spread.ranks], None, reads)
            for spread in outgoing.spreads
        ]
        wire.pack_all([()] * ranks, [()] * ranks, [wire.NOTHING_SHARED] * ranks, spreads=spreads)
        inbox = Inbox(Packed(list(range(ranks)), came, [[]] * ranks, lambda rank: None))
        collected[0] = slot.collect(StepReplies.of(inbox).replies)[0][0].copied()

    whole()
    if not torch.equal(collected[0], gradients):
        raise SystemExit("the rows of a slot did not come back")
    counted = len(rows) * 2 * (8 + 8 * DIM)
    contenders = [Contender("pieces", ours, counted), Contender("torch", theirs, counted)]
    name = f"a slot's rows in messages to {ranks} ranks"
    alone = [Contender("all of it", whole, counted + len(rows) * 8)]
    return [
        Case(name, len(rows), 4 * DIM, contenders, lambda: packed),
        Case(f"{name}, split and requests too", len(rows), 4 * DIM, alone, lambda: collected[0]),
    ]


def shard_call(ranks: int, of_slot: int) -> Callable[[], object]:
    """The work of a shard in a step, for as many slots as there are ranks.

    Each slot sends gradients of `of_slot` rows and asks for as many. Messages are read, gradients
    summed, rows updated; the next rows are found, and packed for all slots.
    """
    generator, layout = (
        torch.Generator().manual_seed(3),
        RowLayout(StripeShape(ranks, 10, 4), 10**7),
    )
    rows = layout.data_rows_per_shard
    optimizer = SparseOptimizer("rowwise_adagrad", 0.05)
    store = NativeStore(rows, DIM, optimizer, lambda local: torch.zeros(len(local), DIM))
    hosted = {(0, 0): HostedShard(store, rows, missing=False, units=10)}
    came = []
    for slot in range(ranks):
        wanted = torch.randint(0, rows, (of_slot,), generator=generator).unique()
        gradients = torch.randn(len(wanted) * DIM, generator=generator)
        asks: list[Part] = [(ROWS, slot, 0, 0), wanted, (MARK, slot, slot), torch.empty(0)]
        came.append(wire.pack([(GRADIENTS, slot, 0, 0), gradients, *asks]).copy())
    place_of, reads = np.arange(ranks), np.zeros(ranks, np.bool_)

    def results() -> StepResults:
        return StepResults.of(
            Inbox(Packed(list(range(ranks)), came, [[]] * ranks, lambda rank: None))
        )

    asked, digests = [ShardRequests.of(results().requests, hosted)], AskedBefore()

    def step() -> None:
        found = results()
        asked[0].update(found.gradients, True, 1)
        if digests.problem(0, found.requests, ()):
            raise SystemExit("the requests have changed")
        asked[0] = ShardRequests.of(found.requests, hosted)
        replies = asked[0].replies()
        spreads = [
            wire.Addressed(spread, place_of[spread.ranks], None, reads)
            for spread in replies.spreads
        ]
        lists = [replies.single.get(rank, ()) for rank in range(ranks)]
        wire.pack_all(lists, [()] * ranks, [wire.NOTHING_SHARED] * ranks, spreads=spreads)
        hosted[0, 0].committed()

    return step


def bag_cases(batch: int, ids: int, dimension: int) -> list[Case]:
    """A slot of 26 features with `ids` ids a bag: sorted, pooled, its gradients summed by row."""
    features, most = 26, 100_000
    generator = torch.Generator().manual_seed(11)
    numbers = (torch.rand(features, batch * ids, generator=generator) ** 5 * most).long()
    wanted = (numbers + torch.arange(features).unsqueeze(1) * most).view(-1)
    found = [unique_with_uses(wanted, 1)]

    def sort() -> None:
        found[0] = unique_with_uses(wanted, 1, backend="cpu")

    def sort_by_torch() -> None:
        _, places = wanted.unique(return_inverse=True)
        places.argsort(stable=True)

    rows, places, uses = found[0]
    pooled = zeros(batch * features, dimension).normal_(generator=generator)
    samples = torch.arange(batch) * features + torch.arange(features).unsqueeze(1)
    bags = samples.view(-1).repeat_interleave(ids)
    sums = [zeros(len(rows), dimension), zeros(len(rows), dimension)]

    def ours() -> None:
        segment_sum(sums[0], uses, pooled, bags, 3.0, backend="cpu")

    def theirs() -> None:
        seen = torch.zeros(len(rows), dtype=torch.uint8)
        scatter_add(sums[1], places, pooled, seen=seen, picked=bags, backend="cpu")
        divide(sums[1], 3.0, backend="cpu")

    ours()
    theirs()
    if not torch.equal(*sums):
        raise SystemExit("segment_sum and scatter_add with divide disagree")
    shards, pieces, pools = 5, [], [torch.empty(0), torch.empty(0)]
    for shard in range(shards):
        to = torch.arange(shard, len(rows), shards)
        source = zeros(2 * len(to), dimension).normal_(generator=generator)
        pieces.append(Piece(source, 0, torch.arange(len(to)) * 2, to))
    whole, lengths = zeros(len(rows), dimension), torch.full((batch * features,), ids)
    ends = torch.arange(batch * features + 1) * ids
    by_sample = places.view(features, batch, ids).transpose(0, 1).reshape(-1)

    def pool() -> None:
        pools[0] = bag_sum(
            RowPieces(len(rows), dimension, pieces), places, lengths, features, backend="cpu"
        )

    def copy_and_pool() -> None:
        copy_pieces(whole, pieces, backend="cpu")
        pools[1] = torch.nn.functional.embedding_bag(
            by_sample, whole, ends, mode="sum", include_last_offset=True
        ).view(batch, -1)

    pool()
    copy_and_pool()
    if not torch.equal(*pools):
        raise SystemExit("bag_sum and torch disagree")
    name = f"{ids} ids a bag"
    pooled_bytes = 8 * len(places) + 4 * dimension * (len(rows) + batch * features)
    counted = 4 * dimension * (len(pooled) + len(rows)) + 12 * len(bags) + 4 * len(rows)
    return [
        Case(
            f"ids of a slot sorted, {name}",
            len(wanted),
            8,
            [
                Contender("unique_with_uses", sort, 20 * len(wanted) + 12 * len(rows)),
                Contender("torch", sort_by_torch, 20 * len(wanted) + 12 * len(rows)),
            ],
            lambda: found[0][1],
        ),
        Case(
            f"bags summed from the rows of 5 shards, {name}",
            len(rows),
            4 * dimension,
            [
                Contender("bag_sum", pool, pooled_bytes),
                Contender("torch", copy_and_pool, pooled_bytes),
            ],
            lambda: pools[0],
        ),
        Case(
            f"gradients of bags by row, divided by 3 slots, {name}",
            len(rows),
            4 * dimension,
            [Contender("segment_sum", ours, counted), Contender("two passes", theirs, counted)],
            lambda: sums[0],
        ),
    ]
