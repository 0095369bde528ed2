"""A transport whose calls a rank's guard can count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecrm.process.calls import Calls
from ecrm.transport.base import Transport, WrappedTransport
from ecrm.transport.message import Part, Received


class CountedTransport(WrappedTransport):
    """Another transport, every call that may wait for other ranks counted."""

    def __init__(self, inner: Transport, calls: Calls) -> None:
        super().__init__(inner)
        self._calls = calls

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> dict[int, list[Received]]:
        with self._calls.call():
            return self.inner.exchange(outgoing)

    def share(self, tensors: Sequence[Part]) -> dict[int, list[Received]]:
        with self._calls.call():
            return self.inner.share(tensors)

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        with self._calls.call():
            return self.inner.agree_alike(flag, word)

    def shrink(self) -> None:
        with self._calls.call():
            self.inner.shrink()
