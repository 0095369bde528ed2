"""Two sets of messages in one exchange, so that two exchanges of a step become one."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

from ecrm.transport.base import Transport
from ecrm.transport.message import Part, Received

Outgoing = Mapping[int, Sequence[Part]]
"""What this rank sends, by receiver."""
Incoming = dict[int, list[Received]]
"""What this rank has received, by sender."""
Rounds = Generator[Outgoing, Incoming, None]
"""Yields what this rank sends in each exchange and is sent what it receives in it.

All live ranks yield equally often.
"""


def exchange(
    transport: Transport, outgoing: Outgoing, attached: Outgoing | None = None
) -> tuple[Incoming, Incoming | None]:
    """Collective: one exchange of `outgoing`, and of what is `attached` to it.

    Returns what was received of each, as `Transport.exchange` does; the second is None where
    nothing may be attached. All ranks attach, be it {}, or none does.
    """
    if attached is None:
        return transport.exchange(outgoing), None
    both: dict[int, list[Part]] = {}
    for rank in sorted({*attached, *outgoing}):
        with_it = attached.get(rank, ())
        both[rank] = [(len(with_it),), *with_it, *outgoing.get(rank, ())]
    received: Incoming = {}
    collected: Incoming = {}
    for rank, (head, *tensors) in transport.exchange(both).items():
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
    """Collective: make the exchanges that `rounds` asks for, the first one with what is `attached`.

    Returns what others had attached; None where nothing was, or where there was no exchange.
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
