"""A transport with calls counted for the rank's guard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecrm.process.calls import CallCount
from ecrm.transport.base import Transport, WrappedTransport
from ecrm.transport.membership import Admit
from ecrm.transport.message import Part, Received


class CountedTransport(WrappedTransport):
    """A transport around `inner` that counts every call with a possible wait for other ranks."""

    def __init__(self, inner: Transport, calls: CallCount) -> None:
        super().__init__(inner)
        self._calls = calls

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        with self._calls.call():
            return self.inner.exchange(outgoing)

    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        with self._calls.call():
            return self.inner.share(tensors)

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        with self._calls.call():
            return self.inner.agree_alike(flag, word)

    def shrink(self, admit: Admit = Admit.NO) -> None:
        with self._calls.call():
            self.inner.shrink(admit)
