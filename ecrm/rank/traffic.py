"""Bytes that a rank gives to files, and to other ranks by the phase in which they were sent."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ecrm.kernels.dispatch import taken
from ecrm.transport.base import Transport


class Traffic:
    """Watches how a transport's `sent_bytes` grow from phase to phase.

    What comes before the first phase is `start`.

    A step begins with the phase `input`. What evaluation and the end of the run send is put down to
    them until then, although they look up rows as a step does.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._phase, self._counted = transport, "start", 0
        self._outside: str | None = None
        self._sent: Counter[str] = Counter()

    def phase(self, name: str) -> None:
        """`name` begins, and whatever was going on has ended."""
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
        """Bytes sent to other ranks so far, by phase; phases that sent none are left out."""
        self._begin(self._phase)
        return {name: count for name, count in self._sent.items() if count}


def gather(transport: Transport, sent: dict[str, int], written: int) -> list[dict[str, Any]]:
    """Collective: what every live rank has sent and written, in the order of their numbers.

    Of each rank {"rank", "sent", "shared", "written", "kernels"}. `shared` are the bytes of that
    which went through shared memory; `kernels` is as `taken` tells it. Raises PeerFailure as
    transport calls do.
    """
    in_shared = 0 if transport.shared_memory is None else transport.shared_memory.shared_bytes
    mine = {
        "rank": transport.rank,
        "sent": sent,
        "shared": in_shared,
        "written": written,
        "kernels": taken(),
    }
    return list(transport.gather(mine).values())
