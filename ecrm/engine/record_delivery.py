"""Records sent to the places of a layout, from a different layout or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ecrm.device.copies import on_device
from ecrm.placement.stripes import RowLayout
from ecrm.placement.view import View
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.storage.undo import Deltas
from ecrm.transport.message import Part, Received, in_groups

Message = dict[int, list[Part]]


def by_shard(layout: RowLayout, numbers: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(shard, places in `numbers`, local rows) for every shard with some of the rows.

    `numbers` are row numbers of a space, int64 [R].
    """
    counts, places, local = layout.split(numbers)
    for shard, (here, rows) in enumerate(
        zip(places.split(counts), local.split(counts), strict=True)
    ):
        if counts[shard]:
            yield shard, here, rows


def address(
    outgoing: Message, view: View, shard: int, space: int, local: Tensor, records: Tensor
) -> None:
    """Add records, uint8 [R, B], of a shard's local rows to the message for the shard's host."""
    outgoing.setdefault(view.shards[shard], []).extend(((shard, space), local, records))


def place(
    received: Mapping[int, Sequence[Received]],
    hosted: Mapping[ShardSpace, HostedShard],
    begins: bool = False,
    keeps_deltas: bool = True,
) -> dict[ShardSpace, Deltas]:
    """Write records addressed to shards hosted on this rank; return the changes, for parity.

    A row comes at most once. Records may be in the form of a store or of a checkpoint. Without
    `keeps_deltas` nothing is returned.

    With `begins`, as a run begins with rows of an earlier run, only the rows' values are taken.
    """
    deltas: dict[ShardSpace, Deltas] = {}
    for tensors in received.values():
        for head, local, flat in in_groups(tensors, 3):
            shard, space = head
            store = hosted[shard, space].store
            records = on_device(store.device, flat).view(local.numel(), -1)
            records = store.begun(records) if begins else store.with_padding(records)
            if keeps_deltas:
                delta = store.read(local).bitwise_xor_(records)
                deltas.setdefault((shard, space), []).append((local, delta))
            store.write(local, records)
    return deltas
