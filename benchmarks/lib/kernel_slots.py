"""Jobs of bench_kernels.py on a slot's work: its messages, the order of its ids, its bags."""

from __future__ import annotations

import torch

from ecrm.kernels.pieces import Piece, copy_pieces
from ecrm.placement.assignment import initial_view
from ecrm.placement.stripes import RowLayout, StripeShape
from ecrm.protection.routing import SlotRequests
from ecrm.transport import wire
from lib.kernel_case import Case, Contender, zeros

DIM = 16


def messages_cases(ranks: int, wanted: int) -> list[Case]:
    """The messages of a slot's rows to as many ranks as there are shards.

    The first case has the rows alone: packed rank by rank, and placed again. The second case is a
    slot's whole work: split, requests, gradients, messages packed, rows collected.
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
    replies = {rank: [((0, 0, rank, 0), cut.flatten())] for rank, cut in enumerate(cuts)}
    came = {view.shards[rank]: parts for rank, (parts,) in replies.items() if counts[rank]}

    def whole() -> None:
        slot = SlotRequests.of({0: [rows]}, [layout], [DIM], view)
        outgoing = slot.gradients({0: [gradients]})
        for rank, requests in slot.requests().items():
            outgoing.setdefault(rank, []).extend(requests)
        lists = list(outgoing.values())
        buffer = torch.empty(sum(map(wire.packed_bytes, lists)), dtype=torch.uint8).numpy()
        wire.pack_all_into(buffer, lists, [()] * len(lists), [wire.NOTHING_SHARED] * len(lists))
        collected[0] = slot.collect(came)[0][0]

    counted = len(rows) * 2 * (8 + 8 * DIM)
    contenders = [Contender("pieces", ours, counted), Contender("torch", theirs, counted)]
    name = f"a slot's rows in messages to {ranks} ranks"
    alone = [Contender("all of it", whole, counted + len(rows) * 8)]
    return [
        Case(name, len(rows), 4 * DIM, contenders, lambda: packed),
        Case(f"{name}, split and requests too", len(rows), 4 * DIM, alone, lambda: collected[0]),
    ]
