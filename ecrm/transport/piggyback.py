"""Combine two sets of messages in a single exchange, to save an exchange per step."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

from ecrm.transport.base import Transport
from ecrm.transport.inbox import Inbox
from ecrm.transport.message import Part, Received

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
    both: dict[int, list[Part]] = {}
    for rank in sorted({*attached, *outgoing}):
        with_it = attached.get(rank, ())
        both[rank] = [(len(with_it),), *with_it, *outgoing.get(rank, ())]
    came = transport.exchange(both)
    if isinstance(came, Inbox):
        collected_here, received_here = came.divided()
        return received_here, collected_here
    received: dict[int, list[Received]] = {}
    collected: dict[int, list[Received]] = {}
    for rank, (head, *tensors) in came.items():
        assert isinstance(head, tuple)
        (count,) = head
        if count:
            collected[rank] = tensors[:count]
        if len(tensors) > count:
            received[rank] = tensors[count:]
    return received, collected


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
