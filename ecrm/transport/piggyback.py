"""Combine two sets of messages in a single exchange, to save an exchange per step."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import numpy as np
import torch

from ecrm.transport.base import Transport
from ecrm.transport.inbox import Inbox
from ecrm.transport.message import Part, Received
from ecrm.transport.outbox import Outbox, Spread

Outgoing = Mapping[int, Sequence[Part]]
"""Messages of this rank, by receiver."""
Incoming = Mapping[int, list[Received]]
"""Messages received by this rank, by sender."""
Rounds = Generator[Outgoing, Incoming, None]
"""Yields the outgoing messages of an exchange; is sent the received messages.

All live ranks yield equally often.
"""


def exchange(
    transport: Transport, outgoing: Outgoing, attached: Outgoing | None = None
) -> tuple[Incoming, Incoming | None]:
    """Collective: make a single exchange of the `outgoing` and the `attached` messages.

    Returns the messages received of either kind, as `Transport.exchange` does; the second is `None`
    if `attached` is `None`. Either all ranks attach, if only {}, or no rank does.
    """
    if attached is None:
        return transport.exchange(outgoing), None
    came = transport.exchange(_both(outgoing, attached))
    if isinstance(came, Inbox):
        collected_here, received_here = came.divided()
        return received_here, collected_here
    received: dict[int, list[Received]] = {}
    collected: dict[int, list[Received]] = {}
    for rank, (head, _, *tensors) in came.items():
        assert isinstance(head, tuple)
        (count,) = head
        if count:
            collected[rank] = tensors[:count]
        if len(tensors) > count:
            received[rank] = tensors[count:]
    return received, collected


def _both(outgoing: Outgoing, attached: Outgoing) -> Outgoing:
    """Messages of a group with the number of attached parts, the attached and the outgoing parts.

    Arrays stay arrays, if none has to follow a single part.
    """
    late_arrays = isinstance(outgoing, Outbox) and outgoing.spreads
    if isinstance(attached, Outbox) and attached.spreads and not late_arrays:
        counts = attached.part_counts()
        for rank in outgoing:
            counts.setdefault(rank, 0)
        ranks = np.array(list(counts), np.int64)
        heads = np.array(list(counts.values()), np.int64).reshape(-1, 1)
        both = Outbox([Spread(ranks, heads, np.zeros_like(ranks), torch.empty(0))])
        both.include(attached)
        for rank, parts in outgoing.items():
            both.add(rank, *parts)
        return both
    lists: dict[int, list[Part]] = {}
    for rank in sorted({*attached, *outgoing}):
        with_it = attached.get(rank, ())
        lists[rank] = [(len(with_it),), torch.empty(0), *with_it, *outgoing.get(rank, ())]
    return lists


def exchange_rounds(
    transport: Transport, rounds: Rounds, attached: Outgoing | None = None
) -> Incoming | None:
    """Collective: make the exchanges of `rounds`, the first with the `attached` messages.

    Returns the messages attached for this rank; `None` without attached messages or without an
    exchange.
    """
    collected: Incoming | None = None
    outgoing = next(rounds, None)
    while outgoing is not None:
        received, found = exchange(transport, outgoing, attached)
        if found is not None:
            collected, attached = found, None
        try:
            outgoing = rounds.send(received)
        except StopIteration:
            break
    return collected
