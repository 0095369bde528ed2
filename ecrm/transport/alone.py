"""The transport of a single rank: the rank receives its own messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecrm.transport import wire
from ecrm.transport.base import Transport
from ecrm.transport.membership import Admit
from ecrm.transport.message import Part, Received, copied


class LoneTransport(Transport):
    """Rank 0 of a world of one rank. No call fails by a death."""

    rank = 0
    live = (0,)

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        strangers = sorted(set(outgoing) - {0})
        if strangers:
            raise ValueError(f"exchange with ranks {strangers}, which are not live; live is 0")
        return self.share(outgoing.get(0, ()))

    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        wire.check(tensors)
        return {0: [copied(part) for part in tensors]} if tensors else {}

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        return bool(flag), True

    def shrink(self, admit: Admit = Admit.NO) -> None:
        pass

    def close(self) -> None:
        pass
