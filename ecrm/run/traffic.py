"""Bytes given by a rank to files, and to other ranks by the phase of sending."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ecrm.kernels.dispatch import taken
from ecrm.transport.base import Transport


class Traffic:
    """Counts how a transport's `sent_bytes` grow from phase to phase.

    Bytes sent from now to the first phase count as `start`. A run before, on the same transport,
    does not count.

    A step begins with the phase `input`. Until the next `input`, all bytes sent by an evaluation or
    the end of the run count as `evaluate` or `finish`, although both look up rows as a step does.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._phase = transport, "start"
        self._counted, self._shared_before = transport.sent_bytes, _shared_bytes(transport)
        self._outside: str | None = None
        self._sent: Counter[str] = Counter()

    def phase(self, name: str) -> None:
        """Begin the phase `name`, and end the phase before."""
        if name == "input":
            self._outside = None
        elif name in ("evaluate", "finish"):
            self._outside = name
        self._begin(self._outside or name)

    def _begin(self, name: str) -> None:
        sent = self._transport.sent_bytes
        self._sent[self._phase] += sent - self._counted
        self._counted, self._phase = sent, name

    @property
    def sent(self) -> dict[str, int]:
        """Bytes sent to other ranks so far, by phase; phases without bytes are left out."""
        self._begin(self._phase)
        return {name: count for name, count in self._sent.items() if count}

    @property
    def shared(self) -> int:
        """The part of the sent bytes passed through shared memory."""
        return _shared_bytes(self._transport) - self._shared_before


def _shared_bytes(transport: Transport) -> int:
    return 0 if transport.shared_memory is None else transport.shared_memory.shared_bytes


def gather_traffic(transport: Transport, traffic: Traffic, written: int) -> list[dict[str, Any]]:
    """Collective: bytes sent and written by every live rank, in the order of rank numbers.

    Of each rank {"rank", "sent", "shared", "written", "kernels"}. `shared` is the part of the sent
    bytes passed through shared memory; `kernels` is the return value of `taken`. Raises PeerFailure
    like every transport call.
    """
    mine = {
        "rank": transport.rank,
        "sent": traffic.sent,
        "shared": traffic.shared,
        "written": written,
        "kernels": taken(),
    }
    return list(transport.gather(mine).values())
